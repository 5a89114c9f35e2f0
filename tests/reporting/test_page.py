"""The page: self-contained, hostile text stays text, everything that happened can be read on it."""

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from page_cases import NASTY, call, comparison, decode, encode, example, pixels, reply

from saccade.ledger import Ledger, Picture
from saccade.types import End, Episode, Kind, Score, Scored, Task, ToolResult
from saccade.view.episodes import Album, call_of, pieces_of, talks, timeline, view_of, window
from saccade.view.page import choose, facts_of, read_metrics, render, write


class Reader(HTMLParser):
    """Collects tags, attributes and text; complains of tags that close nothing."""

    VOID = frozenset({"meta", "br", "path", "use", "rect", "circle", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(*scored, names=("after SFT", "after RL"), **more):
    given = {"title": "run", "facts": {"seed": 0}, "evaluations": {name: list(scored) for name in names}}
    given |= {"comparison": comparison(*names), "decode": decode, "pixels": pixels}
    return render(**{**given, **more})


def test_the_page_shows_what_happened():
    text = "".join(Reader(page(example())).text)
    for part in (
        "What?",
        "I look.",
        "crop_video(start_time=0.0, end_time=8.0",
        "start_time must be a number",
        "after SFT",
    ):
        assert part in text, part
    assert "pass@2 0.75" in text
    assert "of all 32 tasks" in text
    assert "holds zero" in text


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere():
    reader = Reader(page(example(), stages={"rl": [{"step": i, "reward": float(i)} for i in range(9)]}))
    assert not reader.open
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    for _, name, value in reader.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), value


@pytest.mark.parametrize("with_tokens", [True, False])
def test_hostile_text_stays_text_wherever_it_stands(with_tokens):
    scored = example(name=NASTY, think=NASTY, said=NASTY, answer=NASTY, question=NASTY, error=NASTY)
    text = page(
        scored,
        names=(NASTY, "b" + NASTY),
        title=NASTY,
        facts={NASTY: NASTY},
        recipe=NASTY,
        decode=decode if with_tokens else None,
        stages={NASTY: [{"step": 0, f"reward/{NASTY.encode('ascii', 'ignore').decode()}": 1.0}]},
    )
    text.encode()  # no half characters are left
    reader = Reader(text)
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "{{ 7*7 }}" in "".join(reader.text)
    assert "\x00" not in text
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert styles[0].count("alert") == 0


def test_every_sampled_token_stands_on_the_page_with_its_logprob():
    scored = example(think="grün 漢字 I look.")
    for turn, segments in zip(scored.episode.turns, talks(scored.episode.ledger), strict=True):
        pieces = pieces_of(turn.reply, segments, decode)
        assert "".join(piece["text"] for piece in pieces) == turn.reply.text
        sampled = [piece for piece in pieces if piece["origin"] == "sampled"]
        assert all(piece["note"] for piece in sampled)
        assert all(0 <= piece["tint"] <= 1 for piece in sampled)
        assert {piece["origin"] for piece in pieces if piece["note"] is None} == {"forced"}


def test_pieces_know_the_block_they_stand_in():
    turn = reply("I see.", answer="red")
    ledger = (
        Ledger()
        .force(encode("<think>"))
        .act(encode(turn.text[7:]), logprobs=(-0.1,) * len(encode(turn.text[7:])), version=0)
    )
    kinds = {}
    for piece in pieces_of(turn, ledger.segments, decode):
        kinds[piece["kind"]] = kinds.get(piece["kind"], "") + piece["text"]
    assert kinds == {"tag": "<think></think><answer></answer>", "think": "I see.", "answer": "red"}


def test_without_a_decoder_replies_are_shown_as_text():
    pieces = pieces_of(reply("I see.", answer="red"), (), None)
    assert [(piece["text"], piece["origin"], piece["kind"]) for piece in pieces][:2] == [
        ("<think>", "forced", "tag"),
        ("I see.", "sampled", "think"),
    ]


def test_the_time_line_places_frames_calls_and_events():
    found = timeline(example().episode)
    assert found["seconds"] == 64.0
    assert found["ticks"] == [12.5, 37.5, 62.5, 87.5]
    assert [(each["left"], each["width"], each["ok"]) for each in found["calls"]] == [(0.0, 12.5, True)]
    assert [(each["left"], each["colour"]) for each in found["events"]] == [(6.25, "red"), (31.25, "blue")]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"start_time": None},
        {"start_time": "a", "end_time": 1},
        {"start_time": [1], "end_time": 2},
        {"start_time": 9, "end_time": 3},
        {"start_time": float("nan"), "end_time": 3},
        {"0": 1},
    ],
)
def test_a_window_that_makes_no_sense_is_not_drawn(arguments):
    assert window(arguments) is None
    assert window({"0": 3, "end_time": 9.5}) == (3.0, 9.5)


