"""The stages of a run's life as functions: what the commands, the demo and your own script share.

world(folder, recipe)     clips, tasks and traces, checked
sft(folder, recipe)       traces -> checkpoints in folder/sft
rl(folder, recipe)        tasks  -> checkpoints in folder/rl
"""

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch

from saccade.config import Plugin, Recipe, load_recipe
from saccade.data.mixture import Mixture
from saccade.data.record import seen_from
from saccade.data.rows import read_demos, read_tasks
from saccade.data.world import check_world, contact_sheet, make_world, pieces
from saccade.data.world.check import WorldReport
from saccade.data.world.folder import SPLITS
from saccade.data.world.make import FRAME_BUDGETS
from saccade.errors import DataError, ModelError, RunError
from saccade.model.tiny import make_tiny
from saccade.preflight import check, check_device, check_model, jails
from saccade.protocols import TextEngine
from saccade.rollouts.stage import RolloutStage, Stage, examined, takes_text, trainable
from saccade.runlog import Run, writing
from saccade.trackers._tell import telling
from saccade.training import checkpoint
from saccade.training import rl as rl_training
from saccade.training import sft as sft_training
from saccade.types import Task

T = TypeVar("T")
OnStep = Callable[[int, Mapping[str, float]], None]
SERVED = "openai"  # the engine that a model's address stands for
PICTURES = "pictures"  # where a run keeps what its tools made
TINY_TOKEN = 16  # pixels per side of a visual token of the tiny models; those of published ones are larger


def with_paths(
    recipe: Recipe, *, folder: Path | None = None, model: Path | None = None, world: Path | None = None
) -> Recipe:
    """The recipe with a model and a world's files filled in, as the run in `folder` keeps them.

    Below the run's folder paths are relative to it, so that it can be moved as a whole; all others are absolute, so
    that it can be resumed from anywhere. A relative path of the recipe's own model starts at the run's folder if there
    is one, else here.
    """
    if model is not None:
        model = weights_of(model)
    elif recipe.model.path:
        inside = None if folder is None else folder / recipe.model.path
        model = inside if inside is not None and inside.exists() else Path(recipe.model.path)
    if model is not None:
        path = _kept(model, folder)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})
    if world is not None:
        places = {split: _kept(world / split / "tasks.jsonl", folder) for split in SPLITS}
        traces = _kept(world / "train" / "traces.jsonl", folder)
        if not isinstance(recipe.data.train, str):  # a mixture that was asked for; the world has the rest
            del places["train"]
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={**places, "traces": traces})})
    return recipe


def _kept(path: Path, folder: Path | None) -> str:
    root = None if folder is None else folder.resolve()
    return seen_from(root or Path(), str(path.resolve()), root)


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


def guessed(model: str | Path) -> tuple[str, tuple[str, ...]]:
    """The recipe for a model where none is named, and what it needs changed here: its run's, or one that fits."""
    if is_address(model):
        return "paravt/para_grpo", ()
    home = run_of(Path(model))
    return (str(home / "recipe.yaml"), ()) if home else fitting(Path(model))


