"""A fake chat completions server for tests: a real HTTP server with configurable replies."""

import json
import threading
import time
from contextlib import contextmanager

import http_server

MODELS = ({"id": "m"},)


class Served:
    """What a server received: request bodies, headers, and how many requests were open concurrently."""

    def __init__(self):
        self.url, self.bodies, self.headers = "", [], []
        self.open = self.most = self.left = 0
        self.lock = threading.Lock()

    @property
    def prompts(self):
        return [body["messages"][0]["content"] for body in self.bodies]


def completion(text, finish="stop", tokens=None):
    """Build a valid reply; without `tokens` it has no usage counts."""
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
    message = {"role": "assistant", "content": text}
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": finish}], **usage})


@contextmanager
def server(reply, *, seconds=0.0, headers=(), models=MODELS):
    """Run a server; `reply(number, body)` returns a text, or (status, body), for request `number`, from 0.

    `models` are the models that it lists, or (status, body); `seconds` is the delay of each reply.
    """

    class Handler(http_server.Handler):
        def do_GET(self):
            status, text = models if isinstance(models[0], int) else (200, json.dumps({"data": models}))
            self.send(status, text.encode())

        def do_POST(self):
            with served.lock:
                number = len(served.bodies)
                served.bodies.append(self.body())
                served.headers.append({"path": self.path, **dict(self.headers)})
                served.open += 1
                served.most = max(served.most, served.open)
            time.sleep(seconds)
            response = reply(number, served.bodies[number])
            status, text = completion(response) if isinstance(response, str) else response
            with served.lock:
                served.open -= 1
            served.left += not self.send(status, text.encode(), headers)

    served = Served()
    with http_server.serve_http(Handler) as url:
        served.url = f"{url}/v1"
        yield served
