"""Input that no honest user gives: bombs of YAML, absurd sizes, names that no file can have, damaged records."""

import asyncio
import gzip
import json
import lzma
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from archive_cases import build_tar
from commands import bad, fail, good, run
from error_cases import raises
from toy_rows import MAKERS, write_copy

import saccade
from saccade import plugins
from saccade.chat.renderer import load_renderer
from saccade.checks.run_checks import PlannedRun, check_recipe, report_checks
from saccade.config.load import load_recipe, parse_yaml, read_yaml
from saccade.data.archives import Archive, unpack
from saccade.data.constant_baseline import compute_wording_baselines
from saccade.data.dataset import iterate_items, require_gradable
from saccade.data.option_shuffle import restore_options
from saccade.data.rewrite_paths import PathRewriter
from saccade.data.source_row import read_rows
from saccade.data.visibility import is_answerable
from saccade.environments.openenv import Openenv
from saccade.environments.prompt import load_subtitles
from saccade.errors import ConfigError, DataError, EnvironmentServerError, MediaError, RunError, SaccadeError
from saccade.evaluation.benchmarks.base import find_missing_media
from saccade.media.image import read_image
from saccade.media.subtitles import read_cues
from saccade.media.video import probe_video
from saccade.models import tiny
from saccade.models.checkpoint_files import ADAPTERS_FILE, check_weights
from saccade.models.config_sizes import read_sizes
from saccade.models.lora import read_adapters
from saccade.reporting.episode_view import build_timeline
from saccade.rewards.answer_types.number_scanner import scan_numbers
from saccade.runs.run_folder import Run
from saccade.testing import build_example_episodes
from saccade.training.episode_log import read_rollouts
from saccade.types import Media, Task
from saccade.utils.files import read_bytes, read_text, require_regular_files, write_text
from saccade.utils.http_client import RequestFailed
from saccade.utils.jsonl import read_json, write_jsonl
from saccade.utils.openai_client import OpenAIClient

pytestmark = pytest.mark.slow

LEVELS = "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 20))
CHAIN = "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 500))
YAML_BOMBS = {
    "aliases of aliases": f"a0: &a0 [1, 2]\n{LEVELS}",
    "a chain of aliases": f"a0: &a0 [1]\n{CHAIN}",
    "a list of itself": "a: &a [*a]",
    "a mapping of itself": "&a {b: *a}",
    "deep lists": "[" * 5000,
    "deep mappings": "{a: " * 500 + "1" + "}" * 500,
    "a long text": "a" * (2**20 + 1),
    "a null character": '"a\\0b"',
    "half of a character": r'"a\ud800"',
    "a hexadecimal number of 16,000 bits": f"a: 0x{'f' * 4000}",
    "a number in base 60 with 3,000 digits": f"a: {':'.join(['59'] * 3000)}",
    "a list as a key": "? [a]\n: 1",
    "a repeated key": "a: 1\na: 2",
    "an object": "!!python/object/apply:os.system ['true']",
}


@pytest.mark.parametrize("text", YAML_BOMBS.values(), ids=YAML_BOMBS)
def test_yaml_that_explodes_is_refused(text):
    with raises(ConfigError, key="mine.yaml"):
        parse_yaml(text, "mine.yaml")


def test_a_merge_key_is_named():
    with raises(ConfigError, key="mine.yaml") as caught:
        parse_yaml("a: &a {b: 1}\nc: {<<: *a}", "mine.yaml")
    assert "merge keys (<<)" in str(caught.value)


def test_a_mapping_with_many_keys_is_read():
    text = "\n".join(f"k{number}: {number}" for number in range(3000))
    assert len(parse_yaml(text, "mine.yaml")) == 3000


@pytest.mark.parametrize("key", ["rl.steps", "rl.optim.lr", "seed", "rl.filters.max_sampling_rounds", "frame_budgets"])
def test_true_is_no_number(key):
    key = {"rl.filters.max_sampling_rounds": "rl.selection.max_sampling_rounds"}.get(key, key)
    value = [4, True] if key == "frame_budgets" else True
    with raises(ConfigError, key=key, value=value):
        load_recipe("tiny/base", [f"{key}={json.dumps(value)}"])


def test_a_huge_key_is_not_quoted_whole():
    name = "a" * 100_000
    with raises(ConfigError, key=name) as caught:
        load_recipe("tiny/base", [f"{name}=1"])
    assert len(str(caught.value)) < 5_000


