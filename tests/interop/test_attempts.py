"""Another system's questions as tasks, and what an agent answers to them."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import WORLD, good
from PIL import Image

from saccade.data.record import read_jsonl
from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation.run import evaluate
from saccade.interop.attempts import Attempts, task_of
from saccade.interop.lmms_eval import Asked, manifest, text_of
from saccade.types import Block, BlockKind, End, Episode, Kind, Ledger, Media, MediaKind, Reply, Score, Task, Turn


def user(*content):
    return [{"role": "user", "content": list(content)}]


def text(said):
    return {"type": "text", "text": said}


# ---- messages ------------------------------------------------------------------------------------------------------


def test_messages_become_a_task_with_its_media_in_order(tmp_path):
    picture = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 30))
    messages = [{"role": "system", "content": "Be short."}]
    messages += user({"type": "video", "url": "file:///v/a.mp4"}, {"type": "image", "url": picture}, text("Which?"))
    messages += user({"type": "image", "url": "b.jpg"}, text("<b>A</b> or B?"))
    task = task_of("mine/test/3", messages, tmp_path)
    assert (task.id, task.kind, task.question) == ("mine/test/3", Kind.OPEN, "Be short.\nWhich?\n<b>A</b> or B?")
    assert [(media.kind, Path(media.path).suffix) for media in task.media] == [
        (MediaKind.VIDEO, ".mp4"),
        (MediaKind.IMAGE, ".png"),
        (MediaKind.IMAGE, ".jpg"),
    ]
    assert task.media[0].path == "/v/a.mp4"
    kept = Image.open(task.media[1].path)
    assert (kept.mode, kept.size) == ("RGB", (30, 10))
    assert np.array_equal(np.asarray(kept)[..., 0], np.asarray(picture))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "CMYK", "1", "I;16"])
def test_a_picture_of_any_mode_is_kept_once(tmp_path, mode):
    picture = Image.new(mode, (8, 8))
    first, second = (task_of(name, user({"type": "image", "url": picture}), tmp_path) for name in "ab")
    assert first.media == second.media
    assert len(list(tmp_path.iterdir())) == 1


def test_a_picture_comes_in_any_form_in_which_it_is_handed_over(tmp_path):
    pixels = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    content = buffer.getvalue()
    (tmp_path / "a b#.png").write_bytes(content)
    address = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [tmp_path / "a b#.png", f"file://{tmp_path}/a b#.png", f"file://{tmp_path}/a%20b%23.png", content, address]
    forms += [pixels, Image.fromarray(pixels), {"bytes": content, "path": "gone.png"}, {"image_url": {"url": address}}]
    forms += [{"path": str(tmp_path / "a b#.png"), "bytes": None}, bytearray(content)]
    for held in forms:
        (media,) = task_of("a", user({"type": "image", "url": held}), tmp_path / "kept").media
        assert np.array_equal(np.asarray(Image.open(media.path)), pixels), held
    assert len(list((tmp_path / "kept").iterdir())) <= 2  # their bytes, and pixels as they were written here


def test_a_video_comes_as_a_file_as_content_or_as_its_frames(tmp_path):
    for held in (b"a film", {"bytes": b"a film"}, {"video": {"bytes": b"a film"}}, "data:video/mp4;base64,YSBmaWxt"):
        (media,) = task_of("a", user({"type": "video", "url": held}), tmp_path).media
        assert (media.kind, Path(media.path).read_bytes(), Path(media.path).suffix) == (
            MediaKind.VIDEO,
            b"a film",
            ".mp4",
        )
    frames = [Image.new("RGB", (8, 8), (at, 0, 0)) for at in range(3)]
    shown = task_of("a", user({"type": "video", "url": frames}), tmp_path).media
    assert [media.kind for media in shown] == [MediaKind.IMAGE] * 3
    assert [Image.open(media.path).getpixel((0, 0))[0] for media in shown] == [0, 1, 2]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (user({"type": "audio", "url": "a.wav"}), "takes texts, pictures and videos, not 'audio'"),
        (user({"type": "video", "url": "a.mp4", "start_time": 3.0}), "takes whole videos"),
        (user({"type": "video", "url": [1, 2]}), "the image is a int; an agent takes the path of a file"),
        (user({"type": "video", "url": []}), "the video is a list; an agent takes the path of a file"),
        (user({"type": "video", "url": "https://x.org/a.mp4"}), "the video is at https://x.org/a.mp4; download it"),
        (user({"type": "image", "url": {"id": 3}}), "the image is a NoneType"),
        (user({"type": "image", "url": "data:text/plain,hi"}), "'data:text/plain,hi', which is no data address of one"),
        (user({"type": "image", "url": "data:image/png;base64,*"}), "the data address of the image can't be read"),
        (user({"type": "image", "url": np.zeros((2, 2, 7))}), "the array is no picture; give height, width"),
        (user({"type": "image", "url": None}), "the image is a NoneType"),
        ([*user(text("?")), {"role": "assistant", "content": "B"}], "no messages of the role 'assistant'"),
    ],
)
def test_what_no_agent_takes_is_said(tmp_path, messages, sentence):
    with pytest.raises(DataError, match=f"^mine/test/0: .*{sentence}"):
        task_of("mine/test/0", messages, tmp_path)


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written"):
        task_of("a", user({"type": "image", "url": Image.new("RGB", (8, 8))}), tmp_path / "file" / "pictures")


# ---- answers -------------------------------------------------------------------------------------------------------


def test_the_final_answer_is_marked_and_broken_episodes_say_nothing():
    said = "<think>A man</think><answer>B</answer>"
    reply = Reply(text=said, blocks=(Block(kind=BlockKind.ANSWER, body="B", closed=True),))
    task = Task(id="a", question="?", media=(), kind=Kind.OPEN, gold="")
    episode = Episode(task=task, agent="direct", ledger=Ledger(), turns=(Turn(reply=reply),), end=End.ANSWERED)
    assert text_of(episode, whole=False) == "B"
    assert text_of(episode, whole=True) == said
    broken = Episode(
        task=task, agent="direct", ledger=Ledger(), turns=(Turn(reply=reply),), end=End.ABORTED, error="no"
    )
    assert text_of(broken, whole=True) == text_of(broken, whole=False) == ""


@pytest.mark.slow
def test_the_attempts_are_those_of_an_evaluation(tmp_path, tiny_folder):
    good("data", "world", tmp_path / "world", *WORLD)
    settings = ["sampling.max_tokens=8", "evaluation.temperature=1", "evaluation.frames=[4,8]"]
    attempts = Attempts(Path(tiny_folder), folder=tmp_path / "kept", recipe="tiny/para_grpo", settings=settings)
    rows = [json.loads(line) for line in (tmp_path / "world" / "test" / "tasks.jsonl").read_text().splitlines()]
    clip = str(tmp_path / "world" / "test" / rows[0]["media"][0]["path"])
    tasks = [
        task_of(str(at), user({"type": "video", "url": clip}, text(rows[at]["question"])), tmp_path) for at in (0, 1)
    ]
    first = attempts.episodes(tasks)
    again = attempts.episodes(tasks[:1])  # the engine goes on from question to question
    assert [each.task for each in first] == tasks
    assert sorted(each.frames for each in first) == [4, 8]
    assert all(each.usage.visual_tokens for each in first)
    assert first[0].ledger != again[0].ledger
    kept = read_jsonl(tmp_path / "kept" / "episodes.jsonl", Episode)  # in the order in which they ended
    assert sorted(kept[:2], key=lambda each: each.task.id) == first
    assert kept[2:] == again

    stage = attempts.stage
    work = evaluate(
        tasks,
        agent=stage.agent,
        base=stage.context(seed=stage.recipe.seed),
        score=lambda episode, task: Score(value=0.0, parts={}),
        settings=stage.recipe.evaluation,
        path=tmp_path / "same.jsonl",
    )
    same = attempts._loop.run(work)
    assert [each.episode.ledger.sampled_tokens() for each in same] == [each.ledger.sampled_tokens() for each in first]

    gone = [Task(id=name, question="?", media=(Media(path="gone.mp4"),), kind=Kind.OPEN, gold="") for name in "ab"]
    with pytest.warns(UserWarning, match=r"1 of 2 attempts broke \(gone\.mp4"):
        assert attempts.episodes([tasks[0], gone[0]])[1].error
    with pytest.raises(RunError, match=r"every attempt broke, the first with: gone\.mp4"):
        attempts.episodes(gone)
    attempts.close()


def test_what_lmms_eval_may_not_ask_is_said():
    class Request:
        task_name = "mine"

    with pytest.raises(ConfigError, match="mine asks how likely answers are"):
        Asked.loglikelihood(None, [Request()])
    with pytest.raises(ConfigError, match="mine asks in several rounds"):
        Asked.generate_until_multi_round(None, [Request()])


def test_without_lmms_eval_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lmms_eval", None)
    with pytest.raises(ConfigError, match="lmms-eval is not installed here; `pip install lmms-eval`"):
        manifest()
