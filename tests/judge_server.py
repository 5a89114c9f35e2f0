"""A fake judge server for tests: its prompt is one message, with a candidate's answer between two delimiter lines."""

import chat_server
from chat_server import completion as completion


def candidate(prompt):
    """Return the text between the two delimiter lines, and the text outside."""
    lines = prompt.split("\n")
    delimiter = next(line for line in lines if len(line) == 32 and lines.count(line) == 2)
    first, second = (i for i, line in enumerate(lines) if line == delimiter)
    return "\n".join(lines[first + 1 : second]), "\n".join(lines[:first] + lines[second + 1 :])


def server(reply, **settings):
    """Run a server; `reply(number, prompt)` returns a text, or (status, body), for request `number`, from 0."""
    return chat_server.server(lambda number, body: reply(number, body["messages"][0]["content"]), **settings)
