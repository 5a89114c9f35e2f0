"""What a step rolls out: each prompt with its own epoch's budget, rounds that end, prompts that go again."""

import asyncio
from dataclasses import replace

import pytest
from training_cases import Recorder, turns, with_score

from saccade.algorithms.gating import draw
from saccade.config import Select
from saccade.errors import EngineError, RunError
from saccade.training import checkpoint
from saccade.training.lots import draw_lot, roll_out
from saccade.training.prompts import Prompts, task_at
from saccade.types import Ungraded, seed_of

SHORT = ("rl.group=2", "sampling.max_tokens=2")


def stage_of(home, *overrides, value=turns):
    return with_score(home.stage(*SHORT, *overrides), value)


def lot_of(stage, home, prompts=None, **given):
    return asyncio.run(draw_lot(stage, home.tasks, prompts or Prompts(), 0, **given))


def placed(home, lot):
    """The places of the first epochs' prompts of a lot, told by their tasks."""
    first = [task_at(home.tasks, 5, place).id for place in range(12)]
    return [first.index(group.task.id) for group in lot.kept]


# ---- who is asked what -----------------------------------------------------------------------------------------------


def test_prompts_are_drawn_through_the_epochs(home):
    """Twelve tasks, two prompts a step: six steps show each once."""
    stage, prompts, drawn = stage_of(home, "rl.group=2"), Prompts(), []
    for number in range(6):
        groups = []
        _, prompts = asyncio.run(
            draw_lot(stage, home.tasks, prompts, number, seen=lambda _, found, into=groups: into.extend(found))
        )
        drawn += [group.task.id for group in groups]
    assert sorted(drawn) == sorted(task.id for task in home.tasks)


