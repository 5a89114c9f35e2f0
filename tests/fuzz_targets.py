"""Readers of files, servers' responses and models' texts, each of which reads one mutated input per call.

A surface takes a random generator and a folder of its own. It returns if the input was used, and raises one of
REFUSALS if it was refused; any other exception is a failure.
"""

import asyncio
import base64
import contextlib
import copy
import dataclasses
import gzip
import io
import json
import random
from functools import cache, lru_cache
from pathlib import Path
from unittest import mock

import av
import numpy as np
from archive_cases import build_tar, build_zip
from matplotlib.figure import Figure
from PIL import Image
from published_rows import EXAMPLES, PARAVT_RL_ROWS, PARAVT_SFT_ROWS, PYVISION_RL_ROWS, PYVISION_SFT_ROWS
from rich.table import Table
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.chat.message_renderer import MessageRenderer
from saccade.chat.parser import parse_reply
from saccade.checks.run_checks import check_recipe
from saccade.cli.terminal import SafeConsole
from saccade.config import load
from saccade.config.load import RECIPES_DIR, load_recipe, parse_yaml
from saccade.data.archives import Archive, unpack
from saccade.data.dataset import iterate_items, require_gradable
from saccade.data.importer import import_dataset
from saccade.data.rewrite_paths import PathRewriter
from saccade.data.visibility import is_answerable
from saccade.engines.remote import sglang_api, vllm_api
from saccade.engines.remote.server import Server, ServerError, ServerRequest
from saccade.environments.openenv import Openenv
from saccade.environments.prompt import load_subtitles
from saccade.errors import SaccadeError
from saccade.evaluation.benchmarks.base import Answer, grade
from saccade.evaluation.compare import Evaluation, compare_evaluations
from saccade.evaluation.records import Record, read_scored_episodes, void_changed_records
from saccade.interop.lmms_logs import read_samples
from saccade.ledger import ImageRef, Ledger, Origin, Segment
from saccade.media.image import read_image, read_image_size
from saccade.media.subtitles import interleave_cues, read_cues
from saccade.media.video import decode_frames, index_video
from saccade.metrics.metric_log import read_metric_rows
from saccade.models.checkpoint_files import check_weights, verify_checksums, write_checksums
from saccade.protocols import Context
from saccade.reporting import plots, report
from saccade.reporting.episode_view import build_timeline
from saccade.reporting.plots import encode_figure
from saccade.reporting.run_report import render_episode_page
from saccade.rewards.answer_types.base import list_answer_types
from saccade.rewards.judge import Judge
from saccade.runs.report import report_run
from saccade.runs.run_folder import Run
from saccade.sandbox.limits import Limits
from saccade.sandbox.protocol import HEADER, Header, MessageKind, ProtocolError, parse_checked_header
from saccade.testing import FakeMediaLoader, build_example_episodes
from saccade.training.checkpoint import Checkpoint
from saccade.training.episode_log import RolloutRecord
from saccade.types import Demonstration, SamplingParams, Score, ScoredEpisode, Task, Ungraded
from saccade.utils.async_utils import maybe_await
from saccade.utils.http_client import RequestFailed
from saccade.utils.jsonl import encode_json_line, write_jsonl
from saccade.utils.openai_client import OpenAIClient

NASTY = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\x00\u202e\ud800"
REFUSALS = (SaccadeError, ServerError, RequestFailed, ProtocolError)
PIECES = [
    *("null", "true", "-1", "0", "1e400", "NaN", "Infinity", "1" + "0" * 400, "9" * 30, '""', "[]", "{}", '"\\ud800"'),
    *("[" * 200, "]" * 9, "{" * 99, ": ", "*a", "&a ", "<<: *a", "!!python/object:os.system", "\\", "\x00", "\x1b[2J"),
    *(
        "\n",
        "  ",
        "\t",
        ",",
        "'",
        '"',
        "..",
        "é",
        "\u202e",
        "x" * 3000,
        "٣",
        "²",
        "9" * 5000,
        "[" * 3000,
        "\r",
        "%",
        "/",
    ),
]
VALUES = [
    *(
        None,
        True,
        -1,
        0,
        0.5,
        2**70,
        10**400,
        1e400,
        float("nan"),
        "",
        "x",
        "1e999",
        "nan",
        "\ud800",
        "a\x00b",
        "../..",
    ),
    *([], {}, [[]], {"a": 1}, [None], [1, 2], "[" * 3000, {"": {"": []}}, "x" * 5000, json.loads("[" * 90 + "]" * 90)),
]


