"""Rows of every published format are imported as tasks and demonstrations, or are typed errors."""

import json
import os
from pathlib import Path

import pytest
from commands import fail, good
from error_cases import raises
from published_rows import EXAMPLES

from saccade import plugins
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.source_row import SourceRow, read_rows
from saccade.data.task_builder import build_task, find_option_letter, split_options
from saccade.errors import ConfigError, DataError
from saccade.rewards.answer_types.grounding import GroundingAnswer
from saccade.types import AnswerType, MediaKind


def import_row(name, values, **settings):
    row = SourceRow(file=Path("made.jsonl"), number=1, values=values)
    return list(plugins.resolve("data.importers", name, settings)(row))


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- formats -------------------------------------------------------------------------------------------------------


def test_paravt_rl_row():
    (task,) = import_row("paravt_rl", EXAMPLES["paravt_rl"])
    assert (task.answer_type, task.ground_truth, task.options) == (AnswerType.CHOICE, "B", ("red", "blue"))
    assert task.question == "Which colour is shown?"
    assert task.media[0].path == "longvt_source/made/a.mp4"
    assert task.extras == {"question_type": "mcq", "note": "x", "system": "Use the tool."}


@pytest.mark.parametrize(
    ("answer", "span"),
    [
        ("[3.5, 9]", (3.5, 9.0)),
        ([3.5, 9], (3.5, 9.0)),
        ("00:10 - 01:00", (10.0, 60.0)),
        ("3.0s to 4s", (3.0, 4.0)),
        ("00:00:01,500 --> 00:00:03,200", (1.5, 3.2)),
        ("00:01,00:03", (1.0, 3.0)),
        ({"start": 1, "end": 2}, (1.0, 2.0)),
    ],
)
def test_temporal_grounding_answers_are_spans(answer, span):
    info = {"answer": answer, "question_type": "tvg"}
    (task,) = import_row("paravt_rl", {**EXAMPLES["paravt_rl"], "extra_info": info})
    assert (task.answer_type, task.ground_truth, task.options) == (AnswerType.GROUNDING, span, ())


def test_a_text_called_question_is_no_question_type():
    """Metrics, baselines and subsets read `extras.question` as the type."""
    info = {**json.loads(EXAMPLES["paravt_rl"]["extra_info"]), "question": "Which colour is shown?"}
    (task,) = import_row("paravt_rl", {**EXAMPLES["paravt_rl"], "extra_info": info})
    assert "question" not in task.extras


def test_open_question_keeps_its_options_in_the_text():
    info = {"answer": "blue", "question_type": "oe"}
    (task,) = import_row("paravt_rl", {**EXAMPLES["paravt_rl"], "extra_info": info})
    assert (task.answer_type, task.ground_truth) == (AnswerType.OPEN, "blue")
    assert "A. red" in task.question


def test_number_of_files_must_match_placeholders():
    with raises(DataError, key="videos", value=2):
        import_row("paravt_rl", {**EXAMPLES["paravt_rl"], "videos": [{"video": "a.mp4"}, {"video": "b.mp4"}]})


def test_paravt_sft_row():
    (demo,) = import_row("paravt_sft", EXAMPLES["paravt_sft"])
    assert demo.task.media[0].path == "selfqa/a.mp4"
    assert demo.task.ground_truth == "blue"
    assert len(demo.replies) == 2
    assert demo.children == (("blue at 2",),)
    as_json = {"messages": json.dumps(EXAMPLES["paravt_sft"]["messages"])}
    assert import_row("paravt_sft", as_json) == [demo]


