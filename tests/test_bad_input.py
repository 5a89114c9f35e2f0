"""What goes wrong outside: one clear sentence, a non-zero exit, no traceback, and nothing lost."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest
from commands import SFT, SMALL, WORLD, bad, good
from PIL import Image

from saccade.data.world.film import write_clip
from saccade.evaluation import run as evaluation_run
from saccade.runlog import Run

START = [sys.executable, "-c", "from saccade.cli import main; main()"]


def clip(path, frames=64):
    write_clip(path, np.full((frames, 32, 32, 3), 90, np.uint8), 4.0)
    return path


# ---- videos --------------------------------------------------------------------------------------------------------


def no_frames(path):
    with av.open(str(path), "w", format="mp4") as container:
        container.add_stream("libx264", rate=4).width = 32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (
            lambda path: path.write_text("hello " * 100),
            "can't be read as a video (check that it is complete",
        ),
        (lambda path: still(path), "clip.mp4 is a still picture; give it with --image"),
        (no_frames, "video"),
        (lambda path: path.write_bytes(clip(path).read_bytes()[:400]), "video"),
    ],
    ids=["none", "folder", "empty", "text", "picture", "no frames", "cut off"],
)
def test_no_video(tmp_path, tiny_folder, make, words):
    path = tmp_path / "clip.mp4"
    make(path)
    said = bad("ask", "What?", "--video", path, "--model", tiny_folder)
    assert words in said
    assert "clip.mp4" in said
    assert "Errno" not in said
    assert "file:" not in said


def still(path, size=(64, 32)):
    Image.new("RGB", size, "red").save(path, "JPEG")
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("hello " * 100), "can't be read as a picture"),
        (lambda path: path.write_bytes(clip(path.with_name("a.mp4")).read_bytes()), "is a video; give it with --video"),
        (lambda path: path.write_bytes(still(path).read_bytes()[:300]), "can't be read as a picture"),
        (lambda path: still(path, (2, 900)), "too narrow"),
    ],
    ids=["none", "folder", "empty", "text", "video", "cut off", "narrow"],
)
def test_no_picture(tmp_path, tiny_folder, make, words):
    path = tmp_path / "still.jpg"
    make(path)
    said = bad("ask", "What?", "--image", path, "--model", tiny_folder)
    assert words in said
    assert "still.jpg" in said


def test_nothing_to_ask_or_to_look_at(tmp_path, tiny_folder):
    assert "give --video or --image a file" in bad("ask", "What?", "--model", tiny_folder)
    assert "the question is empty" in bad("ask", " ", "--image", still(tmp_path / "a.jpg"), "--model", tiny_folder)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["direct", "reasoning", "parallel"])
def test_pictures_are_asked_about(tmp_path, tiny_folder, agent):
    Image.new("RGBA", (40, 90), (0, 0, 255, 99)).save(tmp_path / "b.png")
    looks = ["--image", still(tmp_path / "a.jpg"), "--image", tmp_path / "b.png", "--video", clip(tmp_path / "c.mp4")]
    settings = [f"agent.name={agent}", "agent.settings.image_pixels=[256,2048]", "sampling.max_tokens=8"]
    if agent != "parallel":  # the recipe's are those of the parallel agent
        settings = [settings[0], "agent.settings=null", settings[2]]
    assert "visual tokens read" in good("ask", "What?", *looks, "--model", tiny_folder, *settings)


@pytest.fixture
def judged(tmp_path, tiny_folder, world):
    """A run that can be evaluated, and its world."""
    mine, run = Path(shutil.copytree(world, tmp_path / "world")), tmp_path / "run"
    start = ["tiny/para_grpo", *SFT, "sft.steps=1", "sampling.max_tokens=8", "--model", tiny_folder]
    good("sft", *start, "--world", mine, "--out", run)
    return run, mine / "test"


@pytest.mark.slow
def test_an_evaluation_of_pictures(judged, tmp_path):
    run, _ = judged
    task = {"question": "What?", "kind": "open", "gold": "red"}
    pictures = [{"path": "a.jpg", "kind": "image"}, {"path": "b.png", "kind": "image"}]
    still(tmp_path / "a.jpg"), still(tmp_path / "b.png", (32, 64))
    rows = [{"id": str(count), "media": pictures[:count], **task} for count in (1, 2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "2 / 2" in good("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    (tmp_path / "b.png").write_bytes(b"no picture")
    said = good("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    assert f"1 of 2 attempts broke and count as wrong ({tmp_path / 'b.png'} can't be read as a picture" in said
    (tmp_path / "b.png").unlink()
    said = bad("eval", run, "--tasks", tmp_path / "tasks.jsonl", "--name", "pictures")
    assert f"task 2: media file {tmp_path / 'b.png'} is missing" in said


@pytest.mark.slow
def test_an_evaluation_of_videos_that_are_none(judged):
    run, split = judged
    clips = sorted((split / "clips").iterdir())
    clips[0].write_text("hello")
    said = good("eval", run)
    assert f"2 of 4 attempts broke and count as wrong ({clips[0]} can't be read as a video" in said
    clips[1].write_bytes(b"")
    said = bad("eval", run)
    assert "every attempt of the evaluation 'test' broke, the first with: " in said
    clips[1].unlink()
    assert "media file" in bad("eval", run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "{}/none.jsonl"], "none.jsonl: there is no such file"),
        (["--tasks", "{}/run/recipe.yaml"], "recipe.yaml: files of rows end in .jsonl"),
        (["--model", "{}/none"], "none is not a model: it has no config.json"),
        (["evaluation.limits=3"], "did you mean evaluation.limit"),
        (["--name", ""], "an evaluation can't be called ''"),
    ],
)
def test_an_evaluation_that_cannot_begin(judged, tmp_path, words, said):
    assert said in bad("eval", judged[0], *(word.format(tmp_path) for word in words))


SCRIPT = r"""
from saccade.engines.scripted import scripted