# ---- mutators ------------------------------------------------------------------------------------------------------


def mutate(text: str, rng: random.Random) -> str:
    """Replace, delete, repeat or swap parts of a text."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 2, 5, 20]))
        part = rng.choice([rng.choice(PIECES), "", text[start:end] * 3, chr(rng.randrange(0x3000))])
        text = text[:start] + part + text[end:]
    return text


def mutate_value(value, rng: random.Random):
    """Replace, remove or repeat one part of plain JSON."""
    if isinstance(value, dict | list | tuple) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(list(keys))
        copy = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = mutate_value(value[key], rng)
        return copy
    if isinstance(value, str) and rng.random() < 0.5:
        return mutate(value, rng)
    return rng.choice([*VALUES, value, [value] * 9, {"x": value}])


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, insert, remove, repeat or truncate parts of a file, mostly of its header."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        reach = min(len(data), rng.choice([32, 128, len(data) or 1, len(data) or 1]))
        start = rng.randrange(reach) if reach else 0
        action = rng.randrange(6)
        if action < 3 and data:
            data[start] = rng.choice([0, 0xFF, 0x7F, 0x80, data[start] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        elif action == 3:
            data[start : start + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"])
        elif action == 4:
            del data[start : start + rng.choice([1, 4, 64, len(data)])]
        else:
            data[start:start] = data[start : start + 64] * rng.randint(1, 4)
    return bytes(data)


def mutate_json_text(value, rng: random.Random) -> str:
    """Return JSON with one wrong value, or text that is almost JSON."""
    if rng.random() < 0.6:
        for _ in range(rng.choice([1, 1, 3])):
            value = mutate_value(value, rng)
        return json.dumps(value)
    return mutate(json.dumps(value), rng)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


# ---- recipes -------------------------------------------------------------------------------------------------------

RECIPE = (RECIPES_DIR / "tiny" / "base.yaml").read_text(encoding="utf-8")
OVERRIDES = [
    *(
        "rl.optim.lr=1e-6",
        "frame_budgets=[4, 8]",
        "environment.settings.max_tool_turns=3",
        "rewards={accuracy: {weight: 1}}",
    ),
    *("data.train=a.jsonl", "rl.advantage.name=grpo", "engine.settings.servers=[http://127.0.0.1:8000]", "seed=1"),
]


def read_recipe(rng, folder):
    check_recipe(load_recipe(str(write(folder, "mutated.yaml", mutate(RECIPE, rng)))))


def read_override(rng, folder):
    load_recipe("tiny/base", [mutate(rng.choice(OVERRIDES), rng)])


def read_yaml_text(rng, folder):
    parse_yaml(mutate("a: &a [1, {b: *a}]\nc: {<<: {d: 1}}\n", rng), "text")


# ---- data ----------------------------------------------------------------------------------------------------------

TASK = {
    "id": "1",
    "question": "Which?",
    "media": [{"path": "a.png", "kind": "image"}],
    "answer_type": "choice",
    "ground_truth": "A",
    "options": ["red", "blue"],
    "extras": {"scene": 3, "subtitles": "a.srt"},
}
DEMONSTRATION = {
    "task": TASK,
    "frame_budget": 4,
    "replies": ["<think>a</think>", "<answer>A</answer>"],
    "children": [["a"], []],
    "is_auxiliary": False,
    "results": [[{"text": "a", "images": []}]],
}
PUBLISHED = [
    *((name, row) for name, row in EXAMPLES.items()),
    *(("paravt_rl", row) for row in PARAVT_RL_ROWS.values()),
    *(("paravt_sft", row) for row in PARAVT_SFT_ROWS.values()),
    *(("pyvision_rl", row) for row in PYVISION_RL_ROWS.values()),
    *(("pyvision_sft", row) for row in PYVISION_SFT_ROWS.values()),
]


def read_tasks(rng, folder):
    for task in iterate_items(write(folder, "tasks.jsonl", mutate_json_text(TASK, rng) + "\n"), Task):
        require_gradable(task, "tasks.jsonl")


def read_demonstrations(rng, folder):
    path = write(folder, "demonstrations.jsonl", mutate_json_text(DEMONSTRATION, rng) + "\n")
    list(iterate_items(path, Demonstration))


PATHS = {
    "video": "longvt_source/a/1.mp4",
    "extra": '{"path": "file://selfqa\\\\/\\\\u00e9.mp4"}',
    "list": ["museg/charades/1.mp4"],
}


def rewrite_paths(rng, folder):
    for reverse in (False, True):
        rewriter = PathRewriter(str(folder), reverse=reverse)
        rewriter.rewrite_value(mutate_value(PATHS, rng))
        rewriter.rewrite_json(mutate_json_text(PATHS, rng))


EXTRAS = {
    **{"question": "at", "target": "red", "seconds": 64.0, "events": [[4.0, 6.0, "red"], [20, 22]], "scene": 3},
    **{"evidence": [[1, 2]], "cover": [0, 4], "event_seconds": 2.0, "width": 640, "height": 480},
    **{"cards": [], "looks": [], "system": "Look.", "subtitles_offset": 2.0, "data_source": "a"},
    "shuffled": {"order": [1, 0], "attempt": 2},
}


def read_extras(rng, folder):
    """Whatever reads the extras of tasks, which any dataset may have, after an evaluation."""
    episode = rng.choice(build_example_episodes(["choice", "box", "grounding", "point"]))
    extras = dict(EXTRAS)
    for _ in range(rng.choice([1, 1, 3])):
        extras = mutate_value(extras, rng)
        extras = extras if isinstance(extras, dict) else dict(EXTRAS)
    options = ("red", "blue") if episode.task.answer_type == "choice" else ()
    task = dataclasses.replace(episode.task, extras=json.loads(json.dumps(extras)), options=options)
    score = Score(value=1.0, parts={"accuracy": 1.0}, correct=1.0)
    scored = [ScoredEpisode(episode=dataclasses.replace(episode, task=task), score=score)] * 2
    assert is_answerable(task, [0.5, 1.5, 9.0]) in (None, True, False)
    compare_evaluations({"a": Evaluation(scored=scored), "b": Evaluation(scored=scored)})
    build_timeline(scored[0].episode)
    asyncio.run(load_subtitles(task))
    assert isinstance(task.source, str)
    asyncio.run(_wait_for(load_rules()[task.answer_type](scored[0].episode)))


def import_rows(rng, folder):
    name, row = rng.choice(PUBLISHED)
    source = write(folder, "rows.jsonl", mutate_json_text(row, rng) + "\n")
    for media in ("a.mp4", "a.png", "video.mp4", "image.png"):
        (folder / media).touch()
    import_dataset(plugins.resolve("data.importers", name, {}), [source], folder / "out.jsonl", on_missing="skip")


def read_subtitles(rng, folder):
    if rng.random() < 0.5:
        text = "1\n00:00:01,000 --> 00:00:02,500\n<i>Red</i>\n\n2\n00:01.5 --> 01:00:02\nBlue\n\n"
        path = write(folder, f"{rng.random()}.srt", mutate(text, rng))
    else:
        rows = [{"timestamp": [1.5, 2.5], "text": "Red"}, {"start": "00:00:01", "end": "00:00:02.5", "line": "Blue"}]
        path = write(folder, f"{rng.random()}.json", mutate_json_text(rows, rng))
    try:
        cues = read_cues(str(path))
    finally:
        path.unlink()
    image = ImageRef(path="a.mp4", digest="a", time=1.5, width=32, height=32)
    assert all(cue.line.endswith("\n") for cue in cues)
    interleave_cues([image] if any(cue.covers(1.5) for cue in cues) else [], cues)


ARCHIVES = {
    **{"a.zip": build_zip({"a.txt": b"red" * 99, "b/c.txt": b"blue"}), "a.tar": build_tar({"a.txt": b"red" * 99})},
    **{
        f"a.tar.{mode}": build_tar({"a.txt": b"red" * 99, "b/c.txt": b"1"}, f"w:{mode}") for mode in ("gz", "bz2", "xz")
    },
}


def unpack_archive(rng, folder):
    name, content = rng.choice([*ARCHIVES.items()])
    (folder / name).write_bytes(mutate_bytes(content, rng))
    unpack(folder, Archive(name=name, parts=(name,)), folder / "out")


# ---- pictures and videos -------------------------------------------------------------------------------------------


@cache
def build_pictures() -> tuple[bytes, ...]:
    """Return a picture of each format, with the metadata that Saccade reads."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 40, 3), np.uint8)
    image, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6
    pictures = []
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"):
        if name in Image.SAVE or (Image.init() and name in Image.SAVE):
            buffer = io.BytesIO()
            image.save(buffer, name, **({"exif": exif} if name in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
            pictures.append(buffer.getvalue())
    for mode in ("P", "RGBA", "I;16", "1", "LA"):
        buffer = io.BytesIO()
        (image.convert(mode) if mode != "I;16" else Image.new("I;16", (9, 9))).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    return tuple(pictures)


def read_picture(rng, folder):
    path = folder / "a.jpg"
    path.write_bytes(mutate_bytes(rng.choice(build_pictures()), rng))
    read_image_size(str(path))
    assert read_image(str(path)).mode == "RGB"


@cache
def build_clips(extra: str = "") -> tuple[bytes, ...]:
    """Return a clip of each of three containers; `extra` is a folder of further ones."""
    clips = []
    for container_name, codec in (("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx")):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container_name) as container:
            stream = container.add_stream(codec, rate=4)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for number in range(12):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 20 * number, np.uint8))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        clips.append(buffer.getvalue())
    files = sorted(Path(extra).iterdir()) if extra else []
    return (*clips, *(file.read_bytes() for file in files if file.stat().st_size < 2**21))


