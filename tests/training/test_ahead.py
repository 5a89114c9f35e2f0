"""Rolling out ahead: in order, never too far, in turns or side by side; failures arrive, nothing is left running."""

import asyncio
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import Recorder, turns, with_score

from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, EngineError
from saccade.training import checkpoint, rl
from saccade.training.ahead import Ahead
from saccade.training.lots import Lot
from saccade.training.prompts import Prompts


def lot(number):
    return Lot(number=number, kept=(), missing=0, tokens=10, measured={})


class Roller:
    """Rolls out in so many turns of the loop each; remembers what version each lot was begun with."""

    def __init__(self, pauses=(), fail_at=None):
        self.begun, self.ended, self.version = [], [], 0
        self.pauses, self.fail_at, self.cancelled = dict(enumerate(pauses)), fail_at, False

    async def __call__(self, prompts, number):
        self.begun.append((number, self.version))
        try:
            for _ in range(self.pauses.get(number, 1)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if number == self.fail_at:
            raise EngineError("the servers are gone")
        self.ended.append(number)
        return lot(number), Prompts(cursor=prompts.cursor + 1)


async def trained(roller, *, last, most, patient, lots=(), pauses=(), stop=None):
    """The lots in the order in which they were taken, each with how many waited behind it."""
    taken, done = [], 0
    ahead = Ahead(roller, Prompts(), lots, version=0, last=last, most=most, patient=patient)
    async with ahead:
        while done < (last if stop is None else stop):
            found = await ahead.take()
            taken.append((found.number, len(ahead.state[1])))
            for _ in range(dict(enumerate(pauses)).get(done, 0)):
                await asyncio.sleep(0)
            done += 1
            roller.version = done
            ahead.published(done)
    return taken, ahead


def test_with_no_lead_rolling_and_learning_take_turns():
    roller = Roller()
    taken, ahead = asyncio.run(trained(roller, last=4, most=0, patient=True))
    assert roller.begun == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert taken == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert ahead.state == (Prompts(cursor=4), ())
    assert ahead.tokens == 40


def test_a_patient_trainer_learns_from_lots_that_are_exactly_so_late():
    roller = Roller()
    asyncio.run(trained(roller, last=6, most=2, patient=True))
    assert roller.begun == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_an_impatient_trainer_takes_what_there_is():
    taken, _ = asyncio.run(trained(Roller(), last=6, most=2, patient=False))
    assert [number for number, _ in taken] == list(range(6))
    assert taken[0] == (0, 0), "it waited for more than it needed"


@settings(deadline=None)
@given(st.data(), st.integers(0, 4), st.booleans())
def test_whoever_is_slow_lots_come_in_order_and_never_too_early(data, most, patient):
    pauses = st.lists(st.integers(0, 6), min_size=8, max_size=8)
    roller = Roller(data.draw(pauses))
    taken, ahead = asyncio.run(trained(roller, last=8, most=most, patient=patient, pauses=data.draw(pauses)))
    assert [number for number, _ in taken] == list(range(8))
    assert all(0 <= number - version <= most for number, version in roller.begun)
    assert max(waiting for _, waiting in taken) <= most
    assert ahead.state == (Prompts(cursor=8), ())


def test_lots_of_a_checkpoint_come_first():
    roller = Roller()
    taken, _ = asyncio.run(trained(roller, last=4, most=2, patient=True, lots=[lot(0), lot(1)]))
    assert [number for number, _ in taken] == [0, 1, 2, 3]
    assert [number for number, _ in roller.begun] == [2, 3]


def test_a_failure_comes_after_the_lots_that_were_whole():
    roller, seen = Roller(fail_at=2), []

    async def go():
        async with Ahead(roller, Prompts(), (), version=0, last=9, most=9, patient=False) as ahead:
            while True:
                seen.append((await ahead.take()).number)

    with pytest.raises(EngineError, match="the servers are gone"):
        asyncio.run(go())
    assert seen == [0, 1]


def test_a_trainer_that_stops_leaves_nothing_running():
    roller = Roller(pauses=[0, 10**6])

    async def go():
        await trained(roller, last=9, most=3, patient=False, stop=1, pauses=[5])
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(go()) == []
    assert roller.cancelled
    assert roller.ended == [0]


# ---- in a run --------------------------------------------------------------------------------------------------------

OVERLAPPED = ("rl={group: 2, steps: 6, prompts: 2, max_staleness: 1, save_every: 1, row_tokens: 512}",)


def overlapped(home, *overrides, weights=None):
    """A stage whose engine is scripted: it has no weights to share."""
    stage = with_score(home.stage(*OVERLAPPED, "sampling.max_tokens=24", *overrides, weights=weights), turns)
    said = scripted(stage.backbone.renderer, replies=lambda ledger: "red</think><answer>red</answer>")
    return replace(stage, engine=said)


@pytest.mark.slow
def test_a_run_learns_while_it_rolls_out(home, tmp_path, monkeypatch):
    """Each update but the last waits until attempts of the next lot have begun: in turns that would never be."""
    stage, learn, updates = overlapped(home), rl.learn, []
    engine = Recorder(stage.engine)

    def late(*given):
        updates.append(len(engine.asked))
        deadline, last = time.monotonic() + 60, len(updates) == 6
        while not last and len(engine.asked) <= 4 * len(updates):  # two prompts, two attempts, one reply each
            assert time.monotonic() < deadline, "nothing is rolled out while the trainer learns"
            time.sleep(0.01)
        return learn(*given)

    monkeypatch.setattr(rl, "learn", late)
    rows = home.rl(replace(stage, engine=engine), tmp_path)
    assert [(row["step"], row["updates"]) for row in rows] == [(step, 1) for step in range(1, 7)]
    assert [row["staleness_max"] for row in rows] == [0.0, *[1.0] * 5]
    assert len(engine.asked) == 24


@pytest.mark.slow
def test_a_stopped_run_goes_on(home, tmp_path):
    rows = home.rl(overlapped(home), tmp_path, die_at=3)
    last = checkpoint.newest(tmp_path)
    rest = home.rl(overlapped(home, weights=last.folder), tmp_path)
    assert [row["step"] for row in (*rows[: last.step], *rest)] == list(range(1, 7))


def test_an_engine_that_shares_the_weights_is_refused(home, tmp_path):
    stage = home.stage("rl.max_staleness=1")
    with pytest.raises(ConfigError) as caught:
        asyncio.run(rl.train(stage, home.tasks, folder=tmp_path, log=lambda values: None))
    assert str(caught.value) == (
        "rl.max_staleness=1 needs an engine with weights of its own, such as vllm; local samples from those that are "
        "being trained: set rl.max_staleness=0"
    )


def test_lateness_is_bounded_or_tried_out_but_not_both(home):
    with pytest.raises(ConfigError, match="set one of them"):
        home.recipe("rl={staleness: 1, max_staleness: 1}")
