"""Run the stages of a build, and write its files.

    videos ─scenes─> captions ─> questions ─> no_video ─> few_frames ─> agreement ─┬─> tasks.jsonl
                                                           demonstrations.jsonl <──┘ demonstrations
    beside them: report.json (counts and usage), rejected.jsonl (what was dropped, and why), provenance.json,
    and stages/STAGE.jsonl (scenes, and every reply of the teacher)

Each stage is a pure function of the one before it and of recorded replies. So the same command continues a build that
was interrupted anywhere, and writes the same files as one that wasn't.
"""

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from saccade import plugins
from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.config.schema import DataBuildRecipe
from saccade.engines.chat_completions import ChatCompletions
from saccade.environments.tool_environment import ToolEnvironment
from saccade.errors import ConfigError, EngineError, MediaError, RunError
from saccade.media.relocation import map_media_paths
from saccade.protocols import ChatEngine
from saccade.rollouts.components import RolloutComponents, uses_chat_engine
from saccade.runs.data_build import captions, demonstrations, filters, questions
from saccade.runs.data_build.captions import CaptionedScene
from saccade.runs.data_build.clips import Clip, OnProgress, list_videos, load_clips, run_items
from saccade.runs.data_build.estimate import compute_cost, estimate_usage
from saccade.runs.data_build.journal import StageUsage, Teacher
from saccade.runs.data_build.questions import QuestionUnit
from saccade.runs.data_build.replies import InvalidReply, Rejection
from saccade.types import Demonstration, Task
from saccade.utils.async_utils import hide_interrupted_tasks
from saccade.utils.files import convert_file_errors
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import relativize_path, to_jsonable, write_json, write_jsonl
from saccade.utils.versions import find_package_version

T = TypeVar("T")
ResultT = TypeVar("ResultT")
StartStage = Callable[[str, int], OnProgress]  # receives a stage and its number of items

