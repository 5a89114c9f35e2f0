"""Seconds by stage: what waits for a score is the reward's, once, however many wait."""

import asyncio
import resource
import sys
import time

import pytest
import torch

from saccade.training import clock as clock_module
from saccade.training.clock import Clock, memory
from saccade.types import Score


class Time:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(clock_module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def hand(monkeypatch):
    return Time(monkeypatch)


def test_rollout_and_reward_add_up(hand):
    """Two seconds of rollout, of which one score takes half and waits that overlap take one."""

    def plain(episode, task):
        hand.now += 0.5
        return Score(value=1.0, parts={})

    clock = Clock(plain)
    hand.now += 0.5
    found = asyncio.run(clock.score(None, None))
    assert found.value == 1.0
    hand.now += 1.0
    clock.lap("rollout")
    hand.now += 3.0
    clock.lap("train")
    clock.lap("publish")
    measured = clock.metrics(torch.device("cpu"), 30)
    assert {name: value for name, value in measured.items() if name.startswith("seconds")} == {
        "seconds/rollout": 1.5,
        "seconds/reward": 0.5,
        "seconds/train": 3.0,
        "seconds/publish": 0.0,
    }
    assert measured["tokens_per_second"] == 20.0


def test_waits_that_overlap_count_once(hand):
    """Two judges are asked at once; the first answers after 1 s, the second after 3."""
    gates = [asyncio.Event(), asyncio.Event()]

    async def judged(episode, task):
        await gates[episode].wait()
        return Score(value=float(episode), parts={})

    async def main(clock):
        asked = [asyncio.ensure_future(clock.score(index, None)) for index in range(2)]
        await asyncio.sleep(0)
        for index, seconds in enumerate((1.0, 2.0)):
            hand.now += seconds
            gates[index].set()
            await asked[index]

    clock = Clock(judged)
    asyncio.run(main(clock))
    clock.lap("rollout")
    assert clock.metrics(torch.device("cpu"), 0)["seconds/reward"] == 3.0
    assert clock.metrics(torch.device("cpu"), 0)["tokens_per_second"] == 0.0


def test_a_score_that_raises_is_waited_for_no_more(hand):
    def broken(episode, task):
        hand.now += 1.0
        raise ValueError("no")

    clock = Clock(broken)
    with pytest.raises(ValueError, match="no"):
        asyncio.run(clock.score(None, None))
    hand.now += 1.0
    clock.lap("rollout")
    assert clock.metrics(torch.device("cpu"), 1)["seconds/reward"] == 1.0


@pytest.mark.parametrize(("platform", "gib"), [("linux", 3.0), ("darwin", 3.0 / 1024)])
def test_memory_is_counted_in_the_units_of_the_system(monkeypatch, platform, gib):
    """Linux says 3 Gi in KiB, macOS says the same number of bytes."""

    class Usage:
        ru_maxrss = 3 * 2**20

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: Usage)
    assert memory(torch.device("cpu")) == {"memory_gib": gib}


def test_a_gpu_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**30)
    assert memory(torch.device("cuda", 0))["memory_device_gib"] == 5.0


def test_the_real_clock_runs():
    clock = Clock(lambda episode, task: Score(value=0.0, parts={}))
    time.sleep(0.01)
    clock.lap("rollout")
    measured = clock.metrics(torch.device("cpu"), 1)
    assert 0.01 <= measured["seconds/rollout"] < 60
    assert 0.01 < measured["memory_gib"] < 1000
