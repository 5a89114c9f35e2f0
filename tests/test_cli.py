"""The command line: light to start, one sentence for what the user can mend, resumable."""

import json
import subprocess
import sys

import pytest
from commands import RL, SFT, WORLD, bad, good, run
from typer.core import TyperGroup
from typer.main import get_command

from saccade import cli, config, doctor
from saccade.runlog import Run


def test_a_table_in_a_log_is_as_wide_as_a_log():
    assert 80 < max(map(len, good("recipes").splitlines())) <= 120


def test_help_needs_nothing_heavy():
    heavy = "[name for name in ('torch', 'transformers', 'av', 'numpy') if name in sys.modules]"
    code = f"import sys; from saccade import cli\ntry: cli.main()\nfinally: print({heavy})"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert all(
        command in done.stdout
        for command in ("doctor", "recipes", "model", "data", "sft", "train", "eval", "ask", "demo")
    )


def commands(group, *path):
    """The words of every command and group below."""
    for name, each in group.commands.items():
        yield (*path, name)
        if isinstance(each, TyperGroup):
            yield from commands(each, *path, name)


@pytest.mark.parametrize("words", commands(get_command(cli.app)), ids=" ".join)
def test_every_command_has_help(words):
    said = good(*words, "--help")
    assert "Usage:" in said
    assert run(*words, "--no-such-option").exit_code == 2


@pytest.mark.slow
def test_recipes_are_listed_and_shown(tmp_path):
    assert all(name in good("recipes") for name in config.recipe_names())
    (tmp_path / "mine.yaml").write_text(good("recipes", "show", "tiny/para_grpo", "seed=3"))
    assert config.load_recipe(str(tmp_path / "mine.yaml")) == config.load_recipe("tiny/para_grpo", ["seed=3"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recipes", "show", "tiny/paragrpo"], "did you mean 'tiny/para_grpo'"),
        (["recipes", "show", "tiny/base", "rl.optm.lr=1"], "did you mean rl.optim.lr"),
        (["sft", "tiny/base", "--out", "{}/run"], "--world"),
        (["eval", "{}/none"], "there is no run at"),
        (["ask", "Why?", "--video", "{}/none.mp4", "--model", "m"], "there is no file"),
        (["model", "tiny", "{}/m", "--family", "nothing"], "no tiny model of the family 'nothing'"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(tmp_path, arguments, words):
    assert words in bad(*(argument.format(tmp_path) for argument in arguments))


@pytest.mark.parametrize("arguments", [["nothing"], ["recipes", "--nothing"], ["sft"]])
def test_wrong_usage_is_typers_own(arguments):
    assert run(*arguments).exit_code == 2


def test_version_and_no_command():
    assert good("--version").startswith("saccade 0")
    assert run().exit_code == 2


def test_a_model_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "already holds a model" in bad("model", "tiny", tmp_path)


@pytest.mark.slow
def test_doctor_tries_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = good("doctor")
    names = ("python", "torch", "transformers", "av", "threads", "device", "video", "jail")
    assert all(name in output for name in names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_forgives_extras_that_are_missing_but_not_old_ones(monkeypatch):
    kept = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name in ("peft", "wandb") else kept(name))
    found = {each.name: each for each in doctor.examine()}
    assert found["peft"].good
    assert found["peft"].found.startswith("not installed")
    assert "pytest" not in found
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.1" if name == "peft" else kept(name))
    assert "mend peft" in run("doctor").stderr


@pytest.mark.slow
def test_doctor_names_what_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.1" if name == "torch" else "99")
    assert "mend torch, transformers" in run("doctor").stderr


@pytest.mark.parametrize(("command", "resumable"), [("sft", True), ("doctor", False)])
def test_ctrl_c_says_how_to_go_on(monkeypatch, command, resumable):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_recipe", stop)
    monkeypatch.setattr(doctor, "examine", stop)
    arguments = ["sft", "tiny/base", "--out", "runs/a b", "--resume"] if resumable else ["doctor"]
    monkeypatch.setattr(sys, "argv", ["saccade", *arguments])
    done = run(*arguments)
    assert done.exit_code == 130
    assert ("saccade sft tiny/base --out 'runs/a b' --resume" in done.stderr) is resumable
    assert done.stderr.startswith("\nStopped.")


@pytest.mark.slow
def test_from_nothing_to_an_answer(tmp_path):
    model, world, folder = tmp_path / "model", tmp_path / "world", tmp_path / "run"
    good("model", "tiny", model)
    good("data", "world", world, *WORLD)
    start = ["sft", "tiny/para_grpo", *SFT, *RL, "--model", model, "--world", world, "--out", folder]
    assert "step-000004" in good(*start)
    assert "already exists" in bad(*start)
    good(*start, "--resume")
    assert [line["step"] for line in Run.open(folder).metrics("sft")] == [1, 2, 3, 4]
    assert "rl/step-000004" in good("train", *start[1:], "--resume")
    assert [line["step"] for line in Run.open(folder).metrics("rl")] == [1, 2, 3, 4]
    assert "accuracy" in good("eval", folder)
    output = good("eval", folder, "--name", "test, tools off", "evaluation.tools=false", "evaluation.limit=2")
    assert "test, tools off − test" in output
    assert "can't be called 'a/b'" in bad("eval", folder, "--name", "a/b")
    clip = next((world / "test" / "clips").iterdir())
    for source in (folder, folder / "sft" / "step-000004", model):
        assert "visual tokens" in good("ask", "--video", clip, "How many flashes?", "--model", source)
    assert json.loads((folder / "done" / "sft.json").read_text())["checkpoint"].endswith("step-000004")


def test_a_run_is_evaluated_without_another_word(tmp_path):
    for words in ((tmp_path,), ("--limit", 3, tmp_path), ("of", tmp_path), (tmp_path, "--tools", "off", "seed=1")):
        assert f"there is no run at {tmp_path}" in bad("eval", *words)
    assert all(word in good("eval", "--help") for word in ("merge", "compare"))
    assert "--shuffle-options" in good("eval", "of", "--help")
