"""Power cuts: after one at any moment, a resumed run finds the last state that it wrote, or the one before, whole."""

import itertools
import json

import pytest
import torch
from power_cut import iterate_survivors, record, restore

from saccade.config.load import load_recipe
from saccade.config.schema import CheckpointConfig
from saccade.models.checkpoint_files import check_weights, verify_checksums
from saccade.runs.run_folder import Run
from saccade.training import checkpoint
from saccade.training.optimizer import Optimizer
from saccade.utils.files import create_folder
from saccade.utils.jsonl import append_jsonl, read_jsonl, write_jsonl


class Cuts:
    """Every state of a folder after a power cut during an action, each once."""

    def __init__(self, folder, tmp_path):
        self.folder, self._copies, self._versions = folder, tmp_path / "copies", tmp_path / "versions"
        self._versions.mkdir()

    def run(self, action, read):
        """Yield the number of acknowledged steps of the action, and what `read` returns for a surviving folder."""
        with record(self.folder, self._versions) as recording:
            action(recording)
            recording.observe()
        results = {}
        for moment in recording.moments:
            for files in iterate_survivors(moment):
                visible = {name: content for name, content in files.items() if not name.startswith((".", "sft/."))}
                key = frozenset(visible.items())
                if key not in results:
                    restore(visible, self._copies)
                    results[key] = read(self._copies)
                yield moment.num_acknowledged, results[key]
        assert len(results) > 3, "the recorder saw no change"


@pytest.fixture(scope="module")
def components(workspace):
    return workspace.load_components()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(2, 3), (1, 2, 2)], ids=["next step", "same step"])
def test_a_resumed_run_finds_the_last_or_the_previous_whole_checkpoint(tmp_path, components, steps):
    optimizer = Optimizer(components.vlm.model, components.recipe.sft.optim, 4)
    for parameter in components.vlm.trainable_parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    run, is_repeated = tmp_path / "run", steps[-1] == steps[-2]
    numbers = itertools.count()

    def save(step, *, folder=run / "sft"):
        state = {"number": next(numbers)}
        retention = CheckpointConfig(last=2 if is_repeated else 1, best=1)
        arguments = {"vlm": components.vlm, "optimizer": optimizer, "trainer_state": state}
        checkpoint.save_checkpoint(folder, step=step, retention=retention, scores={step: 1.0}, **arguments)

    def read(folder):
        newest = checkpoint.find_newest_checkpoint(folder / "sft")
        if newest is None:
            return None
        for saved in checkpoint.list_checkpoints(folder / "sft"):
            verify_checksums(saved.folder)
            check_weights(saved.folder)
        best = folder / "sft" / "best"
        assert best.resolve().is_dir() or not best.is_symlink() or is_repeated
        return json.loads((newest.folder / "trainer_state.json").read_text())["number"]

    def act(recording):
        for step in steps:
            save(step)
            recording.acknowledge()

    run.mkdir()
    for num_acknowledged, number in Cuts(run, tmp_path).run(act, read):
        last = None if num_acknowledged == 0 else num_acknowledged - 1
        # While a step is saved again, the step before is what a cut may leave.
        assert number in (last, num_acknowledged) or (is_repeated and number == 0 == last - 1)


@pytest.mark.slow
def test_a_resumed_run_finds_its_recipe_metrics_and_results(tmp_path):
    recipe, folder, results_name = load_recipe("tiny/base"), tmp_path / "run", "evaluations/test.jsonl"
    rows = [{"stage": "sft", "step": step, "loss": 1.0 / step} for step in (1, 2, 3)]

    def act(recording):
        run = Run.create(folder, recipe)
        create_folder(folder / "evaluations")
        recording.acknowledge()
        for row in rows:
            run.log("sft", row["step"], {"loss": row["loss"]})
            append_jsonl(folder / results_name, row)
            recording.acknowledge()
        run.cut_metrics(["sft"], 1)
        write_jsonl(folder / results_name, rows[:1])
        run.mark_done("sft", {"checkpoint": "x"})
        recording.acknowledge()

    def read(copy):
        if not (copy / "recipe.yaml").exists():
            return None
        run, results = Run.open(copy), []
        if (copy / results_name).exists():
            results = read_jsonl(copy / results_name, dict, skip_truncated_line=True)
        run.read_invocations()
        is_done = run.is_done("sft") and run.read_json("finished_stages/sft.json") == {"checkpoint": "x"}
        return len(run.read_metrics("sft")), len(results), is_done

    folder.mkdir()
    expected = [None, (0, 0, False), (1, 1, False), (2, 2, False), (3, 3, False), (1, 1, True)]
    for num_acknowledged, state in Cuts(folder, tmp_path).run(act, read):
        before, after = expected[num_acknowledged], expected[min(num_acknowledged + 1, 5)]
        assert state in (before, after) or all(value in pair for *pair, value in zip(before, after, state, strict=True))