def test_tool_calls_field_becomes_text():
    messages = json.loads(json.dumps(EXAMPLES["paravt_sft"]["messages"]))
    call = {"type": "function", "function": {"name": "crop_video", "arguments": '{"start_time": 1, "end_time": 3}'}}
    messages[2] = {"role": "assistant", "content": "<think>Look.</think>", "tool_calls": [call, call]}
    messages[3:4] = [{"role": "tool", "content": "red at 1"}, {"role": "tool", "content": "blue at 2"}]
    (demo,) = import_row("paravt_sft", {"messages": messages})
    assert demo.replies[0].count("<tool_call>") == 2
    assert demo.children == (("red at 1", "blue at 2"),)
    messages.pop(3)
    with raises(DataError, key="messages"):
        import_row("paravt_sft", {"messages": messages})


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"name": "crop_video", "arguments": {"image": b"x"}}, "function.arguments.image"),
        ({"name": "crop_video", "arguments": "{"}, "function.arguments"),
        ({"arguments": {}}, "function.name"),
    ],
)
def test_tool_calls_that_are_no_json_are_errors(call, field):
    messages = json.loads(json.dumps(EXAMPLES["paravt_sft"]["messages"]))
    messages[2] = {"role": "assistant", "content": "<think>Look.</think>", "tool_calls": [call]}
    with raises(DataError, key=f"messages.2.tool_calls.0.{field}") as caught:
        import_row("paravt_sft", {"messages": messages})
    assert str(caught.value).startswith("made.jsonl, row 1, ")


def test_pyvision_rows():
    (task,) = import_row("pyvision_rl", EXAMPLES["pyvision_rl"])
    assert (task.question, task.answer_type, task.ground_truth) == ("What is held?", AnswerType.OPEN, "a glove")
    assert task.media[0].kind is MediaKind.IMAGE
    assert task.extras["data_source"] == "deepeyes"
    numeric = {"data_source": "vsi_numerical", "reward_model": {"ground_truth": "3.5"}}
    (task,) = import_row("pyvision_rl", {**EXAMPLES["pyvision_rl"], **numeric})
    assert (task.answer_type, task.ground_truth) == (AnswerType.NUMBER, 3.5)
    (task,) = import_row("pyvision_val", EXAMPLES["pyvision_val"])
    assert (task.answer_type, task.ground_truth, task.options) == (AnswerType.CHOICE, "A", ("a glove", "a rope"))
    assert task.media[0].kind is MediaKind.VIDEO


def test_conversation_gives_a_demonstration_per_question():
    first, second = import_row("llava", EXAMPLES["llava"])
    assert first.replies == ("<answer>A dog.</answer>",)
    assert second.task.question == "Asked before: What is it?\nAnswered: A dog.\nWhich colour?"
    assert second.task.media == first.task.media
    assert first.task.id != second.task.id


def test_python_code_has_no_children():
    messages = [
        {"from": "human", "value": "<image>\nHow many?"},
        {"from": "gpt", "value": "<code>\n```python\nprint(3)\n```\n</code>"},
        {"from": "human", "value": "<interpreter>\n3\n</interpreter>"},
        {"from": "gpt", "value": "<answer>\n\\boxed{3}\n</answer>"},
    ]
    (demo,) = import_row("llava", {"image": "a.png", "conversations": messages})
    assert (len(demo.replies), demo.children, demo.task.ground_truth) == (2, (), "3")


FIGURE_ROW = {
    "messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": "<code>\n```python\nplt.show()\n```\n</code>"},
        {"role": "observation", "content": "<interpreter>Text Result:\n3\nImage Result:\n<image><image></interpreter>"},
        {"role": "assistant", "content": "<code>\n```python\n1/0\n```\n</code>"},
        {"role": "observation", "content": "<interpreter>Execution error: division by zero</interpreter>"},
        {"role": "assistant", "content": "<answer>3</answer>"},
    ],
    "images": ["a.png", "b.png", "c.png"],
    "env_name": "gym",
}


