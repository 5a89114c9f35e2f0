"""Seconds per phase, and the time in which at least one episode waits for its score."""

import asyncio
import resource
import sys
import time

import pytest
import torch

from saccade.rewards.compose import score_each
from saccade.training import step_timer
from saccade.training.step_timer import StepTimer, measure_peak_memory
from saccade.training.train_step import StepReport
from saccade.types import Score


class FakeTime:
    """A clock that a test sets."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(step_timer.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return FakeTime(monkeypatch)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_phases_add_up_to_the_step(clock, is_overlapped):
    """The rollout phase takes two seconds, of which the reward takes half a second."""

    async def score(episodes):
        clock.now += 0.5
        return [Score(value=1.0)]

    timer = StepTimer(score, is_overlapped=is_overlapped)
    clock.now += 0.5
    [result] = asyncio.run(timer.score_fn([None]))
    assert result.value == 1.0
    clock.now += 1.0
    timer.end_phase("rollout")
    clock.now += 3.0
    timer.end_phase("train")
    timer.end_phase("weight_sync")
    metrics = timer.compute_metrics(torch.device("cpu"), 30)
    assert {name: value for name, value in metrics.items() if name.startswith("seconds")} == {
        "seconds/rollout": 2.0,
        "seconds/train": 3.0,
        "seconds/weight_sync": 0.0,
    }
    assert metrics["rollout/reward_seconds"] == 0.5
    assert timer.step_seconds == 5.0
    assert metrics["sampled_tokens_per_second"] == (6.0 if is_overlapped else 15.0)
    timer.start_step()
    timer.end_phase("rollout")
    assert timer.compute_metrics(torch.device("cpu"), 0)["rollout/reward_seconds"] == 0.0


def test_overlapping_waits_count_once(clock):
    """Two scores are requested at once; the first takes 1 s, the second 3 s."""
    is_scored = [asyncio.Event(), asyncio.Event()]

    async def score(episodes):
        await is_scored[episodes[0]].wait()
        return [Score(value=0.0)]

    async def score_both(timer):
        scores = [asyncio.ensure_future(timer.score_fn([index])) for index in range(2)]
        await asyncio.sleep(0)
        for index, seconds in enumerate((1.0, 2.0)):
            clock.now += seconds
            is_scored[index].set()
            await scores[index]

    timer = StepTimer(score)
    asyncio.run(score_both(timer))
    timer.end_phase("rollout")
    metrics = timer.compute_metrics(torch.device("cpu"), 0)
    assert (metrics["rollout/reward_seconds"], metrics["sampled_tokens_per_second"]) == (3.0, 0.0)


def test_a_score_that_raises_stops_counting(clock):
    async def score(episodes):
        clock.now += 1.0
        raise ZeroDivisionError

    timer = StepTimer(score)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(timer.score_fn([None]))
    clock.now += 1.0
    timer.end_phase("rollout")
    assert timer.compute_metrics(torch.device("cpu"), 1)["rollout/reward_seconds"] == 1.0


@pytest.mark.parametrize(("platform", "gib"), [("linux", 3.0), ("darwin", 3.0 / 1024)])
def test_memory_is_converted_from_the_units_of_the_platform(monkeypatch, platform, gib):
    """3 Gi in KiB on Linux, the same number of bytes on macOS."""

    class Usage:
        ru_maxrss = 3 * 2**20

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: Usage)
    assert measure_peak_memory(torch.device("cpu")) == {"memory_gib": gib}


def test_gpu_memory_is_a_separate_metric(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**30)
    assert measure_peak_memory(torch.device("cuda", 0))["memory_device_gib"] == 5.0


class FakeVisionLanguageModel:
    """Two text layers of 30 weights each, one of them frozen, and an output layer of 20."""

    dtype = "bfloat16"

    def __init__(self, device="cuda"):
        self.device = torch.device(device)
        self.language_model = torch.nn.Module()
        self.language_model.layers = torch.nn.ModuleList(torch.nn.Linear(5, 6, bias=False) for _ in range(2))
        self.language_model.layers[0].requires_grad_(False)
        self.model = torch.nn.Module()
        self.model.lm_head = torch.nn.Linear(5, 4, bias=False)


def build_report():
    return StepReport(loss=0.0, entropy=0.0, grad_norm=0.0, packed_tokens=100, trained_tokens=10, stats={})


def test_model_flops():
    # layers: (4 * 60 + 2 * 30) * 100, output: 6 * 20 * 10
    assert step_timer.estimate_flops(FakeVisionLanguageModel(), 100, 10) == 30_000 + 1_200


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("T4", None)])
def test_utilization_is_logged_for_known_gpus(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    metrics = step_timer.compute_update_speed(FakeVisionLanguageModel(), build_report(), 2, 4.0)
    assert metrics["packed_tokens_per_second/train"] == 50.0
    assert metrics.get("mfu") == (peak and pytest.approx(2 * 31_200 / 4.0 / peak))


def test_a_cpu_has_no_utilization():
    assert step_timer.compute_update_speed(FakeVisionLanguageModel("cpu"), build_report(), 1, 4.0) == {
        "packed_tokens_per_second/train": 25.0
    }
    assert step_timer.compute_update_speed(FakeVisionLanguageModel("cpu"), None, 1, 4.0) == {}


def test_real_time():
    timer = StepTimer(score_each(lambda episode: Score(value=0.0)))
    time.sleep(0.01)
    timer.end_phase("rollout")
    metrics = timer.compute_metrics(torch.device("cpu"), 1)
    assert 0.01 <= metrics["seconds/rollout"] < 60
    assert 0.01 < metrics["memory_gib"] < 1000
