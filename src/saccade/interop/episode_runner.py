"""Another system's questions, answered by a checkpoint's agent: messages to tasks, tasks to episodes.

    another system ── messages ──> task_of ──> Attempts.episodes ── run_episode, as in `saccade eval` ──> answers
                                                    │
                                                    └─ one event loop and one engine from first to last

The other system asks in its own thread, and waits; whatever it asks at once is attempted at once.
"""

import asyncio
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade import stages
from saccade.data.record import append
from saccade.errors import DataError, RunError
from saccade.evaluation.metrics import failed
from saccade.evaluation.portions import deal
from saccade.evaluation.run import without_tools
from saccade.interop.media import filmed, pictured
from saccade.rollouts.run import run_episode
from saccade.runlog import writing
from saccade.types import Episode, Kind, Media, MediaKind, Task, seed_of
from saccade.waiting import together


class Attempts:
    """The agent of a run, or of a checkpoint with a recipe, ready to attempt tasks.

    `settings` are dotted, as on the command line. Pictures that come without a file are put into `folder`, and every
    episode is appended to `episodes.jsonl` there as it ends. Raises what `saccade ask` raises for a model that it can't
    use.
    """

    def __init__(
        self, model: Path, *, folder: Path, recipe: str = "", settings: Sequence[str] = (), at_once: int = 64
    ) -> None:
        self.stage = stages.asking(model, recipe=recipe, settings=settings)
        self.folder = folder.resolve()
        self.stage.media.made = str(self.folder / stages.PICTURES)
        self._at_once = at_once
        self._asked: Counter[str] = Counter()
        self._loop = asyncio.Runner()

    def episodes(self, tasks: Sequence[Task]) -> list[Episode]:
        """One attempt at each, in order; a task that comes again is attempted anew, with another seed.

        An episode that broke is among them, with its error; RunError where there are several and every one broke.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        found = self._loop.run(self._attempt(tasks))
        broken = [each for each in found if failed(each)]
        if len(broken) == len(found) > 1:
            raise RunError(f"every attempt broke, the first with: {broken[0].error}")
        if broken:  # the other system has no word for it, and takes their silence for a wrong answer
            warnings.warn(f"{len(broken)} of {len(found)} attempts broke ({broken[0].error})", stacklevel=2)
        return found

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run(self.stage.engine.close())
        self._loop.close()

    async def _attempt(self, tasks: Sequence[Task]) -> list[Episode]:
        settings = self.stage.recipe.evaluation
        agent = self.stage.agent if settings.tools else without_tools(self.stage.agent)
        base = self.stage.context(seed=self.stage.recipe.seed, temperature=settings.temperature)
        budgets, gate = deal(tasks, settings.frames), asyncio.Semaphore(self._at_once)

        async def one(task: Task, index: int) -> Episode:
            seed = seed_of(base.seed, 0, task.digest, index)  # that of the same attempt in `saccade eval`
            async with gate:
                episode = await run_episode(task, agent, replace(base, seed=seed, frames=budgets[task.id]))
            file = self.folder / "episodes.jsonl"
            with writing(file):
                append(file, episode)
            return episode

        return await together([one(task, self._next(task)) for task in tasks])

    def _next(self, task: Task) -> int:
        self._asked[task.digest] += 1
        return self._asked[task.digest] - 1


# ---- messages to tasks ---------------------------------------------------------------------------------------------


def task_of(name: str, messages: Sequence[Mapping[str, Any]], pictures: Path) -> Task:
    """A task of chat messages whose contents are lists of `{"type": "text" | "image" | "video", ...}`.

    Texts are joined to the question, those of the system first; the agent has a system prompt of its own. A medium is a
    path, a `file:` or `data:` address, bytes, or a mapping that holds such as `path`, `bytes` or the like; a picture
    also anything that `save`s itself like a PIL image, or an array (height, width, channels); a video also a list of
    pictures, which are shown one by one. What is no file yet is put into the folder `pictures`. DataError for what no
    agent takes: answers of an assistant, audio, a part of a video, an address on the web.
    """
    said: dict[str, list[str]] = {"system": [], "user": []}
    media: list[Media] = []
    for message in messages:
        if message["role"] not in said:
            raise DataError(f"{name}: an agent takes no messages of the role {message['role']!r}; ask without examples")
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                said[message["role"]].append(part["text"])
            else:
                media += _media(name, part, pictures)
    # No gold answer: whoever asked marks, and nothing here may depend on what is right.
    question = "\n".join(text for texts in said.values() for text in texts if text.strip())
    return Task(id=name, question=question, media=tuple(media), kind=Kind.OPEN, gold="")


def _media(name: str, part: Mapping[str, Any], pictures: Path) -> list[Media]:
    kind, held = part["type"], part.get("url")
    if kind not in ("image", "video"):
        raise DataError(f"{name}: an agent takes texts, pictures and videos, not {kind!r}")
    # Shown whole, the rest of the video could give the answer away, and nobody would know.
    if part.get("start_time") is not None or part.get("end_time") is not None:
        raise DataError(f"{name}: an agent takes whole videos; cut the part out into a file of its own")
    if kind == "video" and isinstance(held, list | tuple) and held:
        return [Media(path=pictured(name, each, pictures), kind=MediaKind.IMAGE) for each in held]
    take = pictured if kind == "image" else filmed
    return [Media(path=take(name, held, pictures), kind=MediaKind(kind))]
