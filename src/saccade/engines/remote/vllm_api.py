"""The API of vLLM servers as of vLLM 0.32: /inference/v1/generate, and the weight updates of the development mode.

During a weight broadcast the server's label ends in a suffix that no complete version has. A server that fails midway
keeps that label until it is restarted, so every client recognizes it: vLLM reports the failure in no other way, and
can't complete a failed transfer.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

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
from saccade.errors import EngineError
from saccade.protocols import Renderer

GENERATE_PATH = "/inference/v1/generate"
KEEPS_IMAGES = True  # until its cache of images is full or reset; then it refuses a request without the data
_INIT_PATH, _DIGEST_PATH = "/init_weight_transfer_engine", "/weight_checker"
LOAD_ADAPTER_PATH, _UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT_PATHS: Collection[str] = (LOAD_ADAPTER_PATH, _UNLOAD_ADAPTER_PATH)
_DEV_MODE_HINT = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, as `saccade serve` does"
MESSAGES = ServerMessages(
    name="vLLM",
    description="a vLLM server",
    start_hint="start one with `saccade serve MODEL`",
    context_flag="--max-model-len",
    missing_path_hints={
        GENERATE_PATH: "start it with vLLM's flag --enable-scale-out, as `saccade serve` does",
        "/pause": _DEV_MODE_HINT,
        "/is_paused": _DEV_MODE_HINT,
        LOAD_ADAPTER_PATH: "start it with `saccade serve --max-lora-rank RANK`, or with vLLM's flag --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
        _INIT_PATH: f"use vLLM 0.32 or newer; {_DEV_MODE_HINT}",
    },
)
# All three: leaving one out makes the server crash.
_CACHE_RESET_PATHS = ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")
_PAUSE_MODES: Mapping[RepliesOnSync, str] = {
    "drain": "wait",
    "continue": "keep",
    "abort": "abort",
}  # vLLM's own names of the policies

_PARTIAL_SUFFIX = "-partial"  # of a label
_PARTIAL_HINT = "it holds partial weights and is not used until it is restarted"
_logger = logging.getLogger("saccade")


def build_request(request: ServerRequest, omitted: Collection[str] = ()) -> dict[str, Any]:
    """See ServerApi. An image without a URL is one that vLLM has."""
    sampling = request.sampling
    content_parts = [
        {"type": "image_url", "uuid": image.key, **({} if image.key in omitted else {"url": mark_image(image)})}
        for image in request.ledger.images()
    ]
    return {
        "token_ids": list(request.ledger.unexpanded_ids()),
        **({"content_parts": content_parts} if content_parts else {}),
        "return_token_ids": True,
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # only the ids above end a reply
            "bad_words": list(request.forbidden_texts),
            "logprobs": 0,  # of the sampled token only
            "detokenize": True,  # vLLM matches bad_words against the text
            "skip_special_tokens": False,
            **request.filters,
        },
    }


def parse_reply(response: Any) -> ServerReply:
    """See ServerApi."""
    choice = response["choices"][0]
    return ServerReply(
        prompt_token_ids=parse_ids(response["prompt_token_ids"]),
        tokens=parse_ids(choice["token_ids"]),
        logprobs=tuple(parse_logprob(entry["logprob"]) for entry in choice["logprobs"]["content"]),
        version_spans=parse_version_spans(choice["weight_versions"] or ()),  # null without tokens
        finish_reason=str(choice["finish_reason"]),
    )


async def describe(server: Server) -> str:
    """See ServerApi."""
    card = (await server.get("/v1/models"))["data"][0]
    server.max_model_len = int(card["max_model_len"])
    return str(card["root"])


async def detokenize(server: Server, ids: Sequence[int]) -> str:
    """See ServerApi."""
    return (await server.post("/detokenize", {"tokens": list(ids)}))["prompt"]


async def check_logprobs(server: Server, renderer: Renderer) -> str:
    """See ServerApi. If only one token is allowed, its logprob must be 0; in the unmasked distribution it is not."""
    token = renderer.encode("a")[0]
    sampling = {"max_tokens": 1, "allowed_token_ids": [token], "logprobs": 0, "ignore_eos": True}
    response = await server.post(GENERATE_PATH, {"token_ids": [token], "sampling_params": sampling})
    choice = response["choices"][0]
    logprob, label = parse_logprob(choice["logprobs"]["content"][0]["logprob"]), choice["weight_versions"][0]["version"]
    if not abs(logprob) <= 1e-3:  # NaN, too
        raise server.build_fatal_error(
            "returns logprobs of another distribution than it samples from; start it with vLLM's flag "
            "--logprobs-mode processed_logprobs, as `saccade serve` does"
        )
    return str(label)


async def check_weight_updates(server: Server, *, by_broadcast: bool) -> None:
    """See ServerApi."""
    await server.get("/is_paused")
    if by_broadcast:
        await check_transfer_support(server)


async def load_weights(server: Server, folder: Path, label: str, replies_on_sync: RepliesOnSync) -> None:
    """See ServerApi. If it fails, the server stays paused."""
    await server.post_again("/pause", mode=_PAUSE_MODES[replies_on_sync])
    call: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    await server.post("/collective_rpc", call)  # a retry would read all weights again, and let other servers wait
    await server.post_again("/update_weight_version", {"new_version": label})
    await finish_update(server, replies_on_sync)


async def load_adapter(server: Server, folder: Path, label: str, replies_on_sync: RepliesOnSync) -> None:
    """Load a LoRA adapter from a folder, under the label's name, in place of the one before; see `load_weights`."""
    await server.post_again("/pause", mode=_PAUSE_MODES[replies_on_sync])
    await _unload_adapter(server, label)  # vLLM refuses a name that it has, from an update that failed midway
    await server.post(LOAD_ADAPTER_PATH, {"lora_name": label, "lora_path": str(folder)})
    await server.post_again("/update_weight_version", {"new_version": label})
    previous, server.adapter = server.adapter, label
    await finish_update(server, replies_on_sync)
    if previous not in ("", label):
        await _unload_adapter(server, previous)


