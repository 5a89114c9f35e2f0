"""Published media paths are rewritten to local ones and back."""

import json

import pytest
from commands import fail, good
from published_rows import EXAMPLES

from saccade.data.rewrite_paths import PathRewriter, rewrite_paths
from saccade.errors import DataError

NAMES = ["longvt_source/made/a b.mp4", "museg/charades/ü.mp4", "museg/et_instruct_164k/2.mp4", "selfqa/3.mp4"]


@pytest.fixture
def root(tmp_path):
    for name in NAMES[:2]:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(b"x")
    return tmp_path / "root"


def make_rows(count):
    """Return rows with paths in lists, in JSON, and in JSON inside JSON."""
    rows = []
    for number in range(count):
        name = NAMES[number % 4]
        messages = json.dumps(
            [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": f"file://{name}"}}]}]
        )
        extra = json.dumps(
            {"answer": f"{number}", "messages": messages, "about": f"see {name}"}, ensure_ascii=bool(number % 2)
        )
        rows.append({"messages": messages, "videos": [{"video": name, "fps": 1.5}], "extra_info": extra, "n": number})
    return rows


def iterate_texts(value):
    """Yield every text in a value; JSON texts are decoded."""
    if isinstance(value, str):
        yield from iterate_texts(json.loads(value)) if value[:1] in ("[", "{") else [value]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_texts(item)


def write_source(path, count=10):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in make_rows(count)))
    return path


def test_paths_get_the_root_and_nothing_else_changes(tmp_path, root):
    source = write_source(tmp_path / "rows.jsonl")
    (report,) = rewrite_paths([source], tmp_path / "out", root)
    written = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    for row, original in zip(written, make_rows(10), strict=True):
        for new, old in zip(iterate_texts(row), iterate_texts(original), strict=True):
            name = old.removeprefix("file://")
            assert new == (old.replace(name, f"{root}/{name}") if name in NAMES else old)
        assert (row["n"], row["videos"][0]["fps"]) == (original["n"], 1.5)
    assert report.rows == 10
    assert report.path_counts == {
        "longvt_source/made": 9,
        "museg/charades": 9,
        "museg/et_instruct_164k": 6,
        "selfqa": 6,
    }
    assert report.missing_files == ("museg/et_instruct_164k/2.mp4", "selfqa/3.mp4")


def test_reverse_restores_the_file(tmp_path, root):
    source = write_source(tmp_path / "rows.jsonl")
    rewrite_paths([source], tmp_path / "out", root)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() != source.read_bytes()
    rewrite_paths([tmp_path / "out" / "rows.jsonl"], tmp_path / "back", root, reverse=True)
    assert (tmp_path / "back" / "rows.jsonl").read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_parquet_round_trip(tmp_path, root):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[data]'")
    import pyarrow

    table = pyarrow.Table.from_pylist(make_rows(1000))
    table = table.append_column("kind", pyarrow.array(["a", None] * 500).dictionary_encode())
    table = table.append_column("image", pyarrow.array([b"\x00selfqa/3.mp4"] * 1000))
    table = table.append_column("none", pyarrow.array([None] * 1000, pyarrow.list_(pyarrow.large_string())))
    table = table.replace_schema_metadata({"huggingface": "{}"})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    table = parquet.read_table(tmp_path / "rows.parquet")
    (report,) = rewrite_paths([tmp_path / "rows.parquet"], tmp_path / "out", root)
    local = parquet.read_table(tmp_path / "out" / "rows.parquet")
    assert report.rows == 1000
    assert local.schema.equals(table.schema, check_metadata=True)
    assert local["videos"][1].as_py()[0]["video"] == f"{root}/museg/charades/ü.mp4"
    assert local["image"] == table["image"]
    rewrite_paths([tmp_path / "out" / "rows.parquet"], tmp_path / "back", root, reverse=True)
    back = parquet.read_table(tmp_path / "back" / "rows.parquet")
    assert back.equals(table)
    assert back.schema.equals(table.schema, check_metadata=True)


