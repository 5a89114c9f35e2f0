"""Everything that a run of a recipe would stumble over, looked at before any of it is loaded.

Whatever a run itself checks is called here, one thing after the other, so that all that is wrong is told at once.
"""

import asyncio
import functools
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade import plugins, preflight, stages
from saccade.chat.render import ChatRenderer
from saccade.config import Plugin, Recipe
from saccade.data.rows import read_demos, read_tasks
from saccade.doctor import Finding
from saccade.errors import ModelError, RunError, SaccadeError, boundary
from saccade.media import image, video
from saccade.planning.steps import Memory, memory, rl_training, sft_training
from saccade.planning.tables import amount, settled
from saccade.planning.talks import Assumed, attempt_of, settings_of, sizes_of
from saccade.protocols import Needs, Remote
from saccade.rewards._compose import compose
from saccade.rollouts.stage import context_of, examined, trainable
from saccade.runlog import Run
from saccade.tools._sandbox import server
from saccade.types import Demo, Media, MediaKind, Task

STAGES = ("sft", "rl", "eval")
ROWS = 2000  # of each file that are read
OPENED = 8  # files of media that are opened
KEPT = 3  # checkpoints of a stage, while the third is written
_MEMORY = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")

Look = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe as a run in `folder` would have it, and the stages of its life that are asked about."""

    recipe: Recipe
    folder: Path
    stages: Collection[str]
    own_tasks: bool = True  # whether the recipe's test split is what it is evaluated on

    @property
    def used(self) -> tuple[Recipe, ...]:
        """The recipe with each agent that is used: the trained one, and that of evaluation."""
        trained = (self.recipe,) if {"sft", "rl"} & {*self.stages} else ()
        return (*trained, *((examined(self.recipe),) if "eval" in self.stages else ()))


def examine(case: Case) -> Iterator[Finding]:
    """Settings, device, model, data, plan, memory, disk, servers, sandbox, and the run folder, in this order."""
    told = list(_settings(case))
    yield from told
    sound = all(each.good for each in told if each.name in ("agent", "family"))
    device = case.recipe.model.device
    yield looked("device", functools.partial(preflight.check_device, device), device)
    weights, renderer = _model(case)
    yield weights
    yield from _data(case)
    if sound and (renderer or not case.recipe.model.path):  # else there is nothing to plan with, as was said
        yield from _plan(case)
    yield from _servers(case, renderer)
    yield from _sandbox(case)
    yield looked("run folder", functools.partial(_folder, case))


def looked(name: str, look: Look, found: str = "") -> Finding:
    """What a look found: its sentence, `found` where it says nothing, or why it failed."""
    try:
        with boundary(SaccadeError, f"{name} can't be looked at"):
            said = look()
    except SaccadeError as error:
        return Finding(name=name, found=str(error), good=False)
    return Finding(name=name, found=said if isinstance(said, str) else found)


# ---- settings and model ----------------------------------------------------------------------------------------------


def _settings(case: Case) -> Iterator[Finding]:
    recipe, model = case.recipe, case.recipe.model
    if {"sft", "rl"} & {*case.stages}:
        yield looked("trainable", functools.partial(trainable, recipe), f"by {', '.join(case.stages)}")
    looks = preflight.checks(recipe, graded="rl" in case.stages)
    if "eval" in case.stages:
        looks["rewards"] = functools.partial(compose, recipe.rewards)
    shown = {
        "agent": recipe.agent.name,
        "engine": recipe.engine.name,
        "rewards": ", ".join(recipe.rewards),
        "family": model.family,
        "adapters": f"rank {model.lora_rank}" if model.lora_rank else "none",
        "practice": f"{recipe.sft.practice:g} of the scenes",
        "trackers": ", ".join(recipe.track) or "none",
    }
    for name, look in looks.items():
        yield looked(name, look, shown[name])


def _model(case: Case) -> tuple[Finding, ChatRenderer | None]:
    """What is said of the weights that a run would begin with, and how they speak."""
    try:
        weights = stages.newest(case.folder) or stages.model_of(case.folder, case.recipe)
        renderer = preflight.check_model(weights)
    except (ModelError, RunError) as error:
        return Finding(name="model", found=str(error), good=False), None
    return Finding(name="model", found=f"{weights}: {renderer.family}, with its tokenizer and all weights"), renderer


# ---- data ------------------------------------------------------------------------------------------------------------


def _data(case: Case) -> Iterator[Finding]:
    data = case.recipe.data
    if "sft" in case.stages:
        yield looked("data.traces", functools.partial(_file, case, data.traces, "data.traces"))
    if "rl" in case.stages:
        for name in [data.train] if isinstance(data.train, str) else data.train or [""]:
            yield looked("data.train", functools.partial(_file, case, name, "data.train"))
    if "eval" in case.stages and case.own_tasks:
        yield looked("data.test", functools.partial(_file, case, data.test, "data.test"))


def _file(case: Case, name: str, key: str) -> str:
    path = stages.named(case.folder, name, key)
    rows: Sequence[Task | Demo] = (read_demos if key == "data.traces" else read_tasks)(path, most=ROWS)
    tasks = [row.task if isinstance(row, Demo) else row for row in rows]
    there, opened = open_some(tasks)
    read = f"the first {len(rows):,}" if len(rows) == ROWS else f"all {len(rows):,}"
    return f"{path}: {read} rows read, their {there:,} files are there, {opened} of them were opened"


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly from the first to the last.

    >>> spread("abcdefg", 3), spread("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    last, gaps = len(items) - 1, max(most - 1, 1)
    return list(items) if len(items) <= most else [items[round(place * last / gaps)] for place in range(most)]


def open_some(tasks: Iterable[Task]) -> tuple[int, int]:
    """How many files of media the tasks have, and how many of them were opened, evenly chosen. Raises MediaError."""
    media = list(dict.fromkeys(one for task in tasks for one in task.media))
    chosen = spread(media, OPENED)
    for one in chosen:
        open_media(one)
    return len(media), len(chosen)


def open_media(one: Media) -> None:
    """See that a file can be opened as what it is said to be. Raises MediaError."""
    if one.kind is MediaKind.VIDEO:
        video.probe(one.path)
    else:
        image.read(one.path)


# ---- what it takes ---------------------------------------------------------------------------------------------------


def _plan(case: Case) -> Iterator[Finding]:
    for name, agent in zip(("context", "context, evaluation"), dict.fromkeys(map(_key, case.used)), strict=False):
        yield looked(name, functools.partial(_context, case, agent))
    needs: dict[str, Memory] = {}

    def planned() -> str:
        needs.update(_needs(case))
        return _room(case.recipe.model.device, needs)

    if {"sft", "rl"} & {*case.stages}:
        yield looked("memory", planned)
    if needs:
        yield looked("disk", functools.partial(_disk, case, needs))


def _key(recipe: Recipe) -> str:
    return recipe.agent.model_dump_json()


def _longest(case: Case, agent: str) -> int:
    """Tokens of the longest conversation of an agent."""
    agreed = Plugin.model_validate_json(agent)
    recipe, assumed = settled(case.recipe.model_copy(update={"agent": agreed}), Assumed(), case.folder)
    return attempt_of(recipe, sizes_of(recipe), assumed).largest.length


def _limit(agent: str) -> int:
    """Tokens of an agent's context; 0: it doesn't say."""
    agreed = Plugin.model_validate_json(agent)
    return context_of(plugins.bind("agents", agreed.name, agreed.settings))


def _context(case: Case, agent: str) -> str:
    limit = _limit(agent)
    known = f", in a context of {limit:,}" if limit else ""
    return f"conversations of up to {_longest(case, agent):,} tokens{known}"


def _needs(case: Case) -> dict[str, Memory]:
    recipe, assumed = settled(case.recipe, Assumed(), case.folder)
    sizes = sizes_of(recipe)
    attempt, found = attempt_of(recipe, sizes, assumed), {}
    if "sft" in case.stages:
        found["sft"] = memory(recipe, sizes, recipe.sft.optim, sft_training(recipe, attempt))
    if "rl" in case.stages:
        rl = recipe.rl
        found["rl"] = memory(recipe, sizes, rl.optim, rl_training(recipe, attempt), kl=rl.kl)
    return found


def _room(device: str, needs: dict[str, Memory]) -> str:
    """Raises RunError where not even what stays in memory has room; what passes keep is an estimate, and is told."""
    there = _memory_of(device)
    stays = {name: each.weights + each.gradients + each.moments + each.copies for name, each in needs.items()}
    for name, least in stays.items():
        if there is not None and least > there:
            mend = "train adapters (model.lora_rank=16), or a smaller model"
            raise RunError(f"{name} holds {amount(least)} and its passes besides; {device} has {amount(there)}: {mend}")
    return "; ".join(f"{name} holds {amount(least)} and its passes besides" for name, least in stays.items())


def _memory_of(device: str) -> int | None:
    """Bytes of a device's memory; None where it isn't known, or the device isn't there."""
    if device == "cpu":
        return math.prod(map(os.sysconf, _MEMORY))
    if not device.startswith("cuda") or not looked("device", functools.partial(preflight.check_device, device)).good:
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _disk(case: Case, needs: dict[str, Memory]) -> str:
    recipe, total, most = case.recipe, 0, 0
    for name, each in needs.items():
        stage = recipe.sft if name == "sft" else recipe.rl
        size = each.weights + each.moments + each.copies  # a checkpoint: the model, its optimiser's memory
        count = min(KEPT, math.ceil(stage.steps / stage.save_every))
        most = max(most, total + count * size)
        total += min(KEPT - 1, count) * size
    place = case.folder.resolve()
    there = next(each for each in (place, *place.parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        raise RunError(f"{there} can't be written to; choose another folder with --out")
    if most > free:
        mend = "free some space, or choose another folder with --out"
        raise RunError(f"checkpoints take up to {amount(most)}, and {there} has {amount(free)} left; {mend}")
    return f"checkpoints take up to {amount(most)}; {there} has {amount(free)} left"


# ---- what answers ----------------------------------------------------------------------------------------------------


def _servers(case: Case, renderer: ChatRenderer | None) -> Iterator[Finding]:
    recipe = case.recipe
    try:
        engine: Any = plugins.load("engines", recipe.engine.name)
        settings = settings_of("engines", recipe.engine)
        context = max(_limit(agent) or _longest(case, agent) for agent in map(_key, case.used))
    except SaccadeError:
        return  # said above
    if not isinstance(engine, Remote):
        return
    model = str(case.folder / recipe.model.path) if recipe.model.path else ""
    needs = Needs(model=model, renderer=renderer, context=context, training="rl" in case.stages)
    try:
        answers = asyncio.run(engine.visit(needs, **settings))
    except SaccadeError as error:
        yield Finding(name="servers", found=str(error), good=False)
        return
    for url, said in answers.items():
        yield Finding(name=f"server {url}", found=str(said), good=isinstance(said, str))


def _sandbox(case: Case) -> Iterator[Finding]:
    """Which walls stand around a tool that runs code, and whether they are those that it wants."""
    try:
        wanted = dict(pair for recipe in case.used for pair in preflight.isolations(recipe))
    except SaccadeError:
        return  # said above

    def walls(isolation: Any) -> str:
        report = server.examine()
        report.check(isolation)
        return f"{isolation}: {report.sentence}"

    for name, isolation in wanted.items():
        yield looked(f"{name}, isolation", functools.partial(walls, isolation))


def _folder(case: Case) -> str:
    if not (case.folder / "recipe.yaml").exists():
        return f"{case.folder} is a new run"
    run = Run(path=case.folder, recipe=case.recipe)
    run.changed()
    if "rl" in case.stages and "sft" not in case.stages:
        stages.check_start(run)
    return f"{case.folder} is a run already, which goes on with --resume"
