"""Published rows of every format become tasks and demonstrations, or one sentence."""

import json
import os
from pathlib import Path

import pytest
from commands import bad, good
from published_rows import EXAMPLES

from saccade import plugins
from saccade.data.answers import judged, letter_of, span_of, split_options
from saccade.data.raw import Row, read_rows
from saccade.data.rows import read_demos, read_tasks
from saccade.errors import ConfigError, DataError
from saccade.types import Kind, MediaKind


def made(source, values, **settings):
    row = Row(file=Path("made.jsonl"), number=1, values=values)
    return list(plugins.bind("data.sources", source, settings)(row))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- what each format says -----------------------------------------------------------------------------------------


def test_paravt_rows_for_rl():
    (task,) = made("paravt_rl", EXAMPLES["paravt_rl"])
    assert (task.kind, task.gold, task.choices) == (Kind.CHOICE, "B", ("red", "blue"))
    assert task.question == "Which colour is shown?"
    assert task.media[0].path == "longvt_source/made/a.mp4"
    assert task.extras == {"question_type": "mcq", "note": "x", "system": "Use the tool."}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("[3.5, 9]", (3.5, 9.0)),
        ([3.5, 9], (3.5, 9.0)),
        ("00:10 - 01:00", (10.0, 60.0)),
        ("3.0s to 4s", (3.0, 4.0)),
        ({"start": 1, "end": 2}, (1.0, 2.0)),
    ],
)
def test_a_question_of_when_has_a_span(answer, gold):
    info = {"answer": answer, "question_type": "tvg"}
    (task,) = made("paravt_rl", {**EXAMPLES["paravt_rl"], "extra_info": info})
    assert (task.kind, task.gold, task.choices) == (Kind.GROUNDING, gold, ())


def test_an_open_question_keeps_its_options():
    info = {"answer": "blue", "question_type": "oe"}
    (task,) = made("paravt_rl", {**EXAMPLES["paravt_rl"], "extra_info": info})
    assert (task.kind, task.gold) == (Kind.OPEN, "blue")
    assert "A. red" in task.question


def test_as_many_files_as_placeholders():
    with pytest.raises(DataError, match=r"made.jsonl, row 1, field videos: there are 2 files for 1 <video>"):
        made("paravt_rl", {**EXAMPLES["paravt_rl"], "videos": [{"video": "a.mp4"}, {"video": "b.mp4"}]})


def test_paravt_rows_for_sft_rehearse_their_tools():
    (demo,) = made("paravt_sft", EXAMPLES["paravt_sft"])
    assert demo.task.media[0].path == "selfqa/a.mp4"
    assert demo.task.gold == "blue"
    assert len(demo.replies) == 2
    assert demo.children == (("blue at 2",),)
    as_json = {"messages": json.dumps(EXAMPLES["paravt_sft"]["messages"])}
    assert made("paravt_sft", as_json) == [demo]


def test_calls_beside_the_text_are_the_text_that_they_are():
    messages = json.loads(json.dumps(EXAMPLES["paravt_sft"]["messages"]))
    call = {"type": "function", "function": {"name": "crop_video", "arguments": '{"start_time": 1, "end_time": 3}'}}
    messages[2] = {"role": "assistant", "content": "<think>Look.</think>", "tool_calls": [call, call]}
    messages[3:4] = [{"role": "tool", "content": "red at 1"}, {"role": "tool", "content": "blue at 2"}]
    (demo,) = made("paravt_sft", {"messages": messages})
    assert demo.replies[0].count("<tool_call>") == 2
    assert demo.children == (("red at 1", "blue at 2"),)
    messages.pop(3)
    with pytest.raises(DataError, match="2 calls and 1 tool responses"):
        made("paravt_sft", {"messages": messages})


def test_pyvision_rows():
    (task,) = made("pyvision_rl", EXAMPLES["pyvision_rl"])
    assert (task.question, task.kind, task.gold) == ("What is held?", Kind.OPEN, "a glove")
    assert task.media[0].kind is MediaKind.IMAGE
    assert task.extras["data_source"] == "deepeyes"
    numeric = {"data_source": "vsi_numerical", "reward_model": {"ground_truth": "3.5"}}
    (task,) = made("pyvision_rl", {**EXAMPLES["pyvision_rl"], **numeric})
    assert (task.kind, task.gold) == (Kind.NUMBER, 3.5)
    (task,) = made("pyvision_val", EXAMPLES["pyvision_val"])
    assert (task.kind, task.gold, task.choices) == (Kind.CHOICE, "A", ("a glove", "a rope"))
    assert task.media[0].kind is MediaKind.VIDEO


