"""A server for tests that speaks as the source of SGLang 0.5.23 does, strictly: what that doesn't know is refused.

A real model samples behind it, one token at a time, and takes real weights from disk. As in SGLang it stops at the ids
that the checkpoint names besides those of the request, at none of them with `ignore_eos`, keeps some of its context for
itself, heeds seeds only if it was told to, and takes weights when nothing is under way, or while it is paused.
"""

import asyncio
import base64
import io
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import http_server
import numpy as np
from PIL import Image

from saccade.config import Model
from saccade.engines.local import local
from saccade.errors import SaccadeError
from saccade.ledger import Ledger, Picture, Slot
from saccade.model.backbone import Backbone
from saccade.types import Sampling, digest_of, seed_of

NUMBER = (int, float)
SAMPLING = {
    **{"max_new_tokens": int, "temperature": NUMBER, "top_p": NUMBER, "top_k": int, "min_p": NUMBER},
    **{"frequency_penalty": NUMBER, "presence_penalty": NUMBER, "repetition_penalty": NUMBER, "min_new_tokens": int},
    **{"stop_token_ids": list, "ignore_eos": bool, "logit_bias": dict, "sampling_seed": int},
}
ACCEPTED = {
    "/generate": {
        **{"input_ids": list, "image_data": list, "sampling_params": dict},
        **{"return_logprob": bool, "return_prompt_token_ids": bool},
    },
    "/detokenize": {"tokens": list, "skip_special_tokens": bool},
    "/pause_generation": {"mode": str},
    "/update_weights_from_disk": {"model_path": str, "weight_version": str, "flush_cache": bool},
    "/continue_generation": {},
}
ORDERS = list(ACCEPTED)[2:]
LABEL = "default"
LOADING = threading.Lock()  # transformers loads one model at a time


class Refused(Exception):
    """What it answers with 400."""


def check(body, kinds):
    for key, value in body.items():
        if key not in kinds:
            raise Refused(f"unknown field `{key}`, expected one of {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool) != (kinds[key] is bool):
            raise Refused(f"invalid type for `{key}`: {value!r}")


class Shown:
    """The pictures that came with requests, as a media library."""

    def __init__(self):
        self.known = {}

    def add(self, url):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))))
        digest = digest_of(url)
        self.known[digest] = pixels
        return Picture(path="", digest=digest, time=None, width=pixels.shape[1], height=pixels.shape[0])

    def pixels(self, picture):
        return self.known[picture.digest]


