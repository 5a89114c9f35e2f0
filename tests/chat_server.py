"""A server of chat completions for tests: a real one, on a port of its own, that behaves as it is told."""

import json
import threading
import time
from contextlib import contextmanager

import http_server

MODELS = ({"id": "m"},)


class Served:
    """What a server saw: request bodies, headers, and how many requests it had at a time."""

    def __init__(self):
        self.url, self.bodies, self.headers = "", [], []
        self.open = self.most = self.left = 0
        self.lock = threading.Lock()

    @property
    def prompts(self):
        return [body["messages"][0]["content"] for body in self.bodies]


def completion(text, finish="stop", tokens=None):
    """A sound reply; without `tokens` the server counts none."""
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    message = {"role": "assistant", "content": text}
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": finish}], **usage})


@contextmanager
def server(reply, *, seconds=0.0, headers=(), models=MODELS):
    """`reply(number, body)` gives a text, or (status, body); the n-th request is number n, from 0.

    `models` are those that it lists, or (status, body).
    """

    class Handler(http_server.Handler):
        def do_GET(self):
            status, said = models if isinstance(models[0], int) else (200, json.dumps({"data": models}))
            self.send(status, said.encode())

        def do_POST(self):
            with served.lock:
                number = len(served.bodies)
                served.bodies.append(self.body())
                served.headers.append({"path": self.path, **dict(self.headers)})
                served.open += 1
                served.most = max(served.most, served.open)
            time.sleep(seconds)
            said = reply(number, served.bodies[number])
            status, text = completion(said) if isinstance(said, str) else said
            with served.lock:
                served.open -= 1
            served.left += not self.send(status, text.encode(), headers)

    served = Served()
    with http_server.listening(Handler) as url:
        served.url = f"{url}/v1"
        yield served