def test_a_conversation_is_a_demonstration_per_question():
    first, second = made("llava", EXAMPLES["llava"])
    assert first.replies == ("<answer>A dog.</answer>",)
    assert second.task.question == "Asked before: What is it?\nAnswered: A dog.\nWhich colour?"
    assert second.task.media == first.task.media
    assert first.task.id != second.task.id


def test_code_runs_again_and_needs_no_children():
    talk = [
        {"from": "human", "value": "<image>\nHow many?"},
        {"from": "gpt", "value": "<code>\n```python\nprint(3)\n```\n</code>"},
        {"from": "human", "value": "<interpreter>\n3\n</interpreter>"},
        {"from": "gpt", "value": "<answer>\n\\boxed{3}\n</answer>"},
    ]
    (demo,) = made("llava", {"image": "a.png", "conversations": talk})
    assert (len(demo.replies), demo.children, demo.task.gold) == (2, (), "3")


def test_a_plain_table_has_columns_of_its_own():
    (task,) = made("plain", {"video": "a.mp4", "q": "Which?", "key": 2, "options": ["red", "blue"]},
                   media="video", question="q", answer="key", choices="options", first=1)  # fmt: skip
    assert (task.kind, task.gold) == (Kind.CHOICE, "B")
    with pytest.raises(DataError, match="should count one of 2 choices from 1"):
        made("plain", {"media": "a.mp4", "question": "Which?", "answer": 0, "choices": ["red", "blue"]}, first=1)
    with pytest.raises(ConfigError, match="did you mean 'media'"):
        made("plain", EXAMPLES["plain"], medai="x")


def test_a_talk_that_ends_with_a_call_is_refused():
    messages = EXAMPLES["paravt_sft"]["messages"]
    with pytest.raises(DataError, match="its last reply calls a tool, and nothing answers"):
        made("paravt_sft", {"messages": messages[:3]})
    with pytest.raises(DataError, match="should end with the assistant's reply"):
        made("paravt_sft", {"messages": messages[:4]})


def test_numbers_of_a_validation_row_are_numbers():
    (task,) = made("pyvision_val", {**EXAMPLES["pyvision_val"], "question": "How many?", "answer": 4}
                   | {"data_source": "vsi_numerical"})  # fmt: skip
    assert (task.kind, task.gold) == (Kind.NUMBER, 4.0)


def test_names_with_brackets_and_choices_by_letter():
    row = {"media": "[x] a.mp4", "question": "Which?", "answer": "B", "choices": {"A": "red", "B": "blue", "C": ""}}
    (task,) = made("plain", {**row, "picture": b"x" * 99})
    assert (task.media[0].path, task.choices, task.gold) == ("[x] a.mp4", ("red", "blue"), "B")
    assert task.extras == {"picture": "99 bytes"}


def test_an_imported_demonstration_is_rehearsed_as_it_was_published(renderer):
    """The agent forces the first tag, runs the call, and hears what the published tool answered."""
    import asyncio

    from saccade.ledger import Origin
    from saccade.protocols import Context
    from saccade.testing import PaintedMedia
    from saccade.training.demos import rehearse
    from saccade.types import Sampling

    (demo,) = made("paravt_sft", EXAMPLES["paravt_sft"])
    agent = plugins.bind("agents", "parallel", {"think_prefix": True})
    ctx = Context(engine=None, renderer=renderer, media=PaintedMedia(), sampling=Sampling(max_tokens=64), seed=0)
    main, child = asyncio.run(rehearse(demo, agent, ctx))
    text = "".join(renderer.decode(segment.tokens) for segment in main.ledger.segments)
    assert text.count("<think>\nLook.</think>") == text.count("<think>\nIt is blue.</think><answer>blue</answer>") == 1
    assert text.count("<think>\n<think>") == 0
    tools = [segment for segment in main.ledger.segments if segment.origin is Origin.TOOL]
    assert "blue at 2" in "".join(renderer.decode(segment.tokens) for segment in tools)
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
def test_options_are_found_in_the_question(question, options):
    assert split_options(question)[1] == options


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *((answer, "B") for answer in ("B", "(B)", "b.", "B. blue", "B) blue", "Blue", "\\boxed{B}", "（Ｂ）")),
        *((answer, "B") for answer in ("Answer: B", "option B", "The answer is B.", "B blue", "<answer>B</answer>")),
        *((answer, None) for answer in ("B. red", "C", "A or B", "", "Boat", "Blue or red")),
    ],
)
def test_an_answer_names_an_option(answer, letter):
    assert letter_of(answer, ("red", "blue")) == letter


