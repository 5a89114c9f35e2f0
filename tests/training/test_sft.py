"""SFT: the loss falls, a resumed run is the same run, samples don't see each other."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_cases import equal, weights

from saccade.errors import DataError
from saccade.ledger import Ledger
from saccade.training import checkpoint, sft
from saccade.training.optim import Optimizer
from saccade.training.pack import pack
from saccade.training.sft import draw, learn, scenes
from saccade.training.step import forward
from saccade.types import Sample

BEST = "sft={steps: 30, save_every: 30}"


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """An uninterrupted run of four steps: stage, metrics, folder."""
    stage, folder = home.stage(), tmp_path_factory.mktemp("sft")
    return stage, home.sft(stage, folder), folder


@pytest.fixture(scope="module")
def drawn(home):
    """A stage and what it would learn in a step."""
    stage = home.stage("sft.tokens_per_step=900")
    return stage, asyncio.run(draw(stage, scenes(home.demos), stage.recipe.sft, seed=1, practice=0.5))


@pytest.mark.slow
def test_a_few_steps_lower_the_loss(home, tmp_path):
    rows = home.sft(home.stage(BEST), tmp_path, demos=home.demos[:8])
    assert rows[0]["loss"] == pytest.approx(math.log(home.stage().backbone.vocabulary), rel=0.05)
    assert np.mean([row["loss"] for row in rows[-5:]]) < 0.6 * rows[0]["loss"]
    assert all(row["grad_norm"] > 0 and row["trained_tokens"] < row["tokens"] for row in rows)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_the_replies(drawn, home):
    stage, samples = drawn
    logp = logprobs(stage, samples)
    learner = home.stage()
    report = learn(learner, samples, stage.recipe.sft, Optimizer(learner.backbone.model, stage.recipe.sft.optim, 1))
    assert report.loss == pytest.approx(-float(torch.cat(logp).mean()), rel=1e-5)
    assert report.trained_tokens == sum(len(sample.ledger.sampled_tokens()) for sample in samples)


# ---- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_recipe_and_seed_are_the_same_run(home, whole, tmp_path):
    stage, rows, _ = whole
    again = home.stage()
    assert home.sft(again, tmp_path) == rows
    assert equal(weights(again), weights(stage))


@pytest.mark.slow
def test_another_seed_is_another_run(home, whole, tmp_path):
    assert home.sft(home.stage("seed=6"), tmp_path)[0] != whole[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("die_at", "saved"), [(3, 2), (4, 2), (1, 0)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(home, whole, tmp_path, die_at, saved):
    stage, rows, folder = whole
    assert home.sft(home.stage(), tmp_path, die_at=die_at) == rows[:die_at]
    last = checkpoint.newest(tmp_path)
    assert (last.step if last else 0) == saved
    resumed = home.stage(weights=last.folder if last else None)
    assert home.sft(resumed, tmp_path) == rows[saved:]
    assert equal(weights(resumed), weights(stage))
    states = [torch.load(each / "step-000004/optimizer.pt", weights_only=True) for each in (folder, tmp_path)]
    moments = [[state["state"] for state in found["parts"]] for found in states]
    assert all(
        torch.equal(one[key], two[key])
        for parts in zip(*moments, strict=True)
        for one, two in zip(*(part.values() for part in parts), strict=True)
        for key in one
    )


def test_a_finished_run_has_nothing_left_to_do(home, whole):
    _, _, folder = whole
    last = checkpoint.newest(folder)
    assert last.step == 4
    assert home.sft(home.stage(weights=last.folder), folder) == []


def test_no_demonstrations_are_an_error(home, tmp_path):
    with pytest.raises(DataError, match="no demonstrations"):
        asyncio.run(sft.train(home.stage(), [], folder=tmp_path, log=lambda values: None))


# ---- what a step draws -----------------------------------------------------------------------------------------------


def test_what_a_step_draws_depends_on_its_seed_alone(drawn, home):
    stage, samples = drawn
    found = scenes(home.demos)
    again, other = (asyncio.run(draw(stage, found, stage.recipe.sft, seed=seed, practice=0.5)) for seed in (1, 2))
    assert again == samples
    assert other != samples


def test_scenes_are_drawn_until_the_step_is_full(drawn, home):
    stage, samples = drawn
    sizes = [stage.recipe.sft.model_copy(update={"tokens_per_step": size}) for size in (1, 300, 900)]
    drawings = [asyncio.run(draw(stage, scenes(home.demos), settings, seed=1, practice=0.5)) for settings in sizes]
    assert 0 < len(drawings[0]) < len(drawings[1]) < len(drawings[2])
    assert all(samples[: len(drawing)] == drawing for drawing in drawings)
    first = {picture.path for sample in drawings[0] for picture in sample.ledger.pictures()}
    assert len(first) == 1  # one scene, which is of one clip


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_practice(home, share):
    stage = home.stage()
    samples = asyncio.run(draw(stage, scenes(home.demos), stage.recipe.sft, seed=1, practice=share))
    assert of_main(stage, samples) == (share == 0.0)


def of_main(stage, samples):
    """Whether some of these conversations are main agents', whose replies begin with what is forced."""
    think = stage.backbone.renderer.encode("<think>\n")
    return any(segment.tokens == think for sample in samples for segment in sample.ledger.segments)


