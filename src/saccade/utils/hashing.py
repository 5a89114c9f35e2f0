"""Compute stable digests and seeds from full identities."""

import hashlib
import json
from typing import Any


def compute_digest(*identity: Any) -> str:
    """Return a digest of a full identity (JSON-like values), equal on every machine and in every process."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def derive_seed(*identity: Any) -> int:
    """Return a 63-bit seed derived from a full identity (Python's `hash` differs between processes)."""
    return int(compute_digest(*identity)[:16], 16) >> 1
