"""A whole recipe in one run folder: SFT, RL and the evaluation, as `saccade train` runs them.

sft ──> rl ──> eval      a stage runs if the recipe configures it and names its data
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from saccade.config.schema import STAGES, Recipe
from saccade.errors import ConfigError, RunError
from saccade.protocols import OnStep
from saccade.runs import pipeline
from saccade.runs.run_folder import Run
from saccade.runs.run_lock import TRAINING, RunLock
from saccade.training import checkpoint

DATA_KEYS = {"sft": "data.demonstrations", "rl": "data.train", "eval": "data.test"}
# Receives a stage and its number of steps; returns its callbacks for steps and for validations.
StartStage = Callable[[str, int], tuple[OnStep, OnStep]]


def parse_stages(text: str) -> list[str]:
    """Parse the names of stages, separated by commas. Raises ConfigError for another name.

    >>> parse_stages("rl, eval")
    ['rl', 'eval']
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STAGES:
            raise ConfigError(f"--stage can't be {name!r}; name some of {', '.join(STAGES)}", key="--stage", value=name)
    return [name for name in STAGES if name in names]


def list_stages(recipe: Recipe) -> list[str]:
    """Return the stages that a recipe configures and names data for, in order. Raises ConfigError without a training.

    The evaluation needs no section of its own.
    """
    data = {"sft": recipe.data.demonstrations, "rl": recipe.data.train, "eval": recipe.data.test}
    stages = [name for name in STAGES if data[name] and (name == "eval" or name in recipe.model_fields_set)]
    if {"sft", "rl"}.isdisjoint(stages):
        configured = [name for name in ("sft", "rl") if name in recipe.model_fields_set]
        keys = " or ".join(DATA_KEYS[name] for name in configured or ["sft", "rl"])
        raise ConfigError(f"the recipe names no data to train on; give --data, or set {keys}=FILE", key="data")
    return stages


def name_evaluation(weights: Path) -> str:
    """Return the name of the evaluation of a checkpoint: a run that is resumed with more steps has several.

    >>> name_evaluation(Path("runs/a/rl/step-000020"))
    'test_rl_step-000020'
    """
    return f"test_{weights.parent.name}_{weights.name}"


def run_stages(
    folder: Path,
    recipe: Recipe,
    stages: Sequence[str],
    *,
    resume: bool = False,
    accept_changed_data: bool = False,
    start_stage: StartStage,
) -> Path:
    """Run the training stages of a recipe in one run folder; return the last checkpoint.

    Everything that any of the `stages` needs is checked before the first one. With `resume`, a finished SFT is not
    repeated, but continued if `sft.steps` has grown. Raises what `pipeline.run_sft` and `pipeline.run_rl`
    raise, and RunError for more steps of an SFT from which RL has started.
    """
    with RunLock(folder, TRAINING) as lock:  # over all stages: no other process starts between two
        run = pipeline.start_run(folder, recipe, stages, resume=resume, lock=lock)
        train_fns = {"sft": (pipeline.run_sft, recipe.sft.steps), "rl": (pipeline.run_rl, recipe.rl.steps)}
        for stage in stages:
            if stage in train_fns and not (stage == "sft" and _is_sft_complete(run)):
                train_fn, steps = train_fns[stage]
                on_step, on_validation = start_stage(stage, steps)
                train_fn(
                    folder,
                    recipe,
                    run=run,
                    accept_changed_data=accept_changed_data,
                    on_step=on_step,
                    on_validation=on_validation,
                )
    weights = pipeline.find_newest_weights(folder)
    assert weights is not None  # a finished stage has a checkpoint
    return weights


def _is_sft_complete(run: Run) -> bool:
    """Return whether a run's SFT has finished all steps of its recipe. Raises RunError if more can't be made."""
    if not run.is_done("sft"):
        return False
    newest = checkpoint.find_newest_checkpoint(run.path / "sft")
    if newest is None or newest.step >= run.recipe.sft.steps:
        return True
    if checkpoint.find_newest_checkpoint(run.path / "rl") is not None:
        message = f"RL has started from the {newest.step} steps of SFT in {run.path}; set sft.steps={newest.step}, or "
        raise RunError(f"{message}choose another folder with --out", key="sft.steps", value=run.recipe.sft.steps)
    return False
