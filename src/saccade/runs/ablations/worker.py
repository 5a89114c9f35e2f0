"""Run one job in a separate process: `python -m saccade.runs.ablations.worker FOLDER JOB PARENT_PID`.

    jobs/<name>.progress.json    progress, rewritten at most once a second and read by the parent
    jobs/<name>.done.json        the job is done: its seconds and memory
    jobs/<name>.log              the process's output; the last line is the reason if it failed
    jobs/<name>.lock             locked by the process that runs the job

An interrupted job resumes from its stages' status files and checkpoints. A worker whose parent has exited stops at the
end of its step; another worker for the same job waits for the lock.
"""

import fcntl
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from saccade.config.schema import MAX_EPISODES_IN_PROGRESS, Recipe
from saccade.data.synthetic.dataset import SPLITS
from saccade.errors import RunError, SaccadeError
from saccade.evaluation.compare import classify_overview
from saccade.evaluation.runner import EvaluationProgress
from saccade.metrics.episode_metrics import (
    count_calls,
    count_python_style_calls,
    get_accuracy,
    get_question_type,
)
from saccade.metrics.statistics import get_media_key
from saccade.runs import evaluation, pipeline
from saccade.runs.ablations.demonstrations import build_demonstrations
from saccade.runs.ablations.schedule import Ablation, Job, configure_evaluation, get_initial_checkpoint_folder
from saccade.runs.run_folder import Run
from saccade.training.checkpoint import list_checkpoints
from saccade.types import ScoredEpisode
from saccade.utils.files import convert_file_errors, open_file, read_text, write_text
from saccade.utils.jsonl import write_jsonl

WRITE_INTERVAL_SECONDS = 1.0  # at least, between two writes of a job's progress
# Single tokens for the Python-style call format, as a model pretrained on that format would have.
PYTHON_STYLE_TOKENS = ("crop_video(start_time=", ", end_time=", ", question='", "')")


