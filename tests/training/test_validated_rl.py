"""RL with an engine that has its own weights: a validation runs beside it and samples one weight version alone."""

import asyncio
from dataclasses import replace

import pytest
from training_cases import RecordingEngine, alternate, with_reward

from saccade.engines.scripted import Scripted
from saccade.runs.validation import Validation
from saccade.training import rl
from saccade.training.validation import ValidationSchedule

pytestmark = pytest.mark.slow
SETTINGS = (
    "rl={group_size: 2, steps: 4, prompts_per_step: 2, save_every: 4, pack_length: 512}",
    "validation={every: 2, num_samples: 2}",
    "sampling.max_tokens=24",
)


class SlowEngine(RecordingEngine):
    """Answers requests of other tasks than `is_trained` after many turns of the event loop."""

    is_trained = staticmethod(lambda ledger: True)

    async def generate(self, request):
        if not self.is_trained(request.ledger):
            for _ in range(200):
                await asyncio.sleep(0)
        return await super().generate(request)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_validation_samples_from_one_version_beside_the_training(workspace, tmp_path, max_staleness):
    overrides = (*SETTINGS, f"rl.max_staleness={max_staleness}")
    components = with_reward(workspace.load_components(*overrides), alternate)
    script = Scripted(components.vlm.renderer, replies=lambda ledger: "red</think><answer>red</answer>")
    engine, records, rows, order = SlowEngine(script), [], [], []
    components = replace(components, engine=engine)
    held_out, trained = workspace.tasks[:4], workspace.tasks[4:]

    async def record_rollouts(stage, step, new_records):
        order.append((stage, step))
        records.extend(new_records)

    def log_step(values):
        order.append(("log", values["step"]))
        rows.append(values)

    validation = Validation(components=components, tasks=held_out, stage="rl", on_rollouts=record_rollouts)
    schedule = ValidationSchedule(validation.run, 2)
    asyncio.run(
        rl.train(
            components,
            trained,
            folder=tmp_path,
            log_step=log_step,
            on_rollouts=record_rollouts,
            validation=schedule,
        )
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sorted(schedule.results) == [0, 2, 4]
    validated = [record for record in records if record.outcome == "validation"]
    assert len(validated) == 3 * (4 + 8)
    for record in validated:
        versions = {segment.version for segment in record.episode.ledger.segments if segment.is_sampled}
        assert versions == {record.step}
    assert order.index(("rl_validation", 2)) < order.index(("log", 3))  # before the sync of step 3
    assert {record.episode.task.id for record in records if record.stage == "rl"} <= {task.id for task in trained}
