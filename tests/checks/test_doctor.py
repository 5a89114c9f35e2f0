"""`saccade doctor RECIPE`: all that a run would stumble over is told at once, in sentences; no weights are loaded."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import SMALL, bad, good, run

sys.path.insert(0, str(Path(__file__).parent / "engines"))
from generate_server import server
from sglang_server import server as sglang_server

from saccade import checkup, stages
from saccade.config import load_recipe, recipe_names
from saccade.data.rows import read_tasks, write_tasks
from saccade.runlog import Run
from saccade.tools._sandbox.walls import Walls, report
from saccade.types import Kind, Task


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(stages, "load", lambda *_: pytest.fail("a model was loaded"))


def found(name, *settings, folder, stage=checkup.STAGES, **given):
    """What is found, by name: (good, sentence)."""
    recipe = stages.with_paths(load_recipe(name, settings), folder=folder, **given)
    case = checkup.Case(recipe=recipe, folder=folder, stages=stage)
    return {each.name: (each.good, each.found) for each in checkup.examine(case)}


def wrong(findings):
    return {name: sentence for name, (fine, sentence) in findings.items() if not fine}


def test_a_run_that_would_go_well_is_said_to(tmp_path, model, world):
    said = good("doctor", "tiny/para_grpo", *SMALL, "--model", model, "--world", world, "--out", tmp_path / "run")
    assert "no" not in {line.split()[-1] for line in said.splitlines() if line.strip()}
    assert "rows read" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_is_told_about_in_sentences(tmp_path, name):
    problems = wrong(found(name, folder=tmp_path / "run"))
    assert "the recipe names no model; give --model, such as" in problems["model"]
    assert all("\n" not in each and "Error" not in each for each in problems.values()), problems
    assert {"data.train", "data.test"} <= {*problems}


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        ("config.json", "it has no config.json"),
        ("preprocessor_config.json", "nothing says how the model sees pictures"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_model_that_is_not_whole(tmp_path, model, world, gone, sentence):
    (model / gone).unlink()
    problems = wrong(found("tiny/para_grpo", folder=tmp_path / "run", model=model, world=world))
    assert sentence in problems["model"]


def test_a_family_that_is_not_known(tmp_path, model, world):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen9_vl"}))
    problems = wrong(found("tiny/para_grpo", folder=tmp_path / "run", model=model, world=world))
    assert "there is no model family 'qwen9_vl'" in problems["model"]


def test_settings_are_told_one_by_one(tmp_path, model, world):
    settings = ["rl.max_staleness=1", "rewards.format.settings.lamm=1", "agent.settings.max_turn=1", "track=[nobody]"]
    problems = wrong(found("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, world=world))
    assert "did you mean 'max_turns'" in problems["agent"]
    assert "needs an engine with weights of its own" in problems["engine"]
    assert "did you mean 'lam'" in problems["rewards"]
    assert "there is no 'nobody' among the trackers" in problems["trackers"]
    assert "model" not in problems


def test_charts_without_practice(tmp_path, model, world):
    settings = ["world={media: image, image: {charts: 0.5}}", "sft.practice=0"]
    problems = wrong(found("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, world=world))
    assert "give sft.practice or sft.practice_first a share" in problems["practice"]
    settings += ["sft.practice_first=0.1"]
    assert "practice" not in wrong(found("tiny/para_grpo", *settings, folder=tmp_path / "2", model=model, world=world))


def test_extras_that_are_missing(tmp_path, model, world, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = ["model.lora_rank=4", "track=[wandb]", "rewards.math={weight: 1.0}"]
    problems = wrong(found("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, world=world))
    assert "saccade[lora]" in problems["adapters"]
    assert "saccade[track]" in problems["trackers"]
    assert "saccade[math]" in problems["rewards"]


def test_a_device_that_is_not_there(tmp_path, model, world):
    problems = wrong(found("tiny/para_grpo", "model.device=cuda:99", folder=tmp_path / "run", model=model, world=world))
    assert problems["device"].startswith("model.device=cuda:99: t")


def test_data_that_can_not_be_used(tmp_path, model, world):
    own = tmp_path / "own"
    shutil.copytree(world, own)
    (own / "train" / "traces.jsonl").write_text("")
    (own / "test" / "tasks.jsonl").unlink()
    clip = Path(read_tasks(own / "train" / "tasks.jsonl")[0].media[0].path)
    clip.write_bytes(b"no film")
    problems = wrong(found("tiny/para_grpo", folder=tmp_path / "run", model=model, world=own))
    assert "the file holds no row" in problems["data.traces"]
    assert str(clip) in problems["data.train"]
    assert "there is no such file" in problems["data.test"]
    clip.unlink()
    problems = wrong(found("tiny/para_grpo", folder=tmp_path / "run", model=model, world=own))
    assert f"media file {clip} is missing" in problems["data.train"]


def test_a_large_file_is_read_in_part_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup, "ROWS", 3)
    tasks = [Task(id=str(number), question="?", media=(), kind=Kind.OPEN, gold="red") for number in range(5)]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    settings = [f"data.train={tmp_path}/tasks.jsonl"]
    fine, said = found("tiny/para_grpo", *settings, folder=tmp_path / "run", stage=["rl"])["data.train"]
    assert fine
    assert "the first 3 rows read" in said


def test_a_prompt_without_room_for_a_reply(tmp_path):
    problems = wrong(found("tiny/para_grpo", "agent.settings.context_tokens=40", folder=tmp_path / "run"))
    assert "the context ends at 40; show fewer or smaller frames" in problems["context"]


def test_a_disk_without_room_for_the_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, 2**20))
    problems = wrong(found("tiny/para_grpo", folder=tmp_path / "run"))
    assert f"{tmp_path} has 1.0 MiB left; free some space" in problems["disk"]


def test_walls_that_strict_isolation_wants(tmp_path, monkeypatch):
    weak = report(Walls(namespaces="", landlock=6, seccomp=True, own_user=False), {"namespaces": "not allowed"})
    monkeypatch.setattr(checkup.server, "examine", lambda: weak)
    name, strict = "tiny/pyvision_image", "agent.settings.tools.python.isolation=strict"
    assert (
        "isolation strict wants every wall, but namespaces are missing (not allowed)"
        in (wrong(found(name, strict, folder=tmp_path / "run"))["python, isolation"])
    )
    assert found(name, folder=tmp_path / "run")["python, isolation"][0]


def test_a_run_that_is_there_already(tmp_path, model, world):
    folder, given = tmp_path / "run", {"model": model, "world": world}
    recipe = stages.with_paths(load_recipe("tiny/para_grpo"), folder=folder, **given)
    Run.create(folder, recipe)
    assert "goes on with --resume" in found("tiny/para_grpo", folder=folder, **given)["run folder"][1]
    problems = wrong(found("tiny/para_grpo", "rl.group=4", folder=folder, **given))
    assert "was started with rl.group=8, not 4" in problems["run folder"]
    (folder / "sft").mkdir()
    assert (
        "was stopped before its end"
        in wrong(found("tiny/para_grpo", folder=folder, stage=["rl"], **given))["run folder"]
    )


def test_stages_and_benchmarks_that_are_not_there(tmp_path):
    assert "--stage can't be 'train'; name some of sft, rl, eval" in bad("doctor", "tiny/para_grpo", "--stage", "train")
    done = run("doctor", "tiny/para_grpo", "--stage", "eval", "--bench", "vstar,nothing", "--data", tmp_path)
    assert done.exit_code == 1
    assert "mend model, benchmark vstar, benchmark nothing" in done.stderr
    assert "data.test" not in done.output


# ---- servers ---------------------------------------------------------------------------------------------------------


def of_server(tmp_path, model, world, served, *settings, stage=("rl", "eval"), engine="vllm"):
    settings = [f"engine.name={engine}", f"engine.settings.servers=[{served.url}]", *settings]
    given = {"folder": tmp_path / "run", "model": model, "world": world}
    return found("tiny/para_grpo", *settings, stage=stage, **given)[f"server {served.url}"]


def test_a_server_that_will_do(tmp_path, model, world, renderer):
    with server(renderer, root=str(model)) as served:
        fine, said = of_server(tmp_path, model, world, served)
    assert fine, said
    assert f"serves {model}, 4096 tokens" in said
    assert not served.bodies


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"lacks": ("/inference/v1/generate",)}, "--enable-scale-out"),
        ({"lacks": ("/is_paused",)}, "VLLM_SERVER_DEV_MODE=1"),
        ({"words": "other words"}, "vocabulary is another"),
        ({"context": 1000}, "takes 1000 tokens, and a conversation may have 1024; start it with --context 1024"),
    ],
)
def test_a_server_that_will_not(tmp_path, model, world, renderer, how, sentence):
    with server(renderer, **how) as served:
        fine, said = of_server(tmp_path, model, world, served)
    assert not fine
    assert sentence in said


def test_an_evaluation_publishes_nothing_and_may_want_more_context(tmp_path, model, world, renderer):
    with server(renderer, lacks=("/is_paused",)) as served:
        assert of_server(tmp_path, model, world, served, stage=["eval"])[0]
        larger = "evaluation.agent={context_tokens: 9000}"
        assert "a conversation may have 9000" in of_server(tmp_path, model, world, served, larger, stage=["eval"])[1]


def test_a_server_that_is_away_or_sick(tmp_path, model, world, renderer):
    with server(renderer) as served:
        served.sick = True
        assert "it answered /v1/models with 500" in of_server(tmp_path, model, world, served)[1]
    fine, said = of_server(tmp_path, model, world, served)
    assert not fine
    assert "can't be reached" in said
    assert "start one with `saccade serve MODEL`" in said


def test_a_server_of_another_model(tmp_path, model, world, renderer):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (other / "config.json").write_text(json.dumps(config))
    with server(renderer, root=str(other)) as served:
        fine, said = of_server(tmp_path, model, world, served)
    assert not fine
    assert f"serves another model, {other}: its text_config.num_hidden_layers is" in said


def test_a_server_whose_checkpoint_lies_elsewhere_is_not_said_to_be_compared(tmp_path, model, world, renderer):
    with server(renderer, root="Qwen/Qwen3-VL-4B-Instruct") as served:
        fine, said = of_server(tmp_path, model, world, served)
    assert fine
    assert "its config doesn't lie here, so that it can't be compared" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "fine", "sentence"),
    [
        ({}, True, "4089 tokens; whether its weights are the model's is compared when a run begins"),
        ({"seeded": False}, True, "seeds decide nothing there"),
        ({"context": 1024}, False, "a conversation may have 1024; start it with --context-length 1031"),
        ({"lacks": ("/pause_generation",)}, False, "doesn't know /pause_generation; it takes SGLang 0.5.23 or newer"),
        ({"lacks": ("/server_info",)}, False, "give the address of an SGLang server, 0.5.23 or newer"),
    ],
)
def test_an_sglang_server(tmp_path, model, world, how, fine, sentence):
    with sglang_server(model, **how) as served:
        found = of_server(tmp_path, model, world, served, engine="sglang")
    assert found[0] == fine, found[1]
    assert sentence in found[1]
    assert not served.orders


def test_no_server_at_all(tmp_path, model, world):
    settings = ["engine={name: vllm, settings: {servers: []}}"]
    problems = wrong(found("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, world=world))
    assert "has no servers; name one in engine.settings.servers" in problems["servers"]


def test_servers_are_asked_where_there_is_no_model_to_compare_with(tmp_path, renderer):
    with server(renderer) as served:
        settings = ["engine.name=vllm", f"engine.settings.servers=[{served.url}]"]
        seen = found("tiny/para_grpo", *settings, folder=tmp_path / "run", stage=["rl"])
    assert seen[f"server {served.url}"] == (
        True,
        "serves models/m, 4096 tokens; there is no model here to compare it with",
    )
