"""Cache verdicts on disk, one small file each, so that any number of processes can share a folder."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError


class JudgeCache:
    """Store verdicts by key in a folder; without a folder nothing is stored.

    Each file also holds the question and answer, for people to read. An unreadable file counts as absent, and a failed
    write is ignored: it must not lose a verdict that was received.
    """

    def __init__(self, cache_dir: str | None) -> None:
        self._cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        if self._cache_dir is not None:
            try:
                self._cache_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"judge.cache_dir={self._cache_dir} can't be created: {error.strerror}; choose another folder",
                    key="rewards.judge.settings.cache_dir",
                    value=cache_dir,
                ) from error

    def get(self, key: str) -> str | None:
        """Return the verdict stored under a key, or None."""
        if self._cache_dir is None:
            return None
        try:
            verdict = json.loads(self._build_path(self._cache_dir, key).read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return verdict if isinstance(verdict, str) else None

    def put(self, key: str, verdict: str, metadata: Mapping[str, Any]) -> None:
        """Store a verdict; the file is written atomically."""
        if self._cache_dir is None:
            return
        path = self._build_path(self._cache_dir, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({**metadata, "verdict": verdict}, file)
            os.replace(partial, path)

    @staticmethod
    def _build_path(cache_dir: Path, key: str) -> Path:
        return cache_dir / key[:2] / f"{key}.json"