MEDIA_FOLDER = ""  # of further clips to mutate


def read_clip(rng, folder):
    path = folder / "a.mp4"
    path.write_bytes(mutate_bytes(rng.choice(build_clips(MEDIA_FOLDER)), rng))
    index = index_video(str(path))
    times = [time for time in (0.0, 1.1, index.info.duration) if np.isfinite(time)]
    frames = decode_frames(index, times, size=(32, 32))
    assert [frame.pixels.shape for frame in frames] == [(32, 32, 3)] * len(times)


# ---- files of a run ------------------------------------------------------------------------------------------------

METRICS = {"stage": "rl", "step": 1, "reward": 0.5, "seconds": 2.0}


def read_metrics(rng, folder):
    read_metric_rows(write(folder, "metrics.jsonl", mutate_json_text(METRICS, rng) + "\n"))


@cache
def build_run(folder: Path) -> dict[str, bytes]:
    """Write a run with metrics, an evaluation and rollouts; return its files by name."""
    run = Run.create(folder / "run", load_recipe("tiny/base", ["rl.steps=2"]))
    for step in (1, 2):
        run.log("rl", step, {"reward": 0.5, "seconds": 1.0, "calls": 1.0, "tool/crop_video/calls": 1.0})
        run.log("rl_validation", step, {"greedy/accuracy": 0.5, "greedy/accuracy/low": 0.25, "greedy/tasks": 8})
    run.mark_done("rl", {"seconds": 2.0})
    outcomes = [
        ScoredEpisode(episode=episode, score=Score(value=1.0, parts={"accuracy": 1.0}, correct=1.0))
        for episode in build_example_episodes(["choice"])[:2]
    ]
    records = [
        Record(task=f"{number}", frame_budget=4, sample_index=0, fingerprint="seed=1", outcome=outcome)
        for number, outcome in enumerate(outcomes)
    ]
    (run.path / "evaluations").mkdir()
    write_jsonl(run.path / "evaluations" / "test.jsonl", records)
    (run.path / "episodes").mkdir()
    rollout = RolloutRecord(
        stage="rl", step=2, group=0, index=0, outcome="kept", episode=outcomes[0].episode, score=outcomes[0].score
    )
    (run.path / "episodes" / "rl-000002.jsonl.gz").write_bytes(gzip.compress(encode_json_line(rollout) * 2))
    return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@cache
