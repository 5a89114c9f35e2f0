"""Teachers that reply with anything: a build ends with rows that pass the check, or with one sentence."""

import collections
import itertools
import json

import pytest
from chat_server import server
from color_teacher import call, identify, make_clip, read_frames, teach
from commands import good, run

from saccade.config.load import load_data_build_recipe
from saccade.data.dataset import load_tasks
from saccade.runs.data_build.build import estimate, prepare

SETTINGS = [
    "data_build.filters.few_frames_votes=0",
    "data_build.filters.no_video_votes=1",
    "data_build.filters.agreement_votes=1",
    "data_build.questions.num_per_scene=1",
    "data_build.questions.pairs_per_video=1",
    "data_build.demonstrations.attempts=1",
    "engine.settings.max_retries=0",
    "engine.settings.retry_backoff=0",
    "sampling.max_tokens=256",
]
QUESTIONS = json.dumps([{"question": "Which?", "answer_type": "open", "options": [], "answer": "red"}] * 2)
NONSENSE = [
    "",
    "x" * 2**20,
    "[" + ",".join([QUESTIONS[1:-1]] * 5000) + "]",  # a megabyte of questions
    "[" * 5000,
    '{"a":' * 3000,
    '{"summary": "x", "frames": [{"time": NaN, "caption": "y"}, {"time": Infinity, "caption": ""}]}',
    '[{"question": "x?", "answer_type": "number", "options": [], "answer": ' + "9" * 1000 + "}]",
    '{"summary": ["x"], "frames": {"time": "1"}, "question": 3}',
    "null",
    "\x00\x1b[2J\ud800\u202e",
    "<think>" + QUESTIONS,
    '<tool_call>{"name": "rm", "arguments": {"path": "/"}}</tool_call>',
    "<answer>purple</answer>",
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Thirteen scenes, one for each piece of nonsense."""
    return make_clip(tmp_path_factory.mktemp("clip") / "a.mp4", ["red", "blue", "green", "yellow"] * 3 + ["red"], 1)


def run_build(reply, clip, folder, *settings, headers=()):
    """Build from a clip; return the result of the command and what the server received."""

    def reply_to_all(number, body):
        text = reply(number, body)
        return teach_or_shrug(number, body) if text is None else text

    with server(reply_to_all, headers=headers) as served:
        arguments = ["--out", folder, "--yes", "--teacher", served.url, *SETTINGS, *settings]
        return run("data", "build", clip, *arguments), served


def teach_or_shrug(number, body):
    """Reply as the color teacher, and to questions that aren't its own with one answer."""
    try:
        return teach(number, body)
    except (TypeError, KeyError, AttributeError, IndexError):
        return "<think>Who knows?</think><answer>red</answer>"


def check(done, folder, clip, *settings):
    """Check that a build ended well: a clean end, counts that add up, rows that pass the check, and a known cost."""
    assert done.exit_code in (0, 1), done.output
    assert "Traceback" not in done.output + done.stderr
    assert done.exit_code == 0 or done.stderr.strip().count("\n") == 0
    report = json.loads((folder / "report.json").read_text())
    assert (report["counts"]["tasks"] > 0) == (done.exit_code == 0)
    recipe = load_data_build_recipe("paravt/sft", [*SETTINGS, *settings])
    prepared = prepare([clip], folder, recipe, skip_bad=False, start_stage=lambda *_: lambda *_: None)
    for stage, most in estimate(prepared).items():
        used = report["usage"].get(stage, {})
        assert all(count <= getattr(most, name) for name, count in used.items()), (stage, most, used)
    for name in ("tasks.jsonl", "demonstrations.jsonl"):
        assert not (folder / name).exists() or "no problem" in good("data", "check", folder / name)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["captions", "questions", "no_video", "votes", "demonstrations", "sub-agent"])
def test_nonsense_at_any_stage(stage, clip, tmp_path):
    """The other stages are taught as usual, so that all of them receive what the nonsense led to."""
    # Types are drawn by the clip's bytes, and two scenes of a color share their question of when it is on screen.
    types = "data_build.questions.answer_types=[choice,open,number]"
    numbers = itertools.count()

    def reply(number, body):
        return NONSENSE[next(numbers) % len(NONSENSE)] if identify(body) == stage else None

    done, _ = run_build(reply, clip, tmp_path / "out", types)
    report = check(done, tmp_path / "out", clip, types)
    assert next(numbers) >= len(NONSENSE)
    if stage == "captions":
        assert sum(report["rejected"]["captions"].values()) == report["counts"]["scenes"] == len(NONSENSE)
    if stage == "questions":
        reasons = report["rejected"]["questions"]
        assert reasons["the reply was truncated"] == 2  # the two megabytes
        assert reasons["the reply holds no JSON"] >= 6


@pytest.fixture(scope="module")
def short_clip(tmp_path_factory):
    return make_clip(tmp_path_factory.mktemp("clip") / "b.mp4", ["red", "blue", "green"], 2)


def write_calls(*windows):
    return "<think>I look.</think>\n" + "\n".join(call(*window, "Which color?") for window in windows)


