"""The run page: self-contained, with hostile text escaped and every event of an episode shown."""

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from jinja2 import Environment
from page_cases import NASTY, call, comparison, decode, encode, example, load_pixels, reply

from saccade.config.load import dump_recipe
from saccade.config.schema import Recipe
from saccade.evaluation.compare import Evaluation
from saccade.ledger import ImageRef, Ledger
from saccade.metrics.looking import parse_window
from saccade.reporting.episode_view import (
    EpisodeViewer,
    build_timeline,
    build_token_pieces,
    group_reply_segments,
)
from saccade.reporting.examples import choose_examples, choose_examples_of_runs
from saccade.reporting.report import Report, render_template
from saccade.reporting.run_report import (
    build_curves,
    build_results,
    collect_metadata,
    read_metrics,
    render_episode_page,
    render_run_page,
    write_report,
)
from saccade.types import AnswerType, Episode, EpisodeStatus, Score, ScoredEpisode, Task, ToolResult


class Reader(HTMLParser):
    """Collect tags, attributes and text; fail on unmatched closing tags."""

    VOID = frozenset({"input", "meta", "br", "path", "use", "rect", "circle", "img", "link"})

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
    report = Report(
        kind="run",
        title=more.pop("title", "run"),
        metadata=more.pop("metadata", {"seed": 0}),
        sections=(*build_results(comparison(*names)), *build_curves(more.pop("stages", {}))),
    )
    answered = more.pop("evaluations", dict.fromkeys(names, scored))
    evaluations = {name: Evaluation(scored=items) for name, items in answered.items()}
    examples = choose_examples_of_runs({"": evaluations}, {"": ()}, weights={"": more.pop("weights", {})})
    decoders = {"": more.pop("decode", decode)}
    return render_run_page(report, examples, **{"decoders": decoders, "load_pixels": load_pixels, **more})


def test_page_shows_the_episodes_events():
    text = "".join(Reader(page(example())).text)
    for part in (
        "What?",
        "I look.",
        "crop_video(start_time=0.0, end_time=8.0",
        "start_time must be a number",  # the result of a call
        "after SFT",
    ):
        assert part in text, part
    assert "pass@20.75" in re.sub(r"\s", "", text)
    assert "of all 32" in text


def test_page_is_well_formed_and_self_contained():
    reader = Reader(page(example(), stages={"rl": [{"step": i, "reward": float(i)} for i in range(9)]}))
    assert not reader.open
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    for _, name, value in reader.attributes:
        assert not name.startswith("on"), name
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), value


def test_contents_lead_to_the_sections():
    reader = Reader(page(example(), stages={"rl": [{"step": 1, "reward": 1.0}]}))
    targets = [value for _, name, value in reader.attributes if name == "href" and value.startswith("#")]
    ids = {value for _, name, value in reader.attributes if name == "id"}
    sections = [value for tag, name, value in reader.attributes if tag == "section" and name == "id"]
    assert [target[1:] for target in targets if target.startswith(("#section", "#episodes"))] == sections
    assert len(sections) >= 3
    assert set(sections) <= ids


def test_filters_show_their_episodes():
    items = [example(name="a"), example(name="b", accuracy=0.0), example(name="c", error="lost")]
    text = page(*items, names=("x",))
    filters = dict(re.findall(r'<label for="filter-(\d+)">([a-z ]+) \d+</label>', text))
    assert set(filters.values()) == {"right", "wrong", "failed"}  # each has a call: that filter would show all
    shown = {}
    for classes, article in re.findall(r'<article class="episode([^"]*)"(.*?)</article>', text, re.DOTALL):
        task = re.search(r'class="id">(\w+)<', article)[1]
        shown[task] = {filters[number] for number in re.findall(r"has-(\d+)", classes)}
    assert shown == {"a": {"right"}, "b": {"wrong"}, "c": {"failed"}}
    assert all(f"#filter-{number}:checked~.episode:not(.has-{number})" in text for number in filters)


def test_parts_of_the_score_have_their_weights():
    text = "".join(Reader(page(example(), weights={"accuracy": 0.5})).text)
    assert re.search(r"accuracy 1\.00 × 0\.5", text)


def test_every_cell_has_its_label_for_narrow_screens():
    cells = re.findall(r"<td( [^>]*)?>", page(example()))
    labeled = [cell for cell in cells if "data-label" in cell]
    assert labeled
    assert len(labeled) == len([cell for cell in cells if "wide" not in cell])


