"""A checkpoint's files without loading them: are its weights complete, its checksums, the digest of its contents."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from saccade.errors import DataError, ModelError, convert_errors
from saccade.utils.files import read_text, require_regular
from saccade.utils.hashing import compute_digest, compute_file_sha256
from saccade.utils.jsonl import read_json, write_json

HASHED_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".txt"}  # weights, configs, tokenizer, template
CHECKSUMS_FILE = "checksums.json"  # of a checkpoint: the bytes and the SHA-256 of each other file, by name
IGNORED_FILES = {"trainer_state.json", CHECKSUMS_FILE}  # the trainer's, beside the weights
METADATA_SUFFIXES = {".json", ".jinja", ".txt"}  # config, tokenizer, template, image processor
ADAPTERS_FILE = "adapters.safetensors"  # the trained adapters, which the weights contain
_RESTORE_HINT = "restore it from a copy"
_FLOATS = {"BF16", "F16", "F32", "F64"}  # dtypes of trainable weights, as safetensors names them
_OS_ERROR_PATTERN = re.compile(r"os error (\d+)")  # in a message of safetensors
_NUM_HASH_THREADS = 8  # hashing releases the GIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """The size and the digest of a file."""

    bytes: int
    sha256: str


@contextlib.contextmanager
def convert_write_errors() -> Iterator[None]:
    """Convert the error of safetensors for a file that it can't write to an OSError, as other writers raise it."""
    try:
        yield
    except SafetensorError as error:
        match = _OS_ERROR_PATTERN.search(str(error))
        code = int(match[1]) if match else errno.EIO
        raise OSError(code, os.strerror(code)) from error


def check_weights(folder: Path) -> int:
    """Check that no weight file is missing or truncated; return their total bytes. Raises ModelError."""
    shards = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        missing = sorted(_read_shard_names(index) - {shard.name for shard in shards})
        if missing:
            problem = f"{folder} has no {missing[0]}, which {index.name} lists; copy the checkpoint again"
            raise ModelError(problem, key=str(folder / missing[0]))
    for shard in shards:
        try:
            require_regular(shard)
            with safe_open(shard, "pt"):  # it compares the file's length with the tensors of its header
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{shard} is truncated, or not a safetensors file ({error}); copy the checkpoint again",
                key=str(shard),
                value=shard.stat().st_size if shard.exists() else None,
            ) from error
    files = shards or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(f"{folder} has no weights (*.safetensors); give the folder of a checkpoint", key=str(folder))
    return sum(file.stat().st_size for file in files)


def check_dtypes(folder: Path) -> None:
    """Raise ModelError for weights in integers or 8 bits, which transformers would convert without their scales."""
    others = dict[str, str]()
    for shard in sorted(folder.glob("*.safetensors")):
        require_regular(shard)
        with safe_open(shard, "pt") as file:
            dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        others |= {name: dtype for name, dtype in dtypes.items() if dtype not in _FLOATS and name.endswith(".weight")}
    if others:
        name, dtype = next(iter(others.items()))
        raise ModelError(
            f"{folder} has {len(others)} weights that aren't floats of 16 bits or more: {name} is {dtype}; "
            "give a checkpoint that isn't quantized",
            key="model.path",
            value=tuple(others),
        )


def _read_shard_names(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(read_text(index))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"{index} is not an index with a weight_map that gives each weight's file; copy the checkpoint again"
        raise ModelError(problem, key=str(index)) from error


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that make it a model: not those of the trainer, nor the adapters by themselves.

    Raises ModelError if no weight file is found, or if one is missing or truncated.
    """
    check_weights(folder)
    ignored = IGNORED_FILES | {ADAPTERS_FILE}
    suffixes = METADATA_SUFFIXES | {".safetensors"}
    return [path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.name not in ignored]


def write_checksums(folder: Path) -> None:
    """Write the checksums of every file in a folder and below, and that of these checksums."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CHECKSUMS_FILE]
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    digests = _hash_files(files)
    content = {name: Checksum(bytes=path.stat().st_size, sha256=digests[name]) for name, path in files.items()}
    write_json(folder / CHECKSUMS_FILE, content | {CHECKSUMS_FILE: _checksum_entries(content)})


def _checksum_entries(checksums: Mapping[str, Checksum]) -> Checksum:
    """Return the checksum of checksums: without it a damaged one would accuse an intact file."""
    entries = {name: asdict(checksum) for name, checksum in checksums.items()}
    return Checksum(bytes=len(entries), sha256=compute_digest(entries))


def verify_checksums(folder: Path, names: Collection[str] | None = None) -> None:
    """Raise ModelError, with its path as key, for the first file whose content isn't the one that was written.

    Compares the files of these `names` (None: all); files that were added later aren't compared. Reads every file
    (about a second per gigabyte and thread).
    """
    checksums = read_checksums(folder)
    expected = {name: checksum for name, checksum in checksums.items() if names is None or name in names}
    for name, checksum in expected.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != checksum.bytes:
            reason = "is missing" if size is None else f"has {size} bytes instead of {checksum.bytes}"
            raise ModelError(f"{path} {reason}; {_RESTORE_HINT}", key=str(path), value=size)
    for name, digest in _hash_files({name: folder / name for name in expected}).items():
        if digest != expected[name].sha256:
            path = folder / name
            raise ModelError(
                f"{path} has another content than was written; {_RESTORE_HINT}", key=str(path), value=digest
            )


def verify_model_files(folder: Path) -> None:
    """Raise ModelError for the first file that affects the model's output and isn't as it was written.

    These are the files that `compute_checkpoint_digest` reads, which a process reads once. A folder without checksums,
    such as a published model's, passes.
    """
    if (folder / CHECKSUMS_FILE).exists():
        names = {name for name in read_checksums(folder) if "/" not in name and name not in IGNORED_FILES}
        verify_checksums(folder, {name for name in names if Path(name).suffix in HASHED_SUFFIXES})


def read_checksums(folder: Path) -> dict[str, Checksum]:
    """Return the checksums of a checkpoint's files by name. Raises ModelError if they can't be read."""
    path = folder / CHECKSUMS_FILE
    try:
        checksums = read_json(path, dict[str, Checksum], hint="it holds the checksums of the checkpoint's files")
    except DataError as error:
        raise ModelError(str(error), key=str(path)) from error
    own = checksums.pop(CHECKSUMS_FILE, None)
    if own != _checksum_entries(checksums):
        raise ModelError(f"{path} has another content than was written; {_RESTORE_HINT}", key=str(path), value=own)
    return checksums


def _hash_files(files: Mapping[str, Path]) -> dict[str, str]:
    with ThreadPoolExecutor(_NUM_HASH_THREADS) as pool:
        return dict(zip(files, pool.map(_hash_file, files.values()), strict=True))


def compute_checkpoint_digest(folder: Path) -> str:
    """Compute a digest of every file of a checkpoint that affects the model's output, by names and contents.

    It is independent of the folder's name, and reads the weights once per process (about a second per gigabyte). Raises
    ModelError if they can't be read.
    """
    with convert_errors(ModelError, f"{folder} can't be read as a model", key=str(folder)):
        paths = (path for path in sorted(folder.iterdir()) if path.suffix in HASHED_SUFFIXES)
        return compute_digest([(path.name, _hash_file(path)) for path in paths if path.name not in IGNORED_FILES])


def _hash_file(path: Path) -> str:
    status = path.stat()
    # ctime, too: unlike mtime, it can't be set back.
    return _hash_file_cached(path.resolve(), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1024)
def _hash_file_cached(path: Path, *_: int) -> str:
    return compute_file_sha256(path)
