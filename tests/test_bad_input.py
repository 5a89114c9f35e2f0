"""Invalid input and failures outside Saccade: one line, a non-zero exit, no traceback, and nothing lost."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from commands import SFT, SMALL, SYNTHETIC, count_visual_tokens, fail, good
from commands import run as run_command
from PIL import Image
from polling import block_until

from saccade.cli import train
from saccade.data.synthetic.video_writer import write_video
from saccade.errors import ConfigError, DataError, MediaError, ModelError, RunError
from saccade.evaluation import runner as evaluation_runner
from saccade.runs import run_folder
from saccade.runs.run_folder import Run
from saccade.utils.files import convert_file_errors, write_text

START = [sys.executable, "-c", "from saccade.cli.app import main; main()"]


def clip(path, frames=64):
    write_video(path, np.full((frames, 32, 32, 3), 90, np.uint8), 4.0)
    return path


# ---- videos --------------------------------------------------------------------------------------------------------


def no_frames(path):
    with av.open(str(path), "w", format="mp4") as container:
        container.add_stream("libx264", rate=4).width = 32
        container.start_encoding()


@pytest.mark.parametrize(
    ("make", "error_type"),
    [
        (lambda path: None, DataError),
        (lambda path: path.mkdir(), MediaError),
        (lambda path: path.write_bytes(b""), MediaError),
        (lambda path: path.write_text("hello " * 100), MediaError),
        (lambda path: still(path), DataError),
        (no_frames, MediaError),
        (lambda path: path.write_bytes(clip(path).read_bytes()[:400]), MediaError),
    ],
    ids=["none", "folder", "empty", "text", "picture", "no frames", "cut off"],
)
def test_no_video(tmp_path, tiny_folder, make, error_type):
    path = tmp_path / "clip.mp4"
    make(path)
    line = fail(error_type, "ask", "What?", "--video", path, "--model", tiny_folder, key=path)
    assert ("--image" in line) == (path.is_file() and path.read_bytes().startswith(b"\xff\xd8"))  # the option for it
    assert "Errno" not in line
    assert "file:" not in line


def still(path, size=(64, 32)):
    Image.new("RGB", size, "red").save(path, "JPEG")
    return path


@pytest.mark.parametrize(
    ("make", "error_type"),
    [
        (lambda path: None, DataError),
        (lambda path: path.mkdir(), MediaError),
        (lambda path: path.write_bytes(b""), MediaError),
        (lambda path: path.write_text("hello " * 100), MediaError),
        (lambda path: path.write_bytes(clip(path.with_name("a.mp4")).read_bytes()), DataError),
        (lambda path: path.write_bytes(still(path).read_bytes()[:300]), MediaError),
    ],
    ids=["none", "folder", "empty", "text", "video", "cut off"],
)
def test_no_picture(tmp_path, tiny_folder, make, error_type):
    path = tmp_path / "still.jpg"
    make(path)
    fail(error_type, "ask", "What?", "--image", path, "--model", tiny_folder, key=path)


def test_a_picture_that_is_too_narrow(tmp_path, tiny_folder):
    """An image's size is read during the episode, whose failure is the command's."""
    path = still(tmp_path / "still.jpg", (2, 900))
    message = fail(DataError, "ask", "What?", "--image", path, "--model", tiny_folder, key="")
    assert all(value in message for value in (str(path), "2x900"))


def test_ask_without_question_or_media(tmp_path, tiny_folder):
    fail(DataError, "ask", "What?", "--model", tiny_folder, key="videos")
    image = still(tmp_path / "a.jpg")
    fail(DataError, "ask", " ", "--image", image, "--model", tiny_folder, key="question", value=" ")


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["single_turn", "tool_calling"])
def test_ask_accepts_images(tmp_path, tiny_folder, environment):
    Image.new("RGBA", (40, 90), (0, 0, 255, 99)).save(tmp_path / "b.png")
    looks = ["--image", still(tmp_path / "a.jpg"), "--image", tmp_path / "b.png", "--video", clip(tmp_path / "c.mp4")]
    settings = [
        f"environment.name={environment}",
        "environment.settings.image_pixels=[256,2048]",
        "sampling.max_tokens=8",
    ]
    if environment != "tool_calling":  # the recipe's settings are for tool_calling
        settings = [settings[0], "environment.settings=null", settings[2]]
    assert count_visual_tokens(good("ask", "What?", *looks, "--model", tiny_folder, *settings)) > 0


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, tiny_folder, dataset_folder):
    """A run that can be evaluated, with its data."""
    run = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(dataset_folder, run / "data")
    start = ["tiny/para_grpo", *SFT, "sft.steps=1", "sampling.max_tokens=8", "--model", tiny_folder]
    good("sft", *start, "--data", run / "data", "--out", run)
    return run


@pytest.fixture
def run_copy(trained_run, tmp_path):
    """A copy of the run, and its test data."""
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    return run, run / "data" / "test"


@pytest.mark.slow
def test_an_evaluation_of_pictures(run_copy, tmp_path):
    run, _ = run_copy
    task = {"question": "What?", "answer_type": "open", "ground_truth": "red"}
    pictures = [{"path": "a.jpg", "kind": "image"}, {"path": "b.png", "kind": "image"}]
    still(tmp_path / "a.jpg"), still(tmp_path / "b.png", (32, 64))
    rows = [{"id": str(count), "media": pictures[:count], **task} for count in (1, 2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "2 / 2" in good("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    (tmp_path / "b.png").write_bytes(b"no picture")
    output = good("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    assert "1 of 2" in output
    assert f"({tmp_path / 'b.png'} " in output
    (tmp_path / "b.png").unlink()
    arguments = ("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    fail(DataError, *arguments, key="media", value=str(tmp_path / "b.png"))


@pytest.mark.slow
def test_an_evaluation_of_videos_that_are_none(run_copy):
    run, split = run_copy
    clips = sorted((split / "clips").iterdir())
    clips[0].write_text("hello")
    output = good("eval", run)
    assert "2 of 4" in output
    assert f"({clips[0]} " in output
    clips[1].write_bytes(b"")
    fail(RunError, "eval", run, key=run / "evaluations" / "test.jsonl")
    clips[1].unlink()
    fail(DataError, "eval", run, key="media", value=str(clips[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error_type", "key"),
    [
        (["--tasks", "{}/none.jsonl"], DataError, "{}/none.jsonl"),
        (["--tasks", "{}/run/recipe.yaml"], DataError, "{}/run/recipe.yaml"),
        (["--model", "{}/none"], ModelError, "{}/none"),
        (["evaluation.limits=3"], ConfigError, "evaluation.limits"),
    ],
)
def test_an_evaluation_that_cannot_start(run_copy, tmp_path, words, error_type, key):
    fail(error_type, "eval", run_copy[0], *(word.format(tmp_path) for word in words), key=key.format(tmp_path))


SCRIPT = r"""
from saccade.engines.scripted import scripted