def draw_nothing():
    return encode_figure(Figure((1, 1)), "svg")


@lru_cache(maxsize=64)
def _parse_yaml_once(text, source):
    return parse_yaml(text, source)


@contextlib.contextmanager
def skip_slow_work(rng):
    """Parse each YAML text once, and rasterize the plots of one report in eight: both take most of a report's time."""
    with contextlib.ExitStack() as stack:
        cached = mock.patch.object(
            load, "parse_yaml", lambda text, source, **_: copy.deepcopy(_parse_yaml_once(text, source))
        )
        stack.enter_context(cached)
        if rng.randrange(8):
            stack.enter_context(mock.patch.object(plots, "_lay_out", lambda figure: figure))
            stack.enter_context(mock.patch.object(report, "encode_figure", return_value=draw_nothing()))
        yield


def report_damaged_run(rng, folder):
    files = build_run(folder)
    name = rng.choice([name for name in files if not name.startswith(".")])
    path, content = folder / "run" / name, files[name]
    try:
        if rng.random() < 0.1:
            path.unlink()
            rng.choice([lambda: None, path.mkdir])()
        elif name.endswith((".jsonl", ".json", ".gz")) and rng.random() < 0.7:
            text = gzip.decompress(content) if name.endswith(".gz") else content
            lines = text.splitlines() if "jsonl" in name else [text]
            number = rng.randrange(len(lines))
            changed = mutate_json_text(json.loads(lines[number]), rng).encode("utf-8", "surrogatepass")
            new = b"\n".join([*lines[:number], changed, *lines[number + 1 :]]) + b"\n"
            path.write_bytes(gzip.compress(new, 1) if name.endswith(".gz") else new)
        else:
            path.write_bytes(mutate_bytes(content, rng))
        with skip_slow_work(rng):
            page = report_run(folder / "run", folder / "page.html").read_text(encoding="utf-8")
        assert "\x1b" not in page
        assert "</html>" in page
    finally:
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)


