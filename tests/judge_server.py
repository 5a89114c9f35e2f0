"""A judge's server for tests: it is asked in one message, which holds a candidate's answer between marks."""

import chat_server
from chat_server import completion as completion


def candidate(prompt):
    """What stands between the two lines that hold the mark, and all that stands outside."""
    lines = prompt.split("\n")
    mark = next(line for line in lines if len(line) == 32 and lines.count(line) == 2)
    first, second = (i for i, line in enumerate(lines) if line == mark)
    return "\n".join(lines[first + 1 : second]), "\n".join(lines[:first] + lines[second + 1 :])


def server(reply, **settings):
    """`reply(number, prompt)` gives a text, or (status, body); the n-th request is number n, from 0."""
    return chat_server.server(lambda number, body: reply(number, body["messages"][0]["content"]), **settings)
