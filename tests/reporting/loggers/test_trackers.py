"""Loggers: they get every step, never block training, and never fail a run."""

import contextlib
import importlib.util
import json
import logging
import time

import pytest
from commands import RL, SFT, SYNTHETIC, bad, good
from error_cases import raises

from saccade import plugins
from saccade.config.load import load_recipe
from saccade.errors import ConfigError
from saccade.reporting.loggers import dispatch
from saccade.reporting.loggers.dispatch import check_loggers, open_loggers
from saccade.runs.run_folder import Run

LOGGER = """
import json

class {name}:
    def __init__(self, folder, recipe):
        self.path = folder / "{name}.jsonl"
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


def recorder(folder, name="recorder", opening="pass", logging="pass", closing="pass"):
    path = folder / f"{name}.py"
    path.write_text(LOGGER.format(name=name, opening=opening, logging=logging, closing=closing))
    return str(path)


def create_run(folder, *names) -> Run:
    return Run.create(folder, load_recipe("tiny/base", [f"loggers={json.dumps(names)}"]))


def read_recorded(run):
    path = run.path / "recorder.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_no_loggers_by_default(tmp_path):
    assert load_recipe("tiny/para_grpo").loggers == ()
    with open_loggers(tmp_path / "run", load_recipe("tiny/base")) as log_step:
        log_step("rl", 1, {"reward": 1.0})


def test_finite_numbers_are_logged_in_order(tmp_path):
    run = create_run(tmp_path / "run", recorder(tmp_path))
    with open_loggers(run.path, run.recipe) as log_step:
        for step in (1, 2, 3):
            log_step("rl", step, {"reward": step / 2, "loss": None, "ratio": float("nan"), "note": "text", "kept": 3})
    assert read_recorded(run) == [["rl", step, {"reward": step / 2, "kept": 3.0}] for step in (1, 2, 3)]


@pytest.mark.parametrize("where", ["opening", "logging", "closing"])
def test_failing_logger_warns_once(tmp_path, caplog, where):
    broken = recorder(tmp_path, "broken", **{where: "raise ConnectionError('no route to host')"})
    run = create_run(tmp_path / "run", broken, recorder(tmp_path))
    with caplog.at_level(logging.WARNING), open_loggers(run.path, run.recipe) as log_step:
        for step in range(1, 6):
            log_step("sft", step, {"loss": 1.0})
    (warning,) = caplog.records
    assert broken in warning.message
    assert "no route to host" in warning.message
    assert [step for _, step, _ in read_recorded(run)] == [1, 2, 3, 4, 5]  # the other logger got all steps


def test_slow_logger_does_not_block_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "CLOSE_TIMEOUT", 0.2)
    slow = recorder(tmp_path, "slow", logging="__import__('time').sleep(3600)")
    begin = time.monotonic()
    run = create_run(tmp_path / "run", slow)
    with caplog.at_level(logging.WARNING), open_loggers(run.path, run.recipe) as log_step:
        for step in range(100):
            log_step("rl", step, {"reward": 0.0})
    assert time.monotonic() - begin < 1800  # it did not wait for the logger
    assert [record.args for record in caplog.records] == [(slow,)]


def test_interrupt_passes_through(tmp_path):
    run = create_run(tmp_path / "run", recorder(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), open_loggers(run.path, run.recipe) as log_step:
        log_step("rl", 1, {"reward": 1.0})
        raise KeyboardInterrupt
    assert len(read_recorded(run)) == 1


def test_missing_package_is_one_error(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with raises(ConfigError, key="loggers", value="wandb"):
        check_loggers(["wandb"])
    for name in ("wandb", "tensorbord"):
        assert name in bad("recipes", "plan", "tiny/base", f"loggers=[{name}]")


def test_every_logger_names_its_package():
    assert {plugins.load("reporting.loggers", name).package for name in plugins.list_plugins("reporting.loggers")} == {
        "swanlab",
        "tensorboard",
        "wandb",
    }


def test_loggers_may_change_on_resume(tmp_path):
    create_run(tmp_path / "run")
    again = Run.create(tmp_path / "run", load_recipe("tiny/base", ["loggers=[tensorboard]"]), resume=True)
    assert again.recipe.loggers == ("tensorboard",)


# ---- packaged loggers ----------------------------------------------------------------------------------------------


def scalars(folder):
    """Return the steps and values by tag that TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@needs("tensorboard")
def test_tensorboard_shows_a_repeated_step_once(tmp_path):
    run = create_run(tmp_path / "run", "tensorboard")
    with open_loggers(run.path, run.recipe) as log_step:
        for step in (1, 2, 3):
            log_step("sft", step, {"loss": 1.0 / step})
            log_step("rl", step, {"reward": 0.5, "seconds/rollout": 2.0})
    with open_loggers(run.path, run.recipe) as log_step:  # resumed from the checkpoint of step 1
        log_step("sft", 2, {"loss": 0.25})
    assert scalars(run.path / "tensorboard/sft") == {"loss": [(1, 1.0), (2, 0.25)]}
    found = scalars(run.path / "tensorboard/rl")
    assert found == {"reward": [(1, 0.5), (2, 0.5), (3, 0.5)], "seconds/rollout": [(1, 2.0), (2, 2.0), (3, 2.0)]}


@needs("wandb")
def test_wandb_resumes_its_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = create_run(tmp_path / "run", "wandb")
    for steps in ((1, 2), (3,)):
        with caplog.at_level(logging.WARNING, logger="saccade"), open_loggers(run.path, run.recipe) as log_step:
            for step in steps:
                log_step("rl", step, {"reward": 0.5})
    assert caplog.text == ""
    run_id = run.read_json("wandb.json")["id"]
    names = sorted(path.name for path in (run.path / "wandb").glob("offline-run-*"))
    assert len(names) >= 1
    assert all(name.endswith(run_id) for name in names)


@needs("swanlab")
def test_swanlab_resumes_its_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run = create_run(tmp_path / "run", "swanlab")
    for steps in ((1, 2), (2, 3)):
        with caplog.at_level(logging.WARNING, logger="saccade"), open_loggers(run.path, run.recipe) as log_step:
            for step in steps:
                log_step("rl", step, {"reward": 0.5})
                log_step("rl_validation", step, {"greedy/accuracy": 0.25})
    assert caplog.text == ""
    run_id = run.read_json("swanlab.json")["id"]
    files = list((run.path / "swanlab").glob("run-*/*.swanlab"))
    assert files
    assert all(run_id in path.name for path in files)


@pytest.mark.slow
@needs("tensorboard")
def test_whole_run_is_logged(tmp_path):
    data, model, folder = tmp_path / "data", tmp_path / "model", tmp_path / "run"
    good("data", "synth", data, *SYNTHETIC)
    good("model", "tiny", model)
    arguments = [
        "tiny/para_grpo",
        *SFT,
        *RL,
        "loggers=[tensorboard]",
        "--data",
        data,
        "--model",
        model,
        "--out",
        folder,
    ]
    good("sft", *arguments)
    good("rl", *arguments, "--resume")
    for stage, name in (("sft", "loss"), ("rl", "reward")):
        lines = {line["step"]: line[name] for line in Run.open(folder).read_metrics(stage)}
        shown = dict(scalars(folder / "tensorboard" / stage)[name])
        assert shown == pytest.approx(lines, rel=1e-6)