def test_images_belong_to_the_messages_that_show_them():
    (demo,) = import_row("pyvision_sft", FIGURE_ROW)
    assert [media.path for media in demo.task.media] == ["a.png"]
    (first,), (second,) = demo.results
    assert (first.text, [image.path for image in first.images], first.error) == ("3", ["b.png", "c.png"], None)
    assert (second.text, second.images, second.error) == ("", (), "Execution error: division by zero")
    assert demo.task.question == "How many?"
    (rerun,) = import_row("pyvision_sft", FIGURE_ROW, rerun_code=True)
    assert (rerun.results, rerun.task) == ((), demo.task)
    with raises(DataError, key="messages"):
        import_row("pyvision_sft", {**FIGURE_ROW, "images": ["a.png", "b.png"]})


def test_recorded_results_survive_files(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", FIGURE_ROW)
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"")
    for suffix in (".jsonl", ".parquet"):
        good("data", "import", "pyvision_sft", source, "--out", tmp_path / "out" / f"d{suffix}")
    (demo,) = load_demonstrations(tmp_path / "out/d.jsonl")
    assert load_demonstrations(tmp_path / "out/d.parquet") == [demo]
    assert all(os.path.isfile(media.path) for media in demo.media)
    assert len(demo.media) == 3
    (tmp_path / "c.png").unlink()
    with raises(DataError, key="media"):
        load_demonstrations(tmp_path / "out/d.jsonl")
    fail(DataError, "data", "import", "pyvision_sft", source, "--out", tmp_path / "e.jsonl", key="media", value=1)


@pytest.mark.parametrize("name", ["pyvision_sft", "pyvision_rl"])
def test_env_names_select_environments(name):
    row = {**EXAMPLES[name], "env_name": "gym"}
    for settings, environment in (
        ({}, None),
        ({"environments": "env_name"}, "gym"),
        ({"environments": {"gym": "image"}}, "image"),
    ):
        (item,) = import_row(name, row, **settings)
        assert getattr(item, "task", item).environment == environment
    with raises(DataError, key="env_name", value="gym"):
        import_row(name, row, environments={"game": "image"})


def test_plain_table_with_custom_columns():
    (task,) = import_row("plain", {"video": "a.mp4", "q": "Which?", "key": 2, "options": ["red", "blue"]},
                   media="video", question="q", answer="key", options="options", index_base=1)  # fmt: skip
    assert (task.answer_type, task.ground_truth) == (AnswerType.CHOICE, "B")
    with raises(DataError, key="answer", value=0):
        import_row(
            "plain", {"media": "a.mp4", "question": "Which?", "answer": 0, "options": ["red", "blue"]}, index_base=1
        )
    with raises(ConfigError, key="plain.medai"):
        import_row("plain", EXAMPLES["plain"], medai="x")


def test_conversation_that_ends_with_a_call_is_an_error():
    messages = EXAMPLES["paravt_sft"]["messages"]
    with raises(DataError, key="messages"):
        import_row("paravt_sft", {"messages": messages[:3]})
    with raises(DataError, key="messages"):
        import_row("paravt_sft", {"messages": messages[:4]})


def test_numeric_validation_row():
    (task,) = import_row("pyvision_val", {**EXAMPLES["pyvision_val"], "question": "How many?", "answer": 4}
                   | {"data_source": "vsi_numerical"})  # fmt: skip
    assert (task.answer_type, task.ground_truth) == (AnswerType.NUMBER, 4.0)


def test_path_with_brackets_and_options_by_letter():
    row = {"media": "[x] a.mp4", "question": "Which?", "answer": "B", "options": {"A": "red", "B": "blue", "C": ""}}
    (task,) = import_row("plain", {**row, "picture": b"x" * 99})
    assert (task.media[0].path, task.options, task.ground_truth) == ("[x] a.mp4", ("red", "blue"), "B")
    assert task.extras == {"picture": "99 bytes"}


