"""Answer another system's questions with a checkpoint's environment: messages to tasks, tasks to episodes.

    another system ── messages ──> build_task ──> AgentRunner.run_episodes ── run_episode ──> answers
                                                       │
                                                       └─ one event loop and one engine for its lifetime

The other system calls from its own thread and blocks; the tasks of one call run concurrently.
"""

import asyncio
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.errors import DataError, RunError
from saccade.evaluation.runner import disable_tools
from saccade.evaluation.subset import assign_frame_budgets
from saccade.interop.media import save_media
from saccade.metrics.episode_metrics import has_failed
from saccade.protocols import SelectEnvironment
from saccade.rollouts.runner import run_episode
from saccade.runs import pipeline
from saccade.types import AnswerType, Episode, Media, MediaKind, Task
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.files import file_errors
from saccade.utils.hashing import derive_seed
from saccade.utils.jsonl import append_jsonl


class AgentRunner:
    """Run tasks with the environment and model of a run, or of a checkpoint with a recipe.

    `overrides` are dotted, as on the command line. Images without a file are stored in `folder`, and every episode is
    appended to `episodes.jsonl` there as it ends. Raises what `saccade ask` raises for a model that it can't use.
    """

    def __init__(
        self, model: Path, *, folder: Path, recipe: str = "", overrides: Sequence[str] = (), max_concurrency: int = 64
    ) -> None:
        self.components = pipeline.load_for_inference(model, recipe=recipe, settings=overrides)
        self.folder = folder.resolve()
        self.components.media.generated_dir = str(self.folder / pipeline.IMAGES_FOLDER)
        self._max_concurrency = max_concurrency
        self._num_runs = Counter[str]()  # by the task's digest
        self._event_loop = asyncio.Runner()

    def run_episodes(self, tasks: Sequence[Task]) -> list[Episode]:
        """Run each task once and return the episodes in order; a task that repeats gets another seed.

        A failed episode is included, with its error, and a warning is issued. Raises RunError if there are several and
        all failed.
        """
        with file_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        episodes = self._event_loop.run(self._run_all(tasks))
        failed = [episode for episode in episodes if has_failed(episode)]
        if len(failed) == len(episodes) > 1:
            raise RunError(
                f"all {len(failed)} episodes failed, the first with: {failed[0].error}; fix the cause and run again",
                key="episodes",
                value=len(failed),
            )
        if failed:  # the other system can't represent a failure and scores it as a wrong answer
            warnings.warn(
                f"{len(failed)} of {len(episodes)} episodes failed, the first with: {failed[0].error}", stacklevel=2
            )
        return episodes

    def close(self) -> None:
        """Close the engine and the event loop."""
        self._event_loop.run(self.components.engine.close())
        self._event_loop.close()

    async def _run_all(self, tasks: Sequence[Task]) -> list[Episode]:
        settings = self.components.recipe.evaluation
        environments: SelectEnvironment = self.components.environments
        environments = environments if settings.use_tools else disable_tools(environments)
        base = self.components.build_context(seed=self.components.recipe.seed, temperature=settings.temperature)
        budgets = assign_frame_budgets(tasks, settings.frame_budgets)
        semaphore = asyncio.Semaphore(self._max_concurrency)

        async def run_one(task: Task) -> Episode:
            index = self._num_runs[task.digest]
            self._num_runs[task.digest] += 1
            seed = derive_seed(base.seed, 0, task.digest, index)  # the seed of the same sample in `saccade eval`
            async with semaphore:
                context = replace(base, seed=seed, frame_budget=budgets[task.id])
                episode = await run_episode(task, environments(task), context)
            file = self.folder / "episodes.jsonl"
            with file_errors(file):
                append_jsonl(file, episode)
            return episode

        return await gather_or_cancel([run_one(task) for task in tasks])


# ---- messages to tasks ---------------------------------------------------------------------------------------------


def build_task(name: str, messages: Sequence[Mapping[str, Any]], image_dir: Path) -> Task:
    """Build a task from chat messages whose contents are lists of `{"type": "text" | "image" | "video", ...}`.

    The question joins all texts, those of system messages first; the environment has its own system prompt. A medium is
    a path, a `file:` or `data:` URL, bytes, or a mapping with a key such as `path` or `bytes`; an image may also be an
    object with `save` like a PIL image, or an array (height, width, channels); a video may also be a list of images,
    which become separate media. Media without a file are stored in `image_dir`.

    Raises DataError for anything an environment can't take: assistant messages, audio, a part of a video, a web URL.
    """
    texts_by_role: dict[str, list[str]] = {"system": [], "user": []}
    media: list[Media] = []
    for message in messages:
        if message["role"] not in texts_by_role:
            raise DataError(
                f"{name}: messages of the role {message['role']!r} are not supported, only system and user; "
                "remove the few-shot examples",
                key="role",
                value=message["role"],
            )
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                texts_by_role[message["role"]].append(part["text"])
            else:
                media += _build_media(name, part, image_dir)
    # The other system grades, so there is no ground truth here.
    question = "\n".join(text for texts in texts_by_role.values() for text in texts if text.strip())
    return Task(id=name, question=question, media=tuple(media), answer_type=AnswerType.OPEN, ground_truth="")


def _build_media(name: str, part: Mapping[str, Any], image_dir: Path) -> list[Media]:
    media_type, value = part["type"], part.get("url")
    if media_type not in ("image", "video"):
        raise DataError(
            f"{name}: content of the type {media_type!r} is not supported; give text, image or video",
            key="type",
            value=media_type,
        )
    # Showing the whole video instead could silently reveal the answer.
    for key in ("start_time", "end_time"):
        if part.get(key) is not None:
            raise DataError(
                f"{name}: {key}={part[key]} selects a part of a video, which is not supported; cut it out first",
                key=key,
                value=part[key],
            )
    if media_type == "video" and isinstance(value, list | tuple) and value:
        return [
            Media(path=save_media(name, image, MediaKind.IMAGE, image_dir), kind=MediaKind.IMAGE) for image in value
        ]
    kind = MediaKind(media_type)
    return [Media(path=save_media(name, value, kind, image_dir), kind=kind)]