NAME = '{"name": "crop_video", "arguments": '
CALL = "<tool_call>" + NAME + '{"start_time": %s, "end_time": %s, "question": "Red?"}}</tool_call>'
CALLS = "".join(CALL % window for window in ((0, 16), (0.5, 1), (30, 40)))
LOOK = "I look.</think>" + CALLS + "<tool_call>{</tool_call>"


def script(backbone):
    return scripted(backbone.renderer, replies=(LOOK, "[red] \x1b[2J", "blue", "So.</think><answer>red</answer>"))
"""


def test_a_clip_shorter_than_the_window_is_looked_at_as_far_as_it_goes(tmp_path, tiny_folder):
    (tmp_path / "script.py").write_text(SCRIPT)
    engine = f"engine.name={tmp_path / 'script.py'}"
    short = clip(tmp_path / "short.mp4", frames=4)
    output = good("ask", "What?", "--video", short, "--model", tiny_folder, engine)
    assert "0-16 s  Red?  ->  [red] \N{REPLACEMENT CHARACTER}[2J" in output  # as text, not as orders to the terminal
    assert "0.5-1 s  Red?  ->  blue" in output
    assert "30-40 s  Red?  ->  error: the window from 30 to 40 lies outside the video, which lasts 1 seconds" in output
    assert "not run: " in output
    assert "Answer: red" in output
    assert "2 turns, 4 calls" in output


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ask", "sft"])
def test_a_folder_that_is_no_model(tmp_path, world, command):
    video = next((world / "test" / "clips").iterdir())
    rest = (
        ["What?", "--video", video]
        if command == "ask"
        else ["tiny/para_grpo", "--world", world, "--out", tmp_path / "r"]
    )
    said = bad(command, *rest, "--model", tmp_path)
    assert f"{tmp_path} is not a model: it has no config.json" in said
    assert not (tmp_path / "r").exists()


def test_a_tokenizer_without_the_special_tokens(tmp_path, model, world):
    path = model / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] != "<|image_pad|>"]
    path.write_text(json.dumps(data))
    said = bad("sft", "tiny/para_grpo", "--model", model, "--world", world, "--out", tmp_path / "run")
    assert "has no special token '<|image_pad|>'" in said


def test_weights_that_are_cut_off(tmp_path, model, world):
    os.truncate(model / "model.safetensors", 1000)
    said = bad("sft", "tiny/para_grpo", "--model", model, "--world", world, "--out", tmp_path / "run")
    assert f"{model / 'model.safetensors'} is no file of weights, or was cut off" in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.device=gpu", "can't be loaded as a model on the device 'gpu'"),
        ("engine.name=scripted", "the engine scripted can't be made from a recipe"),
    ],
)
def test_a_device_or_an_engine_that_cannot_be_had(tmp_path, tiny_folder, setting, words):
    video = clip(tmp_path / "a.mp4", frames=8)
    assert words in bad("ask", "What?", "--video", video, "--model", tiny_folder, setting)


# ---- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny/para_grp"], "did you mean 'tiny/para_grpo'"),
        (["none.yaml"], "there is no recipe file none.yaml"),
        (["sft.stps=3"], "did you mean sft.steps"),
        (["tiny/base", "sft.steps=few"], "sft.steps can't be 'few'"),
        (["tiny/base", "sft.steps=0"], "sft.steps can't be 0"),
        (["agent.name=paralel"], "did you mean 'parallel'"),
        (["agent.settings.max_turn=1"], "did you mean 'max_turns'"),
    ],
)
def test_recipes_and_keys_that_do_not_exist(tmp_path, words, said):
    folder = tmp_path / "run"
    assert said in bad("demo", *words, "--out", folder)
    assert not folder.exists()


# ---- data ----------------------------------------------------------------------------------------------------------


def emptied(folder, name):
    (folder / name).write_text("")


@pytest.mark.parametrize(
    ("command", "spoil", "words"),
    [
        ("sft", lambda folder: shutil.rmtree(folder / "train"), "traces.jsonl: there is no such file"),
        ("sft", lambda folder: emptied(folder, "train/traces.jsonl"), "the file holds no row"),
        ("train", lambda folder: emptied(folder, "train/tasks.jsonl"), "the file holds no row"),
        ("train", lambda folder: shutil.rmtree(folder / "train" / "clips"), "is missing"),
        ("train", lambda folder: (folder / "train/tasks.jsonl").write_text("{}\n"), "tasks.jsonl, row 1"),
    ],
    ids=["no world", "no traces", "no tasks", "no clips", "no task"],
)
def test_empty_worlds_and_files(tmp_path, tiny_folder, world, command, spoil, words):
    mine, out = shutil.copytree(world, tmp_path / "world"), tmp_path / "run"
    spoil(mine)
    assert words in bad(command, "tiny/para_grpo", "--model", tiny_folder, "--world", mine, "--out", out)
    assert not out.exists()  # so that the same command works as soon as the world is there


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "sft", "world", "model"])
@pytest.mark.parametrize("below", [False, True])
def test_a_file_in_place_of_the_folder(tmp_path, tiny_folder, world, command, below):
    place = tmp_path / "taken"
    place.write_text("mine")
    target = place / "run" if below else place
    given = {
        "demo": ["demo", *SMALL, "--out", target],
        "sft": ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--world", world, "--out", target],
        "world": ["data", "world", target, *WORLD],
        "model": ["model", "tiny", target],
    }
    said = bad(*given[command])
    assert str(place) in said
    assert place.read_text() == "mine"


def test_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not empty and holds no world" in bad("data", "world", tmp_path, *WORLD)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_while_a_step_is_logged(tmp_path, tiny_folder, world):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--world", world, "--out", run]
    said = bad(*start)
    assert "metrics.jsonl can't be written: no space left on device; free some space, then go on with --resume" in said
    (run / "metrics.jsonl").unlink()
    good(*start, "--resume")
    assert len(Run.open(run).metrics("sft")) == 4


@pytest.mark.slow
def test_a_full_disk_while_answers_are_kept(tmp_path, tiny_folder, world, monkeypatch):
    run = tmp_path / "run"
    good("sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--world", world, "--out", run)
    whole = evaluation_run.append

    def once_full(path, item):
        if path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, item)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation_run, "append", once_full)
        assert "test.jsonl can't be written: no space left on device" in bad("eval", run, "sampling.max_tokens=8")
    kept = (run / "evaluations" / "test.jsonl").read_text()
    assert kept.count("\n") == 1
    good("eval", run, "sampling.max_tokens=8")
    assert (run / "evaluations" / "test.jsonl").read_text().startswith(kept)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_on_the_disk(tmp_path, tiny_folder, world):
    """The system refuses files beyond a megabyte: what a full disk does, to every library at once."""
    run = tmp_path / "run"
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--world", world, "--out", run]
    limit = 2**20
    done = subprocess.run(
        [*START, *map(str, start)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "can't be written" in done.stderr
    assert "free some space" in done.stderr
    assert done.stderr.count("\n") == 1
    good(*start, "--resume")
    assert [path.name for path in sorted((run / "sft").iterdir())] == ["step-000002", "step-000004"]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "config.json"])
def test_a_corrupt_checkpoint(tmp_path, tiny_folder, world, file):
    run = tmp_path / "run"
    start = ["sft", "tiny/para_grpo", *SFT, "--model", tiny_folder, "--world", world, "--out", run]
    good(*start)
    numbers = Run.open(run).metrics("sft")
    last = run / "sft" / "step-000004"
    os.truncate(last / file, 10)
    said = bad(*start, "--resume")
    assert f"the checkpoint {last} can't be read; delete it to go on from the one before" in said
    shutil.rmtree(last)
    good(*start, "--resume")
    again = Run.open(run).metrics("sft")
    assert [line["loss"] for line in again] == [line["loss"] for line in numbers]


# ---- interrupted and killed ----------------------------------------------------------------------------------------


def stopped(folder, arguments, sign, how):
    """Start a demo, send it the signal as soon as the file `sign` is there; its exit code and what it said."""
    process = subprocess.Popen(
        [*START, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    for _ in range(6000):
        if (folder / sign).exists() or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(how)
    return process.communicate(timeout=120)[1], process.returncode


def numbers_of(folder):
    """Everything that a run found out, without how long it took."""
    found = json.loads((folder / "comparison.json").read_text())
    for summary in found["summaries"].values():
        del summary["seconds"]
    losses = {
        stage: [line["loss"] for line in Run.open(folder).metrics(stage) if "loss" in line] for stage in ("sft", "rl")
    }
    return found["summaries"], found["changes"], losses


@pytest.mark.slow
def test_interrupted_and_killed_anywhere_a_demo_ends_with_the_same_numbers(tmp_path):
    more = [*SMALL, "sft.steps=12", "rl.steps=6", "sft.save_every=1", "rl.save_every=1"]
    good("demo", *more, "--out", tmp_path / "whole")
    run = tmp_path / "run"
    start = ["demo", *more, "--out", run]
    said, code = stopped(run, start, "world/train/clips/00001.mp4", signal.SIGINT)
    assert code == 130, said
    assert said.startswith("\nStopped. Go on with: saccade demo ")
    assert said.rstrip().endswith("--resume")
    for sign, how in (
        ("sft/step-000003", signal.SIGINT),
        ("sft/step-000006", signal.SIGKILL),
        ("rl/step-000002", signal.SIGINT),
        ("evaluations/after RL, sampled.jsonl", signal.SIGKILL),
    ):
        said, code = stopped(run, ["demo", "--out", run, "--resume"], sign, how)
        assert code == (130 if how is signal.SIGINT else -signal.SIGKILL), said
        assert "Traceback" not in said
    good("demo", "--out", run, "--resume")
    assert numbers_of(run) == numbers_of(tmp_path / "whole")
