"""A validation samples from one step's weights: in turns with a shared engine, beside the training with servers."""

import asyncio

import pytest

from saccade.errors import EngineError
from saccade.training.validation import ValidationSchedule


class FakeEngine:
    """Records its weight syncs."""

    def __init__(self, *, has_separate_weights):
        self.has_separate_weights, self.version, self.events = has_separate_weights, 0, []

    async def sync_weights(self, source, version):
        self.version = version
        self.events.append(f"sync {version}")


def build(engine, every=2, results=None):
    async def run(step):
        engine.events.append(f"start {step}")
        await asyncio.sleep(0)
        engine.events.append(f"end {step} with {engine.version}")
        return {"greedy/accuracy": step / 10}

    return ValidationSchedule(run, every, results)


async def train(engine, schedule, steps=4):
    """Sync and validate as a trainer does."""
    await schedule.start(0, engine, None)
    for step in range(1, steps + 1):
        engine.events.append(f"train {step}")
        await asyncio.sleep(0)
        await schedule.finish()
        await engine.sync_weights(None, step)
        await schedule.start(step, engine, None)
    await schedule.finish()


def test_a_shared_engine_is_validated_in_turns_and_its_caches_are_dropped():
    engine = FakeEngine(has_separate_weights=False)
    schedule = build(engine)
    asyncio.run(train(engine, schedule, steps=2))
    first, last = ["start 0", "end 0 with 0", "sync 0"], ["sync 2", "start 2", "end 2 with 2", "sync 2"]
    assert engine.events == [*first, "train 1", "sync 1", "train 2", *last]
    assert schedule.get_scores("greedy/accuracy") == {0: 0.0, 2: 0.2}
    assert schedule.get_scores("sampled/accuracy") == {}


def test_servers_are_validated_beside_the_training():
    engine = FakeEngine(has_separate_weights=True)
    asyncio.run(train(engine, build(engine)))
    events = engine.events
    for step in (0, 2, 4):
        assert f"end {step} with {step}" in events  # no sync came between
    assert events.index("train 1") < events.index("end 0 with 0") < events.index("sync 1")
    assert events.index("train 3") < events.index("end 2 with 2") < events.index("sync 3")


def test_a_validation_of_an_earlier_invocation_is_not_repeated():
    engine = FakeEngine(has_separate_weights=False)
    asyncio.run(train(engine, build(engine, results={0: {}, 2: {}})))
    assert [event for event in engine.events if event.startswith("start")] == ["start 4"]


def test_without_an_interval_there_is_none():
    engine = FakeEngine(has_separate_weights=False)
    asyncio.run(train(engine, ValidationSchedule()))
    assert not any(event.startswith("start") for event in engine.events)


def test_a_failure_is_raised_before_the_next_sync():
    async def fail(step):
        raise EngineError("no server is left")

    engine = FakeEngine(has_separate_weights=True)
    with pytest.raises(EngineError):
        asyncio.run(train(engine, ValidationSchedule(fail, 1)))
    assert engine.events == ["train 1"]


def test_cancel_ends_the_validation():
    async def start_and_cancel():
        is_cancelled = asyncio.Event()

        async def run(step):
            try:
                await asyncio.Event().wait()
            finally:
                is_cancelled.set()

        schedule = ValidationSchedule(run, 1)
        await schedule.start(0, FakeEngine(has_separate_weights=True), None)
        await asyncio.sleep(0)
        await schedule.cancel()
        return is_cancelled.is_set()

    assert asyncio.run(start_and_cancel())
