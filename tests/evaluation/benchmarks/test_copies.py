"""Local copies: complete ones are counted, sample rows load, invalid ones raise one clear error."""

import asyncio
import base64
import csv
import json
import os
from pathlib import Path

import pytest
from error_cases import raises
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.cli.benchmark import BENCHMARK_ALIASES
from saccade.environments.prompt import load_subtitles
from saccade.errors import ConfigError, DataError, RunError
from saccade.evaluation.benchmarks.base import Answer, check_subtitles, find_missing_media, grade
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow

NAMES = plugins.list_plugins("evaluation.benchmarks")
# NAME.sample.jsonl, rows that may not be published: beside the checkout, or in the folder that a variable names
SAMPLES = Path(os.environ.get("SACCADE_BENCHMARK_SAMPLES") or Path(__file__).parents[4] / "shared/benchmarks")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def bound(name, **settings):
    return plugins.resolve("evaluation.benchmarks", name, settings)()


def test_every_benchmark_has_toy_rows():
    assert set(NAMES) == set(MAKERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_complete_copy_is_counted(name, tmp_path):
    benchmark = bound(name)
    tasks = benchmark.load_tasks(write_copy(name, tmp_path))
    assert len(tasks) == benchmark.num_tasks
    assert len({task.id for task in tasks}) == len(tasks)
    # Metrics, baselines and subsets read `extras.question` as the type of a question, of which there are few.
    assert len({task.extras.get("question") for task in tasks}) <= 20
    again = benchmark.load_tasks(tmp_path)
    assert [task.id for task in again] == [task.id for task in tasks]
    assert set(find_missing_media(tasks)) == {task.id for task in tasks if task.media}


@pytest.mark.parametrize("name", NAMES)
def test_real_rows_load(name):
    file = SAMPLES / f"{name}.sample.jsonl"
    if not file.is_file():
        pytest.skip(f"there are no sample rows of this benchmark: {file} is missing")
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    free = [row for row in rows if row.get("question_type") in ("subPlot", "summary")]  # MLVU's, for a judge alone
    tasks = bound(name).load_tasks(file, allow_incomplete=True)
    assert len(tasks) == len(rows) - len(free)
    assert all(task.question for task in tasks)


def test_settings_choose_a_variant(tmp_path):
    assert bound("hrbench", size="8k").name == "hrbench_8k"
    assert bound("mathvision", mini=True).num_tasks == 304
    (tmp_path / "subtitle").mkdir()
    (tmp_path / "subtitle" / "v1.srt").write_text("1\n")
    rows = list(MAKERS["videomme"]())[:6]
    tasks = bound("videomme", subtitles=True).load_tasks(write_copy("videomme", tmp_path, rows), allow_incomplete=True)
    assert tasks[0].extras["subtitles"] == "../subtitle/v1.srt"
    assert tasks[5].extras["subtitles"] == ""
    with raises(ConfigError, key="videomme.subtitle", value=True):
        bound("videomme", subtitle=True)


def test_subtitles_are_independent_of_the_location(tmp_path):
    """The same tasks in two copies, so that an evaluation goes on after its data were moved."""
    found = []
    for place in ("here", "there/below"):
        copy = tmp_path / place
        for name in ("videomme", "longvideobench"):
            (copy / name / ("subtitle" if name == "videomme" else "subtitles")).mkdir(parents=True)
        (copy / "videomme" / "subtitle" / "v1.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhi\n")
        (copy / "longvideobench" / "subtitles" / "s.json").write_text('[{"timestamp": [1, 2], "text": "hi"}]')
        tasks = []
        for name in ("videomme", "longvideobench"):
            rows = list(MAKERS[name]())[:6]
            folder = write_copy(name, copy / name, rows)
            tasks += bound(name, subtitles=True).load_tasks(folder, allow_incomplete=True)
        found.append([(task.id, task.digest) for task in tasks])
        for task in (tasks[0], tasks[-1]):
            assert [cue.text for cue in asyncio.run(load_subtitles(task))] == ["hi"]
    assert found[0] == found[1]
    assert tasks[-1].extras["subtitles_offset"] == 0
    assert "subtitles" not in bound("longvideobench").load_tasks(folder, allow_incomplete=True)[0].extras


def test_missing_subtitles_raise(tmp_path):
    for name, count in (("longvideobench", 2), ("videomme", 3)):
        rows = [row for row in MAKERS[name]() if row.get("duration") in ("long", 9.5)][:count]
        folder, benchmark = write_copy(name, tmp_path / name, rows), bound(name, subtitles=True)
        tasks = benchmark.load_tasks(folder, allow_incomplete=True)
        assert all(any("subtitle" in path for path in paths) for paths in find_missing_media(tasks).values())
        with raises(DataError, value=count) as caught:
            check_subtitles(benchmark, tasks, tasks, folder)
        assert "subtitle" in caught.value.key
        bare = bound(name)
        check_subtitles(bare, *[bare.load_tasks(folder, allow_incomplete=True)] * 2, folder)


@pytest.mark.slow
def test_wrong_number_of_subtitled_videos_raises(tmp_path):
    """Of short and medium videos some have none, so a copy in which they were lost looks like a whole one."""
    folder, benchmark = write_copy("videomme", tmp_path, list(MAKERS["videomme"]())), bound("videomme", subtitles=True)
    (folder / "subtitle").mkdir()
    for video in [*range(601, 901), *range(1, 444)]:  # the long ones, and all but one of the others
        (folder / "subtitle" / f"v{video}.srt").write_text("1\n")
    tasks = benchmark.load_tasks(folder)
    with raises(DataError, key=str(folder), value=743):
        check_subtitles(benchmark, tasks, tasks[:3], folder)
    (folder / "subtitle" / "v444.srt").write_text("1\n")
    tasks = benchmark.load_tasks(folder)
    check_subtitles(benchmark, tasks, tasks[:3], folder)


def test_task_digest_is_independent_of_files(tmp_path):
    rows = list(MAKERS["videomme"]())[:3]
    digests = []
    for place, video, is_listed in (("a", "data", True), ("b", "data", False), ("c", "", True), ("d", "videos", False)):
        folder = write_copy("videomme", tmp_path / place, rows)
        (folder / video).mkdir(exist_ok=True)
        (folder / video / "v1.mp4").write_bytes(b"")
        (folder / "subtitle").mkdir()
        if is_listed:
            (folder / "subtitle" / "v1.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nhi\n")
        digests.append(
            [task.digest for task in bound("videomme", subtitles=True).load_tasks(folder, allow_incomplete=True)]
        )
    assert digests[0] == digests[1] == digests[2] == digests[3]


@pytest.mark.parametrize(("name", "count"), [("videomme_subtitles", 2700), ("longvideobench_subtitles", 1337)])
def test_subtitles_are_a_variant_by_name(name, count):
    file, settings = BENCHMARK_ALIASES[name]
    assert (bound(file, **settings).name, bound(file, **settings).num_tasks) == (name, count)


def test_unknown_benchmark_suggests_the_nearest():
    with raises(ConfigError, key="evaluation.benchmarks", value="video-mme"):
        plugins.load("evaluation.benchmarks", "video-mme")


# ---- bad copies ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_missing_split_and_missing_row_raise(name, tmp_path):
    benchmark = bound(name)
    for missing in ("nowhere", "x" * 300):
        with raises(DataError, key=str(tmp_path / missing)):
            benchmark.load_tasks(tmp_path / missing)
    (tmp_path / "empty").mkdir()
    with raises(DataError, key=str(tmp_path / "empty"), value=benchmark.file_patterns):
        benchmark.load_tasks(tmp_path / "empty")
    rows = list(MAKERS[name]())
    with raises(DataError, key=str(tmp_path / "short")):
        benchmark.load_tasks(write_copy(name, tmp_path / "short", rows[:-1]))
    assert benchmark.load_tasks(tmp_path / "short", allow_incomplete=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mlvu", "charades_sta")])
def test_repeated_id_raises(name, tmp_path):
    row = next(iter(MAKERS[name]()))
    with raises(DataError, key="id"):
        bound(name).load_tasks(write_copy(name, tmp_path, [row, row]), allow_incomplete=True)


@pytest.mark.slow
def test_a_count_per_stratum_is_checked(tmp_path):
    rows = [{**row, "duration": "short"} for row in MAKERS["videomme"]()]
    with raises(DataError, key="duration", value="long"):
        bound("videomme").load_tasks(write_copy("videomme", tmp_path, rows))


def problem(name, folder):
    """Return the problem of a copy in one sentence; "" where it is fine."""
    try:
        bound(name).load_tasks(folder, allow_incomplete=True)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name in NAMES if name != "charades_sta"])
