"""vLLM's words: /inference/v1/generate, and the orders of its development mode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.engines._served import wire
from saccade.engines._served.server import Pause, Reply, Server, Trouble, Words
from saccade.errors import BrokenEngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import Sampling

GENERATE = "/inference/v1/generate"
_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, as `saccade serve` does"
WORDS = Words(
    name="vLLM",
    one="a vLLM server",
    start="start one with `saccade serve MODEL`",
    option="--context",
    lacks={
        GENERATE: "start it with vLLM's flag --enable-scale-out, as `saccade serve` does",
        "/pause": _DEV_MODE,
        "/is_paused": _DEV_MODE,
        "/init_weight_transfer_engine": f"it takes vLLM 0.32 or newer; {_DEV_MODE}",
    },
)
_CACHES = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")  # one forgotten kills the server


def request(
    ledger: Ledger, sampling: Sampling, *, urls: Sequence[str], forbidden: Sequence[str], filters: Mapping[str, float]
) -> dict[str, Any]:
    """See Dialect."""
    return {
        "token_ids": list(ledger.compact()),
        **({"content_parts": [{"type": "image_url", "url": url} for url in urls]} if urls else {}),
        "return_token_ids": True,
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # the ids above are all that ends a reply
            "bad_words": list(forbidden),
            "logprobs": 0,  # of the sampled token alone
            "detokenize": True,  # a server needs words to know which are bad
            "skip_special_tokens": False,
            **filters,
        },
    }


def read(said: Any) -> Reply:
    """See Dialect."""
    choice = said["choices"][0]
    return Reply(
        prompt=wire.ids(said["prompt_token_ids"]),
        tokens=wire.ids(choice["token_ids"]),
        logprobs=tuple(float(each["logprob"]) for each in choice["logprobs"]["content"]),
        spans=wire.spans(choice["weight_versions"]),
        reason=str(choice["finish_reason"]),
    )


async def about(server: Server) -> str:
    """See Dialect."""
    said = (await server.get("/v1/models"))["data"][0]
    server.context = int(said["max_model_len"])
    return str(said["root"])


async def spelled(server: Server, ids: Sequence[int]) -> str:
    """See Dialect."""
    text: str = (await server.post("/detokenize", {"tokens": list(ids)}))["prompt"]
    return text


async def listen(server: Server, renderer: Renderer) -> str:
    """See Dialect. Of a distribution in which one token alone is allowed, its logprob is 0; before that, it is not."""
    token = renderer.encode("a")[0]
    sampling = {"max_tokens": 1, "allowed_token_ids": [token], "logprobs": 0, "ignore_eos": True}
    reply = await server.post(GENERATE, {"token_ids": [token], "sampling_params": sampling})
    choice = reply["choices"][0]
    logprob, label = float(choice["logprobs"]["content"][0]["logprob"]), choice["weight_versions"][0]["version"]
    if abs(logprob) > 1e-3:
        raise BrokenEngineError(
            f"{server.url} reports logprobs of another distribution than it samples from; start it with vLLM's "
            "--logprobs-mode processed_logprobs, as `saccade serve` does"
        )
    return str(label)


async def check_orders(server: Server) -> None:
    """See Dialect."""
    await server.get("/is_paused")


async def load(server: Server, folder: Path, label: str, pause: Pause) -> None:
    """See Dialect. Where it fails the server stays paused."""
    await server.post("/pause", mode=pause, empty=True)
    order: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    await server.post("/collective_rpc", order, empty=True)
    await server.post("/update_weight_version", {"new_version": label}, empty=True)
    await resume(server, pause)


async def resume(server: Server, pause: Pause) -> None:
    """Let it forget what it made of the old weights, and go on. Raises Trouble or EngineError; then it stays paused."""
    for cache in _CACHES:
        # A kept reply lets go of its keys and values, which are those of the old weights.
        kept = {"reset_running_requests": "true"} if pause == "keep" and cache == _CACHES[0] else {}
        done = await server.post(cache, empty=True, **kept)
        if isinstance(done, dict) and done.get("success") is False:
            raise Trouble(f"{server.url} could not empty its cache ({cache})")
    await server.post("/resume", empty=True)