def test_published_examples_are_rewritten(root):
    paths = PathRewriter(media_root="/r")
    local = paths.rewrite_value(EXAMPLES["paravt_sft"])
    assert local["messages"][1]["content"][0]["video_url"]["url"] == "file:///r/selfqa/a.mp4"
    assert paths.rewrite_value(EXAMPLES["paravt_rl"])["videos"][0]["video"] == "/r/longvt_source/made/a.mp4"
    assert PathRewriter(media_root="/r", reverse=True).rewrite_value(local) == EXAMPLES["paravt_sft"]


@pytest.mark.parametrize(
    "text",
    [
        "What is selfqa/ good for?",
        "/already/there/selfqa/3.mp4",
        "notselfqa/3.mp4",
        "selfqa",
        "a\nselfqa/3.mp4",
        "selfqa/../../etc/passwd",
    ],
)
def test_other_texts_stay(text):
    assert PathRewriter(media_root="/r").rewrite_value(text) == text
    line = json.dumps({"a": text, "b": [text]})
    assert PathRewriter(media_root="/r").rewrite_json(line) == line


def test_escaped_slashes():
    line = r'{"a": "file:\/\/selfqa\/\u00fc.mp4"}'
    paths = PathRewriter(media_root="/r")
    assert json.loads(paths.rewrite_json(line)) == {"a": "file:///r/selfqa/ü.mp4"}
    assert paths.missing_files == {"selfqa/ü.mp4"}
    assert PathRewriter(media_root="/r", reverse=True).rewrite_json(paths.rewrite_json(line)) == line


def test_missing_media_are_checked_again(tmp_path, root):
    source = write_source(tmp_path / "rows.jsonl")
    words = ["data", "rewrite-paths", source, "--root", root, "--out", tmp_path / "out"]
    assert "selfqa: 6 paths, 1 " in good(*words)
    assert (tmp_path / "out" / "rows.jsonl.missing.txt").read_text().splitlines() == NAMES[2:]
    (root / "selfqa").mkdir()
    (root / "selfqa" / "3.mp4").write_bytes(b"x")
    assert "selfqa: 6 paths, 0 " in good(*words)
    assert (tmp_path / "out" / "rows.jsonl.missing.txt").read_text().splitlines() == NAMES[2:3]


def test_invalid_arguments_are_errors(tmp_path, root):
    source = write_source(tmp_path / "rows.jsonl")
    out = ["--out", tmp_path / "out"]
    fail(DataError, "data", "rewrite-paths", source, "--root", tmp_path / "none", *out, key=tmp_path / "none")
    fail(DataError, "data", "rewrite-paths", tmp_path / "x.jsonl", "--root", root, *out, key=tmp_path / "x.jsonl")
    fail(DataError, "data", "rewrite-paths", source, "--root", root, "--out", tmp_path, key=source)
    (tmp_path / "a.txt").write_text("x")
    fail(DataError, "data", "rewrite-paths", tmp_path / "a.txt", "--root", root, *out, key=tmp_path / "a.txt")
    (tmp_path / 'a"b').mkdir()
    fail(DataError, "data", "rewrite-paths", source, "--root", tmp_path / 'a"b', *out, key=tmp_path / 'a"b')
    source.write_bytes(b'{"a": "\xff"}\n')
    fail(DataError, "data", "rewrite-paths", source, "--root", root, *out, key=f"{source}, line 1")
    fail(DataError, "data", "rewrite-paths", root, "--root", root, *out, key=root)


def test_truncated_file_is_an_error_with_its_line(tmp_path, root):
    source = write_source(tmp_path / "rows.jsonl", 45)
    full = source.read_bytes()
    source.write_bytes(full[:-20])
    fail(
        DataError, "data", "rewrite-paths", source, "--root", root, "--out", tmp_path / "out", key=f"{source}, line 45"
    )
    assert not (tmp_path / "out" / "rows.jsonl").exists()
    source.write_bytes(b"\xef\xbb\xbf" + full)  # a byte order mark is accepted
    good("data", "rewrite-paths", source, "--root", root, "--out", tmp_path / "out")
