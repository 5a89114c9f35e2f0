"""What a seed's arms share: the world, the random weights, and the cold starts with their rewritten traces."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from saccade import stages
from saccade.chat.parse import parse
from saccade.config import Recipe
from saccade.data.record import write_jsonl
from saccade.data.rows import read_tasks
from saccade.data.world.folder import SPLITS
from saccade.data.world.make import FRAME_BUDGETS, traces_of
from saccade.lab.design import Start
from saccade.runlog import Run, writing
from saccade.types import Call, Demo, Media, seed_of

Told = Callable[[int, str, int], None]  # (done, remark, total)

# What a model that had the leaked form from its pretraining would have as single tokens, as it has the trained form's.
LEAKED_PIECES = ("crop_video(start_time=", ", end_time=", ", question='", "')")


def make_world(folder: Path, recipe: Recipe, *, told: Told) -> None:
    """Clips, tasks and traces in `folder`/world, random weights in `folder`/model."""
    stages.world(folder / "world", recipe, told=told)
    written = folder / "world" / "train" / "traces.jsonl"
    stages.tiny_model(folder / "model", recipe, traces=written, phrases=LEAKED_PIECES)


def make_start(folder: Path, recipe: Recipe, start: Start, begin: str, *, told: Told) -> None:
    """Learn a start's traces in `folder`, from the weights in `begin` (a path as seen from there), or go on with it."""
    world = folder.parents[1] / "world" / "train"
    recipe = with_files(recipe, model=begin, traces="traces.jsonl")
    resume = (folder / "recipe.yaml").exists()
    if not resume:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_jsonl(folder / "traces.jsonl", traces(world / "tasks.jsonl", folder, recipe, start))
    steps = recipe.sft.steps
    stages.sft(
        folder, recipe, resume=resume, on_step=lambda step, row: told(step, f"SFT, loss {row['loss']:.2f}", steps)
    )


def with_files(recipe: Recipe, *, model: str, traces: str = "") -> Recipe:
    """The recipe with the files of its seed, as seen from a folder two levels below the seed's own."""
    places = {split: f"../../world/{split}/tasks.jsonl" for split in SPLITS}
    data = recipe.data.model_copy(update={**places, "traces": traces})
    return recipe.model_copy(update={"data": data, "model": recipe.model.model_copy(update={"path": model})})


def begin_of(seed_folder: Path, start: Start) -> str:
    """Where a start's first weights lie, as seen from its folder: the random ones, or another start's last."""
    if start.after is None:
        return "../../model"
    return checkpoint_of(seed_folder, start.after)


def checkpoint_of(seed_folder: Path, name: str) -> str:
    """The last weights of a start, as seen from a folder two levels below the seed's own."""
    facts = Run.open(seed_folder / "starts" / name).read_json("done/sft.json")
    return f"../../starts/{name}/{facts['checkpoint']}"


# ---- traces --------------------------------------------------------------------------------------------------------


def traces(tasks: Path, folder: Path, recipe: Recipe, start: Start) -> list[Demo]:
    """The traces of a start, to be written into `folder`."""
    rows = read_tasks(tasks)
    budgets = recipe.gating.frames or FRAME_BUDGETS
    made = traces_of(rows, seed=recipe.seed, budgets=tuple(dict.fromkeys(budgets)), direct=start.direct)
    return [_located(rewritten(demo, start, recipe.seed), folder) for demo in made]


def _located(demo: Demo, folder: Path) -> Demo:
    """The demo with its media as seen from the folder."""
    root = folder.parents[1]
    media = tuple(
        Media(path=f"../../{Path(item.path).relative_to(root).as_posix()}", kind=item.kind) for item in demo.task.media
    )
    return replace(demo, task=replace(demo.task, media=media))


def rewritten(demo: Demo, start: Start, seed: int) -> Demo:
    """The demonstration in the habits of the start; each habit is drawn for the demonstration as a whole.

    What sub-agents say, and what is for them alone, stays as it is.
    """
    if not demo.main:
        return demo
    if start.one_by_one:
        demo = in_turns(demo)
    rng = random.Random(seed_of("habits", seed, demo.task.id, demo.frames))
    replies = demo.replies
    if rng.random() < start.leaked:
        replies = tuple(map(leaked, replies))
    if rng.random() < start.open_think:
        replies = tuple(reply.replace("</think>", "", 1) for reply in replies)
    return replace(demo, replies=replies)


def in_turns(demo: Demo) -> Demo:
    """The demonstration with one call per turn, each after the same thought, in the same order."""
    replies: list[str] = []
    for reply in demo.replies:
        calls = re.findall(r"<tool_call>.*?</tool_call>", reply)
        before = reply.partition("<tool_call>")[0]
        replies += [before + call for call in calls] or [reply]
    return replace(demo, replies=tuple(replies), children=tuple((text,) for turn in demo.children for text in turn))


def leaked(reply: str) -> str:
    """The reply with its calls in the leaked form.

    >>> leaked('<tool_call>{"name": "crop_video", "arguments": {"start_time": 0, "question": "Which?"}}</tool_call>')
    "<tool_code>crop_video(start_time=0, question='Which?')</tool_code>"
    """
    return re.sub(r"<tool_call>.*?</tool_call>", lambda found: _in_python(*parse(found[0]).calls), reply)


def _in_python(call: Call) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"<tool_code>{call.name}({arguments})</tool_code>"