def test_at_an_epochs_border_each_prompt_has_its_own_epochs_budget(home):
    stage, budgets = stage_of(home, "rl.group=2"), (4, 8)
    places = range(9, 15)
    groups = list(asyncio.run(roll_out(stage, home.tasks, places, 0)).values())
    expected = [draw(budgets, run_seed=5, epoch=place // 12, task=task_at(home.tasks, 5, place)) for place in places]
    assert [group.members[0].episode.frames for group in groups] == expected
    by_the_first = [draw(budgets, run_seed=5, epoch=0, task=task_at(home.tasks, 5, place)) for place in places]
    assert expected != by_the_first, "the test shows nothing with these seeds"


def test_a_task_that_is_drawn_twice_in_a_step_is_attempted_with_other_seeds(home):
    """One task, three places: of three epochs, or the third in a later round."""
    stage = stage_of(home, "rl.group=2")
    stage = replace(stage, engine=Recorder(stage.engine))
    asyncio.run(roll_out(stage, home.tasks[:1], (0, 1), 0))
    asyncio.run(roll_out(stage, home.tasks[:1], (2,), 0, earlier=(0, 1)))
    mains = [sampling.seed for sampling in stage.engine.asked]
    assert len(set(mains)) == 6  # three places, two attempts each
    assert mains[0] == seed_of(seed_of(5, 0, home.tasks[0].digest, 0), 0)  # a step of its own, an attempt, a turn
    asyncio.run(roll_out(stage, home.tasks[:1], (1,), 0))
    assert stage.engine.asked[-2].seed == mains[0]  # whatever the place, a first attempt is a first attempt


def test_a_file_that_holds_a_task_twice_is_no_exception(home):
    stage = stage_of(home, "rl.group=2")
    stage = replace(stage, engine=Recorder(stage.engine))
    asyncio.run(roll_out(stage, [home.tasks[0]] * 2, (0, 1), 0))
    one, _, two, _ = (sampling.seed for sampling in stage.engine.asked)
    assert one != two


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_one_round_is_enough_where_all_differ(home):
    lot, prompts = lot_of(stage_of(home, "rl.select.max_rounds=3"), home)
    assert (lot.measured["rounds"], lot.missing, len(lot.kept)) == (1.0, 0, 2)
    assert prompts == Prompts(cursor=2)


def test_missing_groups_are_rolled_out_in_a_later_round(home):
    """The first round's two groups agree; then twice as many prompts are taken as are missing."""
    stage = stage_of(
        home, "rl.select={max_rounds: 3, oversample: 2}", value=lambda e, count: count % 2 if count > 7 else 1
    )
    seen = []
    lot, prompts = lot_of(stage, home, seen=lambda number, groups: seen.append(groups))
    assert (lot.measured["rounds"], lot.missing) == (2.0, 0)
    assert placed(home, lot) == [4, 5]
    assert prompts == Prompts(cursor=8)
    assert [len(groups) for groups in seen] == [8]
    assert lot.measured["groups/dropped/spread"] == 4.0
    assert lot.tokens == sum(member.episode.usage.sampled_tokens for group in seen[0] for member in group.members)


def test_rounds_end(home):
    stage = stage_of(home, "rl.select.max_rounds=3", value=lambda episode, count: 1.0)
    lot, prompts = lot_of(stage, home)
    assert (lot.measured["rounds"], lot.missing, lot.kept) == (3.0, 2, ())
    assert prompts == Prompts(cursor=6)


def test_a_run_may_stop_where_groups_are_missing_and_loses_nothing(home, tmp_path):
    """Step 1 has what it needs; step 2 doesn't, so step 1 is kept. A resumed run meets the same."""
    overrides = ("rl.select={on_short: stop, max_rounds: 2}",)
    agree = lambda episode, count: max(episode.ledger.versions()) or count % 2  # noqa: E731
    with pytest.raises(RunError) as caught:
        home.rl(stage_of(home, *overrides, value=agree), tmp_path)
    assert str(caught.value) == (
        "step 2 found 0 of 2 groups to learn from in 2 rounds; raise rl.select.oversample or rl.select.max_rounds, or "
        "set rl.select.on_short=go_on"
    )
    assert checkpoint.newest(tmp_path).step == 1
    again = with_score(home.stage(*SHORT, *overrides, weights=tmp_path / "step-000001"), agree)
    with pytest.raises(RunError, match="step 2 found 0 of 2 groups"):
        home.rl(again, tmp_path)


# ---- groups beyond the target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", ["discard", "requeue"])
def test_prompts_of_spare_groups_go_again_or_wait_for_their_epoch(home, spare):
    stage = stage_of(home, f"rl.select={{oversample: 2, spare: {spare}}}")
    lot, prompts = lot_of(stage, home)
    assert placed(home, lot) == [0, 1]
    assert prompts == Prompts(cursor=4, front=(2, 3) if spare == "requeue" else ())
    following, prompts = asyncio.run(draw_lot(stage, home.tasks, prompts, 1))
    assert placed(home, following) == ([2, 3] if spare == "requeue" else [4, 5])
    versions = {v for group in following.kept for m in group.members for v in m.episode.ledger.versions()}
    assert versions == {-1, stage.engine.version}, "an old attempt was handed on"


# ---- attempts that say nothing ---------------------------------------------------------------------------------------


def test_a_step_that_nobody_could_grade_stops_the_run(home):
    stage = replace(stage_of(home), score=lambda episode, task: Ungraded(reason="the judge is gone"))
    with pytest.raises(EngineError, match=r"none of the 4 attempts of step 1 could be graded.*the judge is gone"):
        lot_of(stage, home)


def test_a_step_whose_prompts_do_not_fit_stops_the_run(home):
    stage = stage_of(home, "agent.settings.context_tokens=20")
    with pytest.raises(EngineError, match=r"all 4 attempts of step 1 broke.* no room for a reply in a context of 20"):
        lot_of(stage, home)


def test_what_could_not_be_graded_is_left_out_and_counted(home):
    graded = stage_of(home, "rl.group=3")

    def score(episode, task, count=iter(range(10**6))):  # noqa: B008
        return Ungraded(reason="no answer") if next(count) % 3 == 0 else graded.score(episode, task)

    lot, _ = lot_of(replace(graded, score=score), home)
    assert lot.measured["ungraded"] == pytest.approx(1 / 3)
    assert all(len(group.members) == 2 for group in lot.kept)


# ---- stragglers ------------------------------------------------------------------------------------------------------


class Slow(Recorder):
    """An engine that never answers attempts at one task; `given_up` counts those that were cancelled."""

    task, given_up = "", 0

    async def generate(self, ledger, sampling):
        if self.task not in self.stage.backbone.renderer.decode(ledger.expanded()):
            return await super().generate(ledger, sampling)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise


def slow(home, place, *overrides):
    """A stage whose engine never answers the task at a place of the first epoch."""
    task = task_at(home.tasks, 5, place)
    stage = stage_of(home, *overrides)
    engine = Slow(stage.engine)
    engine.task, engine.stage = task.question, stage
    return replace(stage, engine=engine)


@pytest.mark.parametrize("spare", ["discard", "requeue"])
def test_a_step_does_not_wait_for_its_slowest_group(home, spare):
    place = lonely(home)
    stage = slow(home, place, "rl.prompts=3", f"rl.select={{overlaunch: 1.3, spare: {spare}}}")
    places = (place, *[each for each in range(12) if each != place][:3])
    lot, prompts = lot_of(stage, home, Prompts(cursor=12, front=places))
    assert sorted(placed(home, lot)) == sorted(places[1:])
    assert stage.engine.given_up == 2, "the attempts of the slow group were not cancelled"
    assert (lot.measured["groups/cancelled"], lot.measured["episodes/cancelled"], lot.missing) == (1.0, 2.0, 0)
    assert prompts == Prompts(cursor=12, front=(place,) if spare == "requeue" else ())


def test_attempts_that_had_ended_are_not_cancelled_with_their_group(home):
    """One of the two attempts of the slow group ends, the other never does."""

    class Half(Slow):
        asked_late = 0

        async def generate(self, ledger, sampling):
            if self.task in self.stage.backbone.renderer.decode(ledger.expanded()):
                self.asked_late += 1
                if self.asked_late == 1:
                    return await self.engine.generate(ledger, sampling)
            return await super().generate(ledger, sampling)

    place = lonely(home)
    stage = slow(home, place, "rl.prompts=3", "rl.select={overlaunch: 1.3}", "agent.settings.max_turns=0")
    engine = Half(stage.engine.engine)
    engine.task, engine.stage = stage.engine.task, stage
    places = (place, *[each for each in range(12) if each != place][:3])
    lot, _ = lot_of(replace(stage, engine=engine), home, Prompts(cursor=12, front=places))
    assert (lot.measured["groups/cancelled"], lot.measured["episodes/cancelled"]) == (1.0, 1.0)
    assert lot.measured["episodes/discarded"] == 1.0
    kept = sum(member.episode.usage.sampled_tokens for group in lot.kept for member in group.members)
    assert lot.tokens > kept, "what had been sampled for the attempt that ended is not counted"


@pytest.mark.parametrize(
    ("oversample", "overlaunch", "wanted", "launched"),
    [
        (1.0, 1.0, 8, (8, 8)),
        (1.5, 1.0, 8, (12, 12)),
        (1.0, 1.25, 8, (8, 10)),
        (1.0, 1.25, 2, (2, 3)),  # few groups, one of them slow
        (1.0, 1.25, 1, (1, 2)),
        (1.0, 1.1, 10, (10, 11)),  # 11.000000000000002, in floating point
        (1.5, 1.25, 8, (12, 15)),
    ],
)
def test_more_groups_are_begun_than_waited_for(oversample, overlaunch, wanted, launched):
    assert Select(oversample=oversample, overlaunch=overlaunch).launched(wanted) == launched


def test_a_lot_holds_the_tokens_of_all_its_conversations(home):
    lot, _ = lot_of(stage_of(home), home)
    episodes = [each for group in lot.kept for member in group.members for each in member.episode.walk()]
    assert lot.held == sum(len(episode.ledger) for episode in episodes) > 0


def test_whoever_is_waited_for_is_not_cancelled(home):
    lot, _ = lot_of(stage_of(home, "rl.select.oversample=2"), home)
    assert lot.measured["groups/cancelled"] == 0.0
    assert lot.measured["groups/kept"] + lot.measured["groups/dropped/target"] == 4.0


def test_what_fails_while_others_are_waited_for_is_raised(home):
    stage = slow(home, lonely(home), "rl.prompts=3", "rl.select.overlaunch=1.3")
    stage = replace(stage, score=lambda episode, task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lot_of(stage, home)


def lonely(home):
    """A place of the first epoch whose task's question no other task has."""
    asked = [task_at(home.tasks, 5, place).question for place in range(12)]
    return next(place for place, question in enumerate(asked) if asked.count(question) == 1)