@cache
def build_records() -> tuple[dict, ...]:
    outcomes = [
        ScoredEpisode(episode=episode, score=Score(value=1.0, parts={"accuracy": 1.0}, correct=1.0))
        for episode in build_example_episodes()
    ]
    records = [
        Record(task=f"{number}", frame_budget=4, sample_index=0, fingerprint="seed=1", outcome=outcome)
        for number, outcome in enumerate(outcomes)
    ]
    return tuple(json.loads(encode_json_line(record)) for record in records)


def read_results(rng, folder):
    path = write(folder, f"{rng.random()}.jsonl", mutate_json_text(rng.choice(build_records()), rng) + "\n")
    try:
        void_changed_records(path, {}, "seed=1")
        scored = read_scored_episodes(path)
        compare_evaluations({"a": Evaluation(scored=scored)})
    finally:
        path.unlink()


class _Optimizer:
    def restore(self, folder):
        pass


@cache
def build_checkpoint(folder: Path) -> dict[str, bytes]:
    """Write a checkpoint of one small tensor; return its files by name."""
    from safetensors.numpy import save_file

    checkpoint = folder / "step-000001"
    checkpoint.mkdir()
    save_file({"weight": np.ones((4, 4), np.float32)}, checkpoint / "model.safetensors")
    write(checkpoint, "model.safetensors.index.json", '{"weight_map": {"weight": "model.safetensors"}}')
    write(checkpoint, "config.json", '{"model_type": "qwen3_vl"}')
    write(checkpoint, "trainer_state.json", '{"step": 1, "position": [0, 1]}')
    write_checksums(checkpoint)
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def read_checkpoint(rng, folder):
    files = build_checkpoint(folder)
    name, checkpoint = rng.choice([*files]), folder / "step-000001"
    if name.endswith(".json") and rng.random() < 0.6:
        write(checkpoint, name, mutate_json_text(json.loads(files[name]), rng))
    else:
        (checkpoint / name).write_bytes(mutate_bytes(files[name], rng))
    try:
        read = rng.choice(["weights", "checksums", "restore"])
        if read == "weights":
            check_weights(checkpoint)
        elif read == "checksums":
            verify_checksums(checkpoint)
        else:
            Checkpoint(step=1, folder=checkpoint).restore(_Optimizer())
    finally:
        (checkpoint / name).write_bytes(files[name])


# ---- texts of models -----------------------------------------------------------------------------------------------