class Served:
    """One server; `lacks`, `behave(number, reply)`, `pace` (seconds per token) and the like may be changed any time.

    `behave` gives None (well), another reply, bytes (no JSON), a number (the status) or "hang up"; `refused` is why it
    answered something with 400, in order.
    """

    def __init__(self, folder, *, context=4096, seeded=True, lacks=(), behave=None, pace=0.0, blind=False):
        self.folder, self.context, self.seeded = str(folder), context, seeded
        self.lacks, self.behave, self.pace, self.blind = lacks, behave, pace, blind
        self.bodies, self.orders, self.refused, self.replies, self.told = [], [], [], [], 0
        self.open, self.paused, self.label, self.url, self.sees = 0, False, LABEL, "", True
        self.changed, self.shown = threading.Condition(), Shown()
        self.backbone = Backbone(Model(path=self.folder, threads=1))
        ends = json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"]
        self.ends = {ends} if isinstance(ends, int) else {*ends}
        self.engine, self.loop = local(self.backbone, self.shown), asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self):
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    # ---- what it is asked ------------------------------------------------------------------------------------------

    def get(self, path):
        if path == "/health":
            return 200, {}
        if path in self.lacks or path not in ("/server_info", *ACCEPTED):
            return 404, {"detail": "Not Found"}
        if path != "/server_info":
            return 405, {"detail": "Method Not Allowed"}
        about = {"model_path": self.folder, "max_req_input_len": self.context - 6, "version": "0.5.23"}
        return 200, {**about, "enable_deterministic_inference": self.seeded}

    def post(self, path, body):
        if path in self.lacks or path not in ACCEPTED:
            return 404, {"detail": "Not Found"}
        try:
            check(body, ACCEPTED[path])
            return {"/generate": self.generate, "/detokenize": self.detokenize}.get(path, self.obey)(path, body)
        except Refused as error:
            self.refused.append(str(error))
            return 400, {"error": {"message": str(error)}}

    def detokenize(self, path, body):
        if body["skip_special_tokens"]:
            raise Refused("this test wants special tokens")
        return 200, {"text": self.backbone.renderer.decode(body["tokens"])}

    def obey(self, path, body):
        with self.changed:
            self.orders.append((path, body.get("mode", "")))
            if path == "/update_weights_from_disk":
                self.changed.wait_for(lambda: self.paused or not self.open)
                try:
                    with LOADING:
                        path = body["model_path"] if self.sees else "/nowhere"
                        weights = Backbone(Model(path=path, threads=1)).model.state_dict()
                except SaccadeError as error:
                    said = {"success": False, "message": f"Failed to get weights iterator: {error}."}
                    return 400, {**said, "num_paused_requests": 0}
                self.run(self.engine.publish(weights, 0))
                self.label = body["weight_version"]
                self.changed.notify_all()
                return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
            if path == "/pause_generation" and body["mode"] != "retract":
                raise Refused("this test keeps what is under way")
            self.paused = path == "/pause_generation"
            self.changed.notify_all()
        return 200, {"message": "Generation paused or continued.", "status": "ok"}

    # ---- what it samples -------------------------------------------------------------------------------------------

    def generate(self, path, body):
        check(body["sampling_params"], SAMPLING)
        with self.changed:
            greets = body["sampling_params"]["temperature"] > 100
            number, self.told = self.told, self.told + (not greets)
            self.bodies += [] if greets else [body]
            self.changed.wait_for(lambda: not self.paused)
            self.open += 1
        try:
            reply = self.sample(self.prompt(body), body["sampling_params"])
        finally:
            with self.changed:
                self.open -= 1
                self.changed.notify_all()
        does = self.behave(-1 if greets else number, reply) if self.behave else None
        return (does, {"error": {"message": f"told to say {does}"}}) if isinstance(does, int) else (200, does or reply)

    def prompt(self, body):
        renderer, ids = self.backbone.renderer, body["input_ids"]
        pictures = [] if self.blind else [self.shown.add(url) for url in body.get("image_data", [])]
        places = [at for at, token in enumerate(ids) if token == renderer.forbidden_ids[0]]
        if not self.blind and len(places) != len(pictures):
            raise Refused(f"prompt has {len(places)} image placeholder token(s) but {len(pictures)} image(s)")
        pairs = zip(places, pictures, strict=False)
        slots = [Slot(at=at, picture=each, tokens=renderer.visual_tokens(each)) for at, each in pairs]
        return Ledger().observe(ids, slots=slots)

    def sample(self, ledger, given):
        if len(ledger) + given["max_new_tokens"] > self.context or len(ledger) >= self.context - 6:
            raise Refused(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        most = min(given["max_new_tokens"], self.context - 2 - len(ledger))
        stops = set() if given["ignore_eos"] else {*given["stop_token_ids"], *self.ends}
        tokens, logprobs, labels = [], [], []
        while len(tokens) < most and not stops.intersection(tokens):
            time.sleep(self.pace)
            with self.changed:
                self.changed.wait_for(lambda: not self.paused)
                said = self.one(ledger.force(tokens) if tokens else ledger, given, len(tokens))
                labels.append(self.label)
            tokens += said.tokens
            logprobs += said.logprobs
        ends = {"type": "stop", "matched": tokens[-1]} if stops.intersection(tokens) else {"type": "length"}
        edges = [at for at, label in enumerate(labels) if not at or label != labels[at - 1]]
        spans = zip(edges, [*edges[1:], len(tokens)], strict=True)
        meta = {
            **{"id": "0", "finish_reason": ends, "prompt_tokens": len(ledger), "completion_tokens": len(tokens)},
            "weight_version": self.label,
            "weight_versions": [{"version": labels[start], "start": start, "end": end} for start, end in spans],
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        }
        text = self.backbone.renderer.decode(tokens)
        return {"text": text, "output_ids": tokens, "meta_info": meta, "prompt_token_ids": [*ledger.expanded()]}

    def one(self, ledger, given, place):
        if any(value > -100 for value in given["logit_bias"].values()):
            raise Refused("this test knows no gentle bias")
        forbidden = tuple(int(each) for each in given["logit_bias"])
        seed = seed_of(given["sampling_seed"] if self.seeded else time.perf_counter_ns(), place)
        wanted = Sampling(temperature=given["temperature"], max_tokens=1, seed=seed, forbidden_ids=forbidden)
        return self.run(self.engine.generate(ledger, wanted))


@contextmanager
def server(folder, *, port=0, **how):
    """A server of a checkpoint, which answers while the block is open."""

    class Handler(http_server.Handler):
        def do_GET(self):
            self.send(*served.get(self.path))

        def do_POST(self):
            status, said = served.post(self.path, self.body())
            if said == "hang up":
                self.close_connection = True
                return self.connection.close()
            return self.send(status, said)

    served = Served(folder, **how)
    try:
        with http_server.listening(Handler, port) as served.url:
            yield served
    finally:
        served.close()
