"""Rolling out ahead: in order, never too far, in turns or side by side; failures arrive, nothing is left running."""

import asyncio
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import Recorder, turns, with_score

from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.rollouts.renewal import Renewal
from saccade.training import checkpoint, rl
from saccade.training import learn as learn_module
from saccade.training.ahead import Ahead
from saccade.training.lots import Lot
from saccade.training.optim import Optimizer
from saccade.training.prompts import Prompts
from saccade.types import End, Episode


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


async def trained(roller, *, last, most, patient, lots=(), pauses=(), stop=None, room=0):
    """The lots in the order in which they were taken, each with how many waited behind it."""
    taken, done = [], 0
    ahead = Ahead(roller, Prompts(), lots, version=0, last=last, most=most, patient=patient, room=room)
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


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_no_lot_is_begun_where_as_much_waits_as_may(data, most, room, patient):
    """Lots of 1 to 20 tokens: whoever is slow, all are learned from, and no more waits than the room and one lot."""
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=8, max_size=8))
    pauses = st.lists(st.integers(0, 6), min_size=8, max_size=8)
    roller = Roller(data.draw(pauses))
    ahead_of = []

    async def rolled(prompts, number):
        # What waits when a lot is begun: what was rolled out and not taken.
        ahead_of.append(sum(sizes[each] for each in range(len(roller.ended)) if each not in taken))
        _, prompts = await roller(prompts, number)
        return Sized(size=sizes[number], number=number), prompts

    taken = set()

    async def go():
        ahead = Ahead(rolled, Prompts(), (), version=0, last=8, most=most, patient=patient, room=room)
        async with ahead:
            for done in range(8):
                lot = await ahead.take()
                taken.add(lot.number)
                assert sum(each.held for each in ahead.state[1]) < room + max(sizes)
                await asyncio.sleep(0)
                ahead.published(done + 1)

    asyncio.run(asyncio.wait_for(go(), 20))
    assert taken == set(range(8))
    assert all(waiting < room for waiting in ahead_of)


@dataclass(frozen=True)
class Sized:
    """What `Ahead` needs to know of a lot."""

    size: int
    number: int
    tokens: int = 10

    @property
    def held(self):
        return self.size


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


class Between(Recorder):
    """Replies after the first lot's wait for new weights, and then are of both versions; asked anew they don't wait."""

    async def generate(self, ledger, sampling):
        begun, late = self.version, len(self.asked) >= 4 and sampling not in self.asked
        self.asked.append(sampling)
        deadline = time.monotonic() + 60
        while late and self.version == begun:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        said = await self.engine.generate(ledger, sampling)
        half = len(said.tokens) // 2
        versions = (begun,) * half + (self.version,) * (len(said.tokens) - half)
        said = replace(said, version=versions[-1], versions=versions if len(set(versions)) > 1 else ())
        self.served.append((ledger, said))
        return said


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "restart"])
def test_what_becomes_of_attempts_when_new_weights_come(home, tmp_path, monkeypatch, on_update):
    """Going on, half of a reply is of older weights, and the loss is told so token by token; anew, none is."""
    stage, stale = overlapped(home, "rl.steps=3", f"rl.on_update={on_update}"), []
    engine, policy_loss = Between(stage.engine), learn_module.policy_loss

    def seen(*given, **named):
        stale.append((named["stale_N"].tolist(), named["engine_logp_N"].tolist()))
        return policy_loss(*given, **named)

    monkeypatch.setattr(learn_module, "policy_loss", seen)
    rows = home.rl(replace(stage, engine=engine), tmp_path)
    assert len(rows) == 3
    count = len(engine.served[0][1].tokens)
    half = [True] * (count // 2) + [False] * (count - count // 2)
    one = engine.served[0][1].logprobs
    for flags, logprobs in stale[1:]:
        assert flags == (half * 4 if on_update == "continue" else [False] * 4 * count)
        assert logprobs == pytest.approx(one * 4)
    restarted = sum(row["episodes/restarted"] for row in rows)
    assert restarted == (0 if on_update == "continue" else 8)
    assert sum(row["tokens_lost"] for row in rows) == 0, "no reply had ended"


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "restart"])
def test_an_episode_is_not_charged_for_the_time_of_publishing_and_saving(home, tmp_path, monkeypatch, on_update):
    """Both take longer than it has, while it is under way."""
    written = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given, **named: (time.sleep(2), written(*given, **named)))
    settings = ("sampling.episode_seconds=0.5", f"rl.on_update={on_update}")
    stage = overlapped(home, *settings)

    class Slow(Recorder):
        async def publish(self, weights, version):
            await asyncio.sleep(2)
            await super().publish(weights, version)

    stage, go = replace(stage, engine=Slow(stage.engine)), asyncio.Event()

    async def agent(task, ctx):
        await go.wait()
        return Episode(task=task, agent="agent", ledger=Ledger(), turns=(), end=End.ANSWERED)

    async def body():
        renewal = Renewal()
        running = asyncio.create_task(renewal.run(home.tasks[0], agent, stage.context(seed=1)))
        await asyncio.sleep(0)
        await rl.publish(stage, 1, renewal)
        at = rl.Progress(done=1, prompts=Prompts(), lots=(), start=str(home.root / "model"))
        rl.save(tmp_path, stage, Optimizer(stage.backbone.model, stage.recipe.rl.optim, 1), at)
        assert not running.done()
        go.set()
        return await running

    assert asyncio.run(body()).end is End.ANSWERED


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