def test_missing_fields_are_named_with_their_row(name, tmp_path):
    row = next(iter(MAKERS[name]()))
    nested = "row" if name == "dynamath" else "qa" if name == "lvbench" else None
    inner = row[nested] if nested == "row" else row["qa"][0] if nested else row
    num_reported = 0
    for field in inner:
        less = {key: value for key, value in inner.items() if key != field}
        changed = {**row, nested: less if nested == "row" else [less]} if nested else less
        num_reported += problem(name, write_copy(name, tmp_path, [changed])).count("row 1")
    assert num_reported >= 3


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("videomme", {"answer": "E"}, "answer"),
        ("videomme", {"options": "A. x"}, "options"),
        ("longvideobench", {"correct_choice": -1}, "correct_choice"),
        ("mlvu", {"question_type": "sportsQA"}, "question_type"),
        ("mmvu", {"metadata": {"subject": "Magic"}}, "metadata.subject"),
        ("charades_sta", {"line": "V1 3 2##a person sits."}, "timestamp"),
        ("charades_sta", {"line": "V1 3"}, "line"),
        ("charades_sta", {"line": "V1 30.4.4 31##a person sits."}, "timestamp"),
        ("charades_sta", {"line": f"V1 3 {'9' * 400}##a person sits."}, "timestamp"),
        ("charades_sta", {"line": None, "video": "V1", "caption": "a person sits.", "timestamp": ["3"]}, "timestamp"),
        ("vsibench", {"ground_truth": "four"}, "ground_truth"),
        ("vstar", {"text": "What?"}, "text"),
        ("wemath", {"key": "4steps_1"}, "key"),
        ("tirbench", {"task": "sudoku"}, "task"),
    ],
)
def test_invalid_value_raises(name, change, field, tmp_path):
    row = {**next(iter(MAKERS[name]())), **change}
    with raises(DataError, key=field) as raised:
        bound(name).load_tasks(write_copy(name, tmp_path, [row]), allow_incomplete=True)
    assert "row 1" in str(raised.value)


