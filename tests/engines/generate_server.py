"""A fake vLLM server for tests: a real HTTP server with vLLM's endpoints and configurable failures.

Its weights are a label and, if it has workers (`workers.py`), the tensors that they received. A gate may hold replies
after some tokens (`hold_replies`), so that a reply spans several labels: a pause stops sampling (mode "keep"), waits
until all replies have ended (mode "wait"), or ends them with the tokens so far (mode "abort").
"""

import base64
import hashlib
import io
import json
import math
import re
import select
import threading
from contextlib import contextmanager
from pathlib import Path

import http_server
from PIL import Image
from safetensors.torch import load_file
from token_gate import TokenGate

LABEL = "default"
RESETS = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
ORDERS = ["/pause", "/collective_rpc", "/update_weight_version", *RESETS, "/resume"]


class Served:
    """What a server received (request bodies, concurrency, weight updates), and how it fails.

    `well` cleared makes it hang; `sick` makes it return 500 for everything. `refuses` (a path, or text of a body) makes
    it return `refusal_status` to `num_refusals` requests, counted in `num_refused`; `deaf` makes it keep its label.
    `mixed` counts the requests that were sampled from partial weights. `closing` is set when the server closes.
    """

    def __init__(self, workers=None):
        self.workers, self.mixed = workers, 0
        self.url = ""
        self.bodies, self.open, self.most, self.left = [], 0, 0, 0
        self.sick, self.refuses, self.refusal_status, self.num_refusals = False, "", 500, math.inf
        self.deaf, self.num_refused, self.gate = False, 0, None
        self.well, self.closing = threading.Event(), threading.Event()
        self.well.set()
        self.lock = threading.Condition()
        self.label, self.paused, self.orders, self.num_aborts = LABEL, False, [], 0
        self.num_misses = 0  # requests refused because they lack the data of an image
        self.num_uploads = 0  # images received with their data
        self.images = {}  # the size of each image that it has, by its uuid
        self.digests = {}  # of the tensors that it has loaded, by its names of the parts
        self.adapters = {}  # the tensors of each loaded LoRA adapter, by its name

    def hold_replies(self, limit):
        """Hold each reply that starts from now on after `limit` tokens; return the gate, which releases them."""
        self.gate = TokenGate(self.lock, limit)
        return self.gate

    def sample(self, count, gate=None, has_left=lambda: False):
        """Sample `count` tokens through a gate until the client `has_left` or a pause aborts the reply; return the
        spans of their labels. A reply that starts during a pause is not aborted.
        """
        labels = []
        with self.lock:
            reply, num_aborts = gate.start() if gate else None, self.num_aborts
            while len(labels) < count and not has_left() and self.num_aborts == num_aborts:
                if self.paused or (gate and not gate.has_passed(reply)):
                    self.lock.wait(0.02)  # nothing notifies of a disconnected client
                    continue
                labels.append(self.label)
                if gate:
                    gate.count(reply)
        edges = [index for index in range(len(labels)) if not index or labels[index] != labels[index - 1]]
        ends = [*edges[1:], len(labels)][: len(edges)]  # none without tokens
        return [{"version": labels[start], "start": start, "end": end} for start, end in zip(edges, ends, strict=True)]

    def restart(self):
        """Reset to the weights of the start, like a new process."""
        self.workers.restart()
        self.label, self.paused, self.sick = LABEL, False, False

    def obey(self, path, body):
        """Handle a weight update request: return status and content, None for other requests."""
        path, _, query = path.partition("?")
        if self.workers and (response := self.workers.obey(path, body)):
            with self.lock:
                self.orders += [(path, query)] if not self.orders or self.orders[-1][0] != path else []
                self.sick |= self.workers.dead
                if path == "/finish_weight_update" and response[0] == 200:
                    self.label = body["weight_version"]
            return response
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return self.change_adapters(path, body)
        if path == "/weight_checker":
            return 200, {"checksums": dict(self.digests)}
        if path not in ORDERS:
            return None
        with self.lock:
            self.orders.append((path, query))
            if path == "/collective_rpc":
                self.digests = compute_digests(Path(body["kwargs"]["weights_path"]))
            if path == "/pause" and "mode=wait" in query:
                self.lock.wait_for(lambda: not self.open)
            self.num_aborts += path == "/pause" and "mode=abort" in query
            if path == "/reset_mm_cache":
                self.images.clear()
            self.paused = path == "/pause" or (self.paused and path != "/resume")
            self.label = body["new_version"] if path == "/update_weight_version" and not self.deaf else self.label
            self.lock.notify_all()
        return 200, {"success": True}

    def read_images(self, body):
        """Keep the images of a request, and return their sizes; None if it lacks the data of one, as vLLM refuses."""
        sizes = []
        for part in body.get("content_parts", []):
            with self.lock:
                if "url" in part:
                    self.num_uploads += 1
                    self.images[part["uuid"]] = read_size(part["url"])
                elif part["uuid"] not in self.images:
                    return None
                sizes.append(self.images[part["uuid"]])
        return sizes

    def change_adapters(self, path, body):
        """Load or unload an adapter, as strictly as vLLM."""
        name, is_known = body["lora_name"], body["lora_name"] in self.adapters
        if path == "/v1/unload_lora_adapter":
            return (
                (200, b"Success: adapter changed")
                if self.adapters.pop(name, None)
                else (404, {"error": {"message": "not found"}})
            )
        if is_known or set(body) != {"lora_name", "lora_path"}:
            return 400, {"error": {"message": f"{name} has already been loaded, or a field is unknown"}}
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        pattern = r"base_model\.model\.(model\.language_model\.layers\.\d+\.\w+\.\w+)\.lora_[AB]\.weight"
        modules = {re.fullmatch(pattern, name)[1] for name in tensors}
        ranks = {min(value.shape) for value in tensors.values()}
        is_valid = config["peft_type"] == "LORA" and modules == {*config["target_modules"]} and ranks == {config["r"]}
        self.adapters[name] = tensors
        return (200, b"Success: adapter changed") if is_valid else (500, {"error": {"message": "malformed adapter"}})