def test_an_answer_without_its_options_is_refused():
    row = Row(file=Path("a.jsonl"), number=3, values={})
    with pytest.raises(DataError, match=r"a.jsonl, row 3, field answer: 'B' should be a letter"):
        judged(row, "Which?", "B", where="answer", declared="mcq")
    assert span_of("5 to 3") is None
    assert span_of("3") is None
    with pytest.raises(DataError, match="one number"):
        judged(row, "How many?", "3 or 4", where="answer", declared="number")
    assert judged(row, "How many?", "1,200", where="answer", declared="number").gold == 1200.0


# ---- files of rows -------------------------------------------------------------------------------------------------


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    rows = [{"media": f"{n}.mp4", "question": f"Q {n}, „ü“?", "answer": "x" * n} for n in range(1, 400)]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8-sig")
    lines = ["media\tquestion\tanswer", *("\t".join(row.values()) for row in rows)]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    for name in ("a.jsonl", "a.json", "b.json", "a.tsv"):
        assert [dict(row.values) for row in read_rows(tmp_path / name)] == rows, name


def test_a_list_is_read_over_the_ends_of_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.data.raw.CHUNK", 7)
    rows = [{"a": "]} , [" * n, "b": [n, {"c": None}]} for n in range(30)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [row.values for row in read_rows(tmp_path / "a.json")] == rows


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":', "line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "row 1: it should be a mapping"),
        ("a.jsonl", "", "holds no row"),
        ("a.json", '[{"a": 1}, {"a": ', "row 2: not valid JSON"),
        ("a.json", '{"a": 1}', "should hold a list of rows"),
        ("a.csv", "a,b\n1,2,3\n", "line 2: it has more cells"),
        ("a.txt", "x", "files of rows end in"),
        ("a.jsonl", b'{"a": "\xff"}\n', "can't be read"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=sentence) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)


# ---- importing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    rows = [{"media": f"clips/{n % 3}.mp4", "question": f"Q{n}?", "answer": str(n)} for n in range(9)]
    (tmp_path / "media" / "clips").mkdir(parents=True)
    for n in range(2):
        (tmp_path / "media" / "clips" / f"{n}.mp4").write_bytes(b"x")
    return write(tmp_path / "rows.jsonl", *rows)


def test_missing_files_are_counted_and_listed(table, tmp_path):
    target = tmp_path / "out" / "tasks.jsonl"
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--out", target]
    said = bad(*words)
    assert "3 of 9 rows lack files (3 in clips), first rows-00000003" in said
    assert not target.exists()
    said = good(*words, "--on-missing", "skip")
    assert "rows-00000003, rows-00000006, rows-00000009" in said
    listed = [json.loads(line) for line in (tmp_path / "out" / "tasks.jsonl.missing.jsonl").read_text().splitlines()]
    assert [each["row"] for each in listed] == [3, 6, 9]
    assert listed[0]["paths"] == ["clips/2.mp4"]
    tasks = read_tasks(target)
    assert len(tasks) == 6
    assert Path(tasks[0].media[0].path).samefile(tmp_path / "media" / "clips" / "0.mp4")


