"""The public API: every name is there, importing it is light, and a run from Python works end to end."""

import subprocess
import sys
import textwrap

import pytest
from commands import SMALL
from error_cases import raises

import saccade
from saccade.errors import DataError, RunError
from saccade.runs import api


@pytest.mark.parametrize("name", saccade.__all__)
def test_every_public_name_exists(name):
    assert getattr(saccade, name) is not None
    assert name in dir(saccade)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError) as caught:
        _ = saccade.trian
    assert caught.value.name == "trian"


def test_importing_brings_neither_torch_nor_pydantic():
    code = "import sys, saccade; print([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_question_needs_text_and_media():
    with raises(DataError, key="question", value=" "):
        saccade.ask(" ", model="none", videos=["a.mp4"])
    with raises(DataError, key="videos"):
        saccade.ask("Which color?", model="none")


def test_resuming_takes_the_paths_of_the_run(tmp_path):
    recipe = saccade.load_recipe("tiny/para_grpo", SMALL)
    with raises(RunError, key=str(tmp_path)):
        saccade.rl(recipe, out=tmp_path, resume=True)
    saccade.Run.create(tmp_path, recipe.with_values({"model.path": "model", "data.train": "gone.jsonl"}))
    with raises(DataError, key=str(tmp_path / "gone.jsonl")):
        saccade.rl(recipe, out=tmp_path, resume=True)
    with raises(DataError, key="data.train"):
        saccade.rl(recipe, out=tmp_path)


def test_no_tasks_are_not_the_test_split(tmp_path):
    saccade.Run.create(tmp_path, saccade.load_recipe("tiny/para_grpo", SMALL))
    with raises(DataError, key="tasks", value=[]):
        saccade.evaluate(tmp_path, tasks=[])


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = textwrap.dedent("\n".join(line for line in api.__doc__.splitlines() if line.startswith("    ")))
    assert '["rl.steps=20"]' in example
    scope = {"saccade": saccade}
    exec(example.replace('["rl.steps=20"]', repr(SMALL)), scope)
    out, read = tmp_path / "runs" / "a", saccade.read_episodes("runs/a")
    assert read == saccade.read_episodes(out / "evaluations" / "test.jsonl")
    assert sorted((one.episode.task.id, one.score.value) for one in read) == sorted(
        (one.episode.task.id, one.score.value) for one in scope["episodes"]
    )
    steps = []
    longer = saccade.load_recipe("tiny/para_grpo", [*SMALL, "rl.steps=5"])
    checkpoint = saccade.rl(longer, out=out, resume=True, on_step=lambda step, metrics: steps.append(step))
    assert steps == [5]
    assert checkpoint.is_relative_to(out / "rl")
    clip = tmp_path / "data" / "a" / "test" / "clips" / "00000.mp4"
    assert isinstance(saccade.ask("When is red shown?", model=out, videos=[clip]), saccade.Episode)
