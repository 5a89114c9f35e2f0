"""The stages of a run's life as functions: what the commands, the demo and your own script share.

world(folder, recipe)     clips, tasks and traces, checked
sft(folder, recipe)       traces -> checkpoints in folder/sft
rl(folder, recipe)        tasks  -> checkpoints in folder/rl
evaluate(folder, recipe)  tasks  -> folder/evaluations/<name>.jsonl
"""

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from saccade import plugins
from saccade.chat.render import load_renderer
from saccade.config import Recipe
from saccade.data.rows import read_demos, read_tasks
from saccade.data.world import check_world, contact_sheet, make_world
from saccade.data.world.check import WorldReport
from saccade.errors import DataError, ModelError, RunError
from saccade.evaluation import run as evaluation_run
from saccade.rewards._compose import compose
from saccade.rollouts.stage import Stage
from saccade.runlog import Run, writing
from saccade.training import checkpoint
from saccade.training import rl as rl_training
from saccade.training import sft as sft_training
from saccade.types import Scored

T = TypeVar("T")
OnStep = Callable[[int, Mapping[str, float]], None]
SPLITS = ("train", "validation", "test")
TINY_TOKEN = 16  # pixels per side of a visual token of the tiny models; those of published ones are larger


def with_paths(recipe: Recipe, *, model: Path | None = None, world: Path | None = None) -> Recipe:
    """The recipe with a model and a world's files filled in, absolute, so that it can be resumed from anywhere."""
    if model is not None:
        path = str(weights_of(model).resolve())
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})
    if world is not None:
        root = world.resolve()
        places = {split: str(root / split / "tasks.jsonl") for split in SPLITS}
        data = recipe.data.model_copy(update={**places, "traces": str(root / "train" / "traces.jsonl")})
        recipe = recipe.model_copy(update={"data": data})
    return recipe


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a run: of its RL if there is one, else of its SFT."""
    return latest(folder, "rl") or latest(folder, "sft")


def latest(folder: Path, stage: str) -> Path | None:
    """The newest checkpoint of a stage of a run ("sft", "rl")."""
    found = checkpoint.newest(folder / stage)
    return found.folder if found else None


def weights_of(path: Path) -> Path:
    """A checkpoint, where a run stands for its newest one. Raises RunError for a run that has none yet."""
    if not (path / "recipe.yaml").exists():
        return path
    found = newest(path)
    if found is None:
        raise RunError(f"the run {path} has no checkpoint yet")
    return found


def run_of(model: Path) -> Path | None:
    """The run that a checkpoint belongs to, or that `model` itself is, if any."""
    places = (model, *model.resolve().parents[:2])
    return next((place for place in places if (place / "recipe.yaml").is_file()), None)


def fitting(model: Path) -> str:
    """The packaged recipe for a checkpoint that belongs to no run, by the pixels of one visual token."""
    try:
        vision = json.loads((model / "config.json").read_text(encoding="utf-8"))["vision_config"]
        side = int(vision["patch_size"]) * int(vision["spatial_merge_size"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{model} is not a model: it has no config.json that speaks of vision") from error
    return "tiny/para_grpo" if side <= TINY_TOKEN else "paravt/para_grpo"


def check(recipe: Recipe) -> None:
    """See that the recipe's plugins and their settings can be used, before anything is made. Raises ConfigError."""
    plugins.bind("agents", recipe.agent.name, recipe.agent.settings)
    plugins.bind("engines", recipe.engine.name, recipe.engine.settings, backbone=None, media=None)
    compose(recipe.rewards)


def load(recipe: Recipe, weights: Path) -> Stage:
    """The stage of a recipe with these weights. Raises RunError where there are none (`Path()`)."""
    if weights == Path():
        _no_model()
    model = recipe.model.model_copy(update={"path": str(weights)})
    return Stage.of(recipe.model_copy(update={"model": model}))


def _no_model() -> NoReturn:
    raise RunError("the recipe names no model; give --model, such as a folder that `saccade model tiny` made")


def finish(stage: Stage, work: Coroutine[None, None, T]) -> T:
    """Run the work of a stage to its end, and close the engine whatever happens."""

    async def whole() -> T:
        try:
            return await work
        finally:
            await stage.engine.close()

    return asyncio.run(whole())