def test_bad_rows_are_named_or_left_out(table, tmp_path):
    table.write_text(table.read_text() + '{"media": "clips/0.mp4", "question": "Q?"}\n')
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--on-missing", "skip"]
    said = bad(*words, "--out", tmp_path / "tasks.jsonl")
    assert "row 10, field answer: it is missing or empty" in said
    good(*words, "--out", tmp_path / "tasks.jsonl", "--on-bad", "skip")
    assert len(read_tasks(tmp_path / "tasks.jsonl")) == 6


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.jsonl", ['{"media": "a.mp4", "question": "Q?", "answer": "x"}', '{"media": "a.m', "[1]"]),
        ("a.csv", ["media,question,answer", "a.mp4,Q?,x", "a.mp4,Q?,x,y"]),
    ],
)
def test_a_broken_line_is_named_or_left_out_like_any_bad_row(tmp_path, name, lines):
    (tmp_path / "a.mp4").write_bytes(b"x")
    (tmp_path / name).write_text("\n".join([*lines, lines[-3 if name == "a.jsonl" else 1]]) + "\n")
    words = ["data", "import", "plain", tmp_path / name, "--out", tmp_path / "tasks.jsonl"]
    assert f"{name}, line {2 if name == 'a.jsonl' else 3}: " in bad(*words)
    said = good(*words, "--on-bad", "skip")
    count = len(lines) - (1 if name == "a.jsonl" else 2)
    assert f"{count} rows can't be read" in said
    assert [task.id for task in read_tasks(tmp_path / "tasks.jsonl")] == ["a-00000001", f"a-{count + 2:08d}"]


def test_a_kind_of_all_rows_that_is_none_is_refused(table, tmp_path):
    words = ["data", "import", "plain", table, "--root", tmp_path / "media", "--out", tmp_path / "tasks.jsonl"]
    assert "'judge' can't be 'chioce': input should be 'choice', 'open'" in bad(*words, "judge=chioce")
    good(*words, "--on-missing", "skip", "judge=number")
    assert {task.kind for task in read_tasks(tmp_path / "tasks.jsonl")} == {Kind.NUMBER}


def test_ids_stay_unique(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    row = {"id": "one", "media": "a.mp4", "question": "Q?", "answer": "x"}
    path = write(tmp_path / "rows.jsonl", row, row)
    assert "the id 'one' was used before" in bad("data", "import", "plain", path, "--out", tmp_path / "t.jsonl")


def test_pictures_in_rows_become_files(tmp_path):
    import base64
    import io

    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(held, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which colour?"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": "<answer>red</answer>"}]
    path = write(tmp_path / "rows.jsonl", {"messages": talk}, {"messages": talk})
    good("data", "import", "paravt_sft", path, "--out", tmp_path / "demos.jsonl")
    first, second = read_demos(tmp_path / "demos.jsonl")
    assert first.task.media == second.task.media
    assert Image.open(first.task.media[0].path).getpixel((0, 0)) == (255, 0, 0)


def test_what_is_asked_for_must_exist(tmp_path):
    assert "did you mean 'plain'" in bad("data", "import", "plane", tmp_path / "x.jsonl", "--out", tmp_path / "t.jsonl")
    assert "no such file" in bad("data", "import", "plain", tmp_path / "x.jsonl", "--out", tmp_path / "t.jsonl")
    assert "ends in .jsonl or .parquet" in bad(
        "data", "import", "plain", write(tmp_path / "x.jsonl", {}), "--out", tmp_path / "t.txt"
    )
    assert "nothing to import" in bad("data", "import", "plain", "media=x", "--out", tmp_path / "t.jsonl")


# ---- Parquet -------------------------------------------------------------------------------------------------------