@pytest.mark.slow
@pytest.mark.parametrize("extras", [{}, {"events": "none"}, {"events": [[1], ["a", 2], None]}, {"seconds": -1}])
def test_strange_extras_do_no_harm(extras):
    task = Task(id="t", question="?", media=(), kind=Kind.GROUNDING, gold=(3.0, 5.0), extras=extras)
    episode = Episode(task=task, agent="a", ledger=Ledger(), turns=(), end=End.ABORTED, error="the engine stopped")
    assert timeline(episode)["gold"] == {"left": 60.0, "width": 40.0}
    assert "the engine stopped" in page(Scored(episode=episode, score=Score(value=0.0, parts={})))


def test_an_event_name_can_not_leave_its_style():
    task = Task(
        id="t", question="?", media=(), kind=Kind.OPEN, gold="x", extras={"events": [[1, 2, "red;position:fixed"]]}
    )
    episode = Episode(task=task, agent="a", ledger=Ledger(), turns=(), end=End.ABORTED)
    assert timeline(episode)["events"][0]["colour"] is None


def test_pictures_are_kept_once_and_missing_ones_are_said():
    text = page(example(), example(name="w-2"))
    assert text.count("data:image/jpeg") == 6  # four frames of the overview and two of the window, for both episodes
    gone = page(example(path="gone.mp4"))
    assert "gone.mp4 is gone" in gone
    assert "data:image" not in gone.split("<body>")[0].replace("img-src data:", "")


def test_a_page_of_real_length_stays_small():
    text = page(*(example(name=f"w-{i}", think="I look. " * 40) for i in range(30)))
    assert text.count('class="episode"') == 12
    assert len(text) < 2_000_000


def test_examples_are_of_every_sort():
    right, wrong = (example(name=f"{accuracy}", accuracy=accuracy) for accuracy in (1.0, 0.0))
    broken = example(name="broken", error="the engine stopped")
    chosen = choose([*[right] * 5, wrong, broken], 3)
    assert {each.episode.task.id for each in chosen} == {"1.0", "0.0", "broken"}
    assert choose([], 3) == []


def test_other_evaluations_of_the_same_task_stand_beside_an_example():
    text = page(example(), evaluations={"after SFT": [example(answer="blue", accuracy=0.0)], "after RL": [example()]})
    assert re.search(r"after SFT</span> blue", text)


def test_a_call_stands_with_what_it_showed():
    picture = Picture(path="a.png", digest="a", time=None, width=32, height=16, box=(8, 0, 16, 4))
    album = Album(pixels=lambda each: np.full((each.height, each.width, 3), 7, np.uint8))
    given = call(left=0.5), ToolResult(pictures=(picture,), executed=True)
    found = call_of(*given, (), album, None)
    assert [frame["size"] for frame in found["frames"]] == ["32×16"]
    assert list(album.held) == [picture.key]
    assert (found["said"], found["child"]) == ("(a picture)", None)


def test_a_call_that_failed_and_one_that_was_not_run_are_told_apart():
    turn = view_of(example(), Album(), decode)["turns"][0]
    assert [each["ok"] for each in turn["calls"]] == [True, False]
    assert call(start_time=1).ok


@pytest.mark.slow
def test_a_run_folder_becomes_a_page(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")
    (tmp_path / "versions.json").write_text(json.dumps([{"seed": 0, "torch": "2.9"}, {"seed": 0, "torch": "2.10"}]))
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "sft.json").write_text('{"seconds": 302}')
    for stage in ("rl", "sft"):
        (tmp_path / stage).mkdir()
        rows = [
            {"step": step, "loss": 1.0, "reward": 0.5, "seconds/train": 30.0, "seconds/draw": 1} for step in (0, 1, 1)
        ]
        lines = [json.dumps(row) for row in rows]
        (tmp_path / stage / "metrics.jsonl").write_text("\n".join([*lines, '{"torn']))
    path = write(tmp_path, evaluations={}, comparison={"summaries": {}, "changes": []})
    text = html.unescape(path.read_text())
    assert path.name == "report.html"
    assert text.index("Supervised cold start") < text.index("Reinforcement learning")
    times = {"sft, wall time": "5 min 2 s", "rl, wall time": "1 min 2 s"}  # by its mark, and by its steps
    assert facts_of(tmp_path) == {"seed": 0, "torch": "2.10", "starts": 2, **times}
    assert [len(rows) for rows in read_metrics(tmp_path).values()] == [2, 2]


def test_one_metrics_file_with_stages_is_read_too(tmp_path):
    lines = [{"stage": "rl", "step": 1, "reward": 0.5}, {"stage": "sft", "step": 0, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_metrics(tmp_path)) == ["sft", "rl"]


def test_an_empty_folder_is_an_empty_page(tmp_path):
    assert "<h1>" in write(tmp_path, evaluations={}, comparison={"summaries": {}, "changes": []}).read_text()
