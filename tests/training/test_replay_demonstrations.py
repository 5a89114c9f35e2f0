"""Demonstrations become exact ledgers: what is written is learned, in both roles, and nothing else is."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from saccade.data.world import phrases
from saccade.errors import DataError, MediaError
from saccade.ledger import Origin
from saccade.testing import PaintedMedia
from saccade.training.demos import rehearse
from saccade.training.pack import pack
from saccade.types import Demo, Kind, Media, Sample, Task

THINK = "<think>\n"  # forced, so it is never learned
LOOK = phrases.calling("I look.", [(0, 4, "When red?"), (4, 8, "When red?")]).removeprefix(THINK)
ANSWER = phrases.answering("I see: 4-6", "4-6").removeprefix(THINK)
TASK = Task(id="t-1", question="When?", media=(Media(path="clip.mp4"),), kind=Kind.GROUNDING, gold=(4.0, 6.0))
DEMO = Demo(task=TASK, frames=2, replies=(THINK + LOOK, THINK + ANSWER), children=(("none", "4-6"),))


@pytest.fixture(scope="module")
def stage(home):
    found = home.stage()
    return replace(found, media=PaintedMedia(seconds=16, fps=2))


def rehearsed(stage, demo=DEMO, **changes) -> list[Sample]:
    return asyncio.run(rehearse(replace(demo, **changes), stage.agent, stage.context(seed=0)))


def learned(stage, sample) -> list[str]:
    """The text of each stretch that the sample trains."""
    ids, mask = sample.ledger.expanded(), [value != 0 for value in sample.advantages]
    edges = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    return [stage.backbone.renderer.decode(ids[low:high]) for low, high in itertools.pairwise(edges) if mask[low]]


def test_both_roles_learn_their_replies_and_nothing_else(stage):
    main, *children = rehearsed(stage)
    assert learned(stage, main) == [LOOK + "<|im_end|>", ANSWER + "<|im_end|>"]
    assert [learned(stage, child) for child in children] == [["none<|im_end|>"], ["4-6<|im_end|>"]]
    untrained = {segment.origin for segment in main.ledger.segments if not segment.sampled}
    assert untrained == {Origin.PROMPT, Origin.FORCED, Origin.TOOL}
    assert set(main.advantages) == {0.0, 1.0}


def test_what_the_sub_agents_say_is_what_the_main_agent_reads(stage):
    results = [segment for segment in rehearsed(stage)[0].ledger.segments if segment.origin is Origin.TOOL]
    said = stage.backbone.renderer.decode(results[0].tokens)
    assert len(results) == 1
    assert said.index("none") < said.index("4-6")


def test_without_a_forced_prefix_the_whole_reply_is_learned(home, stage):
    free = replace(stage, agent=home.stage("agent.settings.think_prefix=false").agent)
    assert learned(free, rehearsed(free)[0]) == [THINK + LOOK + "<|im_end|>", THINK + ANSWER + "<|im_end|>"]


def test_practice_learns_sub_agents_alone(stage):
    samples = rehearsed(stage, main=False)
    assert [learned(stage, sample) for sample in samples] == [["none<|im_end|>"], ["4-6<|im_end|>"]]
    assert [sample.ledger for sample in samples] == [sample.ledger for sample in rehearsed(stage)[1:]]


def test_practice_without_sub_agents_learns_its_own_replies(stage):
    (sample,) = rehearsed(stage, replies=(ANSWER,), children=(), main=False)
    assert learned(stage, sample) == [ANSWER + "<|im_end|>"]


def test_the_frame_budget_is_the_demonstrations(stage):
    for frames in (1, 3):
        assert len(rehearsed(stage, frames=frames)[0].ledger.segments[0].slots) == frames


def test_the_batch_trains_the_same_tokens(stage):
    samples = rehearsed(stage)
    batches = pack(samples, positions=stage.backbone.renderer.positions, row_tokens=512, rows_per_pass=8)
    for index, sample in enumerate(samples):
        found = [token for batch in batches for token in batch.token_N[batch.sample_N == index].tolist()]
        assert tuple(found) == sample.ledger.sampled_tokens()


# ---- malformed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replies": (LOOK,)}, "fewer replies than turns"),
        ({"replies": ()}, "fewer replies than turns"),
        ({"children": ()}, "a call that no sub-agent answers"),
        ({"children": (("none",),)}, "a call that no sub-agent answers"),
        ({"replies": (ANSWER,), "main": False}, "reach no sub-agent"),
        ({"task": replace(TASK, question="why " * 2000)}, "leave no room for a reply"),
    ],
)
def test_a_malformed_demonstration_is_named(stage, changes, reason):
    with pytest.raises(DataError, match=rf"the demonstration of task t-1 with 2 frames is of no use: .*{reason}"):
        rehearsed(stage, **changes)


def test_replies_that_nobody_asks_for_are_left_out(stage):
    (main,) = rehearsed(stage, replies=(ANSWER, "never said"), children=(("nor this",),))
    assert learned(stage, main) == [ANSWER + "<|im_end|>"]


def test_a_malformed_call_is_learned_as_it_is_written(stage):
    broken = "I look.</think><tool_call>{</tool_call>"
    (main,) = rehearsed(stage, replies=(broken, ANSWER), children=())
    assert learned(stage, main) == [broken + "<|im_end|>", ANSWER + "<|im_end|>"]


def test_text_that_looks_like_a_mark_stays_text(stage):
    odd = "<|im_end|><|image_pad|></think><answer>x</answer>"
    (main,) = rehearsed(stage, replies=(odd,), children=())
    renderer = stage.backbone.renderer
    assert set(renderer.forbidden_ids).isdisjoint(main.ledger.sampled_tokens())
    assert set(renderer.stop_ids).isdisjoint(main.ledger.sampled_tokens()[:-1])


def test_a_missing_clip_is_an_error(stage):
    with pytest.raises(MediaError, match="missing"):
        rehearsed(stage, task=replace(TASK, media=(Media(path="missing.mp4"),)))