NAME = '{"name": "crop_video", "arguments": '
CALL = "<tool_call>" + NAME + '{"start_time": %s, "end_time": %s, "question": "Red?"}}</tool_call>'
CALLS = "".join(CALL % window for window in ((0, 16), (0.5, 1), (30, 40)))
LOOK = "I look.</think>" + CALLS + "<tool_call>{</tool_call>"


def script(vlm):
    replies = (LOOK, "[red] \x1b[2J", "blue", "So.</think><answer>red</answer>")
    return scripted(vlm.renderer, replies=replies)
"""


def test_windows_are_clipped_to_a_short_video(tmp_path, tiny_folder):
    (tmp_path / "script.py").write_text(SCRIPT)
    engine = f"engine.name={tmp_path / 'script.py'}"
    short = clip(tmp_path / "short.mp4", frames=4)
    output = good("ask", "What?", "--video", short, "--model", tiny_folder, engine)
    assert "0-16 s  Red?  ->  [red] ␛[2J" in output  # as text, not as orders to the terminal
    assert "0.5-1 s  Red?  ->  blue" in output
    assert "30-40 s  Red?  ->  error: " in output
    assert "not run: " in output
    assert "Answer: red" in output


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ask", "sft"])
def test_a_folder_that_is_no_model(tmp_path, dataset_folder, command):
    video = next((dataset_folder / "test" / "clips").iterdir())
    rest = (
        ["What?", "--video", video]
        if command == "ask"
        else ["tiny/para_grpo", "--data", dataset_folder, "--out", tmp_path / "r"]
    )
    key = tmp_path if command == "ask" else tmp_path / "config.json"
    fail(ModelError, command, *rest, "--model", tmp_path, key=key)
    assert not (tmp_path / "r").exists()


def test_a_tokenizer_without_the_special_tokens(tmp_path, model, dataset_folder):
    path = model / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] != "<|image_pad|>"]
    path.write_text(json.dumps(data))
    arguments = ("sft", "tiny/para_grpo", "--model", model, "--data", dataset_folder, "--out", tmp_path / "run")
    fail(ModelError, *arguments, key=path, value="<|image_pad|>")


def test_weights_that_are_cut_off(tmp_path, model, dataset_folder):
    os.truncate(model / "model.safetensors", 1000)
    arguments = ("sft", "tiny/para_grpo", "--model", model, "--data", dataset_folder, "--out", tmp_path / "run")
    fail(ModelError, *arguments, key=model / "model.safetensors", value=1000)


@pytest.mark.parametrize(
    ("setting", "error_type", "key", "value"),
    [
        ("model.device=gpu", ModelError, "model.device", "gpu"),
        ("engine.name=chat_completions", ConfigError, "engine.settings.url", None),  # it has none
    ],
)
def test_a_device_or_an_engine_that_is_unavailable(tmp_path, tiny_folder, setting, error_type, key, value):
    video = clip(tmp_path / "a.mp4", frames=8)
    fail(error_type, "ask", "What?", "--video", video, "--model", tiny_folder, setting, key=key, value=value)


# ---- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key", "value", "suggestion"),
    [
        (["tiny/para_grp"], "recipe", "tiny/para_grp", "tiny/para_grpo"),
        (["none.yaml"], "none.yaml", "none.yaml", ""),
        (["sft.stps=3"], "sft.stps", 3, "sft.steps"),
        (["tiny/base", "sft.steps=few"], "sft.steps", "few", ""),
        (["tiny/base", "sft.steps=0"], "sft.steps", 0, ""),
        (["environment.name=tool_caling"], "environment.name", "tool_caling", "tool_calling"),
        (["environment.settings.max_tool_turn=1"], "environment.settings.max_tool_turn", 1, "max_tool_turns"),
    ],
)
def test_unknown_recipes_and_keys(tmp_path, words, key, value, suggestion):
    folder = tmp_path / "run"
    assert suggestion in fail(ConfigError, "demo", *words, "--out", folder, key=key, value=value)
    assert not folder.exists()


# ---- data ----------------------------------------------------------------------------------------------------------


def empty_file(folder, name):
    (folder / name).write_text("")


@pytest.mark.parametrize(
    ("command", "spoil", "key"),
    [
        ("sft", lambda folder: shutil.rmtree(folder / "train"), "{}/train/demonstrations.jsonl"),
        ("sft", lambda folder: empty_file(folder, "train/demonstrations.jsonl"), "{}/train/demonstrations.jsonl"),
        ("rl", lambda folder: empty_file(folder, "train/tasks.jsonl"), "{}/train/tasks.jsonl"),
        ("rl", lambda folder: shutil.rmtree(folder / "train" / "clips"), "media"),
        ("rl", lambda folder: (folder / "train/tasks.jsonl").write_text("{}\n"), "id"),
    ],
    ids=["no dataset", "no traces", "no tasks", "no clips", "no task"],
)
def test_empty_datasets_and_files(tmp_path, tiny_folder, dataset_folder, command, spoil, key):
    mine, out = shutil.copytree(dataset_folder, tmp_path / "dataset"), tmp_path / "run"
    spoil(mine)
    arguments = (command, "tiny/para_grpo", "--model", tiny_folder, "--data", mine, "--out", out)
    assert str(mine / "train") in fail(DataError, *arguments, key=key.format(mine))
    assert not out.exists()  # so that the same command works as soon as the dataset exists


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "sft", "data synth", "model"])
@pytest.mark.parametrize("below", [False, True])
def test_a_file_instead_of_the_folder(tmp_path, tiny_folder, dataset_folder, command, below):
    place = tmp_path / "taken"
    place.write_text("mine")
    target = place / "run" if below else place
    given = {
        "demo": ["demo", *SMALL, "--out", target],
        "sft": ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", target],
        "data synth": ["data", "synth", target, *SYNTHETIC],
        "model": ["model", "tiny", target],
    }
    fail(RunError, *given[command], key=target)
    assert place.read_text() == "mine"


def test_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    fail(DataError, "data", "synth", tmp_path, *SYNTHETIC, key=tmp_path)


def test_resuming_a_run_that_never_started(tmp_path, tiny_folder, dataset_folder):
    start = ["sft", "tiny/para_grpo", "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    assert "without --resume" in fail(RunError, *start, "--resume", key=tmp_path / "run")


def test_a_model_that_is_not_there_is_named(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "image.png")
    start = ["ask", "What?", "--image", tmp_path / "image.png", "--model", tmp_path / "none"]
    assert "there is no folder" in fail(ModelError, *start, key=tmp_path / "none")


@pytest.mark.slow
def test_a_full_disk_while_a_step_is_logged(tmp_path, tiny_folder, dataset_folder, monkeypatch):
    run, log = tmp_path / "run", Run.log

    def refuse(file_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def log_to_full_disk(self, *args, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refuse)
            log(self, *args, **kwargs)

    monkeypatch.setattr(Run, "log", log_to_full_disk)
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", run]
    assert "--resume" in fail(RunError, *start, key=run / "metrics.jsonl")
    monkeypatch.undo()
    good(*start, "--resume")
    assert len(Run.open(run).read_metrics("sft")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["invocations.json", "recipe.yaml"])
def test_a_full_disk_before_the_folder_is_a_run(tmp_path, tiny_folder, dataset_folder, monkeypatch, name):
    def fill(path, text):
        if path.name == name:
            with convert_file_errors(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, text)

    run = tmp_path / "run"
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", run]
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_text", fill)
        sentence = fail(RunError, *start, key=run / name)
    assert "repeat the command" in sentence
    assert "--resume" not in sentence
    good(*start)


def test_ctrl_c_names_resume_only_for_a_run(tmp_path, monkeypatch):
    def interrupt(name, settings=()):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_recipe", interrupt)
    start = ["sft", "tiny/para_grpo", "--out", tmp_path]
    assert "--resume" not in run_command(*start).stderr
    for name in ("invocations.json", "recipe.yaml"):
        (tmp_path / name).write_text("{}")
    done = run_command(*start)
    assert done.exit_code == 130
    assert "--resume" in done.stderr


@pytest.mark.slow
def test_a_full_disk_while_results_are_written(tmp_path, tiny_folder, dataset_folder, monkeypatch):
    run = tmp_path / "run"
    good("sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", run)
    whole = evaluation_runner.append_jsonl

    def once_full(path, item):
        if path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, item)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation_runner, "append_jsonl", once_full)
        fail(RunError, "eval", run, "sampling.max_tokens=8", key=run / "evaluations" / "test.jsonl")
    kept = (run / "evaluations" / "test.jsonl").read_text()
    assert kept.count("\n") == 1
    good("eval", run, "sampling.max_tokens=8")
    assert (run / "evaluations" / "test.jsonl").read_text().startswith(kept)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_on_the_disk(tmp_path, tiny_folder, dataset_folder):
    """The system refuses files beyond a megabyte: what a full disk does, to every library at once."""
    run = tmp_path / "run"
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", run]
    limit = 2**20
    done = subprocess.run(
        [*START, *map(str, start)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert str(run / "sft") in done.stderr
    assert "--resume" in done.stderr
    assert done.stderr.count("\n") == 1
    good(*start, "--resume")
    assert [path.name for path in sorted((run / "sft").iterdir())] == ["step-000002", "step-000004"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "limit", "file"),
    [(["model", "tiny"], 2**20, ""), (["data", "synth", *SYNTHETIC], 2**10, "/train/clips/00000.mp4")],
    ids=["a model", "data"],
)
def test_what_does_not_fit_on_the_disk_can_be_made_again(tmp_path, arguments, limit, file):
    folder = tmp_path / "made"
    command = [*arguments[:2], folder, *arguments[2:]]
    done = subprocess.run(
        [*START, *map(str, command)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "it/s]" not in line]
    assert len(lines) == 1
    assert "repeat the command" in lines[0]
    assert lines[0].startswith(f"{folder}{file} can't be written: file too large")
    good(*command)


@pytest.mark.slow
def test_a_corrupt_checkpoint(tmp_path, tiny_folder, dataset_folder):
    run = tmp_path / "run"
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--data", dataset_folder, "--out", run]
    good(*start)
    numbers = Run.open(run).read_metrics("sft")
    last = run / "sft" / "step-000004"
    for file in ("model.safetensors", "optimizer.pt", "config.json"):
        content = (last / file).read_bytes()
        os.truncate(last / file, 10)
        fail(RunError, *start, "--resume", key=last)
        (last / file).write_bytes(content)
    shutil.rmtree(last)
    good(*start, "--resume")
    again = Run.open(run).read_metrics("sft")
    assert [line["loss"] for line in again] == [line["loss"] for line in numbers]


# ---- interrupted and killed ----------------------------------------------------------------------------------------


def interrupt_demo(folder, arguments, sign, how):
    """Start a demo, send it the signal as soon as the file `sign` is there; its exit code and its output."""
    process = subprocess.Popen(
        [*START, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    block_until(lambda: (folder / sign).exists() or process.poll() is not None)
    process.send_signal(how)
    return process.communicate()[1], process.returncode


def numbers_of(folder):
    """Everything that a run found out, without how long it took."""
    found = json.loads((folder / "comparison.json").read_text())
    for summary in found["summaries"].values():
        del summary["seconds"]
    losses = {
        stage: [line["loss"] for line in Run.open(folder).read_metrics(stage) if "loss" in line]
        for stage in ("sft", "rl")
    }
    return found["summaries"], found["changes"], losses


STOPS = [
    ("data/train/clips/00001.mp4", signal.SIGINT),
    ("sft/step-000003", signal.SIGINT),
    ("sft/step-000006", signal.SIGKILL),
    ("rl/step-000002", signal.SIGINT),
    ("evaluations/after_rl_sampled.jsonl", signal.SIGKILL),
]


@pytest.mark.soak
@pytest.mark.parametrize("stops", [STOPS[3:4], STOPS], ids=["one", "all"])
def test_interrupted_and_killed_anywhere_a_demo_ends_with_the_same_numbers(tmp_path, stops):
    more = [*SMALL, "sft.steps=7", "rl.steps=3", "sft.save_every=1", "rl.save_every=1"]
    good("demo", *more, "--out", tmp_path / "whole")
    run = tmp_path / "run"
    start = ["demo", *more, "--out", run]
    for sign, how in stops:
        output, code = interrupt_demo(run, start, sign, how)
        assert code == (130 if how is signal.SIGINT else -signal.SIGKILL), output
        assert "Traceback" not in output
        if how is signal.SIGINT:
            assert "saccade demo " in output
            assert output.rstrip().endswith("--resume")
        start = ["demo", "--out", run, "--resume"]
    good("demo", "--out", run, "--resume")
    assert numbers_of(run) == numbers_of(tmp_path / "whole")
