"""What a validation during a training leaves on disk: no checkpoint is lost while it runs, fails or is killed."""

import asyncio
from dataclasses import replace

import pytest
from training_cases import Killed, alternate, with_reward

from saccade.config.schema import AlarmConfig
from saccade.engines.scripted import Scripted
from saccade.errors import AlarmError, EngineError
from saccade.training import rl, sft
from saccade.training.alarms import AlarmMonitor, prefix_validation
from saccade.training.checkpoint import list_checkpoints
from saccade.training.validation import ValidationSchedule

pytestmark = pytest.mark.slow
SFT = "sft={{steps: 4, tokens_per_step: 300, save_every: {}, checkpoints: {{last: 1, best: {}}}}}"
RL = "rl={{steps: 4, group_size: 2, prompts_per_step: 2, pack_length: 512, save_every: {}, checkpoints: {{best: {}}}}}"


def load(workspace, save_every, best=0):
    """Load components with an engine that has its own weights."""
    settings = (SFT.format(save_every, best), RL.format(save_every, best), "validation.every=2")
    components = with_reward(workspace.load_components(*settings, "sampling.max_tokens=24"), alternate)
    replies = Scripted(components.vlm.renderer, replies=lambda ledger: "red</think><answer>red</answer>")
    return replace(components, engine=replies)


def train(stage, workspace, components, folder, validation, alarms=None, log_step=lambda row: None):
    data = workspace.demonstrations if stage is sft else workspace.tasks
    asyncio.run(stage.train(components, data, folder=folder, log_step=log_step, validation=validation, alarms=alarms))


def list_steps(folder):
    return [saved.step for saved in list_checkpoints(folder)]


def test_sft_keeps_the_best_checkpoint_while_its_validation_runs(workspace, tmp_path):
    """The validation of step 2 ends when the trainer waits for it, or else after all steps."""
    rows, is_awaited = [], asyncio.Event()

    class Schedule(ValidationSchedule):
        async def finish(self):
            is_awaited.set()
            await super().finish()

    async def validate(step):
        is_awaited.clear()
        while not is_awaited.is_set() and len(rows) < 4:
            await asyncio.sleep(0)
        return {"greedy/accuracy": float(step == 2)}

    train(sft, workspace, load(workspace, 1, best=1), tmp_path, Schedule(validate, 2), log_step=rows.append)
    assert list_steps(tmp_path) == [2, 4]
    assert (tmp_path / "best").resolve().name == "step-000002"


@pytest.mark.parametrize("stage", [sft, rl])
def test_a_failed_validation_leaves_a_checkpoint(workspace, tmp_path, stage):
    async def fail(step):
        if step == 2:
            raise EngineError("no server is left")
        return {}

    with pytest.raises(EngineError):
        train(stage, workspace, load(workspace, 10), tmp_path, ValidationSchedule(fail, 2))
    assert list_steps(tmp_path)[-1] >= 2


@pytest.mark.parametrize("stage", [sft, rl])
def test_a_validation_starts_after_the_checkpoint_of_its_step(workspace, tmp_path, stage):
    """It is killed in the validation of step 2."""

    async def kill(step):
        if step == 2:
            raise Killed
        return {}

    with pytest.raises(Killed):
        train(stage, workspace, load(workspace, 2), tmp_path, ValidationSchedule(kill, 2))
    assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize("stage", [sft, rl])
def test_the_last_validation_may_stop_a_training(workspace, tmp_path, stage):
    components = load(workspace, 4)
    rule = {"metric": "validation/greedy/accuracy", "below": 0.5, "window": 1, "action": "stop"}
    alarms = AlarmMonitor({"low": AlarmConfig(**rule)})

    async def validate(step):
        metrics = {"greedy/accuracy": float(step < 4)}
        alarms.check(step, prefix_validation(metrics))
        return metrics

    with pytest.raises(AlarmError):
        train(stage, workspace, components, tmp_path, ValidationSchedule(validate, 2), alarms)
    assert list_steps(tmp_path) == [4]