async def _unload_adapter(server: Server, name: str) -> None:
    with contextlib.suppress(EngineError):  # it has none of this name
        await server.post_again(_UNLOAD_ADAPTER_PATH, {"lora_name": name})


async def finish_update(server: Server, replies_on_sync: RepliesOnSync) -> None:
    """See ServerApi. If it fails, the server may stay paused."""
    for path in _CACHE_RESET_PATHS:
        # An unfinished reply must release its KV cache, which was computed with the old weights.
        is_first = path == _CACHE_RESET_PATHS[0]
        query = {"reset_running_requests": "true"} if replies_on_sync == "continue" and is_first else {}
        reply = await server.post_again(path, **query)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise ServerError(f"{server.url} could not empty its cache ({path})")
    server.forget_images()
    await server.post_again("/resume")


async def fetch_digests(server: Server) -> Mapping[str, str]:
    """See ServerApi. vLLM computes those of all its weights, and samples nothing meanwhile."""
    try:
        await server.check_path(_DIGEST_PATH)
    except EngineError:  # of an older version
        return {}
    response = await server.post(_DIGEST_PATH, {"action": "checksum"})
    with convert_parse_errors(f"{server.url} returned malformed checksums"):
        return {str(name): str(digest) for name, digest in response["checksums"].items()}


async def fetch_label(server: Server) -> str:
    """See ServerApi."""
    with convert_parse_errors(f"{server.url} doesn't report its weight version"):
        label = str((await server.get("/weight_info"))["weight_version"])
    if label.endswith(_PARTIAL_SUFFIX):
        raise ServerError(f"{server.url} can't receive weights: {_PARTIAL_HINT}")
    return label


# ---- weight broadcast: all functions raise ServerError or EngineError ------------------------------------------------


async def check_transfer_support(server: Server) -> None:
    """Check that the server was started with weight transfer enabled, without changing it.

    Post an empty init_info, which no worker accepts: the error shows if it is enabled.
    """
    try:
        await server.post(_INIT_PATH, {"init_info": {}})
    except ServerError as error:
        if "not configured" in str(error):
            raise EngineError(
                f"{server.url} was started without weight transfer, which engine.settings.weight_sync=nccl needs; "
                "start it with `saccade serve --weight-sync nccl` or vLLM's flag --weight-transfer-config "
                '\'{"backend":"nccl"}\', or set engine.settings.weight_sync=files',
                key="engine.settings.weight_sync",
                value=server.url,
            ) from error


async def count_workers(server: Server) -> int:
    """Return how many of the server's processes hold weights."""
    with convert_parse_errors(f"{server.url} doesn't report its number of workers"):
        return int((await server.get("/get_world_size"))["world_size"])


async def join_group(server: Server, init_info: Mapping[str, Any], world_size: int) -> None:
    """Make the workers join a group of `world_size` (rank 0 is the trainer); return when all joined."""
    await server.post(_INIT_PATH, {"init_info": {**init_info, "rank_offset": 1, "world_size": world_size}})


async def receive_tensors(server: Server, tensors: Mapping[str, Tensor]) -> None:
    """Make the server receive these tensors, in this order; return when it has them."""
    update = {
        "names": list(tensors),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in tensors.values()],
        "shapes": [list(value.shape) for value in tensors.values()],
    }
    await server.post("/update_weights", {"update_info": update})


async def receive_weights(
    server: Server, label: str, replies_on_sync: RepliesOnSync, broadcast: Callable[[], Awaitable[None]]
) -> None:
    """Make the server receive all weights while `broadcast` sends them, label them, and empty outdated caches.

    `replies_on_sync` is as in `load_weights`. A server that fails midway stays paused; its label marks it, and it must
    be restarted before it is used again.
    """
    await server.post_again("/pause", mode=_PAUSE_MODES[replies_on_sync])
    await server.post_again("/update_weight_version", {"new_version": label + _PARTIAL_SUFFIX})
    try:
        await server.post("/start_weight_update")
        await broadcast()
        await server.post("/finish_weight_update", {"weight_version": label})
    except (ServerError, EngineError) as error:
        _logger.warning("%s; %s", error, _PARTIAL_HINT)
        raise
    await finish_update(server, replies_on_sync)
