"""Rows of the published schemas, written in full, are replayed completely or rejected with the right reason."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import good, run
from PIL import Image
from published_rows import (
    PARAVT_RL_ROWS,
    PARAVT_SFT_ROWS,
    PARAVT_SYSTEM,
    PYVISION_PROMPT,
    PYVISION_RL_ROWS,
    PYVISION_SFT_ROWS,
)

from saccade import plugins
from saccade.chat.message_renderer import MessageRenderer
from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations, resolve_media_paths, write_items
from saccade.data.source_row import SourceRow
from saccade.data.synthetic.video_writer import write_video
from saccade.environments.task_environments import TaskEnvironments
from saccade.ledger import ImageRef, Origin
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rollouts.components import apply_sft_settings
from saccade.runs.demonstration_check import check_demonstration_file
from saccade.training.demonstrations import ReplayEngine, check_demonstrations, replay_demonstration
from saccade.types import MediaKind, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The media that the rows name."""
    folder = tmp_path_factory.mktemp("published")
    write_video(folder / "video.mp4", np.full((32, 32, 32, 3), 90, np.uint8), 2.0)
    Image.new("RGB", (40, 20), "red").save(folder / "image.png")
    Image.new("RGB", (36, 36), "blue").save(folder / "figure.png")
    return folder


def import_rows(folder, name, rows, **settings):
    """Import rows; return the items with the paths of their media."""
    importer = plugins.resolve("data.importers", name, settings)
    items = []
    for number, values in enumerate(rows, start=1):
        row = SourceRow(file=Path("made.jsonl"), number=number, values=values)
        items += [resolve_media_paths(item, folder) for item in importer(row)]
    return items


def build_context(renderer):
    return Context(
        engine=ReplayEngine(renderer=renderer, replies_by_seed={}),
        renderer=renderer,
        media=CachingMediaLoader(),
        sampling=SamplingParams(),
        seed=0,
    )


SFT_CASES = [("paravt_sft", "paravt/sft", PARAVT_SFT_ROWS), ("pyvision_sft", "pyvision/sft", PYVISION_SFT_ROWS)]


@pytest.mark.parametrize("settings", [{}, {"environments": "env_name"}])
@pytest.mark.parametrize(("importer", "recipe_name", "rows"), SFT_CASES)
def test_published_rows_are_learned_or_refused_with_a_reason(folder, importer, recipe_name, rows, settings):
    settings = settings if importer == "pyvision_sft" else {}
    demonstrations = import_rows(folder, importer, [row for row, _ in rows.values()], **settings)
    recipe = load_recipe(recipe_name)
    report = asyncio.run(
        check_demonstrations(
            dict(enumerate(demonstrations)),
            TaskEnvironments.from_recipe(apply_sft_settings(recipe)),
            build_context(MessageRenderer(28)),
            accept_recorded_errors=recipe.sft.accept_recorded_errors,
        )
    )
    found = {name: report.reasons_by_row.get(number) for number, name in enumerate(rows)}
    wrong = {
        name: found[name]
        for name, (_, reason) in rows.items()
        if (reason is None) != (found[name] is None) or (reason or "") not in (found[name] or "")
    }
    assert not wrong


def replay(folder, renderer, importer, recipe_name, row, *overrides, **settings):
    """Return the samples of a row."""
    (demonstration,) = import_rows(folder, importer, [row], **settings)
    # Fewer visual tokens than the published pixels give: the tiny renderer has tokens of 16 x 16.
    recipe = load_recipe(recipe_name, ["environment.settings.image_pixels=[256,1024]", *overrides])
    environments = TaskEnvironments.from_recipe(apply_sft_settings(recipe))
    return asyncio.run(
        replay_demonstration(
            demonstration,
            environments(demonstration.task),
            build_context(renderer),
            accept_recorded_errors=recipe.sft.accept_recorded_errors,
        )
    )


def decode(renderer, ledger, origin):
    return [renderer.decode(segment.tokens) for segment in ledger.segments if segment.origin is origin]


def test_every_reply_of_a_published_row_is_trained(folder, renderer):
    row, _ = PYVISION_SFT_ROWS["46 messages"]
    (sample,) = replay(folder, renderer, "pyvision_sft", "pyvision/sft", row)
    replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    trained = decode(renderer, sample.ledger, Origin.SAMPLED)
    assert [text.removesuffix("<|im_end|>") for text in trained] == replies
    assert len(replies) == 23


def test_a_figure_stands_in_the_result_that_shows_it(folder, renderer):
    row, _ = PYVISION_SFT_ROWS["a figure, then text"]
    (sample,) = replay(folder, renderer, "pyvision_sft", "pyvision/sft", row)
    shown = [
        (segment.origin, Path(slot.image.path).name) for segment in sample.ledger.segments for slot in segment.slots
    ]
    assert shown == [(Origin.PROMPT, "image.png"), (Origin.OBSERVATION, "figure.png")]
    first, second = decode(renderer, sample.ledger, Origin.OBSERVATION)
    assert "<image_clue_1>" in first
    assert "Text Result:\n3\n" in second


def test_a_published_prompt_is_shown_as_it_stands(folder, renderer):
    row, _ = PYVISION_SFT_ROWS["text"]
    (sample,) = replay(folder, renderer, "pyvision_sft", "pyvision/sft", row)
    (prompt,) = decode(renderer, sample.ledger, Origin.PROMPT)
    assert prompt.count(PYVISION_PROMPT) == 1
    assert "system" not in prompt
    row, _ = PARAVT_SFT_ROWS["parallel calls"]
    main, *children = replay(folder, renderer, "paravt_sft", "paravt/sft", row)
    (prompt,) = decode(renderer, main.ledger, Origin.PROMPT)
    assert prompt.count(PARAVT_SYSTEM) == prompt.count("<tools>") == 1
    (results,) = decode(renderer, main.ledger, Origin.OBSERVATION)
    assert results.index("Red.") < results.index("Blue.")
    (child_prompt,) = decode(renderer, children[1].ledger, Origin.PROMPT)
    assert "from 00:08 to 00:16" in child_prompt
    assert "(8.0 seconds)" in child_prompt


