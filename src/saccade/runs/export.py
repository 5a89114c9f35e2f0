"""Export a checkpoint of a run as a plain Hugging Face folder.

    checkpoint ──checksums──> copy of the model's files ──┐
    adapters ──> peft's files (with `adapter`) ───────────┤
    recipe, versions, scores ──> README.md ───────────────┴──> .OUT.part ──fsync──> rename ──> OUT

The checkpoint of a training in several processes holds the whole weights too; those of LoRA have the adapters merged.
"""

import shutil
from pathlib import Path

from saccade.config.load import dump_recipe
from saccade.data.digests import DIGESTS_FILE, DataDigests
from saccade.errors import ConfigError, ModelError, RunError
from saccade.evaluation.benchmark_result import RESULT_SUFFIX, read_benchmark_results
from saccade.evaluation.records import format_fingerprint
from saccade.models import lora
from saccade.models.checkpoint_files import (
    ADAPTERS_FILE,
    compute_checkpoint_digest,
    list_model_files,
    verify_checksums,
    verify_model_files,
)
from saccade.reporting.model_card import ModelCard, format_model_card
from saccade.reporting.run_report import collect_metadata
from saccade.runs.pipeline import EXPORTED_RECIPE
from saccade.runs.report import read_any_evaluations
from saccade.runs.run_folder import Run
from saccade.runs.validation import STAGE_SUFFIX
from saccade.training.checkpoint import LAST_STEP, Checkpoint, find_checkpoint, list_checkpoints
from saccade.utils.files import convert_file_errors, resolve_path, write_folder_atomically
from saccade.utils.jsonl import read_json

_STAGES = ("rl", "sft")  # the last one trained first
_MODEL_CONFIGS = ("config.json", "generation_config.json")


def export_checkpoint(
    folder: Path, target: Path, *, stage: str = "", step: str = LAST_STEP, adapter: bool = False
) -> Path:
    """Write the checkpoint of a run's `step` (a number, "last" or "best") to the folder `target`; return it.

    `stage` is "sft" or "rl", by default "rl" if it has a checkpoint. With `adapter` the folder holds the LoRA adapters
    alone, in peft's format, without the weights that they adapt. Raises RunError for a step without a checkpoint, for a
    target that isn't empty, and if it can't be written: then nothing is left of it. Raises ModelError for a checkpoint
    whose files have changed.
    """
    run, target = Run.open(folder), resolve_path(target)
    stage = _find_stage(run, stage)
    checkpoint = find_checkpoint(run.path / stage, step)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"{target} exists and is not an empty folder; choose another one", key="OUT", value=str(target))
    if adapter and not (checkpoint.folder / ADAPTERS_FILE).is_file():
        message = f"{checkpoint.folder} has no adapters, since model.lora_rank is 0; leave out --adapter"
        raise ConfigError(message, key="--adapter", value=str(checkpoint.folder))
    try:
        with convert_file_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with write_folder_atomically(target) as part:
                _write_model(checkpoint, part, adapter=adapter)
                card = _describe(run, stage, checkpoint, is_adapter=adapter)
                (part / "README.md").write_text(format_model_card(card), encoding="utf-8")
                (part / EXPORTED_RECIPE).write_text(dump_recipe(run.recipe), encoding="utf-8")
    except (ModelError, RunError) as error:
        if checkpoint.folder.is_dir():
            raise
        message = f"{checkpoint.folder} was deleted while it was copied, as the run wrote a newer one; export that one"
        raise RunError(message, key=str(checkpoint.folder)) from error
    return target


def _find_stage(run: Run, stage: str) -> str:
    if stage and stage not in _STAGES:
        raise ConfigError(f"--stage can't be {stage!r}; choose one of sft, rl", key="--stage", value=stage)
    saved = [name for name in _STAGES if list_checkpoints(run.path / name)]
    if not saved:
        raise RunError(f"the run {run.path} has no checkpoint yet; train it first", key=str(run.path))
    return stage or saved[0]


def _write_model(checkpoint: Checkpoint, part: Path, *, adapter: bool) -> None:
    files = list_model_files(checkpoint.folder)
    if not adapter:
        verify_model_files(checkpoint.folder)
    if adapter:
        files = [path for path in files if not _is_of_weights(path)]
    verify_checksums(checkpoint.folder, {path.name for path in files} | ({ADAPTERS_FILE} if adapter else set()))
    for path in files:
        shutil.copyfile(path, part / path.name)
    if adapter:
        weights, base = lora.read_adapters(checkpoint.folder)
        lora.export_adapters(weights, part, str(base))


def _is_of_weights(path: Path) -> bool:
    """Return whether a file of a model holds or describes its weights, rather than its tokenizer or processor."""
    return path.suffix == ".safetensors" or ".index." in path.name or path.name in _MODEL_CONFIGS


def _describe(run: Run, stage: str, checkpoint: Checkpoint, *, is_adapter: bool) -> ModelCard:
    """Collect what the card says; the scores are those that were measured with these weights."""
    weights = format_fingerprint({"weights": compute_checkpoint_digest(checkpoint.folder)})
    evaluations = {
        name: evaluation
        for name, evaluation in read_any_evaluations(run.path).items()
        if weights in evaluation.fingerprint.split(", ")
    }
    has_benchmark_results = any((run.path / "evaluations").glob(f"*{RESULT_SUFFIX}"))
    benchmark_results = read_benchmark_results(run.path) if has_benchmark_results else {}
    validations = [row for row in run.read_metrics(f"{stage}{STAGE_SUFFIX}") if row["step"] == checkpoint.step]
    return ModelCard(
        run=resolve_path(run.path).name,
        stage=stage,
        step=checkpoint.step,
        recipe=run.recipe,
        recipe_text=dump_recipe(run.recipe, run.path),
        metadata={**collect_metadata(run.path), **_describe_data(run)},
        evaluations={name: value for name, value in evaluations.items() if name not in benchmark_results},
        benchmark_results={name: card for name, card in benchmark_results.items() if name in evaluations},
        validation=validations[-1] if validations else {},
        is_adapter=is_adapter,
    )


def _describe_data(run: Run) -> dict[str, str]:
    """Return the rows and the digest of each data file that the run has recorded last."""
    path = run.path / DIGESTS_FILE
    if not path.exists():
        return {}
    recorded = read_json(path, DataDigests, hint="restore it, or delete it to export without the data's digests")
    return {key: f"{rows[-1].count} rows, digest {rows[-1].digest}" for key, rows in recorded.sources.items() if rows}