def compute_digests(folder):
    """Return the SHA-256 of each tensor on two tensor parallel ranks, as vLLM names and divides them."""
    digests = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            name = name.replace("model.language_model.", "language_model.model.")
            is_divided = name.endswith(("o_proj.weight", "down_proj.weight"))
            parts = tensor.split(tensor.shape[1] // 2, dim=1) if is_divided else [tensor] * 2
            for rank, part in enumerate(parts):
                digest = hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest()
                digests[f"dp0:pp0:pcp0:tp{rank}:{name}"] = digest
    return digests


def read_size(url):
    """Return the width and height of an image in a data URL."""
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size


def reply_to(body, renderer, sizes=(), **changes):
    """Build a valid reply: images expanded by their `sizes` in pixels, tokens determined by the seed."""
    visual = iter([width * height // renderer.factor**2 for width, height in sizes])
    placeholder = renderer.forbidden_ids[0]
    prompt = [copy for token in body["token_ids"] for copy in [token] * (next(visual) if token == placeholder else 1)]
    sampling = body["sampling_params"]
    allowed = sampling.get("allowed_token_ids")
    count = sampling["max_tokens"]
    tokens = allowed or [10 + (sampling.get("seed", 0) * 7 + index) % 50 for index in range(count)]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": 0.0 if allowed else -1.0 - index} for index in range(count)]},
        "finish_reason": "length",
        "weight_versions": [{"version": LABEL, "start": 0, "end": count}],
    }
    response = {"prompt_token_ids": prompt, "choices": [choice]}
    choice.update({key: value for key, value in changes.items() if key in choice})
    response.update({key: value for key, value in changes.items() if key in response})
    return response


@contextmanager
def server(renderer, behave=None, *, port=0, lacks=(), context=4096, words=None, root="models/m", workers=None):
    """Run a server; `behave(number, body)` decides the response to the n-th generate request.

    It returns None (valid reply), a dict (the reply), bytes (invalid JSON), an int (the status), "hang up" (close the
    connection), or "hang" (no response).
    """

    class Handler(http_server.Handler):
        def do_GET(self):
            served.well.wait()
            if served.sick or self.path in lacks:
                return self.answer({"detail": "Not Found"}, 500 if served.sick else 404)
            if served.workers and (content := served.workers.get(self.path, served.label)):
                return self.answer(content)
            if self.path == "/weight_info":
                return self.answer({"weight_version": served.label})
            return self.answer({"data": [{"id": "m", "root": root, "max_model_len": context}]})

        def do_POST(self):
            body = self.body()
            served.well.wait()
            if served.sick or self.path in lacks:
                return self.answer({"detail": "Not Found"}, 500 if served.sick else 404)
            if self.path == "/detokenize":
                return self.answer({"prompt": words or renderer.decode(body["tokens"])})
            is_refused = self.path.startswith(served.refuses) or served.refuses in json.dumps(body)
            if served.refuses and served.num_refusals and is_refused:
                served.num_refusals, served.num_refused = served.num_refusals - 1, served.num_refused + 1
                return self.answer({"error": {"message": "refused as configured"}}, served.refusal_status)
            if (response := served.obey(self.path, body)) is not None:
                return self.act(body, "hang up") if served.sick else self.answer(response[1], response[0])
            if "allowed_token_ids" in body["sampling_params"]:  # a handshake
                return self.answer(reply_to(body, renderer, weight_versions=served.sample(1)))
            if (sizes := served.read_images(body)) is None:
                served.num_misses += 1
                return self.answer({"error": {"message": "Cache miss for image, but data is not provided."}}, 400)
            if body.get("model", "") not in ("", *served.adapters):
                return self.answer({"error": {"message": "the model does not exist"}}, 404)
            with served.lock:
                served.mixed += bool(served.workers and served.workers.mixed and not served.paused)
                number = len(served.bodies)
                served.bodies.append(body)
                served.open += 1
                served.most = max(served.most, served.open)
                gate = served.gate
            try:
                return self.act(body, behave(number, body) if behave else None, gate, sizes)
            finally:
                with served.lock:
                    served.open -= 1
                    served.lock.notify_all()

        def act(self, body, behavior, gate=None, sizes=()):
            if behavior == "hang":
                served.closing.wait()
                behavior = "hang up"
            if behavior == "hang up":
                self.close_connection = True
                return self.connection.close()
            if isinstance(behavior, int):
                return self.answer({"error": {"message": f"configured to return {behavior}"}}, behavior)
            if behavior is None:
                spans = served.sample(body["sampling_params"]["max_tokens"], gate, self.has_left)
                behavior = reply_to(body, renderer, sizes, weight_versions=spans)
                choice = behavior["choices"][0]
                if (count := spans[-1]["end"] if spans else 0) < body["sampling_params"]["max_tokens"]:  # aborted
                    logprobs = {"content": choice["logprobs"]["content"][:count]}
                    choice |= {"token_ids": choice["token_ids"][:count], "logprobs": logprobs}
                    choice |= {"finish_reason": "abort", "weight_versions": spans or None}  # as vLLM returns them
            return self.answer(behavior)

        def has_left(self):
            # Clients don't pipeline requests, so a readable connection is a closed one.
            return bool(select.select([self.connection], [], [], 0)[0])

        def answer(self, content, status=200):
            served.left += not self.send(status, content)

    served = Served(workers)
    try:
        with http_server.serve_http(Handler, port) as served.url:
            yield served
    finally:
        served.well.set()
        served.closing.set()
