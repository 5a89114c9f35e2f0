"""Compute stable digests and seeds from full identities."""

import hashlib
import json
import os
from typing import Any

from saccade.utils.files import open_file


def compute_digest(*identity: Any) -> str:
    """Return a digest of a full identity (JSON-like values), equal on every machine and in every process."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def compute_file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a whole file, 64 hex digits. Raises OSError if it can't be read."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def derive_seed(*identity: Any) -> int:
    """Return a 63-bit seed derived from a full identity (Python's `hash` differs between processes)."""
    return int(compute_digest(*identity)[:16], 16) >> 1