REPLY = (
    '<think>Look.</think><tool_call>{"name": "crop_video", "arguments": {"start_time": 3}}</tool_call>'
    "<tool_code>print(crop_video(3, end_time=9))</tool_code><code>```python\nx = 1\n```</code><answer>red</answer>"
)
FORMAT_REPLIES = {
    "sage": '<json>{"actions": [{"name": "extract-video-parts", "arguments": {"timestamps": ["1", "2"]}}]}</json>',
    "video_zoom": '<video_zoom>{"start_time": 1, "end_time": 2}</video_zoom><video_zoom>[1, 2]</video_zoom>',
    "tool_call": REPLY,
}
ANSWERS = [
    *("B. blue", "(B)", "The answer is \\boxed{3.5}.", "from 3.5 to 12 seconds", "[1, 2, 30, 40]", "00:12 - 01:30"),
    *('{"bbox_2d": [1, 2, 3, 4]}', "\\frac{1}{2}", "about 1,234 km", "5e3", "not red but blue", "<answer>A</answer>"),
]


def read_reply(rng, folder):
    text = mutate(REPLY, rng)
    assert parse_reply(text).text == text


def read_tool_format(rng, folder):
    name, text = rng.choice([*FORMAT_REPLIES.items()])
    text = mutate(text, rng)
    assert plugins.load("chat.tool_formats", name)(text).text == text


@cache
def build_benchmark(name, folder):
    """Return a benchmark and the tasks of its toy rows."""
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    return benchmark, benchmark.load_tasks(write_copy(name, folder / name))


def grade_benchmark_answer(rng, folder):
    benchmark, tasks = build_benchmark(rng.choice([*MAKERS]), folder)
    text = mutate(rng.choice(ANSWERS), rng)
    for scoring in ("strict", "lenient"):
        task = rng.choice(tasks)
        (graded,) = grade(benchmark, [task], {task.id: Answer(text=text)}, scoring=scoring)
        assert 0.0 <= graded.value <= 1.0


def read_benchmark_rows(rng, folder):
    name = rng.choice([*MAKERS])
    rows = list(MAKERS[name]())[:9]
    number = rng.randrange(len(rows))
    rows[number] = mutate_value(rows[number], rng)
    plugins.resolve("evaluation.benchmarks", name, {})().load_tasks(
        write_copy(name, folder / f"rows of {name}", rows), allow_incomplete=True
    )


@cache
def load_rules():
    return {rule.names[0]: rule() for name, rule in list_answer_types().items() if rule.names[0] != "math"}


def score_answer(rng, folder):
    name, rule = rng.choice([*load_rules().items()])
    text = mutate(rng.choice([*ANSWERS, rule.example[1]]), rng)
    episode = _build_answers()[name](text)
    value = asyncio.run(_wait_for(rule(episode)))
    assert isinstance(value, Ungraded) or 0.0 <= getattr(value, "value", value) <= 1.0


@cache
def _build_answers():
    def build(episode):
        def with_answer(text):
            block = dataclasses.replace(episode.turns[-1].reply.blocks[-1], body=text)
            reply = dataclasses.replace(episode.turns[-1].reply, blocks=(*episode.turns[-1].reply.blocks[:-1], block))
            return dataclasses.replace(episode, turns=(dataclasses.replace(episode.turns[-1], reply=reply),))

        return with_answer

    return {name: build(build_example_episodes([name])[0]) for name in load_rules()}


async def _wait_for(value):
    return await maybe_await(value)


# ---- servers -------------------------------------------------------------------------------------------------------