def fitting(model: Path) -> tuple[str, tuple[str, ...]]:
    """The packaged recipe for a checkpoint of no run, by the pixels of a visual token; what it needs changed here."""
    try:
        vision = json.loads((model / "config.json").read_text(encoding="utf-8"))["vision_config"]
        side = int(vision["patch_size"]) * int(vision["spatial_merge_size"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{model} is not a model: it has no config.json that speaks of vision") from error
    if side <= TINY_TOKEN:
        return "tiny/para_grpo", ()
    here = () if torch.cuda.is_available() else ("model.device=cpu", "model.dtype=float32")
    return "paravt/para_grpo", ("engine.name=local", *here)


def asking(model: str | Path, *, recipe: str = "", settings: Sequence[str] = ()) -> RolloutStage:
    """The stage that answers questions with a run's newest weights, a checkpoint's or a server's: by `recipe`, else by
    the run's own or one that fits; `settings` are dotted. Nothing is graded. Raises SaccadeError for a model that can't
    be used.
    """
    name, here = (recipe, ()) if recipe else guessed(model)
    loaded, weights = aimed(ungraded(examined(load_recipe(name, [*here, *settings]))), str(model))
    return attempting(met(loaded), weights and weights_of(weights))


def ungraded(recipe: Recipe) -> Recipe:
    """The recipe as a cold start or a question uses it, which grade nothing and so need no judge."""
    return recipe.model_copy(update={"rewards": {}})


def load(recipe: Recipe, weights: Path) -> Stage:
    """The stage of a recipe with these weights."""
    model = recipe.model.model_copy(update={"path": str(weights)})
    return Stage.of(recipe.model_copy(update={"model": model}))


def attempting(recipe: Recipe, weights: Path | None) -> RolloutStage:
    """The stage of a recipe for attempts alone: with these weights, or with the server of an engine that takes text."""
    return RolloutStage.of(recipe) if weights is None else load(recipe, weights)


def is_address(model: str | Path) -> bool:
    """Whether what is given as a model is where a server answers."""
    return str(model).startswith(("http://", "https://"))


def aimed(recipe: Recipe, model: str | None) -> tuple[Recipe, Path | None]:
    """The recipe and the weights for what is given as a model: of an address, a recipe that asks its server in words.

    Settings that the recipe has for such a server stay.
    """
    if model is None or not is_address(model):
        return recipe, Path(model) if model else None
    kept = recipe.engine.settings if recipe.engine.name == SERVED else {}
    return recipe.model_copy(update={"engine": Plugin(name=SERVED, settings={**kept, "url": model})}), None


def met(recipe: Recipe) -> Recipe:
    """The recipe; of an engine that takes text, once its server is found to answer, with the name of its model.

    Raises ConfigError or BrokenEngineError where the server can't be asked, before anything else is done.
    """
    if not takes_text(recipe):
        return recipe
    stage = RolloutStage.of(recipe)
    settings = {**recipe.engine.settings, "model": finish(stage, cast(TextEngine, stage.engine).meet())}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"settings": settings})})


def model_of(folder: Path, recipe: Recipe) -> Path:
    """The model that a run begins with. Raises RunError where the recipe names none."""
    if not recipe.model.path:
        published = recipe.model.published
        such = f"a folder with {published}" if published else "a folder that `saccade model tiny` made"
        raise RunError(f"the recipe names no model; give --model, such as {such}")
    return folder / recipe.model.path


def finish(stage: RolloutStage, work: Coroutine[None, None, T]) -> T:
    """Run the work of a stage to its end, and close the engine whatever happens."""

    async def whole() -> T:
        try:
            return await work
        finally:
            await stage.engine.close()

    return asyncio.run(whole())


def world(folder: Path, recipe: Recipe, *, told: Callable[[int, str, int], None]) -> WorldReport:
    """Make a needle world, check it (labels, leakage between splits), and draw some of it in sheet.png.

    The traces of videos are for the frame budgets that the recipe trains with, where it names any. `told(done, what,
    total)` counts the videos or pictures of all splits. Raises DataError for a world that is not sound.
    """
    made = dict.fromkeys(SPLITS, 0)
    total = recipe.world.files

    def count(split: str, done: int, _: int) -> None:
        made[split] = done
        told(sum(made.values()), split, total)

    with writing(folder):
        budgets = recipe.gating.frames or FRAME_BUDGETS
        make_world(folder, recipe.world, seed=recipe.seed, budgets=budgets, progress=count)
        told(total, "checking", total)
        found = check_world(folder)
        if found.problems:
            raise DataError(f"the world {folder} is not sound: {found.problems[0]}; delete it and start again")
        contact_sheet(folder, folder / "sheet.png")
    return found


def tiny_model(folder: Path, recipe: Recipe, *, traces: Path, phrases: Sequence[str] = ()) -> None:
    """A checkpoint of random weights in `folder`, to whose tokenizer the words of the traces are tokens.

    So are the fixed parts of the recipe's world, and `phrases` besides.
    """
    texts: dict[str, None] = {}
    for each in read_demos(traces):
        said = (*each.replies, *(text for turn in each.children for text in turn))
        texts |= dict.fromkeys((each.task.question, *each.task.choices, *said))
    with writing(folder):
        make_tiny(
            str(folder),
            family=recipe.model.family,
            seed=recipe.seed,
            vocabulary_text=tuple(texts),
            phrases=(*pieces(recipe.world), *phrases),
        )


