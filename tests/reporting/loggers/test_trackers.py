"""Trackers: told of every step, waited for by nobody, and never the end of a run."""

import contextlib
import importlib.util
import json
import logging
import time

import pytest
from commands import RL, SFT, WORLD, bad, good

from saccade import plugins
from saccade.config import load_recipe
from saccade.errors import ConfigError
from saccade.runlog import Run
from saccade.trackers import _tell
from saccade.trackers._tell import check_trackers, telling

LISTENER = """
import json

class {name}:
    package = ""

    def __init__(self, run):
        self.path = run.path / "{name}.jsonl"
        {opening}

    def log(self, stage, step, values):
        {logging}
        with self.path.open("a") as file:
            file.write(json.dumps([stage, step, values]) + "\\n")

    def close(self):
        {closing}
"""


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is missing: pip install 'saccade[track]'")


def listener(folder, name="listener", opening="pass", logging="pass", closing="pass"):
    path = folder / f"{name}.py"
    path.write_text(LISTENER.format(name=name, opening=opening, logging=logging, closing=closing))
    return str(path)


def begun(folder, *names) -> Run:
    return Run.create(folder, load_recipe("tiny/base", [f"track={json.dumps(names)}"]))


def told(run):
    path = run.path / "listener.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_nobody_is_told_by_default(tmp_path):
    assert load_recipe("tiny/para_grpo").track == ()
    with telling(begun(tmp_path / "run")) as tell:
        tell("rl", 1, {"reward": 1.0})


def test_numbers_are_told_in_order(tmp_path):
    run = begun(tmp_path / "run", listener(tmp_path))
    with telling(run) as tell:
        for step in (1, 2, 3):
            tell("rl", step, {"reward": step / 2, "loss": None, "ratio": float("nan"), "note": "text", "kept": 3})
    assert told(run) == [["rl", step, {"reward": step / 2, "kept": 3.0}] for step in (1, 2, 3)]


@pytest.mark.parametrize("where", ["opening", "logging", "closing"])
def test_a_tracker_that_fails_warns_once_and_stops_nothing(tmp_path, caplog, where):
    broken = listener(tmp_path, "broken", **{where: "raise ConnectionError('no route to host')"})
    run = begun(tmp_path / "run", broken, listener(tmp_path))
    with caplog.at_level(logging.WARNING), telling(run) as tell:
        for step in range(1, 6):
            tell("sft", step, {"loss": 1.0})
    assert [record.message for record in caplog.records] == [
        f"the tracker {broken} failed: no route to host; it is told nothing more, and metrics.jsonl goes on"
    ]
    assert [step for _, step, _ in told(run)] == [1, 2, 3, 4, 5]  # the other one heard all


def test_training_waits_for_no_tracker(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_tell, "CLOSING", 0.2)
    slow = listener(tmp_path, "slow", logging="__import__('time').sleep(60)")
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING), telling(begun(tmp_path / "run", slow)) as tell:
        for step in range(100):
            tell("rl", step, {"reward": 0.0})
    assert time.monotonic() - begin < 5
    assert "slow.py is not done yet and is left behind; metrics.jsonl is whole" in caplog.text


def test_what_stops_training_passes_through(tmp_path):
    run = begun(tmp_path / "run", listener(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), telling(run) as tell:
        tell("rl", 1, {"reward": 1.0})
        raise KeyboardInterrupt
    assert len(told(run)) == 1


def test_a_missing_package_is_one_sentence_before_anything_is_made(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"wandb needs the package wandb; pip install 'saccade\[track\]'"):
        check_trackers(["wandb"])
    assert "needs the package wandb" in bad("recipes", "check", "tiny/base", "track=[wandb]")
    assert "did you mean 'tensorboard'" in bad("recipes", "check", "tiny/base", "track=[tensorbord]")


def test_every_tracker_says_what_it_needs():
    assert {plugins.load("trackers", name).package for name in plugins.names("trackers")} == {"tensorboard", "wandb"}


def test_who_watches_may_change_with_a_resume(tmp_path):
    begun(tmp_path / "run")
    again = Run.create(tmp_path / "run", load_recipe("tiny/base", ["track=[tensorboard]"]), resume=True)
    assert again.recipe.track == ("tensorboard",)


# ---- the real ones -------------------------------------------------------------------------------------------------


def scalars(folder):
    """Per tag the steps and values that TensorBoard itself would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@needs("tensorboard")
def test_tensorboard_shows_each_stage_and_a_step_done_again_once(tmp_path):
    run = begun(tmp_path / "run", "tensorboard")
    with telling(run) as tell:
        for step in (1, 2, 3):
            tell("sft", step, {"loss": 1.0 / step})
            tell("rl", step, {"reward": 0.5, "seconds/rollout": 2.0})
    with telling(run) as tell:  # gone on with from the checkpoint of step 1
        tell("sft", 2, {"loss": 0.25})
    assert scalars(run.path / "tensorboard/sft") == {"loss": [(1, 1.0), (2, 0.25)]}
    found = scalars(run.path / "tensorboard/rl")
    assert found == {"reward": [(1, 0.5), (2, 0.5), (3, 0.5)], "seconds/rollout": [(1, 2.0), (2, 2.0), (3, 2.0)]}


@needs("wandb")
def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = begun(tmp_path / "run", "wandb")
    for steps in ((1, 2), (3,)):
        with caplog.at_level(logging.WARNING, logger="saccade"), telling(run) as tell:
            for step in steps:
                tell("rl", step, {"reward": 0.5})
    assert caplog.text == ""
    own = run.read_json("wandb.json")["id"]
    kept = sorted(path.name for path in (run.path / "wandb").glob("offline-run-*"))
    assert len(kept) >= 1
    assert all(name.endswith(own) for name in kept)


@pytest.mark.slow
@needs("tensorboard")
def test_a_whole_run_is_told(tmp_path):
    world, model, folder = tmp_path / "world", tmp_path / "model", tmp_path / "run"
    good("data", "world", world, *WORLD)
    good("model", "tiny", model)
    tracked = ["tiny/para_grpo", *SFT, *RL, "track=[tensorboard]", "--world", world, "--model", model, "--out", folder]
    good("sft", *tracked)
    good("train", *tracked, "--resume")
    for stage, name in (("sft", "loss"), ("rl", "reward")):
        lines = {line["step"]: line[name] for line in Run.open(folder).metrics(stage)}
        shown = dict(scalars(folder / "tensorboard" / stage)[name])
        assert shown == pytest.approx(lines, rel=1e-6)
