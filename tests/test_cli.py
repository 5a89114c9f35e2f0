"""The command line: fast to start, one line per error, resumable."""

import json
import subprocess
import sys

import pytest
from commands import RL, SFT, SYNTHETIC, count_visual_tokens, fail, good, run
from typer.core import TyperGroup
from typer.main import get_command

from saccade.checks import machine
from saccade.cli.app import app
from saccade.config import load
from saccade.errors import ConfigError, DataError, ModelError, RunError
from saccade.runs.run_folder import Run


def test_table_width_in_a_log():
    assert 80 < max(map(len, good("recipes").splitlines())) <= 120


def test_help_imports_no_heavy_modules():
    heavy = "[name for name in ('torch', 'transformers', 'av', 'numpy') if name in sys.modules]"
    code = f"import sys; from saccade.cli.app import main\ntry: main()\nfinally: print({heavy})"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert all(
        command in done.stdout
        for command in ("doctor", "recipes", "model", "data", "sft", "train", "eval", "ask", "demo")
    )


def commands(group, *path):
    """Yield the words of every command and group."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)


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


@pytest.mark.parametrize(("command", "resumable"), [("sft", True), ("doctor", False)])
def test_interrupt_prints_the_resume_command(monkeypatch, command, resumable):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["saccade.cli.app"], "load_recipe", stop)
    monkeypatch.setattr(machine, "check_machine", stop)
    arguments = ["sft", "tiny/base", "--out", "runs/a b", "--resume"] if resumable else ["doctor"]
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
    assert "rl/step-000004" in good("train", *start[1:], "--resume")
    assert [line["step"] for line in Run.open(folder).read_metrics("rl")] == [1, 2, 3, 4]
    assert "accuracy" in good("eval", folder)
    output = good("eval", folder, "--name", "test_no_tools", "evaluation.use_tools=false", "evaluation.limit=2")
    assert "test_no_tools − test" in output
    for name in ("a/b", "a, b", ""):
        fail(DataError, "eval", folder, "--name", name, key="name", value=name)
    clip = next((data / "test" / "clips").iterdir())
    for source in (folder, folder / "sft" / "step-000004", model):
        assert count_visual_tokens(good("ask", "--video", clip, "How many flashes?", "--model", source)) > 0
    assert json.loads((folder / "status" / "sft.json").read_text())["checkpoint"].endswith("step-000004")


def test_eval_runs_its_default_command(tmp_path):
    for words in ((tmp_path,), ("--limit", 3, tmp_path), (tmp_path, "--use-tools", "off", "seed=1")):
        fail(RunError, "eval", *words, key=tmp_path)
    assert all(word in good("eval", "--help") for word in ("merge", "compare"))
    assert "--shuffle-options" in good("eval", "--help")