@pytest.mark.parametrize(
    ("share", "first", "of_mains"),
    [(0, 0.5, [0, 0, 1, 1]), (0, 0, [1, 1, 1, 1]), (1, 0, [0, 0, 0, 0]), (0, 0.55, [0, 0, 1, 1])],
)
def test_practice_comes_first_and_then_at_its_share(home, share, first, of_mains):
    stage = home.stage("sft.steps=4", f"sft.practice={share}", f"sft.practice_first={first}")

    async def steps():
        return [of_main(stage, samples) async for _, samples in sft.drawn(stage, scenes(home.demos), 0)]

    assert asyncio.run(steps()) == of_mains


def test_practice_alone_or_none_at_all_are_fine(home):
    stage = home.stage()
    for main in (True, False):
        demos = [demo for demo in home.demos if demo.main == main]
        assert asyncio.run(draw(stage, scenes(demos), stage.recipe.sft, seed=1, practice=0.5))


# ---- packing does not leak -------------------------------------------------------------------------------------------


def logprobs(stage, samples, row_tokens=1024) -> list[torch.Tensor]:
    """The trained tokens' logprobs of each sample."""
    found = [[] for _ in samples]
    batches = pack(samples, positions=stage.backbone.renderer.positions, row_tokens=row_tokens, rows_per_pass=8)
    for batch in batches:
        with torch.no_grad():
            logp, _ = forward(stage.backbone, batch, pixels=stage.media.pixels, temperature=1.0)
        for sample, value in zip(batch.sample_N.tolist(), logp, strict=True):
            found[sample].append(value)
    return [torch.stack(values) for values in found]


def changed(sample: Sample, *, sampled: bool) -> Sample:
    """Another token at the end of the last reply but its stop, or of the first segment (the prompt)."""
    segments = list(sample.ledger.segments)
    place = max(i for i, segment in enumerate(segments) if segment.sampled) if sampled else 0
    tokens = list(segments[place].tokens)
    at = max(0, len(tokens) - 2)
    tokens[at] = 11 if tokens[at] != 11 else 12
    segments[place] = replace(segments[place], tokens=tuple(tokens))
    return replace(sample, ledger=Ledger(segments=tuple(segments)))


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("row_tokens", [1024, 96])
def test_a_change_of_one_sample_moves_no_other(drawn, sampled, row_tokens):
    stage, samples = drawn
    before = logprobs(stage, samples, row_tokens)
    for index in range(0, len(samples), 3):
        other = [*samples[:index], changed(samples[index], sampled=sampled), *samples[index + 1 :]]
        after = logprobs(stage, other, row_tokens)
        moved = [float((one - two).abs().max()) for one, two in zip(before, after, strict=True)]
        assert moved[index] > 1e-4
        assert max(value for place, value in enumerate(moved) if place != index) <= 1e-6


def test_packed_and_alone_are_the_same(drawn):
    stage, samples = drawn
    packed = logprobs(stage, samples)
    alone = [logprobs(stage, [sample])[0] for sample in samples]
    assert max(float((one - two).abs().max()) for one, two in zip(packed, alone, strict=True)) <= 2e-6
