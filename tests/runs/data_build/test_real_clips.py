"""The real clips beside the checkout become tasks and demonstrations, which pass the check and are learned.

The teacher reads the brightness of the frames that it receives, so it can do all that is asked of one.
"""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from chat_server import server
from color_teacher import call, identify
from commands import good
from PIL import Image

from saccade.data.dataset import load_demonstrations, load_tasks

REAL = Path(__file__).parents[4] / "shared" / "media"
CLIPS = ("flipping_a_pancake.mkv", "nasa_13013.mp4", "video_90.mov")
OPTION_STEP = 64  # between the brightnesses of a question's options
NEAR_SECONDS = 0.3  # a frame shows a moment that is no farther away
SETTINGS = [
    "data_build.scenes.max_seconds=4",
    "data_build.captions.frame_pixels=[784, 4096]",
    "data_build.questions.answer_types=[choice]",
    "data_build.questions.pairs_per_video=1",
    "data_build.filters.few_frames=2",
    "environment.settings.num_frames=8",
    "environment.settings.frame_pixels=[784, 4096]",
    "environment.settings.tools.crop_video.frame_pixels=[784, 4096]",
    "sampling.max_tokens=256",
]
TRAINING = [
    "model.device=cpu",
    "model.dtype=float32",
    "sft.steps=2",
    "sft.tokens_per_step=4000",
    "sft.optim.warmup_steps=0",
    "environment.settings.num_frames=8",
    "environment.settings.frame_pixels=[784, 4096]",
    "environment.settings.tools.crop_video.frame_pixels=[784, 4096]",
]


def read_brightness(content):
    """Return (time, brightness from 0 to 255) of each frame of a message, and the text after them."""
    if isinstance(content, str):
        return [], content
    frames, times, text = [], [], ""
    for part in content:
        if part["type"] == "text":
            times, text = re.findall(r"<([\d.]+) seconds>", part["text"]), part["text"]
        else:
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            frames.append((float(times[-1]), float(np.asarray(Image.open(io.BytesIO(data)).convert("L")).mean())))
    return frames, text


def find_nearest(frames, time):
    """Return the brightness of the frame that shows a moment, None if none does."""
    distance, brightness = min(((abs(at - time), value) for at, value in frames), default=(np.inf, None))
    return brightness if distance <= NEAR_SECONDS else None


def write_caption(frames):
    lines = [{"time": time, "caption": f"The brightness is {value:.0f} of 255."} for time, value in frames]
    return json.dumps({"summary": "A picture that moves.", "frames": lines})


def write_questions(text):
    lines = re.findall(r"^- at ([\d.]+) seconds: The brightness is (\d+) of 255", text, re.M)
    count = int(re.search(r"Write (\d+) questions", text)[1])
    rows = [
        {
            "question": f"How bright, from 0 to 255, is the picture at {time} seconds?",
            "answer_type": "choice",
            "options": [str((int(value) + OPTION_STEP * step) % 256) for step in range(4)],
            "answer": value,
        }
        for time, value in lines[:count]
    ]
    return json.dumps(rows)


def choose_option(question, brightness):
    options = dict(re.findall(r"^([A-D])\. (\d+)$", question, re.M))
    return min(options, key=lambda letter: abs(int(options[letter]) - brightness))


def teach(_, body):
    messages, stage = body["messages"], identify(body)
    frames, text = read_brightness(messages[-1]["content"])
    if stage == "captions":
        return write_caption(frames)
    if stage == "questions":
        return write_questions(text)
    if stage == "sub-agent":
        time = float(re.search(r"at ([\d.]+) seconds", text)[1])
        return f"The brightness is {min(frames, key=lambda frame: abs(frame[0] - time))[1]:.0f}."
    if stage != "demonstrations":
        brightness = find_nearest(frames, float(re.search(r"at ([\d.]+) seconds", text)[1]))
        return f"<answer>{'unknown' if brightness is None else choose_option(text, brightness)}</answer>"
    question = read_brightness(messages[1]["content"])[1]
    if len(messages) == 2:
        time = float(re.search(r"at ([\d.]+) seconds", question)[1])
        window = max(time - 0.5, 0), time + 0.5
        return f"<think>I look.</think>\n{call(*window, f'How bright is it at {time} seconds?')}"
    brightness = int(re.search(r"brightness is (\d+)", text)[1])
    return f"<think>I have looked.</think>\n<answer>{choose_option(question, brightness)}</answer>"


@pytest.mark.slow
def test_real_clips_become_data_that_is_learned(tiny_folder, tmp_path):
    clips = [REAL / name for name in CLIPS]
    if not all(clip.exists() for clip in clips):
        pytest.skip("the real clips are not part of the repository")
    folder = tmp_path / "built"
    with server(teach) as served:
        good("data", "build", *clips, "--out", folder, "--yes", "--teacher", served.url, *SETTINGS)
    report = json.loads((folder / "report.json").read_text())
    assert report["counts"]["videos"] == len(clips)
    assert report["counts"]["captions"] == report["counts"]["scenes"] > len(clips)
    assert report["counts"]["questions"] >= report["counts"]["tasks"] == len(load_tasks(folder / "tasks.jsonl")) > 3
    assert report["counts"]["demonstrations"] == len(load_demonstrations(folder / "demonstrations.jsonl")) > 3
    for name in ("tasks.jsonl", "demonstrations.jsonl"):
        assert "no problem" in good("data", "check", folder / name)
    data = f"data.demonstrations={folder / 'demonstrations.jsonl'}"
    good("sft", "paravt/sft", data, "--model", tiny_folder, "--out", tmp_path / "run", *TRAINING)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
