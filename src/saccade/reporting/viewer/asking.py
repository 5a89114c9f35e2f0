"""Questions to a model from the viewer: uploaded files, the events of an episode while it runs, the finished episodes.

browser ──files──> a temporary folder ──question──> ask, in a thread ──events──> queue ──lines of JSON──> browser
"""

import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.errors import DataError, SaccadeError
from saccade.reporting.episode_view import format_call
from saccade.reporting.viewer.episodes import Describer, StoredEpisode
from saccade.types import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Episode, MediaKind, ToolResult
from saccade.utils.text import pluralize

ASKED = "(asked)"  # in place of a run's name
MAX_EPISODES = 100  # the newest, which pages can show
SUFFIXES = {
    **dict.fromkeys(sorted(IMAGE_SUFFIXES | {".gif"}), MediaKind.IMAGE),
    **dict.fromkeys(sorted(VIDEO_SUFFIXES), MediaKind.VIDEO),
}
OnEvent = Callable[[str, Mapping[str, Any]], None]
# Receives a question, the paths of videos and of images, and the callback of events.
AskFn = Callable[[str, Sequence[Path], Sequence[Path], OnEvent], Episode]


class Questions:
    """What was asked since the start; `model` is the name that the page shows, `ask` runs an episode."""

    def __init__(self, model: str, ask: AskFn) -> None:
        self.model, self._ask, self._is_busy = model, ask, threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-ask-")
        self._files: list[tuple[Path, MediaKind]] = []
        self._episodes: dict[str, Episode] = {}
        self._count = 0

    def close(self) -> None:
        """Delete the files."""
        self._folder.cleanup()

    def create_file(self, name: str) -> tuple[int, Path]:
        """Return the number and the path of a file to write. Raises DataError for a kind that can't be shown."""
        suffix = Path(name).suffix.lower()
        if suffix not in SUFFIXES:
            message = f"{name!r:.80} is neither a video nor a picture; use one of {', '.join(SUFFIXES)}"
            raise DataError(message, key="name", value=name)
        number = len(self._files)
        stem = re.sub(r"[^\w-]", "_", Path(name).stem)[:60]
        path = Path(self._folder.name) / f"{number}-{stem}{suffix}"
        self._files.append((path, SUFFIXES[suffix]))
        return number, path

    def find(self, ref: str) -> StoredEpisode | None:
        """Return a finished episode; None for an unknown one."""
        episode = self._episodes.get(ref)
        return None if episode is None else StoredEpisode(episode=episode, score=None, outcome="asked")

    def describe(self, ref: str) -> dict[str, Any]:
        """Return what a page shows of an episode. Raises DataError for an unknown one."""
        stored = self.find(ref)
        if stored is None:
            raise DataError(f"there is no answer {ref!r:.40}; ask again", key="ref", value=ref)
        return Describer(stored).describe()

    def stream(self, question: str, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Ask, and yield the events; the last one is `done` with the episode's ref, or `error`."""
        events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        worker = threading.Thread(target=self._run, args=(question, numbers, events.put), daemon=True)
        worker.start()
        while (event := events.get()) is not None:
            yield event

    def _run(self, question: str, numbers: Sequence[int], put: Callable[[dict[str, Any] | None], None]) -> None:
        if not self._is_busy.acquire(blocking=False):
            put({"event": "error", "text": "the model still answers another question; wait for it"})
            put(None)
            return
        try:
            files = [self._files[number] for number in numbers if 0 <= number < len(self._files)]
            videos, images = (
                [path for path, kind in files if kind is wanted] for wanted in (MediaKind.VIDEO, MediaKind.IMAGE)
            )
            episode = self._ask(question, videos, images, lambda event, data: put(_describe_event(event, data)))
            self._count += 1
            ref = str(self._count)
            self._episodes[ref] = episode
            self._episodes.pop(str(self._count - MAX_EPISODES), None)
            put({"event": "done", "ref": ref})
        except (SaccadeError, OSError) as error:
            put({"event": "error", "text": str(error)})
        finally:
            self._is_busy.release()
            put(None)


def _describe_event(event: str, data: Mapping[str, Any]) -> dict[str, Any]:
    if event == "reply":
        return {"event": event, "turn": data["turn"], "text": data["reply"].text}
    if event == "calls":
        return {"event": event, "turn": data["turn"], "calls": [format_call(call) for call in data["calls"]]}
    if event == "result":
        result: ToolResult = data["result"]
        text = result.error if result.error is not None else result.text
        shown = pluralize(sum(len(image.frames) for image in result.images), "image")  # of a pair both frames
        values = {"ok": result.ok, "text": text or shown, "seconds": result.seconds}
        return {"event": event, "turn": data["turn"], "index": data["index"], **values}
    return {"event": event}
