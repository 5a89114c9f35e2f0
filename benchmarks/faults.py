"""Train with RL under faults, with restarts as a scheduler would, and count what is lost.

    python benchmarks/faults.py [--quick] [--only "trainer SIGKILL"] [--steps 6] [--rounds 2] [--seed 0]

Each case is a training of the tiny model by `saccade rl` in a process of its own, with the judge and the inference
servers in others. Each fault comes at a random moment of a random step; a training that ends is resumed until all steps
are done. The columns:

    survived        faults after which the training went on without a restart
    episodes lost   finished episodes that aren't in the run's records at its end, or have no score
    aborted         episodes that did not end, such as those whose video is corrupt
    steps lost      the most steps that a restart repeated
    duplicates      steps that metrics.jsonl holds more than once at the end
    seconds lost    against the same training without faults
"""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _common import describe_machine, parser, show

import saccade
from saccade.config.load import load_recipe
from saccade.runs import pipeline
from saccade.training.checkpoint import find_newest_checkpoint
from saccade.training.episode_log import list_recorded_steps, read_rollouts
from saccade.types import EpisodeStatus

HERE = Path(__file__).parent
MAX_RESTARTS = 8
GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL
OUTAGE_SECONDS = 3.0  # of a judge or a server
MAX_SECONDS = 600.0  # of one training, restarts included
UNFINISHED = {EpisodeStatus.ABORTED, EpisodeStatus.ENVIRONMENT_ERROR}
REWARD = '''
"""A judge's verdict on the sum of a reply's tokens: it differs within every group, whatever the model samples."""
from saccade.rewards.judge import Judge


class judged(Judge):
    async def __call__(self, episode):
        answer = f"{sum(episode.ledger.sampled_tokens())}"
        return await self.score_answer(episode.task.question, "an odd number", answer)
'''
SETTINGS = (
    "seed=3",
    "model.num_threads=1",
    "synthetic={train: 3, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32, fps: 2}",
    "synthetic.tasks_per_video=4",
    "sampling.max_tokens=24",
    "frame_budgets=[4, 8]",
    "rl={prompts_per_step: 2, group_size: 4, save_every: 1, optim: {lr: 1e-3, warmup_steps: 0}}",
    "rl={selection: {oversample: 1}, filters: {reward_std: null}}",
)