def test_imported_demonstration_is_replayed_as_published(renderer):
    """The environment prefills the first tag, runs the call, and gets the published tool response."""
    import asyncio

    from saccade.ledger import Origin
    from saccade.protocols import Context
    from saccade.testing import FakeMediaLoader
    from saccade.training.demonstrations import replay_demonstration
    from saccade.types import SamplingParams

    (demo,) = import_row("paravt_sft", EXAMPLES["paravt_sft"])
    environment = plugins.resolve("environments", "tool_calling", {"force_think": True})
    ctx = Context(
        engine=None, renderer=renderer, media=FakeMediaLoader(), sampling=SamplingParams(max_tokens=64), seed=0
    )
    main, child = asyncio.run(replay_demonstration(demo, environment, ctx))
    text = "".join(renderer.decode(segment.tokens) for segment in main.ledger.segments)
    assert text.count("<think>\nLook.</think>") == text.count("<think>\nIt is blue.</think><answer>blue</answer>") == 1
    assert text.count("<think>\n<think>") == 0
    tool_segments = [segment for segment in main.ledger.segments if segment.origin is Origin.OBSERVATION]
    assert "blue at 2" in "".join(renderer.decode(segment.tokens) for segment in tool_segments)
    assert "blue at 2" in renderer.decode(child.ledger.sampled_tokens())


# ---- options and answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Which?\nA. red\nB. blue", ("red", "blue")),
        ("Which?\nOptions:\n(A) red\n(B) blue\n(C) 3.5", ("red", "blue", "3.5")),
        ("Which? A) red B) blue", ("red", "blue")),
        ("Which?\n<options>\n(a) red\n(b) blue\n</options>", ("red", "blue")),
        ("哪个？\nA．红\nB．蓝", ("红", "蓝")),
        ("Is vitamin A. good?", ()),
        ("A. Smith wrote it. Who is A. Smith?", ()),
        ("Plan B: what is it?", ()),
        ("Which?\nA. red\nC. blue", ()),
    ],
)
def test_split_options(question, options):
    assert split_options(question)[1] == options


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *((answer, "B") for answer in ("B", "(B)", "b.", "B. blue", "B) blue", "Blue", "\\boxed{B}", "（Ｂ）")),
        *((answer, "B") for answer in ("Answer: B", "option B", "The answer is B.", "B blue", "<answer>B</answer>")),
        *((answer, None) for answer in ("B. red", "C", "A or B", "", "Boat", "Blue or red")),
    ],
)
def test_find_option_letter(answer, letter):
    assert find_option_letter(answer, ("red", "blue")) == letter


def test_build_task_rejects_answers_of_another_type():
    row = SourceRow(file=Path("a.jsonl"), number=3, values={})
    with raises(DataError, key="answer", value="B"):
        build_task(row, "Which?", "B", (), field_name="answer", extras={}, declared_type="mcq")
    assert GroundingAnswer.parse_ground_truth("5 to 3") is None
    assert GroundingAnswer.parse_ground_truth("3") is None
    with raises(DataError, key="answer", value="3 or 4"):
        build_task(row, "How many?", "3 or 4", (), field_name="answer", extras={}, declared_type="number")
    task = build_task(row, "How many?", "1,200", (), field_name="answer", extras={}, declared_type="number")
    assert task.ground_truth == 1200.0


# ---- files of rows -------------------------------------------------------------------------------------------------