PROMPTS = {
    captions.STAGE: captions.PROMPT,
    questions.STAGE: [questions.PROMPT, questions.RELATION, questions.RULES],
    "votes": [filters.PROMPT, filters.NO_VIDEO_PROMPT, filters.ANSWER_PROMPT],
}
FAILED = "a request failed"  # the reason of a rejection that the same command tries again
# Settings of an engine that don't change its replies.
_CONNECTION_SETTINGS = {
    "url",
    "model",
    "api_key_env",
    "request_timeout",
    "max_retries",
    "retry_backoff",
    "max_concurrency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """The counts of a build: what each stage yielded, what was rejected by stage and reason, and what it cost."""

    counts: Mapping[str, int]
    rejected: Mapping[str, Mapping[str, int]]
    usage: Mapping[str, StageUsage]
    cost: float | None  # None if a price is unknown

    @property
    def num_failed(self) -> int:
        """How many items a failed request left out; the same command tries them again."""
        return sum(reasons.get(FAILED, 0) for reasons in self.rejected.values())


@dataclass(slots=True, kw_only=True)
class Build:
    """The state of a build in `folder`; it starts with the clips and the rejected files."""

    folder: Path
    recipe: DataBuildRecipe  # of the teacher's episodes
    sft_recipe: DataBuildRecipe  # of the training on them
    clips: Sequence[Clip]
    rejections: list[Rejection]
    counts: dict[str, int] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)


def require_teacher(recipe: DataBuildRecipe) -> None:
    """Raise ConfigError unless the recipe's engine is a chat API."""
    if not uses_chat_engine(recipe):
        raise ConfigError(
            f"engine.name={recipe.engine.name} can't be the teacher, which is a chat completions server: give "
            "--teacher URL, such as http://127.0.0.1:8000/v1",
            key="engine.name",
            value=recipe.engine.name,
        )


def without_prefill(recipe: DataBuildRecipe) -> DataBuildRecipe:
    """Return the recipe without prefilled replies, which few servers continue: the teacher opens its own reasoning.

    Demonstrations have the form that a prefilled reply has (`demonstrations.demonstrate`).
    """
    if "force_think" not in inspect.signature(plugins.load("environments", recipe.environment.name)).parameters:
        return recipe
    return recipe.with_values({"environment.settings": {**recipe.environment.settings, "force_think": False}})


def prepare(
    paths: Sequence[Path], folder: Path, recipe: DataBuildRecipe, *, skip_bad: bool, start_stage: StartStage
) -> Build:
    """Cut the videos into scenes, which needs no teacher. Raises DataError or MediaError, which names the file.

    With `skip_bad`, files that can't be used are rejected and counted; raises RunError if none is left.
    """
    files = list_videos(paths)
    settings = recipe.data_build
    work = load_clips(
        files,
        folder,
        settings.scenes,
        skip_bad=skip_bad,
        max_concurrency=settings.max_concurrency,
        on_progress=start_stage("scenes", len(files)),
    )
    clips, rejections = asyncio.run(work)
    if not clips:
        raise RunError(f"none of the {len(files)} videos can be used: {rejections[0].detail}", key=rejections[0].item)
    return Build(folder=folder, recipe=without_prefill(recipe), sft_recipe=recipe, clips=clips, rejections=rejections)


def estimate(build: Build) -> dict[str, StageUsage]:
    """Return the largest usage of each stage that needs the teacher."""
    default = inspect.signature(ChatCompletions).parameters["image_token_size"].default
    size = build.recipe.engine.settings.get("image_token_size", default)
    return estimate_usage(build.clips, build.recipe, image_token_size=int(size))


def run_build(build: Build, *, start_stage: StartStage) -> BuildReport:
    """Run the stages that need the teacher, and write the files. Raises RunError if no question stays.

    Raises BrokenEngineError or ConfigError for a teacher that can't be used.
    """
    return asyncio.run(_run(build, start_stage))


async def _run(build: Build, start_stage: StartStage) -> BuildReport:
    hide_interrupted_tasks()
    recipe = build.recipe
    components = RolloutComponents.from_recipe(recipe)
    engine = cast(ChatEngine, components.engine)
    try:
        model = await engine.connect()
        identity = {
            "engine": recipe.engine.name,
            "model": model,
            **{name: value for name, value in recipe.engine.settings.items() if name not in _CONNECTION_SETTINGS},
        }
        stages = _Stages(build=build, components=components, model=model, identity=identity, start_stage=start_stage)
        _write_provenance(build, model)
        captioned = await stages.caption()
        tasks = await stages.ask(captioned)
        for stage in filters.STAGES:
            tasks = await stages.filter(stage, tasks)
        return _write_results(build, tasks, await stages.demonstrate(tasks))
    finally:
        await engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """The stages of a build that need the teacher; each records its counts, rejections and usage in `build`."""

    build: Build
    components: RolloutComponents
    model: str
    identity: Mapping[str, Any]
    start_stage: StartStage

    async def caption(self) -> list[CaptionedScene]:
        settings, clips = self.build.recipe.data_build.captions, self.build.clips
        scenes = [(clip, index) for clip in clips for index in range(len(clip.record.scenes))]
        self.build.counts |= {"videos": len(clips), "scenes": len(scenes)}

        async def work(item: tuple[Clip, int], teacher: Teacher) -> CaptionedScene:
            clip, index = item
            media, seed = self.components.media, self.build.recipe.seed
            return await captions.caption_scene(clip, index, settings, teacher=teacher, media=media, seed=seed)

        return await self._run(captions.STAGE, scenes, work, name=lambda item: f"{item[0].name}-s{item[1]}")

    async def ask(self, captioned: Sequence[CaptionedScene]) -> list[Task]:
        settings, seed = self.build.recipe.data_build, self.build.recipe.seed
        # The filters are no part of it: a change of theirs changes no question, and repeats no vote.
        used = settings.model_dump(mode="json", include={"scenes", "captions", "questions"})
        provenance = {
            "stage": questions.STAGE,
            "teacher": self.model,
            "prompts": compute_digest(PROMPTS[captions.STAGE], PROMPTS[questions.STAGE]),
            "settings": compute_digest(used, seed),
        }

        async def work(unit: QuestionUnit, teacher: Teacher) -> list[Task | Rejection]:
            return await questions.write_questions(
                unit, settings.questions, teacher=teacher, seed=seed, provenance=provenance
            )

        units = questions.plan_units(captioned, settings.questions, seed=seed)
        written = await self._run(questions.STAGE, units, work, name=lambda unit: unit.name)
        results = [result for group in written for result in group]
        tasks, repeated = questions.drop_repeated(result for result in results if isinstance(result, Task))
        self.build.rejections += [result for result in results if isinstance(result, Rejection)] + repeated
        self.build.counts[questions.STAGE] = len(tasks)
        return tasks

    async def filter(self, stage: str, tasks: Sequence[Task]) -> list[Task]:
        settings = self.build.recipe.data_build
        voting = filters.Voting(
            settings=settings.filters,
            captions=settings.captions,
            media=self.components.media,
            score_fn=self.components.score_fn,
            seed=self.build.recipe.seed,
        )
        if not filters.count_votes(stage, settings.filters):
            return list(tasks)

        async def work(task: Task, teacher: Teacher) -> Task | Rejection:
            votes = await filters.collect_votes(task, stage, voting, teacher=teacher)
            if not voting.is_dropped(stage, sum(votes)):
                return task
            detail = f"{sum(votes)} of {len(votes)} votes are right"
            return Rejection(stage=stage, item=task.id, reason=filters.REASONS[stage], detail=detail)

        return await self._run(stage, tasks, work, name=lambda task: task.id)

    async def demonstrate(self, tasks: Sequence[Task]) -> list[Demonstration]:
        recipe, settings = self.build.recipe, self.build.recipe.data_build.demonstrations
        if not settings.attempts:
            return []
        context = self.components.build_context(seed=recipe.seed)

        async def work(task: Task, teacher: Teacher) -> Demonstration | Rejection:
            make_environment = self.components.environments(task)
            budget = draw_frame_budget(recipe.frame_budgets, run_seed=recipe.seed, epoch=0, task=task)
            return await demonstrations.demonstrate(
                task,
                make_environment,
                replace(context, engine=teacher, frame_budget=budget),
                self.components.score_fn,
                attempts=settings.attempts,
                require_call=settings.require_call,
                max_merged_calls=_count_parallel_calls(make_environment()) if settings.merge_turns else 0,
            )

        taught = await self._run(demonstrations.STAGE, tasks, work, name=lambda task: task.id)
        reasons = await demonstrations.find_all_problems(taught, self.build.sft_recipe, context)
        self.build.rejections += [
            Rejection(stage=demonstrations.STAGE, item=taught[row].task.id, reason="SFT can't replay it", detail=reason)
            for row, reason in reasons.items()
        ]
        kept = [demonstration for row, demonstration in enumerate(taught) if row not in reasons]
        self.build.counts[demonstrations.STAGE] = len(kept)
        return kept

    async def _run(
        self,
        stage: str,
        items: Sequence[T],
        work: Callable[[T, Teacher], Awaitable[ResultT | Rejection]],
        *,
        name: Callable[[T], str],
    ) -> list[ResultT]:
        """Return what a stage yields for its items, in order, and record the rest."""
        settings = self.build.recipe.data_build
        path = self.build.folder / "stages" / f"{stage}.jsonl"
        engine = cast(ChatEngine, self.components.engine)
        teacher = Teacher(engine, path, identity=self.identity, max_failures=settings.max_failures)

        async def attempt(item: T) -> ResultT | Rejection:
            try:
                return await work(item, teacher)
            except InvalidReply as error:
                return Rejection(stage=stage, item=name(item), reason=error.reason, detail=error.detail)
            except (EngineError, MediaError) as error:
                return Rejection(stage=stage, item=name(item), reason=FAILED, detail=str(error))

        on_progress = self.start_stage(stage, len(items))
        work_items = run_items(attempt, items, max_concurrency=settings.max_concurrency, on_progress=on_progress)
        running = asyncio.ensure_future(work_items)
        try:
            # Unlike awaiting the items, this ends as soon as it is cancelled, before the items have ended.
            await asyncio.wait([running])
            results = running.result()
        except BaseException:
            teacher.stop_sending()
            running.cancel()
            await teacher.abort()
            await asyncio.gather(running, return_exceptions=True)
            raise
        await teacher.close()
        yielded = [result for result in results if not isinstance(result, Rejection)]
        self.build.rejections += [result for result in results if isinstance(result, Rejection)]
        self.build.counts[stage] = len(yielded)
        self.build.usage[stage] = teacher.usage
        return yielded


def _count_parallel_calls(environment: Any) -> int:
    """Return how many calls a turn of a demonstration may have, also if the teacher's turns had one each."""
    return environment.settings.max_calls_per_turn if isinstance(environment, ToolEnvironment) else 0


# ---- files -----------------------------------------------------------------------------------------------------------


def _write_provenance(build: Build, model: str) -> None:
    recipe = build.recipe
    sections = {"seed", "data_build", "environment", "environments", "sampling", "frame_budgets", "rewards"}
    videos = [{"path": clip.path, **to_jsonable(clip.record)} for clip in build.clips]
    content = {
        "saccade": find_package_version("saccade"),
        "teacher": model,
        "engine": {"name": recipe.engine.name, **recipe.engine.settings},
        "settings": recipe.model_dump(mode="json", include=sections),
        "prompts": PROMPTS,
        "prompts_digest": compute_digest(PROMPTS),
        "videos": videos,
    }
    write_json(build.folder / "provenance.json", content)


def _write_results(build: Build, tasks: Sequence[Task], taught: Sequence[Demonstration]) -> BuildReport:
    folder, price = build.folder, build.recipe.data_build.price
    counted: dict[str, Counter[str]] = {}
    for rejection in build.rejections:
        counted.setdefault(rejection.stage, Counter())[rejection.reason] += 1
    report = BuildReport(
        counts={**build.counts, "tasks": len(tasks), "demonstrations": len(taught)},
        rejected=counted,
        usage=build.usage,
        cost=compute_cost(sum(build.usage.values(), StageUsage()), price),
    )
    relocate = functools.partial(relativize_path, folder, root=folder)
    with convert_file_errors(folder):
        write_json(folder / "report.json", report)
        write_jsonl(folder / "rejected.jsonl", build.rejections)
        for name, items in (("tasks.jsonl", tasks), ("demonstrations.jsonl", taught)):
            if items:
                write_jsonl(folder / name, [map_media_paths(item, relocate) for item in items])
            else:
                (folder / name).unlink(missing_ok=True)  # of an earlier build with other settings
    if not tasks:
        reasons = Counter(rejection.reason for rejection in build.rejections)
        reason = f", most often because {reasons.most_common(1)[0][0]}" if reasons else ""
        raise RunError(
            f"no question is left{reason}; {folder / 'rejected.jsonl'} lists what was dropped: change data_build's "
            "settings, or the teacher, and repeat the command",
            key=str(folder),
        )
    return report