class JudgeServer:
    """A judge that finds odd numbers right; `mode` is "", "500" or "hang"."""

    def __init__(self) -> None:
        self.mode = ""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if judge.mode == "hang":
                    time.sleep(OUTAGE_SECONDS)
                is_failing = judge.mode == "500"
                lines = body["messages"][0]["content"].splitlines()
                marks = [index for index, line in enumerate(lines) if len(line) == 32 and lines.count(line) == 2]
                answer = "".join(lines[marks[0] + 1 : marks[1]]) if len(marks) == 2 else ""
                verdict = "yes" if answer.strip()[-1:] in ("1", "3", "5", "7", "9") else "no"
                message = {"role": "assistant", "content": verdict}
                content = {"choices": [{"message": message, "finish_reason": "stop"}]}
                data = json.dumps({"error": {"message": "planted"}} if is_failing else content).encode()
                with contextlib.suppress(OSError):
                    self.send_response(500 if is_failing else 200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Training:
    """One training with its servers; `folder` is its run folder."""

    base: Path  # data and model
    folder: Path
    steps: int
    judge: JudgeServer
    servers: "list[TinyServerProcess]"
    num_processes: int = 1
    num_ray_workers: int = 0
    planted: Sequence[str] = ()  # fault, step, marker: see `_planted_faults.py`
    process: "subprocess.Popen[str] | None" = None
    timers: list[threading.Timer] = field(default_factory=list)
    on_close: list[Callable[[], Any]] = field(default_factory=list)

    def start(self, is_resumed: bool) -> None:
        """Start the command, in a process group of its own."""
        program = [str(HERE / "_planted_faults.py"), *self.planted] if self.planted else ["-m", "saccade"]
        settings = [
            *SETTINGS,
            f"rl.steps={self.steps}",
            f"rewards={{{self.base / 'judged.py'}: {{weight: 1.0, settings: {{url: '{self.judge.url}', model: m, "
            "cache_dir: null, timeout: 1.0, max_retries: 8, retry_backoff: 0.2}}}",
        ]
        if self.servers:
            urls = ", ".join(server.url for server in self.servers)
            settings += [
                "engine.name=vllm",
                f"engine.settings={{servers: [{urls}], retry_backoff: 0.1, max_retries: 8, request_timeout: 5}}",
            ]
        if self.num_ray_workers:
            settings += ["rollouts.executor=ray", 'media.folder=""']
            settings += [f"rollouts.ray={{workers: {self.num_ray_workers}}}"]
        options = ["--out", str(self.folder), "--model", str(self.base / "model"), "--data", str(self.base / "data")]
        options += ["--resume"] if is_resumed else []
        options += ["--nproc", str(self.num_processes)] if self.num_processes > 1 else []
        source = str(Path(saccade.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "rl", "tiny/para_grpo", *options, *settings],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    @property
    def log_path(self) -> Path:
        """Return the file with the output of all its processes."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def pid(self) -> int:
        """Return the id of the command's process."""
        assert self.process is not None
        return self.process.pid

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after some seconds."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def read_steps(self) -> list[int]:
        """Return the RL steps that metrics.jsonl holds."""
        steps: list[int] = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that is being written
                    row = json.loads(line)
                    steps += [int(row["step"])] if row["stage"] == "rl" else []
        return steps

    def read_episodes(self) -> dict[tuple[int, int, int], tuple[str, EpisodeStatus, str]]:
        """Return the outcome, the status and the sampled tokens of each recorded episode, by step, group and index."""
        return {
            (step, record.group, record.index): (
                record.outcome,
                record.episode.status,
                str(record.episode.ledger.sampled_tokens()),
            )
            for step in list_recorded_steps(self.folder, "rl")
            for record in read_rollouts(self.folder, "rl", step)
        }

    def close(self) -> None:
        """End everything that was started."""
        for timer in self.timers:
            timer.cancel()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for server in self.servers:
            server.close()
        for restore in reversed(self.on_close):
            restore()


class TinyServerProcess:
    """An inference server in a process of its own, which keeps its port over restarts."""

    def __init__(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url, self._model = f"http://127.0.0.1:{self._port}", model
        self.start()

    def start(self) -> None:
        """Start it; return when it is ready."""
        script = str(HERE / "_tiny_server.py")
        source = str(Path(saccade.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, str(self._model), str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == self.url

    def send(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


# ---- faults: each function injects one -------------------------------------------------------------------------------


def kill_trainer(training: Training, rng: random.Random) -> None:
    """Kill the training."""
    os.killpg(training.pid, signal.SIGKILL)


def kill_rank(training: Training, rng: random.Random) -> None:
    """Kill rank 1 of a training in several processes."""
    for folder in find_descendants(training.pid):
        with contextlib.suppress(OSError):
            if b"RANK=1" in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def kill_ray_worker(training: Training, rng: random.Random) -> None:
    """Kill one of the rollout workers."""
    folders = find_descendants(training.pid)
    workers = [folder for folder in folders if (folder / "cmdline").read_bytes().startswith(b"ray::RolloutWorker")]
    if workers:  # Ray may still be starting another
        os.kill(int(rng.choice(workers).name), signal.SIGKILL)


def find_descendants(pid: int) -> list[Path]:
    """Return the folders in /proc of a process's children, their children, and so on."""
    parents = dict[Path, int]()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.name.isdecimal():
                parents[folder] = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    ancestors, descendants = {pid}, list[Path]()
    while found := [folder for folder, parent in parents.items() if parent in ancestors and folder not in descendants]:
        descendants += found
        ancestors |= {int(folder.name) for folder in found}
    return sorted(descendants)


def terminate(training: Training, rng: random.Random) -> None:
    """Stop the training as schedulers do: SIGTERM, and SIGKILL after 30 seconds."""
    os.kill(training.pid, signal.SIGTERM)
    process = training.process
    assert process is not None

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    training.later(GRACE_SECONDS, kill)


def kill_server(training: Training, rng: random.Random) -> None:
    """Kill an inference server; it is started again after a while."""
    server = rng.choice(training.servers)
    server.close()
    training.later(OUTAGE_SECONDS, server.start)


def hang_server(training: Training, rng: random.Random) -> None:
    """Stop an inference server without closing its connections, for longer than its timeout."""
    server = rng.choice(training.servers)
    server.send(signal.SIGSTOP)
    training.later(4 * OUTAGE_SECONDS, lambda: server.send(signal.SIGCONT))


def fail_judge(training: Training, rng: random.Random) -> None:
    """Let the judge return 500 for a while."""
    training.judge.mode = "500"
    training.later(OUTAGE_SECONDS, lambda: setattr(training.judge, "mode", ""))


def hang_judge(training: Training, rng: random.Random) -> None:
    """Let the judge exceed its timeout for a while."""
    training.judge.mode = "hang"
    training.later(OUTAGE_SECONDS, lambda: setattr(training.judge, "mode", ""))


def corrupt_video(training: Training, rng: random.Random) -> None:
    """Overwrite the second half of a training video; it is restored at the end."""
    video = rng.choice(sorted((training.base / "data/train").rglob("*.mp4")))
    content = video.read_bytes()
    video.write_bytes(content[: len(content) // 2] + rng.randbytes(len(content) // 2))
    training.on_close.append(lambda: video.write_bytes(content))


def fill_disk(training: Training, rng: random.Random) -> None:
    """Refuse every write beyond the first 64 KiB of a file, with the error of the operating system."""
    resource.prlimit(training.pid, resource.RLIMIT_FSIZE, (2**16, 2**16))


@dataclass(frozen=True)
class Case:
    """A kind of fault: what injects it, or the name of the one that is planted in the process."""

    inject: Callable[[Training, random.Random], None] | None = None
    planted: str = ""
    num_servers: int = 0
    num_processes: int = 1
    num_ray_workers: int = 0
    is_fatal: bool = False  # it ends the process
    is_first_early: bool = False  # the first fault comes before the training
    is_quick: bool = False


CASES = {
    "trainer SIGKILL": Case(kill_trainer, is_fatal=True, is_quick=True),
    "SIGTERM, 30 s of grace": Case(terminate, is_fatal=True, is_quick=True),
    "full disk": Case(fill_disk, is_fatal=True, is_quick=True),
    "NaN loss": Case(planted="nan", is_quick=True),
    "out of memory": Case(planted="memory", is_quick=True),
    "clock jump": Case(planted="clock"),
    "judge returns 500": Case(fail_judge, is_quick=True),
    "judge times out": Case(hang_judge),
    "corrupt video": Case(corrupt_video, is_first_early=True),
    "server SIGKILL": Case(kill_server, num_servers=2),
    "server hang": Case(hang_server, num_servers=2),
    "rank SIGKILL": Case(kill_rank, is_fatal=True, num_processes=2),
}
if find_spec("ray"):
    CASES["Ray worker SIGKILL"] = Case(kill_ray_worker, num_servers=2, num_ray_workers=2)


def run_case(
    case: Case | None, base: Path, folder: Path, *, steps: int, injections: int, rng: random.Random, like: Case
) -> dict[str, Any]:
    """Train to the end under a kind of fault (None: without any); return the figures."""
    judge = JudgeServer()
    moments = sorted((rng.randrange(steps), rng.random()) for _ in range(injections if case else 0))
    planted: Sequence[str] = ()
    if case and case.planted:
        planted = (case.planted, str(moments[0][0] + 1), str(folder.parent / f"{folder.name}.marker"))
        moments = []
    training = Training(base, folder, steps, judge, [], like.num_processes, like.num_ray_workers, planted)
    start, restarts, injected, steps_lost, finished = time.monotonic(), 0, 0, 0, dict[Any, str]()
    try:
        training.servers = [TinyServerProcess(base / "model") for _ in range(like.num_servers)]
        if case and case.inject and case.is_first_early:
            case.inject(training, rng)
            injected, moments = 1, moments[1:]
        start = time.monotonic()
        while True:
            training.start(is_resumed=(folder / "recipe.yaml").exists())
            injected += inject_faults(case, training, moments, rng, start)
            assert training.process is not None
            if training.process.wait() == 0:
                break
            restarts += 1
            saved = find_newest_checkpoint(folder / "rl")
            num_saved, logged = saved.step if saved else 0, training.read_steps()
            steps_lost = max(steps_lost, max(logged, default=0) - num_saved)
            finished |= {
                key: tokens
                for key, (_, status, tokens) in training.read_episodes().items()
                if key[0] <= num_saved and status not in UNFINISHED
            }
            if restarts > MAX_RESTARTS or time.monotonic() - start > MAX_SECONDS:
                raise SystemExit(f"{folder.name} doesn't end:\n{read_tail(training)}")
        seconds = time.monotonic() - start
        episodes, logged = training.read_episodes(), training.read_steps()
    finally:
        training.close()
        judge.close()
    injected += bool(planted) and Path(planted[2]).exists()
    ungraded = sum(outcome == "ungraded" for outcome, _, _ in episodes.values())
    missing = sum(key not in episodes or episodes[key][2] != tokens for key, tokens in finished.items())
    return {
        "injected": injected,
        "survived": max(injected - restarts, 0),
        "restarts": restarts,
        "episodes": len(episodes),
        "episodes lost": missing + ungraded,
        "aborted": sum(status in UNFINISHED for _, status, _ in episodes.values()),
        "steps lost": steps_lost,
        "steps missing": steps - len(set(logged)),
        "duplicates": sum(count - 1 for count in Counter(logged).values()),
        "seconds": seconds,
    }


def inject_faults(
    case: Case | None, training: Training, moments: list[tuple[int, float]], rng: random.Random, start: float
) -> int:
    """Inject the faults that are due until the process ends; return how many."""
    injected, reached_at, previous, step_seconds = 0, time.monotonic(), -1, 1.0
    process = training.process
    assert process is not None
    while process.poll() is None and time.monotonic() - start < MAX_SECONDS:
        now, num_steps = time.monotonic(), len(set(training.read_steps()))
        is_begun = (training.folder / "finished_stages").exists() or num_steps > 0
        if num_steps != previous:
            step_seconds = now - reached_at if previous >= 0 and is_begun else step_seconds
            previous, reached_at = num_steps, now
        is_ending = injected > 0 and case is not None and case.is_fatal
        if moments and case and case.inject and is_begun and not is_ending:
            step, fraction = moments[0]
            if num_steps > step or (num_steps == step and now - reached_at >= fraction * step_seconds):
                moments.pop(0)
                case.inject(training, rng)
                injected += 1
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return injected


def read_tail(training: Training) -> str:
    """Return the end of the command's output."""
    return "\n".join(training.log_path.read_text().splitlines()[-15:])


@contextlib.contextmanager
def prepare(folder: Path | None) -> Iterator[Path]:
    """Generate the dataset and the model in a folder; yield it."""
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe("tiny/para_grpo", SETTINGS)
        if not (root / "model").exists():
            pipeline.generate_data(root / "data", recipe, on_progress=lambda *_: None)
            pipeline.create_tiny_model(root / "model", recipe, demonstrations=root / "data/train/demonstrations.jsonl")
        (root / "judged.py").write_text(REWARD)
        yield root


def run_drill(
    names: Sequence[str], *, steps: int, repeats: int, injections: int, seed: int, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Return one row per kind of fault: sums over the repeats, and the most steps lost."""
    rows, baselines = list[dict[str, Any]](), dict[tuple[int, ...], float]()
    with prepare(folder) as base:
        for name in names:
            case = CASES[name]
            kind = case.num_servers, case.num_processes, case.num_ray_workers
            rng = random.Random(f"{seed} {name}")
            if kind not in baselines:
                result = run_case(
                    None, base, base / f"none-{'-'.join(map(str, kind))}", steps=steps, injections=0, rng=rng, like=case
                )
                baselines[kind] = result["seconds"]
            results = [
                run_case(
                    case,
                    base,
                    base / f"{name.replace(' ', '-')}-{seed}-{number}",
                    steps=steps,
                    injections=injections,
                    rng=rng,
                    like=case,
                )
                for number in range(repeats)
            ]
            row: dict[str, Any] = {"fault": name, "runs": repeats}
            row |= {key: sum(result[key] for result in results) for key in results[0] if key != "seconds"}
            row["steps lost"] = max(result["steps lost"] for result in results)
            row["seconds lost"] = sum(result["seconds"] for result in results) - repeats * baselines[kind]
            rows.append(row)
            print(row, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the drill and print its table."""
    options = parser(__doc__, rounds=1)
    options.add_argument(
        "--quick", action="store_true", help="three steps, one fault per run, the faults of one process"
    )
    options.add_argument("--only", action="append", choices=CASES, help="a fault; may be repeated")
    options.add_argument("--steps", type=int, default=6, help="of each training")
    options.add_argument("--faults", type=int, default=2, help="per training; planted ones come once")
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("--folder", type=Path, help="where the runs are kept; else they are deleted")
    chosen = options.parse_args(arguments)
    if chosen.folder and chosen.folder.exists():
        options.error(f"{chosen.folder} exists; choose another folder")
    names = chosen.only or [name for name, case in CASES.items() if case.is_quick or not chosen.quick]
    steps, injections = (3, 1) if chosen.quick else (chosen.steps, chosen.faults)
    rows = run_drill(
        names, steps=steps, repeats=chosen.rounds, injections=injections, seed=chosen.seed, folder=chosen.folder
    )
    title = f"RL of {steps} steps under faults, seed {chosen.seed}"
    show(title, rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
