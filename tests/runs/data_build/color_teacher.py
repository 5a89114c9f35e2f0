"""Clips whose scenes are filled with one color, and a teacher that reads the colors from the frames it receives."""

import base64
import io
import json
import re

import numpy as np
from PIL import Image

from saccade.data.synthetic.video_writer import write_video
from saccade.runs.data_build import captions, filters, questions

COLORS = {"red": (220, 30, 30), "blue": (30, 40, 220), "green": (30, 200, 40), "yellow": (230, 220, 40)}
FPS, SCENE_SECONDS = 8, 4


def make_clip(path, colors, seconds=SCENE_SECONDS):
    """Write an mp4 whose scenes have these colors, `seconds` each."""
    rng = np.random.default_rng(0)
    noise = rng.integers(-8, 9, (48, 64, 3))
    scenes = [np.clip(np.array(COLORS[color]) + noise, 0, 255).astype(np.uint8) for color in colors]
    write_video(path, [scene for scene in scenes for _ in range(round(FPS * seconds))], FPS)
    return path


def read_frames(content):
    """Return (time, color) of each frame in a message of the API, and the text after them."""
    if isinstance(content, str):
        return [], content
    frames, times, text = [], [], ""
    for part in content:
        if part["type"] == "text":
            times = re.findall(r"<([\d.]+) seconds>", part["text"])
            text = part["text"]
        else:
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float).mean(axis=(0, 1))
            color = min(COLORS, key=lambda name: np.abs(np.array(COLORS[name]) - pixels).sum())
            frames.append((float(times[-1]), color))
    return frames, text


def write_caption(frames):
    lines = [{"time": time, "caption": f"The screen is {color}."} for time, color in frames]
    return json.dumps({"summary": f"A {frames[0][1]} screen.", "frames": lines})


def write_questions(text):
    types = re.search(r"of these types in this order: ([\w, ]+)\.", text)[1].split(", ")
    scenes = re.findall(r"^Scene \d, from ([\d.]+) to ([\d.]+) seconds: A (\w+) screen", text, re.M)
    start, end, color = float(scenes[0][0]), float(scenes[0][1]), scenes[0][2]
    last_end = float(scenes[-1][1])
    by_type = {
        "choice": {"question": f"Which color is on screen at {min(start + 1, end):g} seconds?", "answer": color},
        "open": {"question": f"What color is on screen at {max(end - 1, start):g} seconds?", "answer": color},
        "number": {
            "question": f"How many colors are there from {start:g} to {last_end:g} seconds?",
            "answer": len({scene[2] for scene in scenes}),
        },
        "grounding": {"question": f"When is the screen {color}?", "answer": [start, end]},
    }
    options = {"choice": [*COLORS]}
    rows = [{**by_type[name], "answer_type": name, "options": options.get(name, [])} for name in types]
    return f"<think>I write.</think>Here they are:\n```json\n{json.dumps(rows)}\n```"


def answer_question(frames, question):
    """Answer from frames alone: "unknown" where they don't show it."""
    if not frames:
        return "1" if question.startswith("How many") else "unknown"
    if when := re.search(r"at ([\d.]+) seconds", question):
        time, color = min(frames, key=lambda frame: abs(frame[0] - float(when[1])))
        return color if abs(time - float(when[1])) <= 1 else "unknown"
    if span := re.search(r"from ([\d.]+) to ([\d.]+) seconds", question):
        inside = {color for time, color in frames if float(span[1]) <= time <= float(span[2])}
        return str(len(inside)) if len(frames) > 1 else "unknown"
    color = re.search(r"screen (\w+)\?", question)[1]
    times = [time for time, shown in frames if shown == color]
    return f"{min(times) - 0.5:g}-{max(times) + 0.5:g}" if times else "unknown"


def call(start, end, question):
    arguments = {"start_time": start, "end_time": end, "question": question}
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def take_turn(messages, question):
    """Look at 0-4 seconds, then at 4-8 seconds, then answer with the ground truth that only a perfect model knows."""
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn < 2:
        return f"<think>I look at part {turn}.</think>\n{call(4 * turn, 4 * turn + 4, 'Which color is on screen?')}"
    frames, _ = read_frames(messages[1]["content"])
    return f"<think>I have looked.</think>\n<answer>{answer_question(frames, question)}</answer>"


def is_episode(messages):
    return messages[0]["role"] == "system" and "<tool_call>" in messages[0]["content"]


def identify(body):
    """Return the stage of a request, "sub-agent" for the replies to calls."""
    messages = body["messages"]
    _, text = read_frames(messages[-1]["content"])
    if is_episode(messages):
        return "demonstrations"
    if messages[0]["role"] == "system":
        return filters.NO_VIDEO if filters.NO_VIDEO_PROMPT in messages[0]["content"] else "votes"
    if captions.PROMPT in text:
        return captions.STAGE
    return questions.STAGE if text.startswith("Below are descriptions") else "sub-agent"


def teach(_, body):
    """Reply as a teacher that describes what the frames show."""
    messages, stage = body["messages"], identify(body)
    frames, text = read_frames(messages[-1]["content"])
    if stage == captions.STAGE:
        return write_caption(frames)
    if stage == questions.STAGE:
        return write_questions(text)
    if stage == "demonstrations":
        return take_turn(messages, read_frames(messages[1]["content"])[1])
    if stage == "sub-agent":
        return f"It is {frames[0][1]}."
    return f"<answer>{answer_question(frames, text)}</answer>"