def world(folder: Path, recipe: Recipe, *, told: Callable[[int, str, int], None]) -> WorldReport:
    """Make a needle world, check it (labels, leakage between splits), and draw some of its clips in sheet.png.

    `told(done, what, total)` counts the clips of all splits. Raises DataError for a world that is not sound.
    """
    made = dict.fromkeys(SPLITS, 0)
    total = recipe.world.train + recipe.world.validation + recipe.world.test

    def count(split: str, done: int, _: int) -> None:
        made[split] = done
        told(sum(made.values()), split, total)

    with writing(folder):
        make_world(folder, recipe.world, seed=recipe.seed, progress=count)
        told(total, "checking", total)
        found = check_world(folder)
        if found.problems:
            raise DataError(f"the world {folder} is not sound: {found.problems[0]}; delete it and start again")
        contact_sheet(folder, folder / "sheet.png")
    return found


def sft(folder: Path, recipe: Recipe, *, resume: bool = False, run: Run | None = None, on_step: OnStep) -> Path:
    """Fine-tune on the recipe's traces, resumed from the run's newest checkpoint; returns the last checkpoint.

    `run` is the run of the folder where it is open already.
    """
    demos = read_demos(_named(folder, recipe.data.traces, "data.traces"))
    run = run or _begun(folder, recipe, resume)
    return _learn("sft", functools.partial(sft_training.train, demos=demos), run, on_step)


def rl(folder: Path, recipe: Recipe, *, resume: bool = False, run: Run | None = None, on_step: OnStep) -> Path:
    """Reinforce on the recipe's training tasks, from the run's newest checkpoint; returns the last checkpoint.

    In the folder of a finished `sft` run, with `resume`, it begins with that run's weights; else with the recipe's.
    `run` is the run of the folder where it is open already.
    """
    tasks = read_tasks(_named(folder, recipe.data.train, "data.train"))
    run = run or _begun(folder, recipe, resume)
    return _learn("rl", functools.partial(rl_training.train, tasks=tasks), run, on_step)


def _begun(folder: Path, recipe: Recipe, resume: bool) -> Run:
    # A folder that became a run with a mistake in its recipe could only be deleted.
    if not resume:
        check(recipe)
        load_renderer(recipe.model.path or _no_model())
    return Run.create(folder, recipe, resume=resume)


def _learn(name: str, train: Callable[..., Coroutine[None, None, None]], run: Run, on_step: OnStep) -> Path:
    folder, own = run.path, latest(run.path, name)
    try:
        stage = load(run.recipe, own or newest(folder) or Path(run.recipe.model.path))
    except ModelError as error:
        if own is None:
            raise
        raise RunError(
            f"the checkpoint {own} can't be read; delete it to go on from the one before: {error}"
        ) from error

    def log(values: Mapping[str, float]) -> None:
        run.log(name, int(values["step"]), values)
        on_step(int(values["step"]), values)

    finish(stage, train(stage, folder=folder / name, log=log))
    weights = checkpoint.checkpoints(folder / name)[-1].folder
    run.mark_done(name, {"checkpoint": str(weights)})
    return weights


def evaluate(
    folder: Path,
    recipe: Recipe,
    *,
    name: str,
    weights: Path | None = None,
    tasks: Path | None = None,
    on_done: Callable[[int, int], None],
) -> list[Scored]:
    """Evaluate weights (a run's newest by default) on tasks (the recipe's test split by default).

    The episodes are kept in `folder/evaluations/<name>.jsonl`, and an interrupted evaluation goes on from there.
    Raises DataError for a name that is no file's.
    """
    if not name or Path(name).name != name:
        raise DataError(f"an evaluation can't be called {name!r}; give it a name without slashes")
    rows = read_tasks(tasks or _named(folder, recipe.data.test, "data.test"))
    chosen = weights_of(weights) if weights else newest(folder) or Path(recipe.model.path)
    stage = load(recipe, chosen)
    work = evaluation_run.evaluate(
        rows,
        agent=stage.agent,
        base=stage.context(seed=recipe.seed),
        score=stage.score,
        settings=recipe.evaluation,
        path=folder / "evaluations" / f"{name}.jsonl",
        identity={"weights": str(chosen.resolve()), **recipe.model_dump(mode="json", include={"agent", "rewards"})},
        on_done=on_done,
    )
    return finish(stage, work)


def _named(folder: Path, setting: str, key: str) -> Path:
    if not setting:
        raise DataError(f"the recipe names no {key}; give --world, or set {key}=FILE")
    return folder / setting