def test_truncated_file_raises(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "W')
    with raises(DataError, key=str(tmp_path / "rows.jsonl")):
        bound("videomme").load_tasks(tmp_path)
    (tmp_path / "rows.jsonl").write_text("[1]\n")
    with raises(DataError, key=str(tmp_path / "rows.jsonl"), value=[1]):
        bound("videomme").load_tasks(tmp_path)


# ---- forms ---------------------------------------------------------------------------------------------------------


def test_the_other_published_forms_are_read(tmp_path):
    padded = {**next(iter(MAKERS["longvideobench"]())), "correct_choice": "1"}
    options = padded.pop("candidates")
    padded |= {f"option{at}": text for at, text in enumerate([*options, "N/A"])}
    (task,) = bound("longvideobench").load_tasks(
        write_copy("longvideobench", tmp_path / "a", [padded]), allow_incomplete=True
    )
    assert (task.ground_truth, task.options) == ("B", tuple(options))

    flat = {"video_path": "v.mp4", "type": "tv", "uid": "7", "question": "Who?\n(A) Ann\n(B) Bob", "answer": "B"}
    flat |= {"question_type": ["reasoning"], "time_reference": "00:01-00:02"}
    (task,) = bound("lvbench").load_tasks(write_copy("lvbench", tmp_path / "b", [flat]), allow_incomplete=True)
    assert (task.id, task.question, task.options, task.ground_truth) == ("7", "Who?", ("Ann", "Bob"), "B")

    letter = {"video_name": "v.mp4", "duration": 3, "question": "Who?\n(A) Ann\n(B) Bob", "candidates": ["Ann", "Bob"]}
    letter |= {"answer": "B", "task_type": "needle", "question_id": "q1"}
    (task,) = bound("mlvu").load_tasks(write_copy("mlvu", tmp_path / "c", [letter]), allow_incomplete=True)
    assert (task.id, task.question, task.ground_truth) == ("q1", "Who?", "B")

    hub = {"video": "3MSZA.mp4", "caption": "person turn a light on.", "timestamp": ["24.3", 30.4]}
    (task,) = bound("charades_sta").load_tasks(write_copy("charades_sta", tmp_path / "d", [hub]), allow_incomplete=True)
    assert task.ground_truth == (24.3, 30.4)
    assert task.question.endswith("person turn a light on?")


def test_mlvu_takes_the_last_of_equal_options(tmp_path):
    row = {**next(iter(MAKERS["mlvu"]())), "candidates": ["3", "2", "3", "1"], "answer": "3"}
    tasks = bound("mlvu").load_tasks(write_copy("mlvu", tmp_path, [row, {**row, "answer": "9"}]), allow_incomplete=True)
    assert [task.ground_truth for task in tasks] == ["C", ""]
    answers = {task.id: Answer(text="C") for task in tasks}
    assert [graded.value for graded in grade(bound("mlvu"), tasks, answers)] == [1, 0]


def test_dynamath_reads_its_variant_from_the_folder(tmp_path):
    row = next(iter(MAKERS["dynamath"]()))["row"]
    for trial in (1, 10):
        (tmp_path / f"trial{trial}").mkdir()
        (tmp_path / f"trial{trial}" / "dataset.json").write_text(json.dumps({"1": row, "2": row}))
    tasks = bound("dynamath").load_tasks(tmp_path, allow_incomplete=True)
    assert [task.id for task in tasks] == ["1-1", "2-1", "1-10", "2-10"]
    assert tasks[2].media[0].path == str(tmp_path / "trial10" / "image" / "image1.png")


@pytest.mark.slow
def test_hrbench_reads_images_of_other_rows(tmp_path):
    rows = list(MAKERS["hrbench"]())
    big = base64.b64encode(PNG + bytes(200_000)).decode()  # more than the 128 KiB that a table's field has by default
    with (tmp_path / "hr_bench_4k.tsv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        table.writeheader()
        table.writerows({**row, "image": str(at - at % 4) if at % 4 else big} for at, row in enumerate(rows))
    tasks = bound("hrbench").load_tasks(tmp_path)
    assert len(tasks) == 800
    paths = {task.media[0].path for task in tasks}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes().startswith(PNG)


def row_below(folder):
    return BenchmarkRow(file=folder / "rows.jsonl", number=1, values={}, media_dir=folder)


def test_images_inside_rows_become_files_once(tmp_path):
    copy = row_below(tmp_path)
    first = copy.resolve_image({"bytes": PNG, "path": None})
    stamp = Path(first.path).stat().st_mtime_ns
    assert copy.resolve_image(PNG) == copy.resolve_image(base64.b64encode(PNG).decode()) == first
    assert Path(first.path).stat().st_mtime_ns == stamp
    assert first.path.endswith(".png")
    with raises(DataError, key="image"):
        copy.resolve_image("%%%")


def test_full_disk_raises(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with raises(RunError, key=str(tmp_path / "unpacked")):
        row_below(tmp_path).resolve_image(PNG)


def test_parquet_is_read_or_the_missing_package_raises(tmp_path):
    rows = list(MAKERS["vstar"]())
    rows = [{**row, "image": {"bytes": PNG, "path": None}} for row in rows]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "test-00000-of-00001.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        file.write_bytes(b"PAR1")
        with raises(ConfigError, key="pyarrow"):
            bound("vstar").load_tasks(tmp_path)
        return
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    tasks = bound("vstar").load_tasks(tmp_path)
    assert len(tasks) == 191
    assert Path(tasks[-1].media[0].path).read_bytes() == PNG
    file.write_bytes(file.read_bytes()[:200])
    with raises(DataError) as caught:
        bound("vstar").load_tasks(tmp_path)
    assert str(file) in str(caught.value)
