"""Run an ablation from its plan to its report, in one folder.

ablation.json        the ablation as it is run; a resumed run must match it
invocations.jsonl    one line per invocation: command, versions, commit
seed-N/…             data, weights, initial checkpoints, and a run folder per condition and variant
jobs/…               progress and log of each job
results.json, report.md, report.html, plots/

    parent ──starts──> saccade.runs.ablations.worker ──writes──> jobs/<name>.progress.json, .done.json, .log
       ▲                                                              │
       └──────────── polls twice a second, never blocks <─────────────┘

The parent only reads files and exit codes, so nothing can block it. If a job fails, the jobs that depend on it fail
too; the others continue. When the parent is interrupted it interrupts the processes, and finished work is kept.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import RunError
from saccade.metrics.tables import Table
from saccade.reporting.console import UpdateProgress
from saccade.runs.ablations.report import write_report
from saccade.runs.ablations.schedule import NUM_PROCESSES, Ablation, Job, estimate_minutes
from saccade.runs.run_lock import ABLATION, hold_lock
from saccade.utils.files import convert_file_errors, open_file, read_text, write_text
from saccade.utils.jsonl import append_jsonl
from saccade.utils.text import pluralize
from saccade.utils.versions import collect_versions

POLL_SECONDS = 0.4
STOP_TIMEOUT_SECONDS = 20.0  # for an interrupted process to end


def resolve_ablation(folder: Path, ablation: Ablation, *, resume: bool, keep_selection: bool = False) -> Ablation:
    """Return the ablation that `folder` will hold. Raises RunError if the folder holds something else.

    With `keep_selection`, seeds and conditions are those in the folder; else they may differ, since their jobs are
    independent of each other.
    """
    if not (folder / "ablation.json").exists():
        if folder.exists() and any(path.name != ".locks" for path in folder.iterdir()):
            raise RunError(
                f"{folder} is not empty and holds no ablation; choose another folder with --out", key=str(folder)
            )
        return ablation
    existing = Ablation.load(folder)
    if not resume:
        raise RunError(
            f"{folder} already holds an ablation; resume it with --resume, or choose another folder with --out",
            key=str(folder),
        )
    if existing.name != ablation.name:
        message = f"{folder} holds the ablation {existing.name}, not {ablation.name}; choose another folder with --out"
        raise RunError(message, key="name", value=ablation.name)
    before, now = existing.model_dump(mode="json"), ablation.model_dump(mode="json")
    keys = [(key, before[key], now[key]) for key in ("format", "quick", "settings")]
    keys += [(f"spec.{key}", value, now["spec"][key]) for key, value in before["spec"].items()]
    for key, old, new in keys:
        if old != new:
            raise RunError(
                f"the ablation in {folder} was started with {key}={json.dumps(old)}, not {json.dumps(new)}; resume it "
                "with the same, or choose another folder with --out",
                key=key,
                value=new,
            )
    update = {"seeds": existing.seeds, "conditions": existing.conditions}
    return ablation.model_copy(update=update) if keep_selection else ablation


def run(
    folder: Path, ablation: Ablation, *, add_task: Callable[..., UpdateProgress], print_line: Callable[[str], None]
) -> tuple[Path, list[Table], Mapping[str, str]]:
    """Run the jobs that are not done; return the report page, its tables, and why jobs failed. Raises RunError."""
    with hold_lock(folder, ABLATION):
        write_text(folder / "ablation.json", ablation.model_dump_json(indent=1) + "\n")
        record_invocation(folder, shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
        failures = JobPool(folder=folder, jobs=ablation.build_jobs()).run(add_task, print_line)
        try:
            return *write_report(folder, ablation, failures), failures
        except RunError as error:
            if not failures:
                raise
            name, reason = next(iter(failures.items()))
            raise RunError(
                f"{pluralize(len(failures), 'job')} of the ablation in {folder} failed, first {name}: {reason}; the "
                f"report failed, too: {error}",
                key=str(folder),
                value=sorted(failures),
            ) from error


def record_invocation(folder: Path, command: str) -> None:
    """Append the command, cores and versions of this invocation to invocations.jsonl."""
    path = folder / "invocations.jsonl"
    with convert_file_errors(path):
        append_jsonl(path, {"command": command, "cores": os.cpu_count(), "versions": collect_versions()})


def format_plan(ablation: Ablation) -> str:
    """Return what will be run, in one sentence."""
    jobs, cells = ablation.build_jobs(), ablation.list_cells()
    num_runs = sum(job.stage == "variant" for job in jobs)
    num_checkpoints = sum(job.stage == "initial_checkpoint" for job in jobs)
    steps = ablation.build_recipe(*cells[0]).rl.steps
    quick = "QUICK (no evidence): " if ablation.quick else ""
    return (
        f"{quick}{ablation.name}: {pluralize(len(cells), 'variant')} in conditions x "
        f"{pluralize(ablation.seeds, 'seed')} = {pluralize(num_runs, 'run')} of {pluralize(steps, 'RL step')} from "
        f"{pluralize(num_checkpoints, 'initial checkpoint')}: about "
        f"{pluralize(round(estimate_minutes(jobs)), 'minute')} with two processes on two cores"
    )


@dataclass(slots=True, kw_only=True)
class JobPool:
    """The jobs of an ablation while they run, and the reasons of failed jobs by name."""

    folder: Path
    jobs: Sequence[Job]
    failures: dict[str, str] = field(default_factory=dict)
    # By the number of the process, from 0: the job's name, and the process.
    running: dict[int, tuple[str, "subprocess.Popen[bytes]"]] = field(default_factory=dict)

    def run(self, add_task: Callable[..., UpdateProgress], print_line: Callable[[str], None]) -> Mapping[str, str]:
        """Run all jobs that are not done; return the reasons of failed jobs by name."""
        total_progress = add_task("ablation", len(self.jobs))
        displays = {i: add_task(f"process {i + 1}", 1) for i in range(min(NUM_PROCESSES, len(self.jobs)))}
        displays[-1], shown = total_progress, dict[int, tuple[int, str, int]]()
        try:
            while self.poll(print_line):
                for i, progress in self.read_progress().items():
                    if shown.get(i) != progress:
                        displays[i](*progress)
                        shown[i] = progress
                time.sleep(POLL_SECONDS)
        finally:
            self.stop()
        total_progress(
            None, f"{pluralize(len(self.list_finished()), 'job')} done, {len(self.failures)} failed", len(self.jobs)
        )
        return self.failures

    def poll(self, print_line: Callable[[str], None]) -> bool:
        """Record processes that have ended and start jobs that can run; return whether any process is running."""
        for number, (name, process) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[number]
                self.record_exit(name, process.returncode, print_line)
        done = set(self.list_finished())
        for job in self.jobs:
            free = [number for number in range(NUM_PROCESSES) if number not in self.running]
            if job.name in {*done, *self.failures, *(name for name, _ in self.running.values())}:
                continue
            failed = next((name for name in job.depends_on if name in self.failures), None)
            if failed is not None:
                self.failures[job.name] = f"not run, since {failed} failed"
            elif free and done.issuperset(job.depends_on):
                self.running[free[0]] = (job.name, self.start_process(job.name))
        return bool(self.running)

    def record_exit(self, name: str, exit_code: int, print_line: Callable[[str], None]) -> None:
        """Record and print how a job's process ended."""
        done = self.read_file(name, "done.json")
        if exit_code == 0 and done:
            print_line(f"{name}: done, {done['seconds']:.0f} s")
            return
        log = read_text((self.folder / "jobs" / f"{name}.log"), errors="replace").strip().splitlines()
        reason = log[-1] if log and exit_code > 0 else f"its process exited with {exit_code}"
        if not log and exit_code > 0:
            reason += " before it wrote its log; the disk may be full"
        self.failures[name] = reason
        print_line(f"{name}: FAILED: {reason}")

    def start_process(self, name: str) -> "subprocess.Popen[bytes]":
        """Start a job's process, with its output in the job's log."""
        log = self.folder / "jobs" / f"{name}.log"
        with convert_file_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            with open_file(log, "wb") as output:
                # In a new session, so that Ctrl-C reaches it once, from `stop`.
                return subprocess.Popen(
                    [sys.executable, "-m", "saccade.runs.ablations.worker", str(self.folder), name, str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )

    def stop(self) -> None:
        """Interrupt every process and wait until it has ended; kill it after STOP_TIMEOUT_SECONDS."""
        for _, process in self.running.values():
            process.send_signal(signal.SIGINT)
        for _, process in self.running.values():
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def read_file(self, name: str, suffix: str) -> dict[str, Any]:
        """Return the values of a job's JSON file; {} if it doesn't exist yet."""
        try:
            return json.loads(read_text(self.folder / "jobs" / f"{name}.{suffix}"))
        except (OSError, ValueError):
            return {}

    def list_finished(self) -> list[str]:
        """Return the names of the jobs that are done."""
        return [job.name for job in self.jobs if (self.folder / "jobs" / f"{job.name}.done.json").exists()]

    def read_progress(self) -> dict[int, tuple[int, str, int]]:
        """Return done, remark and total of each process by its number; of the whole ablation by -1."""
        finished = self.list_finished()
        # The remaining minutes are estimated from the pace of the finished jobs.
        seconds = sum(self.read_file(name, "done.json").get("seconds", 0.0) for name in finished)
        expected_seconds = sum(job.expected_seconds for job in self.jobs if job.name in finished)
        pace = seconds / expected_seconds if expected_seconds else 1.0
        minutes, spent = estimate_minutes(self.jobs, [*finished, *self.failures]) * pace, 0.0
        progress = {}
        for number, (name, _) in self.running.items():
            values = self.read_file(name, "progress.json")
            spent += values.get("seconds", 0.0)
            progress[number] = (
                values.get("done", 0),
                f"{name}: {values.get('remark', 'starting')}",
                values.get("total") or 1,
            )
        minutes = max(0.0, minutes - spent / 60 / max(1, len(self.running)))
        return {-1: (len(finished), f"jobs, about {minutes:.0f} min left", len(self.jobs)), **progress}
