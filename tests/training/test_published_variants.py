"""Rows made by rules from the published schemas are replayed completely or rejected with the right reason."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from published_variants import LEARNED, PARAVT_VARIANTS, PYVISION_FAILURES, PYVISION_VARIANTS, RL_VARIANTS

from saccade import plugins
from saccade.chat.message_renderer import MessageRenderer
from saccade.config.load import load_recipe
from saccade.data.dataset import resolve_media_paths
from saccade.data.source_row import SourceRow
from saccade.data.synthetic.video_writer import write_video
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import DataError
from saccade.ledger import Origin
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rollouts.components import apply_sft_settings
from saccade.training.demonstrations import ReplayEngine, check_demonstrations, remove_prefill, replay_demonstration
from saccade.types import MediaKind, SamplingParams


def to_sharegpt(row):
    """Return a row in ShareGPT's form, which LLaMA-Factory reads."""
    if not isinstance(row["messages"], list):
        return row
    roles = {"user": "human", "assistant": "gpt"}
    messages = [
        {"from": roles.get(message["role"], message["role"]), "value": message["content"]}
        for message in row["messages"]
    ]
    return {**{name: value for name, value in row.items() if name != "messages"}, "conversations": messages}


CASES = [
    ("paravt_sft", "paravt/sft", PARAVT_VARIANTS, {}),
    ("pyvision_sft", "pyvision/sft", PYVISION_VARIANTS, {}),
    ("pyvision_sft", "pyvision/sft", PYVISION_VARIANTS, {"environments": "env_name"}),
    ("llava", "pyvision/sft", [(name, to_sharegpt(row), outcome) for name, row, outcome in PYVISION_VARIANTS], {}),
]
# Fewer tokens than the published pixels and frames give.
SMALL = ["environment.settings.image_pixels=[256,1024]", "environment.settings.frame_pixels=[256,1024]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    write_video(folder / "video.mp4", np.full((32, 32, 32, 3), 90, np.uint8), 2.0)
    Image.new("RGB", (40, 20), "red").save(folder / "image.png")
    Image.new("RGB", (36, 36), "blue").save(folder / "figure.png")
    (folder / "broken.mp4").write_bytes(b"\x00\x01" * 500)
    return folder


def build_context(renderer):
    engine = ReplayEngine(renderer=renderer, replies_by_seed={})
    return Context(engine=engine, renderer=renderer, media=CachingMediaLoader(), sampling=SamplingParams(), seed=0)


def import_variants(folder, importer, variants, settings):
    """Return the demonstrations by variant and number, and the keys of the importer's errors by variant."""
    read, demonstrations, keys = plugins.resolve("data.importers", importer, settings), {}, {}
    for name, values, _ in variants:
        try:
            items = list(read(SourceRow(file=Path("made.jsonl"), number=1, values=values)))
        except DataError as error:
            keys[name] = error.key
        else:
            demonstrations |= {(name, index): resolve_media_paths(item, folder) for index, item in enumerate(items)}
    return demonstrations, keys


def load_environments(recipe_name):
    return TaskEnvironments.from_recipe(apply_sft_settings(load_recipe(recipe_name, SMALL)))


def test_there_are_enough_variants_of_every_outcome():
    names = [name for variants in (PARAVT_VARIANTS, PYVISION_VARIANTS) for name, _, _ in variants]
    assert len(names) >= 120
    for variants in (PARAVT_VARIANTS, PYVISION_VARIANTS):
        assert max(Counter(name for name, _, _ in variants).values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("importer", "recipe_name", "variants", "settings"), CASES)
def test_every_row_is_learned_or_refused_with_its_reason(folder, importer, recipe_name, variants, settings):
    demonstrations, outcomes = import_variants(folder, importer, variants, settings)
    report = asyncio.run(
        check_demonstrations(demonstrations, load_environments(recipe_name), build_context(MessageRenderer(28)))
    )
    outcomes |= {name: LEARNED for name, _ in demonstrations}
    outcomes |= {name: problem.rejection for (name, _), problem in report.problems_by_row.items()}
    as_sharegpt = {"messages": "conversations"} if importer == "llava" else {}
    expected = {name: as_sharegpt.get(outcome, outcome) for name, _, outcome in variants}
    wrong = {name: (outcomes[name], expected[name]) for name in expected if outcomes[name] != expected[name]}
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importer", "recipe_name", "variants"),
    [
        ("paravt_sft", "paravt/sft", [variant for variant in PARAVT_VARIANTS if variant[2] == LEARNED]),
        ("pyvision_sft", "pyvision/sft", [variant for variant in PYVISION_VARIANTS if variant[2] == LEARNED]),
        ("pyvision_sft", "pyvision/sft", PYVISION_FAILURES),
    ],
)
def test_every_reply_of_a_learned_row_is_trained(folder, renderer, importer, recipe_name, variants):
    demonstrations, _ = import_variants(folder, importer, variants, {})
    environments, ctx = load_environments(recipe_name), build_context(renderer)

    async def replay(demonstration):
        return await replay_demonstration(
            demonstration, environments(demonstration.task), ctx, accept_recorded_errors=True
        )

    for (name, _), demonstration in demonstrations.items():
        main, *children = asyncio.run(replay(demonstration))
        prefill = environments(demonstration.task)().prefill
        expected = [remove_prefill(reply, prefill) for reply in demonstration.replies]
        assert decode_trained(renderer, main) == expected, name
        texts = [text for turn in demonstration.children for text in turn]
        assert [text for child in children for text in decode_trained(renderer, child)] == texts, name
        images = [Path(image.path).name for image in main.ledger.images() if image.time is None]
        assert images == [Path(file.path).name for file in demonstration.media if file.kind is MediaKind.IMAGE], name


def decode_trained(renderer, sample):
    """Return the trained texts of a sample, without the token that ends each."""
    segments = [segment for segment in sample.ledger.segments if segment.origin is Origin.SAMPLED]
    return [renderer.decode(segment.tokens).removesuffix("<|im_end|>") for segment in segments]


@pytest.mark.parametrize("importer", RL_VARIANTS)
def test_rl_rows_become_tasks_or_errors(folder, renderer, importer):
    read, ctx = plugins.resolve("data.importers", importer, {}), build_context(renderer)
    environments, wrong = load_environments("paravt/sft" if importer == "paravt_rl" else "pyvision/sft"), {}
    for name, values, expected in RL_VARIANTS[importer]:
        try:
            (task,) = read(SourceRow(file=Path("made.jsonl"), number=1, values=values))
        except DataError as error:
            outcome = error.key
        else:
            outcome = (str(task.answer_type), task.ground_truth)
            environment = environments(task)()
            observation = asyncio.run(environment.reset(resolve_media_paths(task, folder), ctx))
            assert observation.num_frames == 0 or task.media[0].kind is MediaKind.VIDEO
        if outcome != expected:
            wrong[name] = outcome, expected
    assert not wrong
