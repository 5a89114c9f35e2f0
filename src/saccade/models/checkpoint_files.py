"""The files of a checkpoint's weights, looked at without being read."""

import json
from pathlib import Path

from saccade.errors import ModelError

_INDEX = "*.safetensors.index.json"
_LENGTH = 8  # bytes, at the beginning of a safetensors file: how long its header is


def check_weights(folder: Path) -> int:
    """See that all weights of a checkpoint are there and none was cut off; their bytes. Raises ModelError."""
    shards = sorted(folder.glob("*.safetensors"))
    for index in folder.glob(_INDEX):
        missing = sorted(_named(index) - {shard.name for shard in shards})
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, which {index.name} names; copy the checkpoint again")
    for shard in shards:
        _check_length(shard)
    files = shards or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(f"{folder} has no weights (*.safetensors); give a checkpoint's own folder")
    return sum(file.stat().st_size for file in files)


def _named(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} can't be read: it must say which file holds which weights") from error


def _check_length(shard: Path) -> None:
    """A safetensors file says in its header where its last tensor ends."""
    try:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            size = shard.stat().st_size
            header = json.loads(file.read(length) if length <= size else b"")
        ends = [int(each["data_offsets"][1]) for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{shard} is no file of weights, or was cut off; copy the checkpoint again") from error
    whole = _LENGTH + length + max(ends, default=0)
    if size < whole:
        raise ModelError(f"{shard} was cut off: it has {size:,} of {whole:,} bytes; copy the checkpoint again")
