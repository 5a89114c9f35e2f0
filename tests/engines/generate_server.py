"""A server for tests that speaks vLLM's endpoints: a real one, on a port of its own, that behaves as it is told.

Its weights are a label, and what its workers took (`workers.py`), if it has any. With `pace` it takes so many seconds
for each token, and a reply may see several labels: while it is paused no token is made ("keep"), or it pauses when all
replies have ended ("wait").
"""

import base64
import io
import json
import select
import threading
import time
from contextlib import contextmanager

import http_server
from PIL import Image

LABEL = "default"
RESETS = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
ORDERS = ["/pause", "/collective_rpc", "/update_weight_version", *RESETS, "/resume"]


class Served:
    """What a server saw: bodies of requests, how many at a time, orders for its weights; `well` cleared makes it hang,
    `sick` answer 500 to everything, `refuses` to one order (its path, or what its body holds), `deaf` makes it keep its
    label. `mixed` counts what was sampled from weights that its workers had in part.
    """

    def __init__(self, workers=None):
        self.workers, self.mixed = workers, 0
        self.url = ""
        self.bodies, self.open, self.most, self.left = [], 0, 0, 0
        self.sick, self.refuses, self.deaf = False, "", False
        self.well = threading.Event()
        self.well.set()
        self.lock = threading.Condition()
        self.label, self.paused, self.orders = LABEL, False, []

    def spans(self, count, pace, gone=lambda: False):
        """Make so many tokens, each at its time, until whoever asked is `gone`: the labels that they have."""
        labels = []
        for _ in range(count):
            if gone():
                break
            time.sleep(pace)
            with self.lock:
                self.lock.wait_for(lambda: not self.paused)
                labels.append(self.label)
        edges = [place for place in range(len(labels)) if not place or labels[place] != labels[place - 1]]
        ends = [*edges[1:], len(labels)]
        return [{"version": labels[start], "start": start, "end": end} for start, end in zip(edges, ends, strict=True)]

    def restart(self):
        """As a new process, which has the weights that it was started with."""
        self.workers.restart()
        self.label, self.paused, self.sick = LABEL, False, False

    def obey(self, path, body):
        """An order for its weights: status and answer, or None where it is none."""
        path, _, query = path.partition("?")
        if self.workers and (said := self.workers.obey(path, body)):
            with self.lock:
                self.orders += [(path, query)] if not self.orders or self.orders[-1][0] != path else []
                self.sick |= self.workers.dead
                if path == "/finish_weight_update" and said[0] == 200:
                    self.label = body["weight_version"]
            return said
        if path not in ORDERS:
            return None
        with self.lock:
            self.orders.append((path, query))
            if path == "/pause" and "mode=wait" in query:
                self.lock.wait_for(lambda: not self.open)
            self.paused = path == "/pause" or (self.paused and path != "/resume")
            self.label = body["new_version"] if path == "/update_weight_version" and not self.deaf else self.label
            self.lock.notify_all()
        return 200, {"success": True}


def reply_to(body, renderer, **changes):
    """A sound reply: pictures expanded by the size of their pixels, tokens from the seed alone."""
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))).size
        for part in body.get("content_parts", [])
    ]
    visual = iter([width * height // renderer.factor**2 for width, height in sizes])
    placeholder = renderer.forbidden_ids[0]
    prompt = [token for each in body["token_ids"] for token in [each] * (next(visual) if each == placeholder else 1)]
    sampling = body["sampling_params"]
    allowed = sampling.get("allowed_token_ids")
    count = sampling["max_tokens"]
    tokens = allowed or [10 + (sampling.get("seed", 0) * 7 + place) % 50 for place in range(count)]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": 0.0 if allowed else -1.0 - place} for place in range(count)]},
        "finish_reason": "length",
        "weight_versions": [{"version": LABEL, "start": 0, "end": count}],
    }
    whole = {"prompt_token_ids": prompt, "choices": [choice]}
    choice.update({key: value for key, value in changes.items() if key in choice})
    whole.update({key: value for key, value in changes.items() if key in whole})
    return whole


@contextmanager
def server(
    renderer, behave=None, *, port=0, lacks=(), context=4096, words=None, pace=0.0, root="models/m", workers=None
):
    """`behave(number, body)` gives None (well), a dict (the reply), bytes (a reply that is no JSON), a number (the
    status), or seconds as a float (that it takes); "hang up" closes the connection. The n-th request is number n.
    """

    class Handler(http_server.Handler):
        def do_GET(self):
            served.well.wait()
            if served.sick or self.path in lacks:
                return self.answer({"detail": "Not Found"}, 500 if served.sick else 404)
            if served.workers and (said := served.workers.get(self.path, served.label)):
                return self.answer(said)
            return self.answer({"data": [{"id": "m", "root": root, "max_model_len": context}]})

        def do_POST(self):
            body = self.body()
            served.well.wait()
            if served.sick or self.path in lacks:
                return self.answer({"detail": "Not Found"}, 500 if served.sick else 404)
            if self.path == "/detokenize":
                return self.answer({"prompt": words or renderer.decode(body["tokens"])})
            if served.refuses and (self.path.startswith(served.refuses) or served.refuses in json.dumps(body)):
                return self.answer({"error": {"message": "told to refuse"}}, 500)
            if (done := served.obey(self.path, body)) is not None:
                return self.act(body, "hang up") if served.sick else self.answer(done[1], done[0])
            if "allowed_token_ids" in body["sampling_params"]:  # a greeting
                return self.answer(reply_to(body, renderer, weight_versions=served.spans(1, 0.0)))
            with served.lock:
                served.mixed += bool(served.workers and served.workers.mixed and not served.paused)
                number = len(served.bodies)
                served.bodies.append(body)
                served.open += 1
                served.most = max(served.most, served.open)
            try:
                return self.act(body, behave(number, body) if behave else None)
            finally:
                with served.lock:
                    served.open -= 1
                    served.lock.notify_all()

        def act(self, body, does):
            if does == "hang up":
                self.close_connection = True
                return self.connection.close()
            if isinstance(does, float):
                time.sleep(does)
                does = None
            if isinstance(does, int):
                return self.answer({"error": {"message": f"told to say {does}"}}, does)
            if does is None:
                spans = served.spans(body["sampling_params"]["max_tokens"], pace, self.gone)
                does = reply_to(body, renderer, weight_versions=spans)
            return self.answer(does)

        def gone(self):
            return bool(select.select([self.connection], [], [], 0)[0])  # nobody says more than one thing at a time

        def answer(self, content, status=200):
            served.left += not self.send(status, content)

    served = Served(workers)
    with http_server.listening(Handler, port) as served.url:
        yield served
