"""The command line: fast to start, one line per error, resumable."""

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import RL, SFT, SMALL, SYNTHETIC, count_visual_tokens, fail, good, run
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from saccade import plugins
from saccade.checks import machine
from saccade.cli.app import app
from saccade.config import load, reference
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe
from saccade.errors import ConfigError, DataError, ModelError, RunError
from saccade.runs import stages
from saccade.runs.run_folder import Run


def test_table_width_in_a_log():
    assert 80 < max(map(len, good("recipes").splitlines())) <= 120


def list_commands(group=None, words=()):
    """Yield the words of every command and of every group of commands."""
    group = group or get_command(app)
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from list_commands(command, (*words, name))


@pytest.mark.slow
def test_help_imports_no_heavy_modules():
    code = (
        "import json, sys; from saccade.cli.app import app\n"
        "for words in json.loads(sys.argv[1]): app([*words, '--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'av', 'numpy') if name in sys.modules])"
    )
    # The default command of `eval` has no name of its own.
    commands = [[word for word in words if "<" not in word] for words in list_commands()]
    assert len(commands) > 20
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert all(
        command in done.stdout
        for command in ("doctor", "recipes", "model", "data", "sft", "rl", "train", "eval", "ask", "demo")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "tiny/base", "rl.optm.lr=1"],
        ["rl", "tiny/base", "rl.optm.lr=1"],
        ["eval", "tiny/base", "rl.optm.lr=1", "--model", "m"],
        ["doctor", "tiny/base", "rl.optm.lr=1"],
        ["ask", "Why?", "rl.optm.lr=1", "--model", "m"],
        ["data", "synth", "d", "rl.optm.lr=1"],
        ["recipes", "plan", "tiny/base", "rl.optm.lr=1"],
        ["demo", "rl.optm.lr=1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_key_is_reported_before_torch_is_imported(monkeypatch, arguments):
    """None in sys.modules makes the import of torch an error."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith(("saccade.runs.", "saccade.checks.run_checks"))]:
        monkeypatch.delitem(sys.modules, name)
    done = run(*arguments)
    assert done.exit_code == 1
    assert "rl.optim.lr" in done.stderr


def test_help_lists_the_common_commands_first():
    names = list(get_command(app).list_commands(None))
    assert sorted(names) == sorted(get_command(app).commands)
    assert names.index("demo") < names.index("train") < names.index("sft") < names.index("rl") < names.index("ablate")


def complete(monkeypatch, words):
    monkeypatch.setenv("_SACCADE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["saccade", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    done = CliRunner().invoke(app, prog_name="saccade")
    return done.output.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rep"], ["report"]),
        (["rl", "tiny/para"], ["tiny/para_grpo"]),
        (["rl", "tiny/base", "rl.optim.l"], ["rl.optim.lr="]),
        (["rl", "tiny/base", "rl.op"], ["rl.optim."]),
        (["rl", "tiny/base", "engine.name=vl"], ["engine.name=vllm"]),
        (["rl", "tiny/base", "engine.name", "=", "vl"], ["vllm"]),  # as bash divides it
        (["rl", "tiny/base", "rl.streaming", "="], ["true", "false"]),
        (["rl", "tiny/base", "rl.streaming="], ["rl.streaming=true", "rl.streaming=false"]),
        (["rl", "tiny/base", "rl.on_stale_group=d"], ["rl.on_stale_group=drop"]),
        (["eval", "runs", "--shar"], ["--shard"]),
        (["recipes", "explain", "rl.micro"], ["rl.micro_batch_size"]),
        (["eval", "runs", "--benchmarks", "mlvu,videomme_"], ["mlvu,videomme_subtitles"]),
        (["data", "import", "paravt_s"], ["paravt_sft"]),
        (["ablate", "tur"], ["turns"]),
    ],
    ids=" ".join,
)
def test_completion(monkeypatch, words, expected):
    assert complete(monkeypatch, words) == expected


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rl.group_size", ["default: 8", "in tiny/base: 8", "int"]),
        ("rl", ["group_size", "optim"]),
        ("environment.settings.max_tool_turns", ["default:", "turns"]),
        ("environment.settings.tools.crop_video.fps", ["frames per second"]),
        ("rewards.tool_use.settings.mode", ["graded"]),
        ("rl.loss.settings", ["clip_high"]),
        ("rl.filters.reward_std.above", ["population std"]),
        ("environments.image.settings.max_calls_per_turn", ["calls"]),
    ],
)
def test_recipes_explain(key, words):
    output = good("recipes", "explain", key, "--recipe", "tiny/base")
    assert all(word in output for word in words), output


def test_every_key_can_be_explained():
    for key in load.list_keys():
        assert reference.explain_key(key, Recipe()).meaning, key


def test_recipes_explain_names_the_nearest_key():
    for key in ("rl.group_siz", "environment.settings.max_tool_turn", "rl.group_size.x", "rewards.accuracy.settings.x"):
        fail(ConfigError, "recipes", "explain", key, key=key)
    for key, nearest in (
        ("rl.group_siz", "rl.group_size"),
        ("rl.optm.lr", "rl.optim"),
        ("environment.settings.max_tool_turn.x", "environment.settings.max_tool_turns"),
    ):
        assert repr(nearest) in run("recipes", "explain", key).stderr
        good("recipes", "explain", nearest)


@pytest.mark.parametrize("kind", ["reward", "tool", "environment"])
def test_new_writes_a_plugin_that_passes_its_test(tmp_path, monkeypatch, kind):
    good("new", kind, "second_look", "--out", tmp_path)
    fail(RunError, "new", kind, "second_look", "--out", tmp_path, key=tmp_path / "second_look.py")
    plugin = plugins.load(f"{kind}s", str(tmp_path / "second_look.py"))
    assert plugin is not None
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "second_look", raising=False)
    spec = importlib.util.spec_from_file_location(f"new_{kind}_test", tmp_path / "test_second_look.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test(*([tmp_path / "model"] if inspect.signature(test).parameters else []))


@pytest.mark.parametrize("name", ["a-b", "class", "accuracy", "2x", "../x", "random", "torch"])
def test_new_refuses_a_name_that_no_plugin_can_have(tmp_path, name):
    fail(ConfigError, "new", "reward", name, "--out", tmp_path, key="NAME", value=name)
    assert not list(tmp_path.iterdir())


def commands(group, *path):
    """Yield the words of every command and group."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(get_command(app)), ids=" ".join)
def test_every_command_has_help(words):
    output = good(*words, "--help")
    assert "Usage:" in output
    assert run(*words, "--no-such-option").exit_code == 2


@pytest.mark.slow
def test_recipes_list_and_show(tmp_path):
    assert all(name in good("recipes") for name in load.list_recipes())
    (tmp_path / "mine.yaml").write_text(good("recipes", "show", "tiny/para_grpo", "seed=3"))
    assert load.load_recipe(str(tmp_path / "mine.yaml")) == load.load_recipe("tiny/para_grpo", ["seed=3"])


@pytest.mark.parametrize(
    ("arguments", "error_type", "key", "word"),
    [
        (["recipes", "show", "tiny/paragrpo"], ConfigError, "recipe", "tiny/para_grpo"),
        (["recipes", "show", "tiny/base", "rl.optm.lr=1"], ConfigError, "rl.optm.lr", "rl.optim.lr"),
        (["sft", "tiny/base", "--out", "{}/run"], DataError, "data.demonstrations", "--data"),
        (["eval", "{}/none"], RunError, "{}/none", "none"),
        (["ask", "Why?", "--video", "{}/none.mp4", "--model", "m"], DataError, "{}/none.mp4", "none.mp4"),
        (["model", "tiny", "{}/m", "--family", "nothing"], ModelError, "family", "qwen3_vl"),
    ],
)
def test_user_error_is_one_line(tmp_path, arguments, error_type, key, word):
    """It names the key, and the nearest one, a choice or the option to use."""
    given = [argument.format(tmp_path) for argument in arguments]
    assert word in fail(error_type, *given, key=key.format(tmp_path))


@pytest.mark.parametrize("arguments", [["nothing"], ["recipes", "--nothing"], ["sft"]])
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_version_and_no_command():
    assert good("--version").startswith("saccade 0")
    assert run().exit_code == 2


def test_model_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    fail(RunError, "model", "tiny", tmp_path, key=tmp_path)


@pytest.mark.parametrize(("command", "resumable"), [("sft", True), ("sft", False), ("doctor", False)])
def test_interrupt_prints_the_resume_command(tmp_path, monkeypatch, command, resumable):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    if resumable:
        Run.create(Path("runs/a b"), load_recipe("tiny/base"))
    monkeypatch.setattr(sys.modules["saccade.cli.train"], "load_recipe", stop)
    monkeypatch.setattr(machine, "check_machine", stop)
    arguments = [command, *(["tiny/base", "--out", "runs/a b", "--resume"] if command == "sft" else [])]
    monkeypatch.setattr(sys, "argv", ["saccade", *arguments])
    done = run(*arguments)
    assert done.exit_code == 130
    assert ("saccade sft tiny/base --out 'runs/a b' --resume" in done.stderr) is resumable
    assert done.stderr.startswith("\n")


@pytest.mark.slow
def test_pipeline_from_nothing_to_an_answer(tmp_path):
    model, data, folder = tmp_path / "model", tmp_path / "data", tmp_path / "run"
    good("model", "tiny", model)
    good("data", "synth", data, *SYNTHETIC)
    start = ["sft", "tiny/para_grpo", *SFT, *RL, "--model", model, "--data", data, "--out", folder]
    assert "step-000004" in good(*start)
    fail(RunError, *start, key=folder)
    good(*start, "--resume")
    assert [line["step"] for line in Run.open(folder).read_metrics("sft")] == [1, 2, 3, 4]
    assert "rl/step-000004" in good("rl", *start[1:], "--resume")
    assert [line["step"] for line in Run.open(folder).read_metrics("rl")] == [1, 2, 3, 4]
    assert "accuracy" in good("eval", folder)
    output = good("eval", folder, "--name", "test_no_tools", "evaluation.use_tools=false", "evaluation.num_tasks=2")
    assert "test_no_tools − test" in output
    for name in ("a/b", "a, b"):
        fail(DataError, "eval", folder, "--name", name, key="name", value=name)
    clip = next((data / "test" / "clips").iterdir())
    for source in (folder, folder / "sft" / "step-000004", model):
        assert count_visual_tokens(good("ask", "--video", clip, "How many flashes?", "--model", source)) > 0
    assert json.loads((folder / "finished_stages" / "sft.json").read_text())["checkpoint"].endswith("step-000004")


@pytest.mark.slow
def test_train_runs_the_stages_whose_data_is_named(tmp_path, tiny_folder, dataset_folder):
    start = ["train", "tiny/para_grpo", *SMALL, "validation.every=2", "--model", tiny_folder]
    fail(ConfigError, *start, "--out", tmp_path / "none", key="data")
    fail(ConfigError, *start, "--stage", "sft,evil", "--out", tmp_path / "none", key="--stage", value="evil")
    start += ["--data", dataset_folder, "--out", tmp_path / "run"]
    output = good(*start, "--stage", "sft", "sft.steps=2") + good(*start, "--resume")  # a grown SFT is continued
    assert "stages: sft, rl, eval" in output
    assert all(f"{stage}: validation after step {step}" in output for stage in ("sft", "rl") for step in (0, 2, 4))
    folder = Run.open(tmp_path / "run")
    assert all(folder.is_done(stage) for stage in ("sft", "rl"))
    assert (folder.path / "evaluations" / "test_rl_step-000004.jsonl").is_file()
    fail(RunError, *start, key=tmp_path / "run")
    fail(RunError, *start, "--resume", "sft.steps=5", key="sft.steps", value=5)
    good(*start, "--resume", "rl.steps=5")
    assert (folder.path / "evaluations" / "test_rl_step-000005.jsonl").is_file()
    assert [line["step"] for line in folder.read_metrics("rl")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in folder.read_metrics("sft")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_ctrl_c_while_modules_are_imported_is_one_word():
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'saccade.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from saccade.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.split()) == (130, ["Interrupted."])


def test_a_warning_shows_control_characters_as_visible_ones():
    code = (
        "import logging; from saccade.cli import app as cli\n"
        "cli.app = lambda: logging.getLogger('saccade.models').warning('surplus tensor %s', 'x\\x1b[31m\\u202e')\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "surplus tensor x\N{SYMBOL FOR ESCAPE}[31m\N{REPLACEMENT CHARACTER}\n"


def test_stages_follow_from_the_recipe_and_its_data():
    recipe = load.load_recipe("tiny/para_grpo", ["data.train=t", "data.test=e"])
    assert stages.list_stages(recipe) == ["rl", "eval"]
    assert stages.list_stages(recipe.with_values({"data.demonstrations": "d"})) == ["sft", "rl", "eval"]
    assert stages.list_stages(recipe.with_values({"data.test": "", "data.demonstrations": "d"})) == ["sft", "rl"]


def test_eval_runs_its_default_command(tmp_path):
    for words in ((tmp_path,), ("--num-tasks", 3, tmp_path), (tmp_path, "--use-tools", "off", "seed=1")):
        fail(RunError, "eval", *words, key=tmp_path)
    assert all(word in good("eval", "--help") for word in ("merge", "compare"))
    assert "--shuffle-options" in good("eval", "--help")


def iterate_parameters(command=None, words=()):
    """Yield each parameter that takes a value, with the words of its command and the command's arguments."""
    command = command or get_command(app)
    arguments = [parameter for parameter in command.params if isinstance(parameter, TyperArgument)]
    for parameter in command.params:
        if not getattr(parameter, "is_flag", False):
            yield words, parameter, arguments
    for name, child in getattr(command, "commands", {}).items():
        yield from iterate_parameters(child, (*words, name) if "<" not in name else words)


def list_parameters():
    return [
        pytest.param(words, parameter, arguments, id=" ".join((*words, parameter.name)))
        for words, parameter, arguments in iterate_parameters()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "parameter", "arguments"), list_parameters())
def test_no_parameter_is_empty(tmp_path, monkeypatch, words, parameter, arguments):
    """An empty path would mean the current folder."""
    monkeypatch.chdir(tmp_path)
    if parameter in arguments:
        values = ["" if argument is parameter else "x" for argument in arguments]
    else:
        values = [parameter.opts[0], "", *("x" for argument in arguments)]
    done = run(*words, *values)
    assert done.exit_code == 2, done.output + repr(done.exception)
    assert "it is empty; give a value" in " ".join(done.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


FORMATS = {"HTML": ".html", "JSON": ".json", "page": ".html"}


def test_every_file_to_write_in_one_format_has_its_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = []
    for words, parameter, arguments in iterate_parameters():
        suffixes = {suffix for word, suffix in FORMATS.items() if word in (getattr(parameter, "help", "") or "")}
        if "Path" not in str(parameter.type_descriptor.annotation) or not suffixes or parameter in arguments:
            continue
        if ".pdf" in parameter.help:  # a report, whose format is that of its name
            continue
        done = run(*words, parameter.opts[0], "x.txt", *("x" for argument in arguments))
        (suffix,) = suffixes
        assert done.exit_code == 2, parameter.opts
        assert f"give it a name that ends in {suffix}" in " ".join(done.stderr.replace("│", " ").split())
        tried.append(parameter.opts[0])
    assert sorted(tried) == ["--export", "--json", "--json", "--out", "--page", "--page"]
    assert not list(tmp_path.iterdir())