def sft(folder: Path, recipe: Recipe, *, resume: bool = False, run: Run | None = None, on_step: OnStep) -> Path:
    """Fine-tune on the recipe's traces, resumed from the run's newest checkpoint; returns the last checkpoint.

    `run` is the run of the folder where it is open already.
    """
    demos = read_demos(named(folder, recipe.data.traces, "data.traces"))
    run = run or _begun(folder, recipe, resume, graded=False)
    return _learn("sft", ungraded(run.recipe), functools.partial(sft_training.train, demos=demos), run, on_step)


def rl(folder: Path, recipe: Recipe, *, resume: bool = False, run: Run | None = None, on_step: OnStep) -> Path:
    """Reinforce on the recipe's training tasks, from the run's newest checkpoint; returns the last checkpoint.

    In the folder of a finished `sft` run, with `resume`, it begins with that run's weights; else with the recipe's.
    `run` is the run of the folder where it is open already. Raises RunError where the folder's `sft` was stopped
    halfway.
    """
    tasks = training_tasks(folder, recipe)
    run = run or _begun(folder, recipe, resume, graded=True)
    check_start(run)
    return _learn("rl", run.recipe, functools.partial(rl_training.train, tasks=tasks), run, on_step)


def check_start(run: Run) -> None:
    """See that the cold start in a run's folder, if there is one, came to its end. Raises RunError."""
    # Half a cold start would be taken for a whole one, and nobody would ever know.
    if (run.path / "sft").exists() and not run.is_done("sft") and latest(run.path, "rl") is None:
        mend = f"finish it first with `saccade sft … --out {run.path} --resume`"
        raise RunError(f"the SFT in {run.path} was stopped before its end; {mend}")


def training_tasks(folder: Path, recipe: Recipe) -> Sequence[Task]:
    """The tasks to learn from, of the run in `folder`: of one file, or of several mixed by weight."""
    train = recipe.data.train
    if isinstance(train, str) or not train:
        return read_tasks(named(folder, str(train or ""), "data.train"))
    return Mixture(tuple(read_tasks(folder / path) for path in train), tuple(train.values()))


def _begun(folder: Path, recipe: Recipe, resume: bool, *, graded: bool) -> Run:
    # A folder that became a run with a mistake in its recipe could only be deleted; and what may change when a run goes
    # on, such as its engine, may change for what can't be used.
    check(trainable(recipe), graded=graded)
    check_device(recipe.model.device)
    if newest(folder) is None:
        check_model(model_of(folder, recipe))
    return Run.create(folder, recipe, resume=resume, facts=jails(recipe) if graded else {})


def _learn(
    name: str, recipe: Recipe, train: Callable[..., Coroutine[None, None, None]], run: Run, on_step: OnStep
) -> Path:
    folder, own = run.path, latest(run.path, name)
    try:
        stage = load(recipe, own or newest(folder) or model_of(folder, recipe))
    except ModelError as error:
        if own is None:
            raise
        raise RunError(
            f"the checkpoint {own} can't be read; delete it to go on from the one before: {error}"
        ) from error

    stage.media.made = str(folder.resolve() / PICTURES)
    run.mark_begun(name)
    with writing(folder / name):
        (folder / name).mkdir(exist_ok=True)  # says that the stage was begun, whenever it is stopped
    with telling(run) as tell:

        def log(values: Mapping[str, float]) -> None:
            run.log(name, int(values["step"]), values)
            tell(name, int(values["step"]), values)
            on_step(int(values["step"]), values)

        finish(stage, train(stage, folder=folder / name, log=log))
    weights = checkpoint.checkpoints(folder / name)[-1].folder
    run.mark_done(name, {"checkpoint": weights.relative_to(folder).as_posix()})
    return weights


def named(folder: Path, setting: str, key: str) -> Path:
    """The file of tasks or traces that a recipe names. Raises DataError where it names none."""
    if not setting:
        raise DataError(f"the recipe names no {key}; give --world, or set {key}=FILE")
    return folder / setting
