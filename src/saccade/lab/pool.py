"""Jobs in processes, a few at a time.

    parent ── starts ──> saccade.lab.work FOLDER JOB PARENT ── writes ──> jobs/<name>.now.json, .done.json, .log
       ▲                                                                              │
       └──────────── looks twice a second; waits for nothing else <───────────────────┘

The parent only looks at files and exit codes, so nothing can block it. A job that fails takes along those that need it;
the others go on. When the parent is stopped it stops the processes, and they leave what they have finished.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import RunError
from saccade.lab.plan import PROCESSES, Job, minutes
from saccade.runlog import writing

LOOK = 0.4  # seconds between two looks
PATIENCE = 20.0  # seconds that a stopped process may take to end

Tell = Callable[..., None]  # (done, remark, total); see view.live.Advance


@dataclass(slots=True, kw_only=True)
class Pool:
    """The jobs of a lab on their way; `failed` says, by name, why a job can't be done."""

    folder: Path
    jobs: Sequence[Job]
    processes: int = PROCESSES
    failed: dict[str, str] = field(default_factory=dict)
    active: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)  # which job stands in which line
    shown: dict[int, tuple[int, str, int]] = field(default_factory=dict)

    def run(self, begin: Callable[..., Tell], say: Callable[[str], None]) -> Mapping[str, str]:
        """Do all jobs that are not done; returns why some could not be."""
        whole = begin("the lab", len(self.jobs))
        slots = [begin(f"process {i + 1}", 1) for i in range(min(self.processes, len(self.jobs)))]
        try:
            while self.turn(say):
                self.show(whole, slots)
                time.sleep(LOOK)
        finally:
            self.stop()
        whole(None, f"{len(self.done())} jobs done, {len(self.failed)} failed", len(self.jobs))
        return self.failed

    def turn(self, say: Callable[[str], None]) -> bool:
        """Start what can be started, notice what has ended; whether anything is still to be done."""
        for name, process in list(self.active.items()):
            if process.poll() is not None:
                del self.active[name]
                self.ended(name, process.returncode, say)
        done = set(self.done())
        for job in self.jobs:
            lost = next((need for need in job.needs if need in self.failed), None)
            if lost is not None and job.name not in self.failed:
                self.failed[job.name] = f"not run, since {lost} failed"
            free = len(self.active) < self.processes
            fresh = job.name not in done and job.name not in self.active and job.name not in self.failed
            if free and fresh and done.issuperset(job.needs):
                self.active[job.name] = self.start(job.name)
        return bool(self.active)

    def ended(self, name: str, code: int, say: Callable[[str], None]) -> None:
        """Take note of how a job ended."""
        if code == 0 and self.file(name, "done.json").exists():
            say(f"{name}: done, {_read(self.file(name, 'done.json')).get('seconds', 0.0):.0f} s")
            return
        said = self.file(name, "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = said[-1] if said and code > 0 else f"its process ended with {code}"
        self.failed[name] = reason
        say(f"{name}: FAILED: {reason}")

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """A process for a job."""
        log = self.file(name, "log")
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as said:
                # In a session of its own, so that Ctrl-C reaches it once, from here.
                return subprocess.Popen(
                    [sys.executable, "-m", "saccade.lab.work", str(self.folder), name, str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                )

    def stop(self) -> None:
        """Stop every process, and wait until it has ended."""
        for process in self.active.values():
            process.send_signal(signal.SIGINT)
        for process in self.active.values():
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.active.clear()

    # ---- how far it is ---------------------------------------------------------------------------------------------

    def file(self, name: str, kind: str) -> Path:
        """A file about a job."""
        return self.folder / "jobs" / f"{name}.{kind}"

    def done(self) -> list[str]:
        """The jobs that are done."""
        return [job.name for job in self.jobs if self.file(job.name, "done.json").exists()]

    def left(self, done: Sequence[str]) -> float:
        """About how many minutes are left, at the pace of what is done."""
        finished = [job for job in self.jobs if job.name in done]
        took = sum(_read(self.file(job.name, "done.json")).get("seconds", 0.0) for job in finished)
        planned = sum(job.seconds for job in finished)
        pace = took / planned if planned else 1.0
        spent = sum(_read(self.file(name, "now.json")).get("seconds", 0.0) for name in self.active)
        whole = minutes(self.jobs, [*done, *self.failed]) * pace
        return max(0.0, whole - spent / 60 / max(1, len(self.active)))

    def show(self, whole: Tell, slots: Sequence[Tell]) -> None:
        """Say how far the lab is, and what each process is doing, where that has changed; a job keeps its line."""
        done = self.done()
        told = {-1: (len(done), f"jobs, about {self.left(done):.0f} min left", len(self.jobs))}
        self.lines = {place: name for place, name in self.lines.items() if name in self.active}
        for name in self.active:
            if name not in self.lines.values():
                self.lines[next(place for place in range(len(slots)) if place not in self.lines)] = name
        for place, name in self.lines.items():
            now = _read(self.file(name, "now.json"))
            remark = f"{name}: {now.get('remark', 'begins')}"
            told[place] = (int(now.get("done", 0)), remark, int(now.get("total", 0)) or 1)
        for place, words in told.items():
            if self.shown.get(place) != words:
                (whole if place < 0 else slots[place])(*words)
        self.shown = told


def _read(path: Path) -> dict[str, Any]:
    """A job's file; {} where there is none yet."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lab's folder: RunError where another process is at work in it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(folder / ".lock", wait=False))
        except BlockingIOError:
            raise RunError(f"another process is at work in {folder}; wait for it, or choose another folder") from None
        yield


@contextlib.contextmanager
def held(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a file that one process at a time can hold, until that process ends; BlockingIOError where not to wait."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
