"""The stage of scenes: find the video files, cut them into scenes, and reject files that can't be used."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from saccade.config.schema import ScenesConfig
from saccade.errors import DataError, MediaError
from saccade.media import hashing
from saccade.media.scenes import Scene, find_scenes
from saccade.runs.data_build.journal import Journal
from saccade.runs.data_build.replies import Rejection
from saccade.types import VIDEO_SUFFIXES
from saccade.utils.async_utils import gather_or_cancel, run_in_daemon_thread
from saccade.utils.hashing import compute_digest

T = TypeVar("T")
ResultT = TypeVar("ResultT")
OnProgress = Callable[[int, str], None]  # receives how many items are done, and a remark

STAGE = "scenes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneRecord:
    """What is known of a video's content, whatever its path; seconds and pixels."""

    key: str
    digest: str
    duration: float
    num_frames: int
    width: int
    height: int
    scenes: tuple[Scene, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A video file and its scenes."""

    path: str
    record: SceneRecord

    @property
    def name(self) -> str:
        """The start of the ids of its scenes and questions: a digest of its content."""
        return self.record.digest[:12]


def list_videos(paths: Iterable[Path]) -> list[str]:
    """Return the files that paths name, those of folders by suffix and in order. Raises DataError for no file."""
    files: dict[str, None] = {}
    for path in paths:
        if not path.is_dir():
            files[str(path)] = None
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in VIDEO_SUFFIXES and file.is_file())
        if not inside:
            suffixes = ", ".join(sorted(VIDEO_SUFFIXES))
            raise DataError(f"the folder {path} holds no video ({suffixes}); name another", key=str(path))
        files.update(dict.fromkeys(map(str, inside)))
    return list(files)


async def load_clips(
    files: Sequence[str],
    folder: Path,
    settings: ScenesConfig,
    *,
    skip_bad: bool,
    max_concurrency: int,
    on_progress: OnProgress,
) -> tuple[list[Clip], list[Rejection]]:
    """Return the clips, in order, and rejections of files that repeat another one's content or can't be decoded.

    Unless `skip_bad`, raises MediaError, which names the file, for the first that can't.
    """
    journal = Journal(folder / "stages" / f"{STAGE}.jsonl", SceneRecord)

    async def load(file: str) -> Clip | Rejection:
        try:
            digest = hashing.compute_file_digest(file)
            key = compute_digest(digest, settings.model_dump())
            if key not in journal.items:
                info, scenes = await run_in_daemon_thread(lambda: find_scenes(file, settings), "saccade-scenes")
                journal.append(
                    SceneRecord(
                        key=key,
                        digest=digest,
                        duration=info.duration,
                        num_frames=info.num_frames,
                        width=info.width,
                        height=info.height,
                        scenes=scenes,
                    )
                )
        except MediaError as error:
            if not skip_bad:
                raise
            return Rejection(stage=STAGE, item=file, reason="the file can't be used", detail=str(error))
        return Clip(path=file, record=journal.items[key])

    results = await run_items(load, files, max_concurrency=max_concurrency, on_progress=on_progress)
    clips: dict[str, Clip] = {}
    rejections: list[Rejection] = []
    for result in results:
        if isinstance(result, Rejection):
            rejections.append(result)
        elif result.record.digest in clips:
            same = clips[result.record.digest].path
            rejections.append(Rejection(stage=STAGE, item=result.path, reason="a copy of another file", detail=same))
        else:
            clips[result.record.digest] = result
    return list(clips.values()), rejections


async def run_items(
    function: Callable[[T], Awaitable[ResultT]], items: Sequence[T], *, max_concurrency: int, on_progress: OnProgress
) -> list[ResultT]:
    """Return the function's result for each item, in order, with at most `max_concurrency` in progress."""
    semaphore, num_done = asyncio.Semaphore(max_concurrency), 0

    async def run(item: T) -> ResultT:
        nonlocal num_done
        async with semaphore:
            result = await function(item)
        num_done += 1
        on_progress(num_done, "")
        return result

    return await gather_or_cancel([run(item) for item in items])
