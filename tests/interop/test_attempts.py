"""Other systems' questions as tasks, and an environment's answers to them."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import SYNTHETIC, good
from error_cases import raises
from PIL import Image

from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation.runner import evaluate
from saccade.interop.lmms_eval import SaccadeModel, build_manifest, format_response
from saccade.interop.messages import build_task
from saccade.rewards.compose import score_each
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Episode,
    EpisodeStatus,
    Ledger,
    Media,
    MediaKind,
    Reply,
    Score,
    Task,
    Turn,
)
from saccade.utils.jsonl import read_jsonl


def user(*content):
    return [{"role": "user", "content": list(content)}]


def text(value):
    return {"type": "text", "text": value}


# ---- messages ------------------------------------------------------------------------------------------------------


def test_messages_become_a_task_with_its_media_in_order(tmp_path):
    image = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 30))
    messages = [{"role": "system", "content": "Be short."}]
    messages += user({"type": "video", "url": "file:///v/a.mp4"}, {"type": "image", "url": image}, text("Which?"))
    messages += user({"type": "image", "url": "b.jpg"}, text("<b>A</b> or B?"))
    task = build_task("mine/test/3", messages, tmp_path)
    assert (task.id, task.answer_type, task.question) == (
        "mine/test/3",
        AnswerType.OPEN,
        "Be short.\nWhich?\n<b>A</b> or B?",
    )
    assert [(media.kind, Path(media.path).suffix) for media in task.media] == [
        (MediaKind.VIDEO, ".mp4"),
        (MediaKind.IMAGE, ".png"),
        (MediaKind.IMAGE, ".jpg"),
    ]
    assert task.media[0].path == "/v/a.mp4"
    saved = Image.open(task.media[1].path)
    assert (saved.mode, saved.size) == ("RGB", (30, 10))
    assert np.array_equal(np.asarray(saved)[..., 0], np.asarray(image))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "CMYK", "1", "I;16"])
def test_image_of_any_mode_is_saved_once(tmp_path, mode):
    image = Image.new(mode, (8, 8))
    first, second = (build_task(name, user({"type": "image", "url": image}), tmp_path) for name in "ab")
    assert first.media == second.media
    assert len(list(tmp_path.iterdir())) == 1


def test_image_formats(tmp_path):
    pixels = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    content = buffer.getvalue()
    (tmp_path / "a b#.png").write_bytes(content)
    data_url = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [tmp_path / "a b#.png", f"file://{tmp_path}/a b#.png", f"file://{tmp_path}/a%20b%23.png", content, data_url]
    forms += [pixels, Image.fromarray(pixels), {"bytes": content, "path": "gone.png"}, {"image_url": {"url": data_url}}]
    forms += [{"path": str(tmp_path / "a b#.png"), "bytes": None}, bytearray(content)]
    for value in forms:
        (media,) = build_task("a", user({"type": "image", "url": value}), tmp_path / "kept").media
        assert np.array_equal(np.asarray(Image.open(media.path)), pixels), value
    assert len(list((tmp_path / "kept").iterdir())) <= 2  # the given bytes, and the pixels as encoded here


def test_video_formats(tmp_path):
    for value in (b"a clip", {"bytes": b"a clip"}, {"video": {"bytes": b"a clip"}}, "data:video/mp4;base64,YSBjbGlw"):
        (media,) = build_task("a", user({"type": "video", "url": value}), tmp_path).media
        assert (media.kind, Path(media.path).read_bytes(), Path(media.path).suffix) == (
            MediaKind.VIDEO,
            b"a clip",
            ".mp4",
        )
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    shown = build_task("a", user({"type": "video", "url": frames}), tmp_path).media
    assert [media.kind for media in shown] == [MediaKind.IMAGE] * 3
    assert [Image.open(media.path).getpixel((0, 0))[0] for media in shown] == [0, 1, 2]


@pytest.mark.parametrize(
    ("messages", "key", "value"),
    [
        (user({"type": "audio", "url": "a.wav"}), "type", "audio"),
        (user({"type": "video", "url": "a.mp4", "start_time": 3.0}), "start_time", 3.0),
        (user({"type": "video", "url": [1, 2]}), "image", 1),
        (user({"type": "video", "url": []}), "video", []),
        (user({"type": "video", "url": "https://x.org/a.mp4"}), "video", "https://x.org/a.mp4"),
        (user({"type": "image", "url": {"id": 3}}), "image", None),
        (user({"type": "image", "url": "data:text/plain,hi"}), "image", "data:text/plain,hi"),
        (user({"type": "image", "url": "data:image/png;base64,*"}), "image", "data:image/png;base64,*"),
        (user({"type": "image", "url": np.zeros((2, 2, 7))}), "image", (2, 2, 7)),
        (user({"type": "image", "url": None}), "image", None),
        ([*user(text("?")), {"role": "assistant", "content": "B"}], "role", "assistant"),
    ],
)
def test_unsupported_messages_raise(tmp_path, messages, key, value):
    with raises(DataError, key=key, value=value) as caught:
        build_task("mine/test/0", messages, tmp_path)
    assert str(caught.value).startswith("mine/test/0: ")


def test_unwritable_image_dir_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(RunError) as caught:
        build_task("a", user({"type": "image", "url": Image.new("RGB", (8, 8))}), tmp_path / "file" / "images")
    assert caught.value.key.startswith(str(tmp_path / "file" / "images"))


# ---- answers -------------------------------------------------------------------------------------------------------


def test_format_response():
    response = "<think>A man</think><answer>B</answer>"
    reply = Reply(text=response, blocks=(Block(kind=BlockKind.ANSWER, body="B", is_closed=True),))
    task = Task(id="a", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="")
    episode = Episode(
        task=task, environment="direct", ledger=Ledger(), turns=(Turn(reply=reply),), status=EpisodeStatus.ANSWERED
    )
    assert format_response(episode, full_reply=False) == "B"
    assert format_response(episode, full_reply=True) == response
    failed = Episode(
        task=task,
        environment="direct",
        ledger=Ledger(),
        turns=(Turn(reply=reply),),
        status=EpisodeStatus.ABORTED,
        error="no",
    )
    assert format_response(failed, full_reply=True) == format_response(failed, full_reply=False) == ""


@pytest.mark.slow
def test_episodes_equal_those_of_an_evaluation(tmp_path, tiny_folder):
    good("data", "synth", tmp_path / "dataset", *SYNTHETIC)
    settings = {"sampling.max_tokens": 8, "evaluation.temperature": 1, "evaluation.frame_budgets": "[4,8]"}
    runner = SaccadeModel(str(tiny_folder), "tiny/para_grpo", episode_dir=str(tmp_path / "episodes"), **settings)
    rows = [json.loads(line) for line in (tmp_path / "dataset" / "test" / "tasks.jsonl").read_text().splitlines()]
    clip = str(tmp_path / "dataset" / "test" / rows[0]["media"][0]["path"])
    tasks = [
        build_task(str(i), user({"type": "video", "url": clip}, text(rows[i]["question"])), tmp_path) for i in (0, 1)
    ]
    first = runner.run_episodes(tasks)
    again = runner.run_episodes(tasks[:1])  # the engine persists between calls
    assert [episode.task for episode in first] == tasks
    assert sorted(episode.frame_budget for episode in first) == [4, 8]
    assert all(episode.usage.visual_tokens for episode in first)
    assert first[0].ledger != again[0].ledger
    stored = read_jsonl(tmp_path / "episodes" / "episodes.jsonl", Episode)  # in the order of completion
    assert sorted(stored[:2], key=lambda episode: episode.task.id) == first
    assert stored[2:] == again

    components = runner.components
    work = evaluate(
        tasks,
        environments=components.environments,
        context=components.build_context(seed=components.recipe.seed),
        score_fn=score_each(lambda episode: Score(value=0.0)),
        settings=components.recipe.evaluation,
        results_path=tmp_path / "same.jsonl",
    )
    same = runner._event_loop.run(work)
    assert [episode.episode.ledger.sampled_tokens() for episode in same] == [
        episode.ledger.sampled_tokens() for episode in first
    ]

    missing = [
        Task(id=name, question="?", media=(Media(path="gone.mp4"),), answer_type=AnswerType.OPEN, ground_truth="")
        for name in "ab"
    ]
    with pytest.warns(UserWarning, match=r"gone\.mp4"):
        assert runner.run_episodes([tasks[0], missing[0]])[1].error
    with raises(RunError, key="episodes", value=2):
        runner.run_episodes(missing)
    runner.clean()


def test_unsupported_requests_raise():
    class Request:
        task_name = "mine"

    with raises(ConfigError, key="tasks", value="mine"):
        SaccadeModel.loglikelihood(None, [Request()])
    with raises(ConfigError, key="tasks", value="mine"):
        SaccadeModel.generate_until_multi_round(None, [Request()])


def test_missing_lmms_eval_raises(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lmms_eval", None)
    with raises(ConfigError, key="lmms-eval"):
        build_manifest()
