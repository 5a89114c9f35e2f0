"""Verdicts on disk: one small file each, so that any number of processes may share a folder."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError


class Verdicts:
    """A folder of verdicts by key; without a folder nothing is kept.

    Each file also holds what was asked, for people. One that can't be read counts as absent, and one that can't be
    written is not: a verdict that was given is not lost over it.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"the judge's cache {self._folder} can't be made: {error.strerror}") from error

    def get(self, key: str) -> str | None:
        """The verdict under a key."""
        if self._folder is None:
            return None
        try:
            found = json.loads(self._path(self._folder, key).read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def put(self, key: str, verdict: str, asked: Mapping[str, Any]) -> None:
        """Keep a verdict. The file appears complete or not at all."""
        if self._folder is None:
            return
        path = self._path(self._folder, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({**asked, "verdict": verdict}, file)
            os.replace(partial, path)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