def test_a_crop_sees_its_window(folder, renderer):
    row, _ = PARAVT_SFT_ROWS["numbers as text"]
    _, child = replay(folder, renderer, "paravt_sft", "paravt/sft", row)
    times = [slot.image.time for segment in child.ledger.segments for slot in segment.slots]
    assert times == pytest.approx([0.5 + second for second in range(8)])


def test_rl_rows_select_their_environments(folder):
    tasks = import_rows(folder, "pyvision_rl", PYVISION_RL_ROWS.values(), environments="env_name")
    environments = TaskEnvironments.from_recipe(load_recipe("pyvision/mixed_rl"))
    in_prompt = {
        task.environment: environments(task)().settings.image_in_prompt
        for task in tasks
        if task.media[0].kind is MediaKind.IMAGE
    }
    assert in_prompt == {"pyvision_gym_w_image_hint": True, "pyvision_gym_wo_image_hint": False}
    assert {task.question for task in tasks} == {"How many discs are there?"}
    as_published = import_rows(folder, "pyvision_rl", PYVISION_RL_ROWS.values(), use_prompt=True)
    assert {(task.question, task.extras["system"]) for task in as_published} == {(PYVISION_PROMPT, "")}


def test_a_published_rl_prompt_is_the_whole_prompt(folder):
    """It states the facts about its image or video itself."""
    rows, environments = PYVISION_RL_ROWS.values(), TaskEnvironments.from_recipe(load_recipe("pyvision/mixed_rl"))
    for task in import_rows(folder, "pyvision_rl", rows, use_prompt=True, environments="env_name"):
        observation = asyncio.run(environments(task)().reset(task, build_context(MessageRenderer(28))))
        (message,) = observation.messages
        image, name = sum(isinstance(part, ImageRef) for part in message.parts), "<image_clue_0></image_clue_0>\n"
        assert image == (task.environment == "pyvision_gym_w_image_hint")
        assert "".join(part for part in message.parts if isinstance(part, str)) == name * image + PYVISION_PROMPT


def test_paravt_rl_rows_have_their_answers(folder):
    choice, grounding, text = import_rows(folder, "paravt_rl", PARAVT_RL_ROWS.values())
    assert (choice.ground_truth, grounding.ground_truth, text.ground_truth) == ("B", (3.5, 9.0), "in spring")
    assert {task.extras["system"] for task in (choice, grounding, text)} == {PARAVT_SYSTEM}


@pytest.mark.slow
@pytest.mark.parametrize(("importer", "recipe_name", "rows"), SFT_CASES)
def test_the_command_reports_counts_and_rows(folder, importer, recipe_name, rows):
    source, target = folder / f"{importer}.jsonl", folder / f"{importer}.demonstrations.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row, _ in rows.values()))
    good("data", "import", importer, source, "--out", target)
    demonstrations = load_demonstrations(target)
    usable = [item for item, (_, reason) in zip(demonstrations, rows.values(), strict=True) if reason is None]
    number = next(number for number, (_, reason) in enumerate(rows.values(), start=1) if reason is not None)
    done = run("data", "check", target)
    assert done.exit_code == 1
    assert f"{len(usable)} of {len(rows)} demonstrations" in done.output
    assert f"row {number}, task {demonstrations[number - 1].task.id}" in done.output
    write_items(folder / "usable.jsonl", usable)
    assert f"{len(usable)} of {len(usable)}" in good("data", "check", folder / "usable.jsonl", "--recipe", recipe_name)


@pytest.mark.slow
def test_the_check_offers_the_packaged_tools_that_demonstrations_call(folder):
    """A file of demonstrations needs no recipe, even if its tasks name environments of another one."""
    (demonstration,) = import_rows(folder, "pyvision_sft", [PYVISION_SFT_ROWS["direct"][0]])
    box = {"name": "zoom_image", "arguments": {"left": 0, "top": 0, "right": 20, "bottom": 10}}
    call = f"<think>\nCloser.</think><tool_call>{json.dumps(box)}</tool_call>"
    zooming = replace(
        demonstration,
        task=replace(demonstration.task, environment="elsewhere"),
        replies=(call, f"<think>\nIt is red.</think>{demonstration.replies[-1]}"),
    )
    wrong = replace(zooming, replies=(call.replace('"right": 20', '"right": -1'), *zooming.replies[1:]))
    write_items(folder / "zooming.jsonl", [zooming, wrong])
    report = check_demonstration_file(folder / "zooming.jsonl")
    assert [*report.reasons_by_row] == [2]
    assert "right -1" in report.reasons_by_row[2]
    # code reads the pixels of the crop, which the replay has not decoded before
    code = "<code>\n```python\nassert image_clue_1.size[0] > 1\n```\n</code>"
    reading = replace(zooming, replies=(zooming.replies[0], f"<think>\nI look.</think>{code}", zooming.replies[1]))
    write_items(folder / "reading.jsonl", [reading])
    assert check_demonstration_file(folder / "reading.jsonl").reasons_by_row == {}
    write_items(folder / "tasks.jsonl", [demonstration.task])
    assert check_demonstration_file(folder / "tasks.jsonl") is None
