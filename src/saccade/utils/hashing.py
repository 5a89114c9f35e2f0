"""What a checkpoint holds, as a digest: equal wherever the folder lies and whatever it is called."""

import hashlib
from functools import lru_cache
from pathlib import Path

from saccade.errors import ModelError, boundary
from saccade.types import digest_of

KINDS = {".safetensors", ".bin", ".json", ".jinja", ".txt"}  # weights, configs, tokenizer, template
NOTES = {"notes.json"}  # of the trainer, beside the weights


def weights_digest(folder: Path) -> str:
    """A digest of every file of a checkpoint that decides what the model says, names and contents.

    Reads the weights once per process (about a second per gigabyte). Raises ModelError where they can't be read.
    """
    with boundary(ModelError, f"{folder} can't be read as a model"):
        found = [path for path in sorted(folder.iterdir()) if path.suffix in KINDS and path.name not in NOTES]
        return digest_of([(path.name, _content(path)) for path in found])


def _content(path: Path) -> str:
    status = path.stat()
    # Beside the size, the time of the last change of any kind: nobody can set it back.
    return _hashed(path.resolve(), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=1024)
def _hashed(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
