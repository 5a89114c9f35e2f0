"""SGLang's words, by the source of its version 0.5.23: /generate, and the orders that its documentation gives to RL."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.engines._distribution import NEUTRAL
from saccade.engines._served import wire
from saccade.engines._served.server import Pause, Reply, Server, Trouble, Words
from saccade.errors import BrokenEngineError, EngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import Sampling

GENERATE = "/generate"
_LOAD = "/update_weights_from_disk"
_NEWER = "it takes SGLang 0.5.23 or newer"
_ORDERS = ("/pause_generation", _LOAD, "/continue_generation")
_LAST_WORD = 5.0  # seconds for what is said to a server by who must go
_SPARE = 7  # of its context that SGLang keeps for itself
WORDS = Words(
    name="SGLang",
    one="an SGLang server, 0.5.23 or newer",
    start="start one with `python -m sglang.launch_server --model-path MODEL`",
    option="--context-length",
    lacks=dict.fromkeys(_ORDERS, _NEWER),
    spare=_SPARE,
    seeds="--enable-deterministic-inference",
)
_NEVER = -1e4  # added to a logit; half precision can hold it
# Whatever is left out is filled with what the server's operator prefers.
_PLAIN = {**NEUTRAL, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
_HEAT, _HEATED = 1e6, 4  # a temperature at which all tokens are equally likely, and how many are sampled at it


def request(
    ledger: Ledger, sampling: Sampling, *, urls: Sequence[str], forbidden: Sequence[str], filters: Mapping[str, float]
) -> dict[str, Any]:
    """See Dialect."""
    settings = {**_PLAIN, **filters}
    return {
        "input_ids": list(ledger.compact()),
        **({"image_data": list(urls)} if urls else {}),
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "sampling_params": {
            **settings,
            "top_k": settings["top_k"] or -1,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # it ignores those above as well
            "logit_bias": {str(each): _NEVER for each in sampling.forbidden_ids},
        },
    }


def read(said: Any) -> Reply:
    """See Dialect."""
    meta, tokens = said["meta_info"], wire.ids(said["output_ids"])
    logprobs = [(float(logprob), token) for logprob, token, _ in meta["output_token_logprobs"]]
    if [token for _, token in logprobs] != [*tokens]:
        raise ValueError("logprobs of other tokens than those that were sampled")
    return Reply(
        prompt=wire.ids(said["prompt_token_ids"]),
        tokens=tokens,
        logprobs=tuple(logprob for logprob, _ in logprobs),
        spans=wire.spans(meta["weight_versions"]),
        reason=str(meta["finish_reason"]["type"]),
    )


async def about(server: Server) -> str:
    """See Dialect. Its cache of keys and values may leave less room than its context."""
    said = await server.get("/server_info")
    server.context = int(said["max_req_input_len"]) - 1
    server.seeded = bool(said.get("enable_deterministic_inference"))
    return str(said["model_path"])


async def spelled(server: Server, ids: Sequence[int]) -> str:
    """See Dialect."""
    text: str = (await server.post("/detokenize", {"tokens": list(ids), "skip_special_tokens": False}))["text"]
    return text


async def listen(server: Server, renderer: Renderer) -> str:
    """See Dialect. After a great temperature all tokens have one logprob; before it, each has its own."""
    ledger, hot = Ledger().observe(renderer.encode("a")), Sampling(temperature=_HEAT, max_tokens=_HEATED)
    said = await server.post(GENERATE, request(ledger, hot, urls=(), forbidden=(), filters={}))
    if "prompt_token_ids" not in said or "weight_versions" not in said["meta_info"]:
        raise BrokenEngineError(f"{server.url} doesn't say which ids it read, and with which weights; {_NEWER}")
    heard = read(said)
    if max(heard.logprobs) - min(heard.logprobs) > 1e-3:
        raise BrokenEngineError(
            f"{server.url} reports logprobs of another distribution than it samples from; start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        )
    return heard.spans[0][0]


async def check_orders(server: Server) -> None:
    """See Dialect."""
    for path in _ORDERS:
        await server.check_path(path)


async def load(server: Server, folder: Path, label: str, pause: Pause) -> None:
    """See Dialect. Unless it is paused, SGLang waits for what is under way before it takes weights."""
    try:
        if pause == "keep":
            await server.post(_ORDERS[0], {"mode": "retract"})  # what is under way gives up its keys and values
        await _take(server, folder, label)
    except asyncio.CancelledError:
        with contextlib.suppress(Trouble, EngineError, TimeoutError):  # it may hang
            async with asyncio.timeout(_LAST_WORD):
                await server.post(_ORDERS[2], {})
        raise
    await server.post(_ORDERS[2], {})


async def _take(server: Server, folder: Path, label: str) -> None:
    try:
        await server.post(_LOAD, {"model_path": str(folder), "weight_version": label, "flush_cache": True})
    except EngineError as error:
        # It answers with 400 where it failed, too; then it has put back what it had, and what it keeps may go on.
        await server.post(_ORDERS[2], {})
        raise Trouble(str(error)) from error