def test_an_ungraded_episode_has_no_verdict():
    text = render_episode_page(example().episode, decode=decode, load_pixels=load_pixels)
    reader = Reader(text)
    assert "crop_video(start_time=0.0" in "".join(reader.text)
    assert "ground truth" not in "".join(reader.text)
    assert 'class="mark' not in text


@pytest.mark.slow
@pytest.mark.parametrize("with_tokens", [True, False])
def test_hostile_text_is_escaped_everywhere(with_tokens):
    scored = example(name=NASTY, think=NASTY, response=NASTY, answer=NASTY, question=NASTY, error=NASTY)
    text = page(
        scored,
        names=(NASTY, "b" + NASTY),
        title=NASTY,
        metadata={NASTY: NASTY},
        recipe=NASTY,
        decode=decode if with_tokens else None,
        stages={NASTY: [{"step": 0, f"reward/{NASTY.encode('ascii', 'ignore').decode()}": 1.0}]},
    )
    text.encode()  # no lone surrogates
    reader = Reader(text)
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]
    assert "{{ 7*7 }}" in "".join(reader.text)
    assert "\x00" not in text
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert styles[0].count("alert") == 0


def test_every_sampled_token_has_its_logprob():
    scored = example(think="grün 漢字 I look.")
    for turn, segments in zip(scored.episode.turns, group_reply_segments(scored.episode.ledger), strict=True):
        pieces = build_token_pieces(turn.reply, segments, decode)
        assert "".join(piece["text"] for piece in pieces) == turn.reply.text
        sampled = [piece for piece in pieces if piece["origin"] == "sampled"]
        assert all(piece["note"] for piece in sampled)
        assert all(0 <= piece["tint"] <= 1 for piece in sampled)
        assert {piece["origin"] for piece in pieces if piece["note"] is None} == {"prefill"}


def test_pieces_have_their_block_kind():
    turn = reply("I see.", answer="red")
    ledger = (
        Ledger()
        .prefill(encode("<think>"))
        .append_completion(encode(turn.text[7:]), logprobs=(-0.1,) * len(encode(turn.text[7:])), version=0)
    )
    kinds = {}
    for piece in build_token_pieces(turn, ledger.segments, decode):
        kinds[piece["kind"]] = kinds.get(piece["kind"], "") + piece["text"]
    assert kinds == {"tag": "<think></think><answer></answer>", "think": "I see.", "answer": "red"}


def test_without_decoder_replies_are_shown_as_text():
    pieces = build_token_pieces(reply("I see.", answer="red"), (), None)
    assert [(piece["text"], piece["origin"], piece["kind"]) for piece in pieces][:2] == [
        ("<think>", "prefill", "tag"),
        ("I see.", "sampled", "think"),
    ]


def test_timeline_positions():
    found = build_timeline(example().episode)
    assert found["seconds"] == 64.0
    assert found["frames"] == [8.0, 24.0, 40.0, 56.0]
    assert [(window["start"], window["end"], window["ok"]) for window in found["windows"]] == [(0.0, 8.0, True)]
    assert [(event["start"], event["color"]) for event in found["events"]] == [(4.0, "red"), (20.0, "blue")]
    text = page(example())
    assert re.findall(r'class="tick" style="left:([\d.]+)%"', text) == ["12.5", "37.5", "62.5", "87.5"]
    assert '<i class="call" style="left:0.0%;width:12.5%">' in text
    assert re.findall(r'class="event" style="left:([\d.]+)%', text) == ["6.25", "31.25"]


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
def test_invalid_window_is_not_drawn(arguments):
    assert parse_window(arguments) is None
    assert parse_window({"0": 3, "end_time": 9.5}) == (3.0, 9.5)


@pytest.mark.slow
@pytest.mark.parametrize("extras", [{}, {"events": "none"}, {"events": [[1], ["a", 2], None]}, {"seconds": -1}])
def test_invalid_extras_are_ignored(extras):
    task = Task(
        id="t", question="?", media=(), answer_type=AnswerType.GROUNDING, ground_truth=(3.0, 5.0), extras=extras
    )
    episode = Episode(
        task=task, environment="a", ledger=Ledger(), turns=(), status=EpisodeStatus.ABORTED, error="the engine stopped"
    )
    assert build_timeline(episode)["ground_truth"] == (3.0, 5.0)
    text = page(ScoredEpisode(episode=episode, score=Score(value=0.0, parts={})))
    assert "left:60.0%;width:40.0%" in text
    assert "the engine stopped" in text


