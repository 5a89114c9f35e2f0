"""Compare a few tensors of a weight version with those that a server holds, by their SHA-256.

The logprob comparison after a weight sync can't distinguish two versions in bfloat16 that are one update apart; equal
bytes can. A server names and divides its tensors in its own way, so only those are compared that both sides have whole
or in the same parts.
"""

import hashlib
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from saccade.engines.remote.server import Server
from saccade.utils.async_utils import run_in_daemon_thread

_LAYER_NAME = re.compile(
    r"(?:model\.|language_model\.)*layers\.(\d+)\.(input_layernorm|self_attn\.o_proj|mlp\.down_proj)\.weight"
)
_NORM_NAME = re.compile(r"(?:model\.|language_model\.)*norm\.weight")
_WRAPPER_NAMES = {"model", "language_model"}  # which checkpoints and servers nest in different orders
# vLLM's name of a part of a tensor: the ranks of data, pipeline, context and tensor parallelism.
_PART_NAME = re.compile(r"dp\d+:pp\d+:pcp\d+:tp(\d+):(.+)")
_EMPTY_DIGEST = hashlib.sha256().hexdigest()  # of a tensor that the server has converted into another format


def select_names(names: Collection[str]) -> list[str]:
    """Return the tensors of a checkpoint that are compared: of the first, middle and last layer, and the last norm.

    >>> select_names([f"model.language_model.layers.{index}.mlp.down_proj.weight" for index in range(9)])[-1]
    'model.language_model.layers.8.mlp.down_proj.weight'
    """
    layers = sorted({int(match[1]) for name in names if (match := _LAYER_NAME.fullmatch(name))})
    chosen = {layers[0], layers[len(layers) // 2], layers[-1]} if layers else set()
    return [
        name
        for name in names
        if _NORM_NAME.fullmatch(name) or ((match := _LAYER_NAME.fullmatch(name)) and int(match[1]) in chosen)
    ]


async def compare(server: Server, tensors: Mapping[str, Tensor]) -> int:
    """Compare the tensors of a checkpoint with the server's; return how many could be compared, 0 if it has no digests.

    Raises BrokenEngineError if one differs; what `Server.post` raises.
    """
    digests = await server.api.fetch_digests(server)
    parts_by_name: dict[str, list[tuple[int, str]]] = {}  # the tensor parallel rank and the digest of each
    num_ranks = 1
    for key, digest in digests.items():
        if match := _PART_NAME.fullmatch(key):
            num_ranks = max(num_ranks, int(match[1]) + 1)
            if digest != _EMPTY_DIGEST:
                parts_by_name.setdefault(_unwrap_name(match[2]), []).append((int(match[1]), digest))
    compared = {name: parts for name in tensors if (parts := parts_by_name.get(_unwrap_name(name)))}

    def find_difference() -> str | None:
        for name, parts in compared.items():
            expected = compute_part_digests(tensors[name], num_ranks)
            if any(digest != expected[rank] for rank, digest in parts):
                return name
        return None

    if (name := await run_in_daemon_thread(find_difference, "saccade-digests")) is not None:
        raise server.build_fatal_error(
            f"has other weights than it received: the tensor {name} differs; if it converts weights as it loads them, "
            "set engine.settings.checksum_interval=0"
        )
    return len(compared)


def compute_part_digests(tensor: Tensor, num_ranks: int) -> list[str]:
    """Return the SHA-256 of the part of a selected tensor that each tensor parallel rank holds.

    The ranks divide the inputs of `o_proj` and `down_proj`; each has the whole norms.
    """
    parts = tensor.chunk(num_ranks, dim=1) if tensor.ndim == 2 else [tensor] * num_ranks
    return [
        hashlib.sha256(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for part in parts
    ]


def _unwrap_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
