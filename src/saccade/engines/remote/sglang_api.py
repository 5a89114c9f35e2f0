"""The API of SGLang servers, by the source of version 0.5.23: /generate, and the weight update endpoints for RL."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.engines.image_urls import mark_image
from saccade.engines.remote.server import (
    RepliesOnSync,
    Server,
    ServerError,
    ServerMessages,
    ServerReply,
    ServerRequest,
    convert_parse_errors,
    parse_ids,
    parse_logprob,
    parse_version_spans,
)
from saccade.engines.sampling_filters import NEUTRAL_VALUES
from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import SamplingParams

GENERATE_PATH = "/generate"
KEEPS_IMAGES = False
TEXT_PATHS: Collection[str] = ()
_LOAD_PATH = "/update_weights_from_disk"
_VERSION_HINT = "use SGLang 0.5.23 or newer"
_WEIGHT_UPDATE_PATHS = ("/pause_generation", _LOAD_PATH, "/continue_generation")
_RESUME_TIMEOUT = 5.0  # seconds for resuming a server when the run is cancelled
_RESERVED_TOKENS = 7  # of its context that SGLang reserves
MESSAGES = ServerMessages(
    name="SGLang",
    description="an SGLang server, 0.5.23 or newer",
    start_hint="start one with `python -m sglang.launch_server --model-path MODEL`",
    context_flag="--context-length",
    missing_path_hints=dict.fromkeys(_WEIGHT_UPDATE_PATHS, _VERSION_HINT),
    reserved_tokens=_RESERVED_TOKENS,
    deterministic_flag="--enable-deterministic-inference",
)
_FORBIDDEN_BIAS = -1e4  # added to a logit; representable in half precision
# All are sent: omitted parameters are filled from the server's own defaults.
_DEFAULT_SAMPLING = {
    **NEUTRAL_VALUES,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
}
_PROBE_TEMPERATURE = 1e6  # at which all tokens are equally likely
_NUM_PROBE_TOKENS = 4  # sampled at that temperature


def build_request(request: ServerRequest, omitted: Collection[str] = ()) -> dict[str, Any]:
    """See ServerApi."""
    sampling, images = request.sampling, request.ledger.images()
    settings = {**_DEFAULT_SAMPLING, **request.filters}
    return {
        "input_ids": list(request.ledger.unexpanded_ids()),
        **({"image_data": [mark_image(image) for image in images]} if images else {}),
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "sampling_params": {
            **settings,
            "top_k": settings["top_k"] or -1,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,  # True would make SGLang ignore `stop_token_ids` as well
            "logit_bias": {str(token): _FORBIDDEN_BIAS for token in sampling.forbidden_ids},
        },
    }


def parse_reply(response: Any) -> ServerReply:
    """See ServerApi."""
    meta, tokens = response["meta_info"], parse_ids(response["output_ids"])
    logprobs = [(parse_logprob(logprob), token) for logprob, token, _ in meta["output_token_logprobs"]]
    if [token for _, token in logprobs] != [*tokens]:
        raise ValueError("the logprobs are not those of the sampled tokens")
    return ServerReply(
        prompt_token_ids=parse_ids(response["prompt_token_ids"]),
        tokens=tokens,
        logprobs=tuple(logprob for logprob, _ in logprobs),
        version_spans=parse_version_spans(meta["weight_versions"]),
        finish_reason=str(meta["finish_reason"]["type"]),
    )


async def describe(server: Server) -> str:
    """See ServerApi. Read the maximum request length: the KV cache may be smaller than the context."""
    info = await server.get("/server_info")
    server.max_model_len = int(info["max_req_input_len"]) - 1
    server.is_seeded = bool(info.get("enable_deterministic_inference"))
    return str(info["model_path"])


async def detokenize(server: Server, ids: Sequence[int]) -> str:
    """See ServerApi."""
    return (await server.post("/detokenize", {"tokens": list(ids), "skip_special_tokens": False}))["text"]


async def check_logprobs(server: Server, renderer: Renderer) -> str:
    """See ServerApi. At a very high temperature all logprobs must be equal; without the temperature they differ."""
    ledger = Ledger().observe(renderer.encode("a"))
    sampling = SamplingParams(temperature=_PROBE_TEMPERATURE, max_tokens=_NUM_PROBE_TOKENS)
    response = await server.post(GENERATE_PATH, build_request(ServerRequest(ledger, sampling)))
    if "prompt_token_ids" not in response or "weight_versions" not in response["meta_info"]:
        raise server.build_fatal_error(f"doesn't return prompt_token_ids and weight_versions; {_VERSION_HINT}")
    reply = parse_reply(response)
    if not max(reply.logprobs) - min(reply.logprobs) <= 1e-3:  # NaN, too
        raise server.build_fatal_error(
            "returns logprobs of another distribution than it samples from; start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        )
    return reply.version_spans[0][0]


async def check_weight_updates(server: Server, *, by_broadcast: bool) -> None:
    """See ServerApi."""
    for path in _WEIGHT_UPDATE_PATHS:
        await server.check_path(path)


async def load_weights(server: Server, folder: Path, label: str, replies_on_sync: RepliesOnSync) -> None:
    """See ServerApi. Unless it is paused, SGLang finishes all requests before it loads weights."""
    try:
        if replies_on_sync == "continue":
            await server.post_again(
                _WEIGHT_UPDATE_PATHS[0], {"mode": "retract"}
            )  # unfinished replies release their KV cache
        await _update_from_disk(server, folder, label)
    except asyncio.CancelledError:
        with contextlib.suppress(ServerError, EngineError, TimeoutError):  # the server may hang
            async with asyncio.timeout(_RESUME_TIMEOUT):
                await server.post(_WEIGHT_UPDATE_PATHS[2], {})
        raise
    await finish_update(server, replies_on_sync)


async def finish_update(server: Server, replies_on_sync: RepliesOnSync) -> None:
    """See ServerApi. SGLang empties its caches when it loads weights."""
    await server.post_again(_WEIGHT_UPDATE_PATHS[2], {})


async def fetch_digests(server: Server) -> Mapping[str, str]:
    """See ServerApi. Return none: SGLang's own digests haven't been tried."""
    return {}


async def fetch_label(server: Server) -> str:
    """See ServerApi."""
    with convert_parse_errors(f"{server.url} doesn't report its weight version"):
        return str((await server.get("/server_info"))["weight_version"])


async def _update_from_disk(server: Server, folder: Path, label: str) -> None:
    try:
        await server.post(_LOAD_PATH, {"model_path": str(folder), "weight_version": label, "flush_cache": True})
    except EngineError as error:
        # SGLang returns 400 for a failed load, too; it has then restored the old weights, so replies may continue.
        await server.post(_WEIGHT_UPDATE_PATHS[2], {})
        raise ServerError(str(error)) from error