def test_true_is_no_number_for_a_plugin():
    recipe = load_recipe("tiny/base", ["environment.settings.max_calls_per_turn=true"])
    with raises(ConfigError, key="environment.settings.max_calls_per_turn", value=True):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("rl.group_size=1000000000", "rl.group_size"),
        ("rl.prompts_per_step=1000000000", "rl.prompts_per_step"),
        ("rl.selection.oversample=1e300", "rl.selection.oversample"),
        ("environment.settings.max_tool_turns=1000000000", "environment.settings.max_tool_turns"),
        ("sft.tokens_per_step=1000000000000", "sft.tokens_per_step"),
        ("frame_budgets=[1000000000]", "num_frames"),
    ],
)
def test_a_step_that_is_too_large_to_plan_is_refused(setting, key):
    result = run("recipes", "plan", "tiny/base", setting)
    assert result.exit_code == 1
    assert key in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def folder(tmp_path):
    Run.create(tmp_path / "run", load_recipe("tiny/base"))
    return tmp_path / "run"


NAMES = ["..", ".", "", "a/b", "a\x00b", "x" * 5000, "é" * 120, "a\n", "-a", "\x1b[2J"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:8]))
def test_a_name_that_no_evaluation_can_have_is_refused(folder, name):
    for arguments in (["eval", folder], ["eval", "merge", folder], ["eval", "compare", folder, folder]):
        if name:  # an empty one is refused by the command line
            fail(DataError, *arguments, f"--name={name}", key="name", value=name)
    with raises(DataError, key="name", value=name):
        saccade.read_episodes(folder, name=name)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"stage": "rl"}',
        '{"stage": ["rl"], "step": 1}',
        '{"stage": "rl", "step": "1"}',
        '{"stage": "rl", "step": true}',
        '{"stage": "rl", "step": 1, "reward": ' + "9" * 400 + "}",
        "7",
    ],
)
def test_a_damaged_line_of_metrics_is_refused(folder, text):
    (folder / "metrics.jsonl").write_text(f'{text}\n{{"stage": "rl", "step": 2}}\n')
    bad("report", folder)
    with pytest.raises(RunError):
        Run.open(folder).read_metrics("rl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "invocations.json"])
def test_a_folder_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert name in bad("report", folder)


def test_deep_json_of_a_run_is_refused(folder):
    (folder / "invocations.json").write_text("[" * 100_000)
    assert "invocations.json" in bad("report", folder)


@pytest.mark.parametrize("name", ["x" * 5000, "file/below"], ids=["long", "below a file"])
@pytest.mark.parametrize(
    "command",
    [
        ["report"],
        ["model", "tiny"],
        ["eval"],
        ["recipes", "show"],
        ["data", "check"],
        ["sft", "tiny/base", "--model"],
        ["doctor", "tiny/base", "--out"],
    ],
    ids=" ".join,
)
def test_a_path_that_no_file_can_have_is_one_sentence(tmp_path, monkeypatch, command, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = run(*command, name)
    assert result.exit_code == 1 or command[0] == "doctor", result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)


@pytest.mark.parametrize(
    "command",
    [
        "sft tiny/base --data d --model m --out loop",
        "rl tiny/base --data d --model loop",
        "train tiny/base --data loop --model m",
        "demo --out loop",
        "eval loop",
        "eval tiny/base --model loop",
        "report loop",
        "ask Why? --model loop",
        "export loop out",
        "serve loop",
        "doctor tiny/base --out loop",
        "data check loop",
        "data check loop.jsonl",
        "data synth loop",
        "model tiny loop",
        "recipes show loop.yaml",
        "sft tiny/base data.train=loop.jsonl model.path=loop",
    ],
)
def test_a_link_to_itself_is_one_sentence(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for name in ("loop", "loop.jsonl", "loop.yaml"):
        Path(name).symlink_to(name)
    result = run(*command.split())
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert Path("loop").is_symlink()


@pytest.mark.parametrize("name", ["file", "loop", "broken", "loop/below", "file/below"])
def test_doctor_refuses_a_run_folder_that_cannot_be_created(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("missing")
    planned_run = PlannedRun(recipe=load_recipe("tiny/base"), folder=tmp_path / name, stages=["sft"])
    results = {result.name: result for result in report_checks(planned_run)}
    assert not results["disk"].is_ok


@pytest.mark.parametrize("text", ["", "\n", "# comment\n", "seed: 0\nmodel:\n  family: qwen3_vl\n"])
def test_a_recipe_of_a_run_that_is_empty_or_cut_off_is_refused(folder, text):
    (folder / "recipe.yaml").write_text(text)
    for command in (["report"], ["eval"], ["sft", "tiny/base", "--resume", "--out"], ["doctor"]):
        if text.startswith("seed") and command == ["doctor"]:
            continue  # it takes any recipe
        assert "recipe" in bad(*command, folder)
    assert (folder / "recipe.yaml").read_text() == text


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        (name, values)
        for names, values in {
            ("train", "validation", "test", "frame_size", "image.image_size"): (10**8, 10**21),
            ("clip_seconds", "fps", "image.grid_images"): (1e8, 1e300),
        }.items()
        for name in names
    ],
)
def test_absurd_sizes_of_synthetic_data_are_refused(tmp_path, setting, values):
    for value in values:
        key = f"synthetic.{setting}"
        fail(ConfigError, "data", "synth", tmp_path, "synthetic.media=image", f"{key}={value}", key=key)


@pytest.mark.parametrize(
    "key",
    [
        "sft.steps",
        "sft.tokens_per_step",
        "rl.steps",
        "rl.prompts_per_step",
        "rl.group_size",
        "rl.selection.oversample",
        "rl.selection.over_provision",
        "rl.selection.round_size",
        "model.num_threads",
    ],
)
def test_absurd_sizes_of_a_training_are_refused(tmp_path, key):
    for value in (10**8, 10**21):
        fail(ConfigError, "sft", "tiny/base", f"{key}={value}", "--out", tmp_path / "run", key=key)


@pytest.mark.parametrize(
    ("command", "key", "option"),
    [
        (["eval", "tiny/base"], "data.test", "--tasks"),
        (["sft", "tiny/base"], "data.demonstrations", "--data"),
        (["rl", "tiny/base"], "data.train", "--data"),
    ],
)
def test_missing_data_advises_an_option_of_the_command(tmp_path, tiny_folder, command, key, option):
    line = fail(DataError, *command, "--model", tiny_folder, "--out", tmp_path / "run", key=key, value="")
    assert option in line
    assert option in good(command[0], "--help")


def test_a_model_whose_writing_was_interrupted_is_written_again(tmp_path, monkeypatch):
    def interrupt(folder, *others):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_save_checkpoint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiny.make_tiny_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "config.json").exists()
    good("model", "tiny", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"]
    assert not [path for path in (tmp_path / "model").iterdir() if path.name.startswith(".")]


# ---- shrunk inputs that mutations found ----------------------------------------------------------------------------

CUE = {"timestamp": [1, 2], "text": "Red"}


@pytest.mark.parametrize("row", [{**CUE, "timestamp": [10**400, 2]}, {**CUE, "timestamp": [1, 10**400]}])
def test_subtitles_at_a_time_that_no_float_holds_are_refused(tmp_path, row):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([row]))
    with raises(MediaError, key=str(path)):
        read_cues(str(path))


