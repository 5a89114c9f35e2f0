"""A fake SGLang server for tests that follows the source of SGLang 0.5.23 strictly: it refuses unknown fields.

It samples from a real model, token by token, and loads real weights from disk. Like SGLang it stops at the checkpoint's
eos ids in addition to those of the request, at none of them with `ignore_eos`, reserves some of its context, uses seeds
only if configured, and loads weights when it is idle or paused.
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
from token_gate import TokenGate

from saccade.config.schema import ModelConfig
from saccade.engines.local import Local
from saccade.errors import SaccadeError
from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.types import GenerationRequest, SamplingParams
from saccade.utils.hashing import compute_digest, derive_seed

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
    """A request to which the server returns 400."""


def check(body, kinds):
    for key, value in body.items():
        if key not in kinds:
            raise Refused(f"unknown field `{key}`, expected one of {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool) != (kinds[key] is bool):
            raise Refused(f"invalid type for `{key}`: {value!r}")


class Shown:
    """The images of requests, as a media loader."""

    def __init__(self):
        self.known = {}

    def add(self, url):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))))
        digest = compute_digest(url)
        self.known[digest] = pixels
        return ImageRef(path="", digest=digest, time=None, width=pixels.shape[1], height=pixels.shape[0])

    def load_pixels(self, image):
        return self.known[image.digest]


class Served:
    """One server; its options may be changed at any time. A gate holds replies after some tokens (`hold_replies`).

    `behave(number, reply)` returns None (valid reply), another reply, bytes (invalid JSON), an int (the status) or
    "hang up"; `refused` lists the reasons of all responses with 400.
    """

    def __init__(self, folder, *, context=4096, seeded=True, lacks=(), behave=None, ignores_images=False):
        self.folder, self.context, self.seeded = str(folder), context, seeded
        self.lacks, self.behave, self.ignores_images, self.gate = lacks, behave, ignores_images, None
        self.bodies, self.orders, self.refused, self.num_generated = [], [], [], 0
        self.open, self.paused, self.label, self.url, self.sees, self.is_closed = 0, False, LABEL, "", True, False
        self.changed, self.shown = threading.Condition(), Shown()
        self.vlm = VisionLanguageModel(ModelConfig(path=self.folder, num_threads=1))
        ends = json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"]
        self.ends = {ends} if isinstance(ends, int) else {*ends}
        self.engine, self.loop = Local(self.vlm, self.shown), asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def hold_replies(self, limit):
        """Hold each reply that starts from now on after `limit` tokens; return the gate, which releases them."""
        self.gate = TokenGate(self.changed, limit)
        return self.gate

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self):
        with self.changed:
            self.is_closed = True  # replies to clients that are gone end here
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    # ---- requests --------------------------------------------------------------------------------------------------

    def get(self, path):
        if path == "/health":
            return 200, {}
        if path in self.lacks or path not in ("/server_info", *ACCEPTED):
            return 404, {"detail": "Not Found"}
        if path != "/server_info":
            return 405, {"detail": "Method Not Allowed"}
        info = {"model_path": self.folder, "max_req_input_len": self.context - 6, "version": "0.5.23"}
        info["weight_version"] = self.label
        return 200, {**info, "enable_deterministic_inference": self.seeded}

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
            raise Refused("these tests need special tokens")
        return 200, {"text": self.vlm.renderer.decode(body["tokens"])}

    def load(self, weights):
        self.vlm.model.load_state_dict(weights)
        self.run(self.engine.sync_weights(self.vlm, 0))

    def obey(self, path, body):
        with self.changed:
            self.orders.append((path, body.get("mode", "")))
            if path == "/update_weights_from_disk":
                self.changed.wait_for(lambda: self.paused or not self.open)
                try:
                    with LOADING:
                        path = body["model_path"] if self.sees else "/nowhere"
                        weights = VisionLanguageModel(ModelConfig(path=path, num_threads=1)).model.state_dict()
                except SaccadeError as error:
                    content = {"success": False, "message": f"Failed to get weights iterator: {error}."}
                    return 400, {**content, "num_paused_requests": 0}
                self.load(weights)
                self.label = body["weight_version"]
                self.changed.notify_all()
                return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
            if path == "/pause_generation" and body["mode"] != "retract":
                raise Refused("these tests keep unfinished requests")
            self.paused = path == "/pause_generation"
            self.changed.notify_all()
        return 200, {"message": "Generation paused or continued.", "status": "ok"}

    # ---- sampling --------------------------------------------------------------------------------------------------

    def generate(self, path, body):
        check(body["sampling_params"], SAMPLING)
        with self.changed:
            is_handshake = body["sampling_params"]["temperature"] > 100
            number, self.num_generated = self.num_generated, self.num_generated + (not is_handshake)
            self.bodies += [] if is_handshake else [body]
            self.changed.wait_for(lambda: not self.paused)
            self.open += 1
            gate = self.gate
        try:
            reply = self.sample(self.prompt(body), body["sampling_params"], gate)
        finally:
            with self.changed:
                self.open -= 1
                self.changed.notify_all()
        behavior = self.behave(-1 if is_handshake else number, reply) if self.behave else None
        if isinstance(behavior, int):
            return behavior, {"error": {"message": f"configured to return {behavior}"}}
        return 200, behavior or reply

    def prompt(self, body):
        renderer, ids = self.vlm.renderer, body["input_ids"]
        images = [] if self.ignores_images else [self.shown.add(url) for url in body.get("image_data", [])]
        indices = [index for index, token in enumerate(ids) if token == renderer.forbidden_ids[0]]
        if not self.ignores_images and len(indices) != len(images):
            raise Refused(f"prompt has {len(indices)} image placeholder token(s) but {len(images)} image(s)")
        slots = [
            ImageSlot(index=index, image=image, num_tokens=renderer.count_visual_tokens(image))
            for index, image in zip(indices, images, strict=False)
        ]
        return Ledger().observe(ids, slots=slots)

    def sample(self, ledger, given, gate):
        if len(ledger) + given["max_new_tokens"] > self.context or len(ledger) >= self.context - 6:
            raise Refused(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        most = min(given["max_new_tokens"], self.context - 2 - len(ledger))
        stops = set() if given["ignore_eos"] else {*given["stop_token_ids"], *self.ends}
        tokens, logprobs, labels = [], [], []
        with self.changed:
            number = gate.start() if gate else None
        while len(tokens) < most and not stops.intersection(tokens):
            with self.changed:
                self.changed.wait_for(lambda: not self.paused and (not gate or gate.has_passed(number)))
                completion = self.sample_token(ledger.prefill(tokens) if tokens else ledger, given, len(tokens))
                labels.append(self.label)
                if gate:
                    gate.count(number)
            tokens += completion.tokens
            logprobs += completion.logprobs
        ends = {"type": "stop", "matched": tokens[-1]} if stops.intersection(tokens) else {"type": "length"}
        edges = [at for at, label in enumerate(labels) if not at or label != labels[at - 1]]
        spans = zip(edges, [*edges[1:], len(tokens)], strict=True)
        meta = {
            **{"id": "0", "finish_reason": ends, "prompt_tokens": len(ledger), "completion_tokens": len(tokens)},
            "weight_version": self.label,
            "weight_versions": [{"version": labels[start], "start": start, "end": end} for start, end in spans],
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        }
        text = self.vlm.renderer.decode(tokens)
        return {"text": text, "output_ids": tokens, "meta_info": meta, "prompt_token_ids": [*ledger.input_ids()]}

    def sample_token(self, ledger, given, index):
        if any(value > -100 for value in given["logit_bias"].values()):
            raise Refused("these tests use logit_bias only to forbid tokens")
        if self.is_closed:
            raise Refused("the server is closed")
        forbidden = tuple(int(token) for token in given["logit_bias"])
        seed = derive_seed(given["sampling_seed"] if self.seeded else time.perf_counter_ns(), index)
        sampling = SamplingParams(temperature=given["temperature"], max_tokens=1, seed=seed, forbidden_ids=forbidden)
        return self.run(self.engine.generate(GenerationRequest(ledger, sampling)))


@contextmanager
def server(folder, *, port=0, **how):
    """Run a server of a checkpoint inside the block."""

    class Handler(http_server.Handler):
        def do_GET(self):
            self.send(*served.get(self.path))

        def do_POST(self):
            status, content = served.post(self.path, self.body())
            if content == "hang up":
                self.close_connection = True
                return self.connection.close()
            return self.send(status, content)

    served = Served(folder, **how)
    try:
        with http_server.serve_http(Handler, port) as served.url:
            yield served
    finally:
        served.close()