def test_every_file_format_gives_the_same_rows(tmp_path):
    rows = [{"media": f"{n}.mp4", "question": f"Q {n}, „ü“?", "answer": "x" * n} for n in range(1, 400)]
    write_rows(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8-sig")
    lines = ["media\tquestion\tanswer", *("\t".join(row.values()) for row in rows)]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    for name in ("a.jsonl", "a.json", "b.json", "a.tsv"):
        assert [dict(row.values) for row in read_rows(tmp_path / name)] == rows, name


def test_json_list_is_read_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.data.source_row.CHUNK_CHARS", 7)
    rows = [{"a": "]} , [" * n, "b": [n, {"c": None}]} for n in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [row.values for row in read_rows(tmp_path / "a.json")] == rows


@pytest.mark.parametrize(
    ("name", "content", "location"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":', ", line 2: "),
        ("a.jsonl", "[1]\n", ", row 1: "),
        ("a.jsonl", "", ": "),
        ("a.json", '[{"a": 1}, {"a": ', ", row 2: "),
        ("a.json", '{"a": 1}', ": "),
        ("a.csv", "a,b\n1,2,3\n", ", line 2: "),
        ("a.txt", "x", ": "),
        ("a.jsonl", b'{"a": "\xff"}\n', ", after row 0: "),
    ],
)
def test_invalid_file_is_an_error_with_its_location(tmp_path, name, content, location):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(DataError, key=str(path)) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}{location}")


# ---- importing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    rows = [{"media": f"clips/{n % 3}.mp4", "question": f"Q{n}?", "answer": str(n)} for n in range(9)]
    (tmp_path / "media" / "clips").mkdir(parents=True)
    for n in range(2):
        (tmp_path / "media" / "clips" / f"{n}.mp4").write_bytes(b"x")
    return write_rows(tmp_path / "rows.jsonl", *rows)


def test_missing_media_are_counted_and_listed(table, tmp_path):
    target = tmp_path / "out" / "tasks.jsonl"
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--out", target]
    fail(DataError, *words, key="media", value=3)
    assert not target.exists()
    output = good(*words, "--on-missing", "skip")
    assert "rows-00000003, rows-00000006, rows-00000009" in output
    missing_rows = [
        json.loads(line) for line in (tmp_path / "out" / "tasks.jsonl.missing.jsonl").read_text().splitlines()
    ]
    assert [row["row"] for row in missing_rows] == [3, 6, 9]
    assert missing_rows[0]["paths"] == ["clips/2.mp4"]
    tasks = load_tasks(target)
    assert len(tasks) == 6
    assert Path(tasks[0].media[0].path).samefile(tmp_path / "media" / "clips" / "0.mp4")


def test_invalid_rows_are_errors_or_skipped(table, tmp_path):
    table.write_text(table.read_text() + '{"media": "clips/0.mp4", "question": "Q?"}\n')
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--on-missing", "skip"]
    fail(DataError, *words, "--out", tmp_path / "tasks.jsonl", key="answer")
    good(*words, "--out", tmp_path / "tasks.jsonl", "--on-bad", "skip")
    assert len(load_tasks(tmp_path / "tasks.jsonl")) == 6


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.jsonl", ['{"media": "a.mp4", "question": "Q?", "answer": "x"}', '{"media": "a.m', "[1]"]),
        ("a.csv", ["media,question,answer", "a.mp4,Q?,x", "a.mp4,Q?,x,y"]),
    ],
)
def test_broken_line_is_an_error_or_skipped(tmp_path, name, lines):
    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path / name).write_text("\n".join([*lines, lines[-3 if name == "a.jsonl" else 1]]) + "\n")
    words = ["data", "import", "plain", tmp_path / name, "--out", tmp_path / "tasks.jsonl"]
    message = fail(DataError, *words, key=tmp_path / name)
    assert f"{name}, line {2 if name == 'a.jsonl' else 3}: " in message
    output = good(*words, "--on-bad", "skip")
    count = len(lines) - (1 if name == "a.jsonl" else 2)
    assert f"{count} rows" in output
    assert [task.id for task in load_tasks(tmp_path / "tasks.jsonl")] == ["a-00000001", f"a-{count + 2:08d}"]


def test_default_answer_type_must_exist(table, tmp_path):
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--out", tmp_path / "tasks.jsonl"]
    fail(ConfigError, *words, "default_answer_type=chioce", key="plain.default_answer_type", value="chioce")
    good(*words, "--on-missing", "skip", "default_answer_type=number")
    assert {task.answer_type for task in load_tasks(tmp_path / "tasks.jsonl")} == {AnswerType.NUMBER}