def test_parquet_holds_what_jsonl_holds(table, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[parquet]'")
    import pyarrow

    rows = [json.loads(line) for line in table.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    words = ["--root", tmp_path / "media", "--on-missing", "skip", "--out"]
    good("data", "import", "plain", table, *words, tmp_path / "a.jsonl")
    good("data", "import", "plain", tmp_path / "rows.parquet", *words, tmp_path / "b.parquet")
    assert read_tasks(tmp_path / "a.jsonl") == read_tasks(tmp_path / "b.parquet")
    path = write(tmp_path / "talks.jsonl", *[EXAMPLES["llava"]] * 3)
    (tmp_path / "a.png").write_bytes(b"x")
    good("data", "import", "llava", path, "--out", tmp_path / "c.parquet")
    good("data", "import", "llava", path, "--out", tmp_path / "c.jsonl")
    assert read_demos(tmp_path / "c.parquet") == read_demos(tmp_path / "c.jsonl")
    changed = pyarrow.parquet.read_table(tmp_path / "b.parquet").to_pylist()
    changed[3]["kind"] = "guess"
    parquet.write_table(pyarrow.Table.from_pylist(changed), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, row 4, field kind"):
        read_tasks(tmp_path / "b.parquet")


def test_parquet_that_is_none(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a.parquet can't be read as Parquet"):
        list(read_rows(tmp_path / "a.parquet"))


def test_without_pyarrow_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"pip install 'saccade\[parquet\]'"):
        list(read_rows(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    """Ten times the rows: no more than the marks of their ids, while a row that is held takes a thousand bytes."""
    import tracemalloc

    from saccade.data.gather import gather

    (tmp_path / "a.mp4").write_bytes(b"x")
    make, peaks = plugins.bind("data.sources", "plain", {}), []
    row = {"media": "a.mp4", "question": "Which colour is shown? " * 20, "answer": "red"}
    for rows in (500, 5000):
        path = write(tmp_path / "rows.jsonl", *[row] * rows)
        tracemalloc.start()
        gather(make, [path], tmp_path / "tasks.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 300 * 4500


@pytest.fixture
def many(tmp_path):
    """Two files of rows, of which some lack files, some are bad, and one repeats an id of the other file."""
    (tmp_path / "a.mp4").write_bytes(b"x")
    for name, count in (("one", 50), ("two", 40)):
        rows = [{"id": f"{name}-{n}", "media": "a.mp4", "question": f"Q{n}?", "answer": "x"} for n in range(count)]
        for n in range(0, count, 7):
            rows[n]["media"] = f"gone/{n}.mp4"
        rows[5]["answer"] = ""
        write(tmp_path / f"{name}.jsonl", *rows, {**rows[3], "id": "one-3"} if name == "two" else rows[4] | {"id": "z"})
    return [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]


def gathered(files, target, *, stop=None, note=8, identity="plain", monkeypatch, **more):
    """An import that is stopped at its row number `stop`, if it gets so far; what came of it."""
    from saccade.data import gather as module

    left = [stop]

    def told(rows):
        if left[0] is not None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "NOTED", note)
    make = plugins.bind("data.sources", "plain", {})
    given = {"on_missing": "skip", "on_bad": "skip", "identity": identity, **more}
    try:
        return module.gather(make, files, target, told=told, **given)
    except KeyboardInterrupt:
        return None


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("stop", [1, 7, 8, 9, 30, 51, 52, 60, 92])
def test_a_stopped_import_goes_on_to_the_same_file(many, tmp_path, monkeypatch, stop, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "whole").mkdir()
    (tmp_path / "again").mkdir()
    first, second = (tmp_path / name / f"t.{ending}" for name in ("whole", "again"))
    whole = gathered(many, first, monkeypatch=monkeypatch)
    assert whole[1].bad_rows == 2
    assert gathered(many, second, stop=stop, monkeypatch=monkeypatch) is None
    assert not second.exists()
    with second.with_name(f"{second.name}.draft.jsonl").open("ab") as torn:
        torn.write(b'{"id": "half a li')
    assert gathered(many, second, monkeypatch=monkeypatch) == whole
    assert [task.id for task in read_tasks(second)] == [task.id for task in read_tasks(first)]
    if ending == "jsonl":
        assert second.read_bytes() == first.read_bytes()
    listings = [path.with_name(f"{path.name}.missing.jsonl").read_bytes() for path in (first, second)]
    assert listings[0] == listings[1]
    assert sorted(path.name for path in second.parent.iterdir()) == [second.name, f"{second.name}.missing.jsonl"]


def test_rows_that_were_noted_are_not_read_again(many, tmp_path, monkeypatch):
    target = tmp_path / "t.jsonl"
    gathered(many, target, stop=60, monkeypatch=monkeypatch)
    taken = []
    monkeypatch.setattr("saccade.data.gather.problem_of", lambda task: taken.append(task.id))
    gathered(many, target, monkeypatch=monkeypatch)
    assert taken[0] == "two-8"


def test_what_changed_since_begins_anew(many, tmp_path, monkeypatch):
    target = tmp_path / "t.jsonl"

    def begun(**more):
        gathered(many, target, stop=60, monkeypatch=monkeypatch)
        reports = gathered(many, target, monkeypatch=monkeypatch, **more)
        return [report.written for report in reports]

    whole = begun()
    assert begun(identity="other") == whole
    (tmp_path / "gone").mkdir()
    gathered(many, target, stop=60, monkeypatch=monkeypatch)
    (tmp_path / "gone" / "7.mp4").write_bytes(b"x")
    assert [report.written for report in gathered(many, target, monkeypatch=monkeypatch)] == [
        whole[0] + 1,
        whole[1] + 1,
    ]
    gathered(many, target, stop=60, monkeypatch=monkeypatch)
    many[0].write_text(many[0].read_text().replace("Q1?", "Which?"))
    os.utime(many[0], (1, 1))
    gathered(many, target, monkeypatch=monkeypatch)
    assert read_tasks(target)[0].question == "Which?"


def test_what_can_be_mended_leaves_no_draft(many, tmp_path, monkeypatch):
    target = tmp_path / "out" / "t.jsonl"
    gathered(many, target, stop=60, monkeypatch=monkeypatch)
    with pytest.raises(DataError, match="row 6, field answer"):
        gathered(many, target, on_bad="error", monkeypatch=monkeypatch)
    with pytest.raises(DataError, match="rows lack files"):
        gathered(many, target, on_missing="error", monkeypatch=monkeypatch)
    assert [path.name for path in target.parent.iterdir()] == ["t.jsonl.missing.jsonl"]


@pytest.mark.slow
def test_an_import_killed_at_any_moment_ends_with_the_same_file(tmp_path):
    import signal
    import subprocess
    import sys
    import time

    (tmp_path / "a.mp4").write_bytes(b"x")
    rows = [{"media": "a.mp4" if n % 9 else "gone.mp4", "question": f"Q{n}?", "answer": str(n)} for n in range(9000)]
    file = write(tmp_path / "rows.jsonl", *rows)
    words = [sys.executable, "-c", "from saccade.cli import main; main()", "data", "import", "plain", file]
    words += ["--on-missing", "skip", "--out"]
    subprocess.run([*words, tmp_path / "whole.jsonl"], check=True, capture_output=True)
    done, pause = 1, 0.8
    while done:
        going = subprocess.Popen([*words, tmp_path / "again.jsonl"], stdout=subprocess.DEVNULL)
        time.sleep(pause)
        going.send_signal(signal.SIGKILL)
        done, pause = going.wait(), pause + 0.7
        assert done in (0, -signal.SIGKILL)
    for ending in ("", ".missing.jsonl"):
        again, whole = ((tmp_path / f"{name}.jsonl{ending}").read_bytes() for name in ("again", "whole"))
        assert again == whole
    assert not list(tmp_path.glob("again.jsonl.draft*"))


def test_native_files_turn_into_each_other(table, tmp_path):
    pytest.importorskip("pyarrow")
    good("data", "import", "plain", table, "--root", tmp_path / "media", "--on-missing", "skip",
         "--out", tmp_path / "a.jsonl")  # fmt: skip
    good("data", "import", "tasks", tmp_path / "a.jsonl", "--out", tmp_path / "there" / "b.parquet")
    good("data", "import", "tasks", tmp_path / "there" / "b.parquet", "--out", tmp_path / "c.jsonl")
    first, *others = (read_tasks(tmp_path / name) for name in ("a.jsonl", "there/b.parquet", "c.jsonl"))
    assert [[task.digest for task in each] for each in others] == [[task.digest for task in first]] * 2
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "c.jsonl").read_text()


def test_demonstrations_of_one_task_stay_together(tmp_path):
    from saccade.data.rows import write_tasks
    from saccade.types import Demo, Media, Task

    (tmp_path / "a.mp4").write_bytes(b"x")
    task = Task(id="t", question="Q?", media=(Media(path="a.mp4"),), kind=Kind.OPEN, gold="x")
    write_tasks(tmp_path / "a.jsonl", [Demo(task=task, frames=n, replies=("<answer>x</answer>",)) for n in (4, 8)])
    good("data", "import", "tasks", tmp_path / "a.jsonl", "--out", tmp_path / "b.jsonl")
    assert read_demos(tmp_path / "a.jsonl") == read_demos(tmp_path / "b.jsonl")