@pytest.mark.parametrize("offset", [10**400, float("nan"), True, "2"])
def test_an_offset_of_subtitles_that_is_no_number_is_refused(offset):
    task = build_task(extras={"subtitles": "a.srt", "subtitles_offset": offset})
    with raises(MediaError, key="extras.subtitles_offset"):
        asyncio.run(load_subtitles(task))


SPANS = {"evidence": [[1, 2]], "cover": [0, 4], "event_seconds": 2.0}


@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        (SPANS, True),
        ({**SPANS, "cover": [0, 1e300]}, False),  # more slots than memory
        ({**SPANS, "event_seconds": 0}, None),
        ({**SPANS, "evidence": 7}, None),
        ({**SPANS, "evidence": [[1]]}, None),
        ({**SPANS, "cover": ["a", "b"]}, None),
    ],
)
def test_extras_of_other_types_specify_no_visibility(extras, expected):
    assert is_answerable(build_task(extras=extras), [0.5, 1.5, 2.5]) is expected


@pytest.mark.parametrize("record", [True, {"reason": "x"}, {"order": [1]}, {"order": [0, "1"]}, {"order": [0.0, 1.0]}])
def test_a_dataset_may_have_an_extra_of_the_name_of_shuffled_options(record):
    task = build_task(extras={"shuffled": record}, options=("red", "blue"))
    assert restore_options(task) is task


@pytest.mark.parametrize("width", [0, "640", None, 10**400])
def test_a_box_of_an_image_of_no_size_has_a_baseline(width):
    extras = {"question": "where", "width": width, "height": 480}
    task = build_task(extras=extras, answer_type="box", ground_truth=(0.0, 0.0, 0.5, 0.5))
    assert compute_wording_baselines([task]) == {task.digest: 1.0}