ANSWER_TYPE = """
import saccade


class Shade(saccade.BaseAnswerType):
    names = ("shade",)
    expected = "a shade"
    example = ("dark", "dark")

    def __call__(self, episode):
        return 1.0

    @classmethod
    def is_valid(cls, ground_truth):
        return ground_truth in ("dark", "light")

    @classmethod
    def parse_ground_truth(cls, value):
        return value if cls.is_valid(value) else None
"""


def test_an_answer_type_from_a_file_is_imported_and_checked(table, tmp_path):
    shade = tmp_path / "shade.py"
    shade.write_text(ANSWER_TYPE)
    write_rows(table, {"media": "clips/0.mp4", "question": "Which?", "answer": "dark", "answer_type": "shade"})
    target = tmp_path / "tasks.jsonl"
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--out", target]
    fail(DataError, *words, key="answer_type", value="shade")
    good(*words, "--answer-type", shade)
    assert [(task.answer_type, task.ground_truth) for task in load_tasks(target)] == [("shade", "dark")]
    assert "1 shade" in good("data", "check", target, "--no-open", "--answer-type", shade)


def test_repeated_id_is_an_error(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    row = {"id": "one", "media": "a.mp4", "question": "Q?", "answer": "x"}
    path = write_rows(tmp_path / "rows.jsonl", row, row)
    fail(DataError, "data", "import", "plain", path, "--out", tmp_path / "t.jsonl", key="id", value="one")


def test_embedded_images_become_files(tmp_path):
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which colour?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "<answer>red</answer>"}]
    path = write_rows(tmp_path / "rows.jsonl", {"messages": messages}, {"messages": messages})
    good("data", "import", "paravt_sft", path, "--out", tmp_path / "demos.jsonl")
    first, second = load_demonstrations(tmp_path / "demos.jsonl")
    assert first.task.media == second.task.media
    assert Image.open(first.task.media[0].path).getpixel((0, 0)) == (255, 0, 0)


def test_invalid_arguments_are_errors(tmp_path):
    source, target = tmp_path / "x.jsonl", tmp_path / "t.jsonl"
    fail(ConfigError, "data", "import", "plane", source, "--out", target, key="data.importers")
    fail(DataError, "data", "import", "plain", source, "--out", target, key=source)
    write_rows(source, {})
    fail(DataError, "data", "import", "plain", source, "--out", tmp_path / "t.txt", key=tmp_path / "t.txt")
    fail(ConfigError, "data", "import", "plain", "media=x", "--out", target, key="FILE")


# ---- Parquet -------------------------------------------------------------------------------------------------------