def find_turn(body):
    return sum(message["role"] == "assistant" for message in body["messages"])


FLOOD = write_calls(*[(second % 6, second % 6 + 1) for second in range(60)])
EPISODES = [  # the first reply, later ones, the sub-agents' (None: the color teacher's), and why SFT can't learn them
    (write_calls((100, 200)), None, None, "a call failed"),
    (write_calls((5, 2)), None, None, "a call failed"),
    (write_calls((float("nan"), 2)), None, None, "a call failed"),
    (write_calls(("soon", 2)), None, None, "a call failed"),
    (FLOOD, None, None, "a call failed"),
    (FLOOD.replace("crop_video", "show_frames"), FLOOD, None, "the episode ended as context_full"),
    (write_calls((0, 2)), write_calls((2, 4)), None, "the episode ended as max_turns"),
    (write_calls((0, 2), (2, 4)), None, " ", "a sub-agent's reply is blank"),
    (write_calls((0, 2)), "<think></think><answer>ultraviolet</answer>", None, "the answer is wrong"),
    ("I don't know.", None, None, "the episode ended as no_answer"),
]


@pytest.mark.slow
def test_episodes_that_can_not_be_learned_are_refused(clip, tmp_path):
    """Each question gets one of the episodes; the color teacher plays those of the others."""
    numbers, windows = {}, {}

    def reply(number, body):
        text = read_frames(body["messages"][-1]["content"])[1]
        if identify(body) == "sub-agent":
            return windows.get(text)
        if identify(body) != "demonstrations":
            return None
        question = read_frames(body["messages"][1]["content"])[1]
        episode = numbers.setdefault(question, len(numbers))
        if episode >= len(EPISODES):
            return None
        first, later, sub_agent, _ = EPISODES[episode]
        if not any(message["role"] == "assistant" for message in body["messages"]):
            windows[f"About {episode}?"] = sub_agent
            return first.replace("Which color?", f"About {episode}?")
        return later

    limits = [
        "data_build.questions.answer_types=[choice]",
        "environment.settings.max_context_tokens=4096",
        "environment.settings.tools={crop_video: {frame_range: [1, 4]}, show_frames: {max_frames: 4}}",
        "environment.settings.tools.crop_video.prompt_template='{question}'",
        "sampling.max_tokens=4096",
    ]
    done, _ = run_build(reply, clip, tmp_path / "out", *limits)
    report = check(done, tmp_path / "out", clip, *limits)
    assert len(numbers) > len(EPISODES)
    assert report["rejected"]["demonstrations"] == collections.Counter(reason for *_, reason in EPISODES)
    assert report["counts"]["demonstrations"] == len(numbers) - len(EPISODES)


@pytest.mark.slow
def test_text_of_any_language_and_lone_surrogates_are_kept_or_replaced(short_clip, tmp_path):
    """The captions are Chinese and have halves of characters, as escapes in JSON and as sub-agents' replies."""
    prompts = []

    def reply(number, body):
        prompts.append(json.dumps(body))
        if identify(body) == "captions":
            frames, _ = read_frames(body["messages"][-1]["content"])
            lines = [{"time": time, "caption": "屏幕是红色的\ud83d" * 9} for time, _ in frames]
            return json.dumps({"summary": f"A {frames[0][1]} screen \ud83d屏幕", "frames": lines})
        if identify(body) == "questions":
            return teach(number, body).replace("screen", "屏幕\\ud83d\udc00")
        if identify(body) in ("votes", "demonstrations"):
            return teach(number, json.loads(json.dumps(body).replace("\\u5c4f\\u5e55??", "screen")))
        return "红\ud83d" if identify(body) == "sub-agent" else None

    types = "data_build.questions.answer_types=[open]"
    done, _ = run_build(reply, short_clip, tmp_path / "out", types)
    check(done, tmp_path / "out", short_clip, types)
    tasks = load_tasks(tmp_path / "out" / "tasks.jsonl")
    assert any("屏幕??" in task.question for task in tasks)
    texts = "".join((tmp_path / "out" / name).read_text() for name in ("tasks.jsonl", "demonstrations.jsonl"))
    assert "\\ud83d" not in texts
    assert not any("\\ud83d" in prompt for prompt in prompts)


@pytest.mark.slow
def test_a_busy_teacher_is_asked_again_and_paid_once(short_clip, tmp_path):
    """Every other request is answered with 429 and Retry-After; each reply is received once."""
    received = collections.Counter()

    def reply(number, body):
        received[json.dumps(body)] += 1
        return (429, '{"error": {"message": "busy"}}') if received[json.dumps(body)] == 1 else teach(number, body)

    retries = ["engine.settings.max_retries=2", "data_build.demonstrations.attempts=0", "data_build.max_failures=2"]
    done, _ = run_build(reply, short_clip, tmp_path / "out", *retries, headers=(("Retry-After", "0"),))
    assert done.exit_code == 0, done.output
    check(done, tmp_path / "out", short_clip, *retries)
    assert {*received.values()} == {2}