@pytest.mark.parametrize("extras", [{"events": [[1, 10**400]]}, {"seconds": 10**400}])
def test_a_timeline_leaves_out_times_that_no_float_holds(extras):
    episode = replace(build_example_episodes(["choice"])[0], task=build_task(extras=extras))
    assert build_timeline(episode) is None


def test_deep_json_of_rollouts_is_refused(tmp_path):
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "rl-000001.jsonl.gz").write_bytes(gzip.compress(b"[" * 100_000 + b"\n"))
    with raises(DataError):
        read_rollouts(tmp_path, "rl", 1)


def test_an_id_with_half_a_character_is_imported(tmp_path):
    row = {"id": "\ud800", "question": "Which?", "media": [], "answer_type": "open", "ground_truth": "red"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    good("data", "import", "tasks", tmp_path / "rows.jsonl", "--out", tmp_path / "tasks.jsonl")
    assert saccade.load_tasks(tmp_path / "tasks.jsonl")[0].id == "\ud800"


def build_task(**fields):
    values = {"id": "1", "question": "Which?", "media": (), "answer_type": "choice", "ground_truth": "A"}
    return Task(**{**values, "media": (Media(path="a.mp4"),), **fields})


def test_arguments_of_an_environments_reset_that_are_no_mapping_are_refused():
    with raises(DataError, key="extras.reset", value=7):
        asyncio.run(Openenv(url="http://127.0.0.1:9").reset(build_task(extras={"reset": 7}), None))


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_compressed_archive_with_a_damaged_byte_is_used_or_refused(tmp_path, suffix):
    content = build_tar({"a.txt": bytes(range(256)) * 256}, f"w:{suffix}")
    archive = Archive(name=f"a.tar.{suffix}", parts=(f"a.tar.{suffix}",))
    num_refused = 0
    for position in range(0, len(content), 1 + len(content) // 40):
        damaged = bytes([*content[:position], content[position] ^ 0xFF, *content[position + 1 :]])
        (tmp_path / archive.name).write_bytes(damaged)
        try:
            unpack(tmp_path, archive, tmp_path / str(position))
        except DataError as error:
            num_refused += error.key == str(tmp_path / archive.name)
    assert num_refused > 20


def test_a_server_at_a_port_beyond_the_last_is_refused(tmp_path):
    client = OpenAIClient(base_url="http://127.0.0.1:99999/v1", timeout=5.0)
    with pytest.raises(RequestFailed, match="65535"):
        asyncio.run(client.create_chat_completion({}))
    with raises(EnvironmentServerError, key="environment.settings.url"):
        asyncio.run(Openenv(url="http://127.0.0.1:99999").reset(build_task(), None))


@pytest.mark.parametrize(
    ("answer_type", "truth"),
    [
        ("grounding", (0.0, float("inf"))),
        ("grounding", (float("-inf"), 3.0)),
        ("box", (0.0, 0.0, float("inf"), 1.0)),
        ("box", (0.0, float("nan"), 1.0, 1.0)),
    ],
)
def test_a_ground_truth_without_end_is_refused(answer_type, truth):
    with raises(DataError, key="ground_truth"):
        require_gradable(build_task(answer_type=answer_type, ground_truth=truth), "a.jsonl")


@pytest.mark.parametrize("name", ["question\n", "que\r\nstion", "a\u2028b", "\x85"])
def test_an_error_is_one_line_whatever_it_quotes(tmp_path, name):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "1", name: "Which?"}) + "\n")
    with pytest.raises(DataError) as caught:
        list(iterate_items(path, Task))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("section", ["", "environment.settings."])
def test_a_key_of_many_levels_is_refused(section):
    key = section + ".".join(["a"] * 2000)
    with raises(ConfigError, key=key):
        load_recipe("tiny/base", [f"{key}=1"])


def test_a_mixed_number_of_thousands_of_digits_is_no_answer():
    assert scan_numbers("9" * 5000 + " 1/2")[0].value is None


@pytest.mark.parametrize("bounds", [(0.5, 0.5, 0.9, 0.9), (0.5, 0.1, 0.9, 0.9)])
def test_boxes_that_rounding_makes_lines_have_a_baseline(bounds):
    truth = tuple(value / 1e6 for value in bounds)
    task = build_task(answer_type="box", ground_truth=truth, extras={"question": "where", "width": 1, "height": 1e9})
    assert compute_wording_baselines([task])[task.digest] >= 0