PROMPT = Ledger(segments=(Segment(tokens=(5, 6, 7), origin=Origin.PROMPT),))
SAMPLING = SamplingParams(max_tokens=2)
VLLM_REPLY = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "token_ids": [8, 9],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "v", "start": 0, "end": 2}],
        }
    ],
}
SGLANG_REPLY = {
    "output_ids": [8, 9],
    "prompt_token_ids": [5, 6, 7],
    "meta_info": {
        "output_token_logprobs": [[-1.0, 8, None], [-2.0, 9, None]],
        "finish_reason": {"type": "length", "length": 2},
        "weight_versions": [{"version": "v", "start": 0, "end": 2}],
    },
}
CHAT_REPLY = {
    "choices": [{"message": {"role": "assistant", "content": "red"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 3},
}


def generate(api, reply, rng):
    async def post(path, body=None, **query):
        return mutate_value(reply, rng)

    server = Server("http://127.0.0.1:9", 1.0, api)
    server.version_by_label, server.vocab_size, server.post = {"v": 0}, 100, post
    completion, _ = asyncio.run(server.generate(ServerRequest(PROMPT, SAMPLING)))
    assert len(completion.tokens) == len(completion.logprobs)
    assert all(0 <= token < 100 for token in completion.tokens)


def read_vllm_reply(rng, folder):
    generate(vllm_api, VLLM_REPLY, rng)


def read_sglang_reply(rng, folder):
    generate(sglang_api, SGLANG_REPLY, rng)


def describe_server(rng, folder):
    """The responses of the handshake: models, detokenized text, versions."""
    responses = {
        "/v1/models": {"data": [{"id": "m", "root": "m", "max_model_len": 4096}]},
        "/version": {"version": "0.11.0"},
        "/detokenize": {"prompt": "red", "text": "red"},
        "/weight_info": {"model_path": "m", "weight_version": "v"},
        "/server_info": {
            "model_path": "m",
            "context_length": 4096,
            "max_total_num_tokens": 4096,
            "weight_version": "v",
        },
    }

    async def respond(path, body=None, **query):
        return mutate_value(responses.get(path, {"data": []}), rng)

    from saccade.engines.remote import handshake
    from saccade.engines.remote.server import convert_parse_errors

    async def run():
        server = Server("http://127.0.0.1:9", 1.0, api)
        server.get = server.post = server.post_again = respond
        assert isinstance(await handshake.describe(server), str)
        server.check_context_length(128)
        with convert_parse_errors("no text"):
            await api.detokenize(server, [1, 2])

    api = rng.choice([vllm_api, sglang_api])
    asyncio.run(run())


@cache
def build_client():
    return OpenAIClient(base_url="http://127.0.0.1:9", timeout=1.0)


def read_chat_reply(rng, folder):
    text, client = mutate_json_text(CHAT_REPLY, rng), build_client()

    async def send(*arguments):
        return text.encode("utf-8", "surrogatepass")

    client._send = send
    completion = asyncio.run(client.create_chat_completion({}))
    assert isinstance(completion.text, str)
    assert completion.num_tokens >= 0


def read_verdict(rng, folder):
    judge = build_judge()
    text = mutate_json_text({**CHAT_REPLY, "choices": [{"message": {"content": rng.choice(["yes", " NO\n"])}}]}, rng)

    async def send(*arguments):
        return text.encode("utf-8", "surrogatepass")

    judge._client._send = send
    verdict = asyncio.run(judge.score_answer(mutate("Which?", rng), mutate("red", rng), mutate("red", rng)))
    assert isinstance(verdict, Ungraded) or verdict in (0.0, 1.0)


@cache
def build_judge():
    return Judge(url="http://127.0.0.1:9", model="m", cache_dir=None, max_retries=0)


class _Connection:
    """A WebSocket whose messages are given."""

    def __init__(self, messages):
        self.messages = messages

    async def send(self, message):
        pass

    async def recv(self):
        return self.messages.pop(0)

    async def close(self):
        pass


def play_openenv(rng, folder):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    observation = {"text": "Go.", "picture": base64.b64encode(buffer.getvalue()).decode()}
    arrays = {"text": "Go.", "picture": np.zeros((32, 32, 3), np.uint8).tolist()}
    flat = {"text": "Go.", "picture": [0] * 3072, "picture_shape": [32, 32, 3]}
    messages = [
        {"type": "observation", "data": {"observation": rng.choice([observation, arrays, flat]), "reward": 0.5}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"loc": ["a", 1], "msg": "b"}]}},
        {"type": "observation", "data": {"observation": observation, "reward": 1.0, "done": True}},
    ]
    number = rng.randrange(3)
    messages = [json.dumps(message) for message in messages]
    messages[number] = mutate_json_text(json.loads(messages[number]), rng)
    environment = Openenv(
        url="http://127.0.0.1:9", text_fields=["text"], image_fields=["picture"], image_pixels=(256, 4096)
    )
    environment.connection = _Connection(messages)
    ctx = Context(
        engine=None,
        renderer=MessageRenderer(32),
        media=FakeMediaLoader(),
        sampling=SAMPLING,
        seed=1,
    )
    extras = {"reset": {"number": 7}}
    values = {**TASK, "media": (), "extras": mutate_value(extras, rng) if rng.random() < 0.3 else extras}

    async def play():
        (task,) = iterate_items(write(folder, "tasks.jsonl", json.dumps(values) + "\n"), Task)
        await environment.reset(task, ctx)
        for _ in range(2):
            await environment.step(parse_reply("<answer>{}</answer>"), ctx)

    asyncio.run(play())


