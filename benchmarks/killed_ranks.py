"""Kill a random rank of `saccade sft --nproc` at random moments; count sentences, exit codes and what is lost.

    python benchmarks/killed_ranks.py [--ranks 2 4] [--rounds 3] [--steps 12] [--seed 0]

A round is one training of the tiny model, which is killed once at each moment and resumed, until it has ended:

    start        while modules are imported, processes connect or the model is loaded
    step         in a forward or backward pass, an update, or between
    checkpoint   while a checkpoint is written
    end          after the last step: its checkpoint, the final weights, the end of the processes

The columns:

    kills           moments at which the rank still ran
    one sentence    kills after which stderr holds exactly one line, with "--resume" and without a traceback
    exit codes      of the command
    steps lost      the most steps that a resume repeated: checkpoints are written every 2, beside the training
    differ          trainings of this number of ranks whose weights or metrics aren't, bit for bit, those without a kill
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _common import describe_machine, parser, show
from faults import find_descendants

import saccade
from saccade.config.load import load_recipe
from saccade.runs import pipeline
from saccade.training.checkpoint import find_newest_checkpoint

MOMENTS = ("start", "step", "checkpoint", "end")
MAX_SECONDS = 600.0  # of one command
SAVE_EVERY = 2
SYNTHETIC = "synthetic={train: 3, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32, fps: 2}"
COMPARED = ("step", "loss", "grad_norm", "entropy")


class Training:
    """One training in a run folder, started again and again."""

    def __init__(self, base: Path, name: str, num_ranks: int, steps: int) -> None:
        self.folder, self._num_ranks = base / name, num_ranks
        self._settings = (
            "seed=3",
            "model.num_threads=1",
            f"sft={{steps: {steps}, tokens_per_step: 600, save_every: {SAVE_EVERY}, optim: {{warmup_steps: 1}}}}",
        )
        self._options = ("--model", str(base / "model"), "--data", str(base / "data"), "--out", str(self.folder))
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> "subprocess.Popen[str]":
        """Start or resume the command; return its process."""
        options = [*self._options, "--nproc", str(self._num_ranks)]
        options += ["--resume"] if (self.folder / "recipe.yaml").exists() else []
        source = str(Path(saccade.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "saccade", "sft", "tiny/para_grpo", *options, *self._settings],
            env={**os.environ, "PYTHONPATH": source, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        rows = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that is being written
                    rows.append(json.loads(line))
        return rows

    def read_result(self) -> tuple[bytes, list[list[Any]]]:
        """Return the final weights and the metrics."""
        newest = find_newest_checkpoint(self.folder / "sft")
        assert newest is not None
        weights = b"".join(path.read_bytes() for path in sorted(newest.folder.glob("*.safetensors")))
        return weights, [[row.get(name) for name in COMPARED] for row in self.read_rows()]

    def kill_rank(self, rank: int) -> bool:
        """Kill a rank; return whether it still ran."""
        assert self.process is not None
        is_killed = False
        for folder in find_descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    is_killed = True
        return is_killed

    def wait_for(self, moment: str, steps: int, start_seconds: float, rng: random.Random) -> bool:
        """Wait for a random time within a moment; return whether the command still runs."""
        assert self.process is not None
        begun, num_steps, delay = time.monotonic(), len(self.read_rows()), rng.random()
        target = min(num_steps + rng.randint(1, 3), steps - 1)
        while self.process.poll() is None and time.monotonic() - begun < MAX_SECONDS:
            num_rows = len(self.read_rows())
            is_begun = {
                "start": bool(find_descendants(self.process.pid)),
                "step": num_rows >= target,
                "checkpoint": num_rows > num_steps and any((self.folder / "sft").glob(".step-*.part")),
                "end": num_rows >= steps,
            }[moment]
            if is_begun:
                time.sleep(delay * {"start": start_seconds, "step": 0.5, "checkpoint": 0.05, "end": 2.0}[moment])
                break
            time.sleep(0.005)
        return self.process.poll() is None

    def finish(self) -> str:
        """Wait for the end of the command; return its stderr."""
        assert self.process is not None
        return self.process.communicate(timeout=MAX_SECONDS)[1]

    def close(self) -> None:
        """Kill what still runs."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def kill_at_each_moment(
    training: Training, num_ranks: int, steps: int, start_seconds: float, rng: random.Random
) -> list[dict[str, Any]]:
    """Run a training to its end; return what each kill did."""
    kills = []
    for moment in MOMENTS:
        process, rank = training.start(), rng.randrange(num_ranks)
        if not training.wait_for(moment, steps, start_seconds, rng) or not training.kill_rank(rank):
            training.finish()
            continue
        stderr = training.finish()
        lines = [line for line in stderr.splitlines() if line.strip()]
        newest = find_newest_checkpoint(training.folder / "sft")
        num_steps = len(training.read_rows())
        kill = {
            "ranks": num_ranks,
            "moment": moment,
            "rank": rank,
            "exit code": process.returncode,
            "is one sentence": len(lines) == 1 and "--resume" in lines[0] and "Traceback" not in stderr,
            "steps lost": max(0, num_steps - (newest.step if newest else 0)),
            "stderr": stderr.strip(),
        }
        print(kill, flush=True)
        kills.append(kill)
    process = training.start()
    stderr = training.finish()
    if process.returncode:
        raise SystemExit(f"{training.folder.name} doesn't end:\n{stderr}")
    return kills


def run_drill(ranks: Sequence[int], *, rounds: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per number of ranks and moment."""
    rows = []
    with TemporaryDirectory() as name:
        base = Path(name)
        recipe = load_recipe("tiny/para_grpo", [SYNTHETIC])
        pipeline.generate_data(base / "data", recipe, on_progress=lambda *_: None)
        pipeline.create_tiny_model(base / "model", recipe, demonstrations=base / "data/train/demonstrations.jsonl")
        for num_ranks in ranks:
            rng, kills, differ = random.Random(f"{seed} {num_ranks}"), list[dict[str, Any]](), 0
            whole = Training(base, f"whole-{num_ranks}", num_ranks, steps)
            with contextlib.closing(whole):
                begun = time.monotonic()
                whole.start()
                whole.wait_for("step", 2, 0.0, rng)
                start_seconds = time.monotonic() - begun
                if stderr := whole.finish():
                    raise SystemExit(stderr)
            for number in range(rounds):
                training = Training(base, f"killed-{num_ranks}-{number}", num_ranks, steps)
                with contextlib.closing(training):
                    kills += kill_at_each_moment(training, num_ranks, steps, start_seconds, rng)
                differ += training.read_result() != whole.read_result()
            for moment in MOMENTS:
                own = [kill for kill in kills if kill["moment"] == moment]
                codes = Counter(kill["exit code"] for kill in own)
                rows.append(
                    {
                        "ranks": num_ranks,
                        "moment": moment,
                        "kills": len(own),
                        "one sentence": sum(kill["is one sentence"] for kill in own),
                        "exit codes": ", ".join(f"{code}: {count}" for code, count in sorted(codes.items())),
                        "steps lost": max((kill["steps lost"] for kill in own), default=0),
                        "differ": f"{differ} of {rounds}",
                    }
                )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the drill and print its table."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--steps", type=int, default=12, help="of each training")
    options.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    chosen = options.parse_args(arguments)
    rows = run_drill(chosen.ranks, rounds=chosen.rounds, steps=chosen.steps, seed=chosen.seed)
    show(f"SFT of {chosen.steps} steps with killed ranks, seed {chosen.seed}", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