def main(arguments: Sequence[str]) -> None:
    """Run a job. Exit with 1 and one sentence on a SaccadeError, with 130 on an interrupt."""
    folder, name, parent_pid = arguments
    try:
        run_job(Path(folder), name, int(parent_pid))
    except SaccadeError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def run_job(folder: Path, name: str, parent_pid: int) -> None:
    """Run a job of the ablation in `folder`, unless it is done; delete all its checkpoints but the last."""
    ablation, jobs_folder = Ablation.load(folder), folder / "jobs"
    job = next((job for job in ablation.build_jobs() if job.name == name), None)
    if job is None:
        raise RunError(f"the ablation in {folder} has no job {name!r}", key=str(folder), value=name)
    with lock_file(jobs_folder / f"{name}.lock"):
        if (jobs_folder / f"{name}.done.json").exists():
            return
        progress = JobProgress(jobs_folder / f"{name}.progress.json", parent_pid)
        progress.check_parent()
        stages = {"data": generate_data, "initial_checkpoint": train_initial_checkpoint}
        stages.get(job.stage, train_and_evaluate)(ablation, job, folder, progress)
        for stage in ("sft", "rl"):
            for old in list_checkpoints(folder / job.name / stage)[:-1]:
                shutil.rmtree(old.folder, ignore_errors=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        done = {"seconds": progress.elapsed_seconds, "memory_gib": peak}
        write_text(jobs_folder / f"{name}.done.json", json.dumps(done) + "\n")


def lock_file(path: Path) -> IO[str]:
    """Wait for a file's lock; return the open file, which is locked until it is closed or the process ends."""
    with convert_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = open_file(path, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


class JobProgress:
    """Writes a job's progress to a file that the parent reads; interrupts the job if the parent has exited."""

    def __init__(self, path: Path, parent_pid: int) -> None:
        self.path, self.parent_pid, self.last_write_time = path, parent_pid, 0.0
        self.start_time = time.monotonic()  # earlier by the seconds of interrupted invocations
        if path.exists():
            self.start_time -= float(json.loads(read_text(path))["seconds"])

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the job has taken, over all invocations."""
        return time.monotonic() - self.start_time

    def check_parent(self) -> None:
        """Raise KeyboardInterrupt if the parent has exited."""
        if os.getppid() != self.parent_pid:
            raise KeyboardInterrupt

    def __call__(self, done: int, remark: str, total: int) -> None:
        """Write the progress, at most once a second."""
        self.check_parent()
        if time.monotonic() - self.last_write_time < WRITE_INTERVAL_SECONDS and done < total:
            return
        self.last_write_time = time.monotonic()
        values = {"done": done, "total": total, "remark": remark, "seconds": self.elapsed_seconds}
        write_text(self.path, json.dumps(values) + "\n")


def generate_data(ablation: Ablation, job: Job, folder: Path, progress: JobProgress) -> None:
    """Generate a seed's synthetic data and random weights, which all its variants share."""
    recipe, seed_folder = ablation.build_initial_checkpoint_recipe("base_sft", job.seed), folder / f"seed-{job.seed}"
    pipeline.generate_data(seed_folder / "data", recipe, on_progress=progress)
    texts = seed_folder / "data" / "train" / "demonstrations.jsonl"
    pipeline.create_tiny_model(seed_folder / "model", recipe, demonstrations=texts, phrases=PYTHON_STYLE_TOKENS)


def train_initial_checkpoint(ablation: Ablation, job: Job, folder: Path, progress: JobProgress) -> None:
    """Run SFT on rewritten demonstrations, from random weights or from another initial checkpoint."""
    job_folder, initial_checkpoint = folder / job.name, ablation.spec.initial_checkpoints[job.initial_checkpoint]
    recipe = ablation.build_initial_checkpoint_recipe(job.initial_checkpoint, job.seed)
    parent = initial_checkpoint.continues_from
    model_path = "../../model" if parent is None else resolve_last_checkpoint(folder, job.seed, parent)
    recipe = with_data_paths(recipe, model_path, "demonstrations.jsonl")
    resume = (job_folder / "recipe.yaml").exists()
    if not resume:
        dataset_path = folder / f"seed-{job.seed}" / "data" / "train" / "demonstrations.jsonl"
        with convert_file_errors(job_folder):
            job_folder.mkdir(parents=True, exist_ok=True)
            demonstrations = build_demonstrations(dataset_path, job_folder, recipe.seed, initial_checkpoint)
            write_jsonl(job_folder / "demonstrations.jsonl", demonstrations)

    def report_step(step: int, row: Mapping[str, float]) -> None:
        progress(step, f"SFT, loss {row['loss']:.2f}", recipe.sft.steps)

    pipeline.run_sft(job_folder, recipe, resume=resume, on_step=report_step)


def train_and_evaluate(ablation: Ablation, job: Job, folder: Path, progress: JobProgress) -> None:
    """Run RL and then the evaluations of a variant; or evaluate an initial checkpoint without RL."""
    job_folder = folder / job.name
    with convert_file_errors(job_folder):  # relative paths through a folder's parent need the folder to exist
        job_folder.mkdir(parents=True, exist_ok=True)
    model_path = resolve_last_checkpoint(folder, job.seed, job.initial_checkpoint)
    recipe = with_data_paths(ablation.build_recipe(job.condition, job.variant, job.seed), model_path)
    if job.stage == "variant":
        steps = recipe.rl.steps
        pipeline.run_rl(
            job_folder,
            recipe,
            resume=(job_folder / "recipe.yaml").exists(),
            on_step=lambda step, row: progress(step, f"RL, accuracy {row['accuracy']:.2f}", steps),
        )
    # An evaluation before RL is stored one level deeper than a run, and refers to the same files.
    base_folder = job_folder if job.stage == "variant" else job_folder.parent
    weights = pipeline.find_newest_weights(job_folder, "rl") or (base_folder / model_path).resolve()
    recipe = recipe.with_values({"data.test": str((base_folder / recipe.data.test).resolve())})
    results = {}
    for mode in ablation.spec.evaluations:

        def report_evaluation_progress(
            evaluation_progress: EvaluationProgress, label: str = mode.replace("_", " ")
        ) -> None:
            progress(evaluation_progress.done, f"evaluation, {label}", evaluation_progress.total)

        results[mode] = tabulate_episodes(
            evaluation.evaluate(
                job_folder,
                configure_evaluation(recipe, mode, ablation.spec.batch1_tasks),
                name=mode,
                weights=weights,
                max_concurrency=1 if mode == "batch_size_1" else MAX_EPISODES_IN_PROGRESS,
                on_progress=report_evaluation_progress,
            )
        )
    write_text(job_folder / "results.json", json.dumps(results) + "\n")


def with_data_paths(recipe: Recipe, model_path: str, demonstrations: str = "") -> Recipe:
    """Return the recipe with the paths of its seed's data, relative to a folder two levels below the seed's folder."""
    paths = {f"data.{split}": f"../../data/{split}/tasks.jsonl" for split in SPLITS}
    return recipe.with_values({**paths, "data.demonstrations": demonstrations, "model.path": model_path})


def resolve_last_checkpoint(folder: Path, seed: int, name: str) -> str:
    """Return the path of an initial checkpoint's weights, relative to a folder two levels below the seed's folder."""
    status = Run.open(folder / get_initial_checkpoint_folder(seed, name)).read_json("finished_stages/sft.json")
    return f"../../initial_checkpoints/{name}/{status['checkpoint']}"


def tabulate_episodes(scored_episodes: Sequence[ScoredEpisode]) -> dict[str, list[Any]]:
    """Return one column per measure and slice, over all episodes; `task` holds the digests of their tasks."""
    episodes = [scored.episode for scored in scored_episodes]
    return {
        "task": [episode.task.digest for episode in episodes],
        "clip": [get_media_key(episode.task) for episode in episodes],
        "question_type": [get_question_type(episode.task) for episode in episodes],
        "frame_budget": [episode.frame_budget for episode in episodes],
        "overview": [classify_overview(scored) for scored in scored_episodes],
        "accuracy": [get_accuracy(scored) for scored in scored_episodes],
        "format_compliance": [scored.score.parts.get("format_compliance", 0.0) for scored in scored_episodes],
        "calls": [count_calls(episode) for episode in episodes],
        "succeeded": [sum(result.ok for result in episode.results) for episode in episodes],
        "frac_with_tool_call": [float(count_calls(episode) > 0) for episode in episodes],
        "python_style": [count_python_style_calls(episode) for episode in episodes],
        "answered": [float(episode.answer is not None) for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "response_tokens": [episode.ledger.num_sampled_tokens for episode in episodes],
        "sampled_tokens": [episode.usage.sampled_tokens for episode in episodes],
        "visual_tokens": [episode.usage.visual_tokens for episode in episodes],
        "seconds": [episode.usage.seconds for episode in episodes],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