# ---- the sandbox's messages, terminals, pages ----------------------------------------------------------------------


def read_header(rng, folder):
    kind = rng.choice([*MessageKind])
    data = Header(kind, rng.choice([0, 1, 10]), 10, 0, rng.choice([0, 4, 300, 3000])).pack(b"12345678")
    header = parse_checked_header(
        mutate_bytes(data, rng)[: HEADER.size].ljust(HEADER.size, b"\0"), b"12345678", Limits(), 1
    )
    assert header.payload_size <= 3 * Limits().max_image_pixels


def print_hostile_text(rng, folder):
    text = mutate(f"{NASTY}[red]a[/red]\x9b31m\u2066 \x1b]8;;file:///\x07", rng)
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    table = Table(title="a")
    table.add_column("b")
    from rich.markup import escape

    table.add_row(escape(text))
    console.print(table)
    console.print(text, markup=False)
    shown = console.file.getvalue()
    assert not set(shown) & {*"\x07\x9b\u202e\u2066\u2028\x00"}
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown


@cache
def list_example_episodes():
    return build_example_episodes()


def render_page(rng, folder):
    episode = rng.choice(list_example_episodes())
    for _ in range(rng.randint(1, 6)):
        episode = _replace_text(episode, mutate(NASTY + "[a](javascript:alert(1))", rng), rng)
    page = render_episode_page(episode)
    page.encode()
    assert "<script" not in page
    assert "<img src=x" not in page
    assert not set(page) & {*"\x00\u202e\x1b"}


def _replace_text(item, text, rng):
    """Replace one text somewhere in a dataclass of texts, enums, tuples and dataclasses."""
    if type(item) is str:
        return text
    if isinstance(item, tuple) and item:
        index = rng.randrange(len(item))
        return (*item[:index], _replace_text(item[index], text, rng), *item[index + 1 :])
    if isinstance(item, dict):
        return {text: text}
    if dataclasses.is_dataclass(item):
        name = rng.choice([field.name for field in dataclasses.fields(item) if field.init])
        return dataclasses.replace(item, **{name: _replace_text(getattr(item, name), text, rng)})
    return item


def read_lmms_samples(rng, folder):
    row = {
        "doc_id": 0,
        "doc": {"id": "1", "question": "Which?"},
        "target": "A",
        "resps": [["A"]],
        "filtered_resps": ["A"],
    }
    read_samples(write(folder, "samples.jsonl", mutate_json_text(row, rng) + "\n"))


SURFACES = {
    "recipe files": read_recipe,
    "overrides": read_override,
    "YAML with anchors": read_yaml_text,
    "files of tasks": read_tasks,
    "files of demonstrations": read_demonstrations,
    "extras of tasks": read_extras,
    "published rows (importers)": import_rows,
    "paths of media (rewrite-paths)": rewrite_paths,
    "archives": unpack_archive,
    "subtitles": read_subtitles,
    "pictures": read_picture,
    "videos": read_clip,
    "metrics.jsonl": read_metrics,
    "results of evaluations": read_results,
    "files of a run (report)": report_damaged_run,
    "files of a checkpoint": read_checkpoint,
    "lmms-eval's logs": read_lmms_samples,
    "replies of models": read_reply,
    "tool formats": read_tool_format,
    "answers, by type": score_answer,
    "answers, by benchmark": grade_benchmark_answer,
    "rows of benchmarks": read_benchmark_rows,
    "completions of vLLM": read_vllm_reply,
    "completions of SGLang": read_sglang_reply,
    "handshakes": describe_server,
    "chat completions": read_chat_reply,
    "verdicts of judges": read_verdict,
    "OpenEnv messages": play_openenv,
    "sandbox messages": read_header,
    "terminal output": print_hostile_text,
    "episode pages": render_page,
}