def test_an_archive_whose_dictionary_exceeds_the_memory_is_refused(tmp_path):
    content = bytearray(lzma.compress(build_tar({"a.txt": b"red"}), format=lzma.FORMAT_ALONE))
    content[1:5] = b"\xff\xff\xff\xff"  # the size of the dictionary
    (tmp_path / "a.tar.xz").write_bytes(content)
    code = (
        "import resource, sys; from pathlib import Path; from saccade.data.archives import *\n"
        "from saccade.errors import DataError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "try: unpack(Path(sys.argv[1]), Archive(name='a.tar.xz', parts=('a.tar.xz',)), Path(sys.argv[1]) / 'out')\n"
        "except DataError as error: sys.exit(0 if 'a.tar.xz' in error.key else 1)\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


@pytest.mark.parametrize("command", ["sft", "rl", "train"])
def test_more_processes_than_the_machine_has_room_for_are_refused(command):
    fail(ConfigError, command, "tiny/base", "--nproc", 10_000, key="--nproc", value=10_000)


@pytest.mark.parametrize("section", ["evaluation", "validation"])
def test_more_samples_of_a_task_than_can_be_planned_are_refused(section):
    with raises(ConfigError, key=f"{section}.num_samples", value=10**11):
        load_recipe("tiny/base", [f"{section}.num_samples={10**11}"])


def test_a_path_with_a_backslash_of_its_own_is_rewritten(tmp_path):
    rewriter = PathRewriter(str(tmp_path))
    assert rewriter.rewrite_value("selfqa/\\u12.mp4") == f"{tmp_path}/selfqa/\\u12.mp4"
    assert rewriter.missing_files == {"selfqa/\\u12.mp4"}


def test_a_row_that_names_a_video_of_thousands_of_characters_is_read(tmp_path):
    (row, *others) = MAKERS["mlvu"]()
    benchmark = plugins.resolve("evaluation.benchmarks", "mlvu", {})()
    folder = write_copy("mlvu", tmp_path, [{**row, "video": "x" * 5000}, *others])
    tasks = benchmark.load_tasks(folder, allow_incomplete=True)
    assert find_missing_media(tasks)[tasks[0].id] == [tasks[0].media[0].path]


PIPE_READERS = {
    "a recipe": ("x.yaml", lambda path: read_yaml(path, "recipe")),
    "tasks": ("x.jsonl", lambda path: saccade.load_tasks(path)),
    "rows": ("x.json", lambda path: list(iterate_items(path, Task))),
    "a table": ("x.csv", lambda path: list(read_rows(path))),
    "JSON": ("x.json", lambda path: read_json(path, dict, hint="write it again")),
    "a picture": ("x.png", lambda path: read_image(str(path))),
    "a video": ("x.mp4", lambda path: probe_video(str(path))),
    "subtitles": ("x.srt", lambda path: read_cues(str(path))),
    "rollouts": ("episodes/rl-000001.jsonl.gz", lambda path: read_rollouts(path.parents[1], "rl", 1)),
    "a model": ("model.safetensors", lambda path: load_renderer(str(path.parent))),
    "the weights of a model": ("model.safetensors", lambda path: check_weights(path.parent)),
    "adapters": (ADAPTERS_FILE, lambda path: read_adapters(path.parent)),
    "the sizes of a model": ("config.json", lambda path: read_sizes(str(path.parent))),
    "a run": ("recipe.yaml", lambda path: Run.open(path.parent)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "read"), PIPE_READERS.values(), ids=PIPE_READERS)
def test_a_named_pipe_without_a_writer_is_refused_at_once(tmp_path, name, read):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(SaccadeError):
        read(path)


@pytest.mark.parametrize("write", [lambda path: write_text(path, "a"), lambda path: write_jsonl(path, [{}])])
def test_a_pipe_is_not_replaced_by_a_file(tmp_path, write):
    """As root, a file would also replace a device such as /dev/full."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((RunError, OSError), match="it is a named pipe"):
        write(tmp_path / "pipe")
    assert [(path.name, path.is_fifo()) for path in tmp_path.iterdir()] == [("pipe", True)]


def test_what_is_no_file_is_named(tmp_path):
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, problem in ((pipe, "a named pipe"), ("/dev/zero", "a device"), (folder, "directory")):
        with pytest.raises(OSError, match=problem):
            read_bytes(path)
    with pytest.raises(OSError, match="a named pipe"):
        require_regular_files(tmp_path)
    (tmp_path / "text").write_text("a\r\nb")
    assert read_text(tmp_path / "text") == "a\nb"
    assert read_bytes(tmp_path / "text") == b"a\r\nb"