def test_parquet_and_jsonl_give_the_same_items(table, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[data]'")
    import pyarrow

    rows = [json.loads(line) for line in table.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    words = ["--root", tmp_path / "media", "--on-missing", "skip", "--out"]
    good("data", "import", "plain", table, *words, tmp_path / "a.jsonl")
    good("data", "import", "plain", tmp_path / "rows.parquet", *words, tmp_path / "b.parquet")
    assert load_tasks(tmp_path / "a.jsonl") == load_tasks(tmp_path / "b.parquet")
    path = write_rows(tmp_path / "conversations.jsonl", *[EXAMPLES["llava"]] * 3)
    (tmp_path / "a.png").write_bytes(b"x")
    good("data", "import", "llava", path, "--out", tmp_path / "c.parquet")
    good("data", "import", "llava", path, "--out", tmp_path / "c.jsonl")
    assert load_demonstrations(tmp_path / "c.parquet") == load_demonstrations(tmp_path / "c.jsonl")
    changed = pyarrow.parquet.read_table(tmp_path / "b.parquet").to_pylist()
    changed[3]["answer_type"] = "guess"
    parquet.write_table(pyarrow.Table.from_pylist(changed), tmp_path / "b.parquet")
    with raises(DataError, key="answer_type", value="guess"):
        load_tasks(tmp_path / "b.parquet")


def test_invalid_parquet_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with raises(DataError, key=str(tmp_path / "a.parquet")):
        list(read_rows(tmp_path / "a.parquet"))


def test_missing_pyarrow_is_a_config_error(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with raises(ConfigError, key="pyarrow"):
        list(read_rows(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_memory_hardly_depends_on_the_number_of_rows(tmp_path):
    """Ten times the rows add only the hashes of their ids; a row in memory would take a thousand bytes."""
    import tracemalloc

    from saccade.data.importer import import_dataset

    (tmp_path / "a.mp4").write_bytes(b"x")
    importer, peaks = plugins.resolve("data.importers", "plain", {}), []
    row = {"media": "a.mp4", "question": "Which colour is shown? " * 20, "answer": "red"}
    for rows in (500, 5000):
        path = write_rows(tmp_path / "rows.jsonl", *[row] * rows)
        tracemalloc.start()
        import_dataset(importer, [path], tmp_path / "tasks.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 300 * 4500


@pytest.fixture
def many(tmp_path):
    """Two files of rows: some lack media, some are invalid, and one repeats an id of the other file."""
    (tmp_path / "a.mp4").write_bytes(b"x")
    for name, count in (("one", 50), ("two", 40)):
        rows = [{"id": f"{name}-{n}", "media": "a.mp4", "question": f"Q{n}?", "answer": "x"} for n in range(count)]
        for n in range(0, count, 7):
            rows[n]["media"] = f"gone/{n}.mp4"
        rows[5]["answer"] = ""
        write_rows(
            tmp_path / f"{name}.jsonl", *rows, {**rows[3], "id": "one-3"} if name == "two" else rows[4] | {"id": "z"}
        )
    return [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]


def run_import(files, target, *, stop=None, identity="plain", **options):
    """Run an import, interrupted after `stop` rows; return its reports, or None if it was interrupted."""
    from saccade.data import importer as module

    rows_left = [stop]

    def interrupt(rows):
        if rows_left[0] is not None:
            rows_left[0] -= 1
            if not rows_left[0]:
                raise KeyboardInterrupt

    importer = plugins.resolve("data.importers", "plain", {})
    options = {"on_missing": "skip", "on_bad": "skip", "identity": identity, **options}
    try:
        return module.import_dataset(importer, files, target, on_progress=interrupt, **options)
    except KeyboardInterrupt:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("stop", [1, 7, 8, 9, 30, 51, 52, 60, 92])
def test_interrupted_import_resumes_to_the_same_file(many, tmp_path, stop, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "whole").mkdir()
    (tmp_path / "again").mkdir()
    first, second = (tmp_path / name / f"t.{ending}" for name in ("whole", "again"))
    reports = run_import(many, first)
    assert reports[1].bad_rows == 2
    assert run_import(many, second, stop=stop) is None
    assert not second.exists()
    with second.with_name(f"{second.name}.partial.jsonl").open("ab") as file:
        file.write(b'{"id": "half a li')
    assert run_import(many, second) == reports
    assert [task.id for task in load_tasks(second)] == [task.id for task in load_tasks(first)]
    if ending == "jsonl":
        assert second.read_bytes() == first.read_bytes()
    listings = [path.with_name(f"{path.name}.missing.jsonl").read_bytes() for path in (first, second)]
    assert listings[0] == listings[1]
    assert sorted(path.name for path in second.parent.iterdir()) == [second.name, f"{second.name}.missing.jsonl"]


def test_recorded_rows_are_not_read_again(many, tmp_path, monkeypatch):
    target = tmp_path / "t.jsonl"
    run_import(many, target, stop=60)
    checked = []
    monkeypatch.setattr(
        "saccade.data.importer.require_gradable", lambda task, location: checked.append((task.id, location))
    )
    run_import(many, target)
    assert checked[0] == ("two-9", f"{many[1]}, row 10")


def test_changed_input_restarts_the_import(many, tmp_path):
    target = tmp_path / "t.jsonl"

    def restart(**options):
        run_import(many, target, stop=60)
        reports = run_import(many, target, **options)
        return [report.written for report in reports]

    counts = restart()
    assert restart(identity="other") == counts
    (tmp_path / "gone").mkdir()
    run_import(many, target, stop=60)
    (tmp_path / "gone" / "7.mp4").write_bytes(b"x")
    assert [report.written for report in run_import(many, target)] == [
        counts[0] + 1,
        counts[1] + 1,
    ]
    run_import(many, target, stop=60)
    many[0].write_text(many[0].read_text().replace("Q1?", "Which?"))
    os.utime(many[0], (1, 1))
    run_import(many, target)
    assert load_tasks(target)[0].question == "Which?"


def test_data_error_deletes_the_partial_file(many, tmp_path):
    target = tmp_path / "out" / "t.jsonl"
    run_import(many, target, stop=60)
    with raises(DataError, key="answer"):
        run_import(many, target, on_bad="error")
    with raises(DataError, key="media"):
        run_import(many, target, on_missing="error")
    assert [path.name for path in target.parent.iterdir()] == ["t.jsonl.missing.jsonl"]


@pytest.mark.slow
def test_killed_import_resumes_to_the_same_file(tmp_path):
    import signal
    import subprocess
    import sys
    import time

    (tmp_path / "a.mp4").write_bytes(b"x")
    rows = [{"media": "a.mp4" if n % 9 else "gone.mp4", "question": f"Q{n}?", "answer": str(n)} for n in range(9000)]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    words = [sys.executable, "-c", "from saccade.cli.app import main; main()", "data", "import", "plain", file]
    words += ["--on-missing", "skip", "--out"]
    subprocess.run([*words, tmp_path / "whole.jsonl"], check=True, capture_output=True)
    exit_code, pause = 1, 0.8
    while exit_code:
        process = subprocess.Popen([*words, tmp_path / "again.jsonl"], stdout=subprocess.DEVNULL)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        exit_code, pause = process.wait(), pause + 0.7
        assert exit_code in (0, -signal.SIGKILL)
    for ending in ("", ".missing.jsonl"):
        again, whole = ((tmp_path / f"{name}.jsonl{ending}").read_bytes() for name in ("again", "whole"))
        assert again == whole
    assert not list(tmp_path.glob("again.jsonl.p*"))


def test_jsonl_and_parquet_round_trip(table, tmp_path):
    pytest.importorskip("pyarrow")
    good("data", "import", "plain", table, "--root", tmp_path / "media", "--on-missing", "skip",
         "--out", tmp_path / "a.jsonl")  # fmt: skip
    good("data", "import", "tasks", tmp_path / "a.jsonl", "--out", tmp_path / "there" / "b.parquet")
    good("data", "import", "tasks", tmp_path / "there" / "b.parquet", "--out", tmp_path / "c.jsonl")
    first, *others = (load_tasks(tmp_path / name) for name in ("a.jsonl", "there/b.parquet", "c.jsonl"))
    assert [[task.digest for task in tasks] for tasks in others] == [[task.digest for task in first]] * 2
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "c.jsonl").read_text()


def test_demonstrations_of_one_task_stay_together(tmp_path):
    from saccade.data.dataset import write_items
    from saccade.types import Demonstration, Media, Task

    (tmp_path / "a.mp4").write_bytes(b"x")
    task = Task(id="t", question="Q?", media=(Media(path="a.mp4"),), answer_type=AnswerType.OPEN, ground_truth="x")
    write_items(
        tmp_path / "a.jsonl",
        [Demonstration(task=task, frame_budget=n, replies=("<answer>x</answer>",)) for n in (4, 8)],
    )
    good("data", "import", "tasks", tmp_path / "a.jsonl", "--out", tmp_path / "b.jsonl")
    assert load_demonstrations(tmp_path / "a.jsonl") == load_demonstrations(tmp_path / "b.jsonl")