def test_event_name_cannot_inject_css():
    task = Task(
        id="t",
        question="?",
        media=(),
        answer_type=AnswerType.OPEN,
        ground_truth="x",
        extras={"events": [[1, 2, "red;position:fixed"]]},
    )
    episode = Episode(task=task, environment="a", ledger=Ledger(), turns=(), status=EpisodeStatus.ABORTED)
    assert build_timeline(episode)["events"][0]["color"] is None


def test_images_are_embedded_once_and_missing_ones_reported():
    text = page(example(), example(name="w-2"))
    assert text.count("data:image/jpeg") == 6  # four frames of the overview and two of the window, for both episodes
    gone = page(example(path="gone.mp4"))
    assert "gone.mp4" in gone
    assert "data:image" not in gone.split("<body>")[0].replace("img-src data:", "")


def test_long_page_stays_small():
    text = page(*(example(name=f"w-{i}", think="I look. " * 40) for i in range(30)))
    assert text.count('class="episode"') == 12
    assert len(text) < 2_000_000


def test_examples_cover_every_category():
    right, wrong = (example(name=f"{accuracy}", accuracy=accuracy) for accuracy in (1.0, 0.0))
    broken = example(name="broken", error="the engine stopped")
    chosen = choose_examples([*[right] * 5, wrong, broken], 3)
    assert {scored.episode.task.id for scored in chosen} == {"1.0", "0.0", "broken"}
    assert choose_examples([], 3) == []


def test_example_shows_other_evaluations_of_its_task():
    text = page(example(), evaluations={"after SFT": [example(answer="blue", accuracy=0.0)], "after RL": [example()]})
    assert re.search(r"after SFT</span> blue", text)


def test_call_view_has_the_shown_images():
    image = ImageRef(path="a.png", digest="a", time=None, width=32, height=16, box=(8, 0, 16, 4))
    viewer = EpisodeViewer(load_pixels=lambda image: np.full((image.height, image.width, 3), 7, np.uint8))
    given = call(left=0.5), ToolResult(images=(image,), was_executed=True)
    view = viewer.build_call(*given, ())
    assert [frame["size"] for frame in view["frames"]] == ["32×16"]
    assert list(viewer.thumbnails) == [image.key]
    assert (view["result"], view["child"]) == ("(an image)", None)


def test_failed_call_is_marked():
    turn = EpisodeViewer(decode).build_view(example())["turns"][0]
    assert [shown_call["ok"] for shown_call in turn["calls"]] == [True, False]
    assert call(start_time=1).ok


@pytest.mark.slow
def test_page_of_a_run_folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(Recipe()))
    (tmp_path / "invocations.json").write_text(json.dumps([{"seed": 0, "torch": "2.9"}, {"seed": 0, "torch": "2.10"}]))
    (tmp_path / "finished_stages").mkdir()
    (tmp_path / "finished_stages" / "sft.json").write_text('{"seconds": 302}')
    values = {"loss": 1.0, "reward": 0.5, "seconds/train": 30.0, "seconds/draw": 1}
    rows = [{"stage": stage, "step": step, **values} for stage in ("rl", "sft") for step in (0, 1, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), '{"torn']))
    path = write_report(tmp_path, evaluations={})
    text = html.unescape(path.read_text())
    assert path.name == "report.html"
    assert text.index("Supervised cold start") < text.index("Reinforcement learning")
    times = {"sft, wall time": "5 min 2 s", "rl, wall time": "1 min 2 s"}  # by its status file, and by its steps
    assert collect_metadata(tmp_path) == {"seed": 0, "torch": "2.10", "invocations": 2, **times}
    assert {stage: len(rows) for stage, rows in read_metrics(tmp_path).items()} == {"sft": 2, "rl": 2}


def test_empty_folder_gives_an_empty_page(tmp_path):
    assert "<h1>" in write_report(tmp_path, evaluations={}).read_text()


def test_templates_are_compiled_once(monkeypatch):
    compiled, compile_source = [], Environment.compile

    def compile_counted(environment, source, *given):
        compiled.append(source)
        return compile_source(environment, source, *given)

    monkeypatch.setattr(Environment, "compile", compile_counted)
    assert len({render_template("report.html.j2", report=Report(kind="a", title="b")) for _ in range(3)}) == 1
    assert len(compiled) == len(set(compiled))
