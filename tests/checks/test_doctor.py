"""`saccade doctor RECIPE`: reports everything that would make a run fail, without loading weights."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import SMALL, fail, good, run
from error_cases import raises

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from generate_server import server
from sglang_server import server as sglang_server

from saccade.checks import run_checks
from saccade.config.load import list_recipes, load_recipe
from saccade.config.schema import STAGES
from saccade.data.dataset import load_tasks, write_items
from saccade.errors import BrokenEngineError, ConfigError, DataError, EngineError, RunError
from saccade.runs import pipeline
from saccade.runs.run_folder import Run
from saccade.sandbox import IsolationLayers, IsolationReport
from saccade.types import AnswerType, Task


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(pipeline, "load_training_components", lambda *_: pytest.fail("a model was loaded"))


def check(name, *settings, folder, stage=STAGES, **given):
    """Return the results by the name of their check."""
    recipe = pipeline.with_paths(load_recipe(name, settings), folder=folder, **given)
    results = pipeline.check_run(folder, recipe, stage)
    return {result.name: result for result in results}


def find_failed(results):
    """Return the keys of the errors by the name of the check."""
    return {name: result.error.key for name, result in results.items() if not result.is_ok}


def test_valid_run_passes(tmp_path, model, dataset_folder):
    output = good(
        "doctor", "tiny/para_grpo", *SMALL, "--model", model, "--data", dataset_folder, "--out", tmp_path / "run"
    )
    assert "no" not in {line.split()[-1] for line in output.splitlines() if line.strip()}
    assert all(name in output for name in ("data.demonstrations", "data.train", "data.test"))
    assert not (tmp_path / "run").exists()


def test_the_stages_that_train_would_run_are_checked(tmp_path, model, dataset_folder):
    """`saccade train` leaves out a stage without data; so does the check, unless the recipe names no data at all."""
    given = ("tiny/para_grpo", *SMALL, "--model", model, "--out", tmp_path / "run")
    output = good("doctor", *given, f"data.train={dataset_folder / 'train' / 'tasks.jsonl'}")
    assert "data.train" in output
    assert "data.demonstrations" not in output
    done = run("doctor", *given)
    assert done.exit_code == 1
    assert all(key in done.stderr for key in ("data.demonstrations", "data.train", "data.test"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list_recipes())
def test_every_packaged_recipe_has_one_line_messages(tmp_path, name):
    results = check(name, folder=tmp_path / "run")
    problems = find_failed(results)
    assert problems["model"] == "model.path"
    assert all("\n" not in result.message and "Error" not in result.message for result in results.values()), results
    assert {"data.train", "data.test"} <= {*problems}


@pytest.mark.parametrize("gone", ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_model(tmp_path, model, dataset_folder, gone):
    (model / gone).unlink()
    problems = find_failed(check("tiny/para_grpo", folder=tmp_path / "run", model=model, data=dataset_folder))
    assert problems["model"] in (str(model / gone), str(model))


def test_unknown_family(tmp_path, model, dataset_folder):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "qwen9_vl"}))
    problems = find_failed(check("tiny/para_grpo", folder=tmp_path / "run", model=model, data=dataset_folder))
    assert problems["model"] == "model_type"


def test_invalid_settings_are_reported_separately(tmp_path, model, dataset_folder):
    settings = [
        "rl.max_staleness=1",
        "rewards.format_reward.settings.anchor_weigth=1",
        "environment.settings.max_tool_turn=1",
        "loggers=[nothing]",
    ]
    problems = find_failed(
        check("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, data=dataset_folder)
    )
    assert problems == {
        "environment": "environment.settings.max_tool_turn",
        "engine": "rl.max_staleness",
        "rewards": "rewards.format_reward.settings.anchor_weigth",
        "loggers": "loggers",
    }


def test_grid_images_without_auxiliary_sft(tmp_path, model, dataset_folder):
    settings = ["synthetic={media: image, image: {grid_images: 0.5}}", "sft.auxiliary_fraction=0"]
    problems = find_failed(
        check("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, data=dataset_folder)
    )
    assert problems["auxiliary data"] == "synthetic.image.grid_images"
    settings += ["sft.auxiliary_warmup=0.1"]
    assert "auxiliary data" not in find_failed(
        check("tiny/para_grpo", *settings, folder=tmp_path / "2", model=model, data=dataset_folder)
    )


def test_missing_extras(tmp_path, model, dataset_folder, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = ["model.lora_rank=4", "loggers=[wandb]", "rewards.accuracy.settings.answer_types={math: {}}"]
    problems = find_failed(
        check("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, data=dataset_folder)
    )
    assert problems == {"adapters": "model.lora_rank", "loggers": "loggers", "rewards": "answer_type"}


def test_missing_device(tmp_path, model, dataset_folder):
    problems = find_failed(
        check("tiny/para_grpo", "model.device=cuda:99", folder=tmp_path / "run", model=model, data=dataset_folder)
    )
    assert problems["device"] == "model.device"


def test_unusable_data(tmp_path, model, dataset_folder):
    own = tmp_path / "own"
    shutil.copytree(dataset_folder, own)
    (own / "train" / "demonstrations.jsonl").write_text("")
    (own / "test" / "tasks.jsonl").unlink()
    clip = Path(load_tasks(own / "train" / "tasks.jsonl")[0].media[0].path)
    clip.write_bytes(b"not a video")
    problems = find_failed(check("tiny/para_grpo", folder=tmp_path / "run", model=model, data=own))
    assert problems == {
        "data.demonstrations": str(own / "train" / "demonstrations.jsonl"),
        "data.train": str(clip),
        "data.test": str(own / "test" / "tasks.jsonl"),
    }
    clip.unlink()
    problems = find_failed(check("tiny/para_grpo", folder=tmp_path / "run", model=model, data=own))
    assert problems["data.train"] == "media"


def test_large_file_is_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(run_checks, "MAX_ROWS", 3)
    tasks = [
        Task(id=str(number), question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
        for number in range(5)
    ]
    write_items(tmp_path / "tasks.jsonl", tasks)
    settings = [f"data.train={tmp_path}/tasks.jsonl"]
    result = check("tiny/para_grpo", *settings, folder=tmp_path / "run", stage=["rl"])["data.train"]
    assert result.is_ok
    assert {"3", "5"} & {*result.message.split()} == {"3"}


@pytest.mark.parametrize("name", ["hue", "tone"])  # loading registers a type for good, so that each has its own
def test_answer_type_of_an_environments_rewards(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(
        "from saccade.rewards.answer_types.open_ import OpenAnswer\n\n\n"
        f"class Hue(OpenAnswer):\n    names = ({name!r},)\n\n\n{name} = Hue\n"
    )
    task = Task(id="a", question="?", media=(), answer_type=name, ground_truth="red", environment="colors")
    write_items(tmp_path / "tasks.jsonl", [task])
    with raises(DataError, key="answer_type", value=name):
        load_tasks(tmp_path / "tasks.jsonl")
    accuracy = {"is_accuracy": True, "settings": {"answer_types": {str(tmp_path / f"{name}.py"): {}}}}
    environments = {"colors": {"name": "single_turn", "rewards": {"accuracy": accuracy}}}
    settings = [f"data.train={tmp_path}/tasks.jsonl", f"environments={json.dumps(environments)}"]
    if name == "hue":
        assert pipeline.load_training_tasks(tmp_path, load_recipe("tiny/para_grpo", settings)) == [task]
    else:
        result = check("tiny/para_grpo", *settings, folder=tmp_path / "run", stage=["rl"])["data.train"]
        assert result.is_ok, result.message


def test_prompt_without_room_for_a_reply(tmp_path):
    problems = find_failed(
        check("tiny/para_grpo", "environment.settings.max_context_tokens=40", folder=tmp_path / "run")
    )
    assert problems["context"] == "environment.settings.max_context_tokens"


def test_disk_without_room_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(run_checks.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, 2**20))
    problems = find_failed(check("tiny/para_grpo", folder=tmp_path / "run"))
    assert problems["disk"] == str(tmp_path)


def test_checkpoints_of_a_resumed_run_count_once(tmp_path, monkeypatch):
    enough = 2**24  # bytes: more than one tiny checkpoint, fewer than three
    monkeypatch.setattr(run_checks.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, enough))
    assert "disk" in find_failed(check("tiny/para_grpo", folder=tmp_path / "run", stage=["rl"]))
    for step in (20, 40):
        (tmp_path / "run" / "rl" / f"step-{step:06d}").mkdir(parents=True)
    assert "disk" not in find_failed(check("tiny/para_grpo", folder=tmp_path / "run", stage=["rl"]))


def test_processes_that_shard_a_model_need_less_memory_each(tmp_path, monkeypatch):
    """An 8B model whose language model is trained doesn't fit on one GPU, and does on four."""
    gpu, host = 80 * 2**30, 2000 * 2**30
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=gpu))
    monkeypatch.setattr(run_checks.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": host}.__getitem__)
    planned_run = run_checks.PlannedRun(
        recipe=load_recipe("paravt/para_grpo", ["model.device=cuda"]), folder=tmp_path / "run", stages=["rl"]
    )

    def check_memory(planned_run):
        return next(check for check in run_checks.list_checks(planned_run) if check.name == "memory").run()

    with raises(RunError, key="model.device"):
        check_memory(planned_run)
    assert "in each process" in check_memory(replace(planned_run, num_processes=4))
    with raises(RunError, key="model.device"):
        check_memory(replace(planned_run, num_nodes=4))  # weights are sharded within a node


def test_a_run_stops_at_a_check_that_fails(tmp_path, model, dataset_folder, monkeypatch):
    monkeypatch.setattr(run_checks.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, 2**20))
    recipe = pipeline.with_paths(
        load_recipe("tiny/para_grpo"), folder=tmp_path / "run", model=model, data=dataset_folder
    )
    with raises(RunError, key=str(tmp_path)):
        pipeline.run_sft(tmp_path / "run", recipe, on_step=lambda *_: None)
    assert not (tmp_path / "run").exists()


def test_strict_isolation_needs_every_layer(tmp_path, monkeypatch):
    weak = IsolationReport(
        IsolationLayers(namespaces="", landlock=6, seccomp=True, per_worker_user=False), {"namespaces": "not allowed"}
    )
    monkeypatch.setattr(run_checks.sandbox, "probe_isolation", lambda: weak)
    name, strict = "tiny/pyvision_image", "environment.settings.tools.python.isolation=strict"
    assert find_failed(check(name, strict, folder=tmp_path / "run"))["python, isolation"] == "isolation"
    assert check(name, folder=tmp_path / "run")["python, isolation"].is_ok


@pytest.mark.slow
def test_existing_run(tmp_path, model, dataset_folder):
    folder, given = tmp_path / "run", {"model": model, "data": dataset_folder}
    recipe = pipeline.with_paths(load_recipe("tiny/para_grpo"), folder=folder, **given)
    Run.create(folder, recipe)
    assert "--resume" in check("tiny/para_grpo", folder=folder, **given)["run folder"].message
    problems = find_failed(check("tiny/para_grpo", "rl.group_size=4", folder=folder, **given))
    assert problems["run folder"] == "rl.group_size"
    (folder / "sft").mkdir()
    problems = find_failed(check("tiny/para_grpo", folder=folder, stage=["rl"], **given))
    assert problems["run folder"] == str(folder / "sft")


def test_unknown_stages_and_benchmarks(tmp_path):
    fail(ConfigError, "doctor", "tiny/para_grpo", "--stage", "train", key="--stage", value="train")
    done = run(
        "doctor", "tiny/para_grpo", "--stage", "eval", "--benchmarks", "vstar,nothing", "--benchmark-data", tmp_path
    )
    assert done.exit_code == 1
    assert all(name in done.stderr for name in ("model", "vstar", "nothing"))
    assert "data.test" not in done.output


# ---- servers ---------------------------------------------------------------------------------------------------------


def of_server(tmp_path, model, dataset_folder, served, *settings, stage=("rl", "eval"), engine="vllm"):
    settings = [f"engine.name={engine}", f"engine.settings.servers=[{served.url}]", *settings]
    given = {"folder": tmp_path / "run", "model": model, "data": dataset_folder}
    return check("tiny/para_grpo", *settings, stage=stage, **given)[f"server {served.url}"]


def test_a_usable_server_passes(tmp_path, model, dataset_folder, renderer):
    with server(renderer, root=str(model)) as served:
        result = of_server(tmp_path, model, dataset_folder, served)
    assert result.is_ok, result.message
    assert all(value in result.message for value in (str(model), "4096"))
    assert not served.bodies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error_type", "key", "setting"),
    [
        ({"lacks": ("/inference/v1/generate",)}, EngineError, "engine.settings.servers", "--enable-scale-out"),
        ({"lacks": ("/is_paused",)}, EngineError, "engine.settings.servers", "VLLM_SERVER_DEV_MODE=1"),
        ({"words": "other words"}, BrokenEngineError, "engine.settings.servers", "models/m"),
        ({"context": 1000}, BrokenEngineError, "environment.settings.max_context_tokens", "--max-model-len 1024"),
    ],
)
def test_an_unusable_server_is_reported(tmp_path, model, dataset_folder, renderer, options, error_type, key, setting):
    with server(renderer, **options) as served:
        result = of_server(tmp_path, model, dataset_folder, served)
    assert (type(result.error), result.error.key) == (error_type, key)
    assert setting in result.message


def test_an_evaluation_syncs_no_weights_and_may_need_more_context(tmp_path, model, dataset_folder, renderer):
    with server(renderer, lacks=("/is_paused",)) as served:
        assert of_server(tmp_path, model, dataset_folder, served, stage=["eval"]).is_ok
        larger = "evaluation.environment_settings={max_context_tokens: 9000}"
        error = of_server(tmp_path, model, dataset_folder, served, larger, stage=["eval"]).error
    assert (error.key, error.value) == ("environment.settings.max_context_tokens", 9000)


def test_a_failing_server_and_an_unreachable_one_are_reported(tmp_path, model, dataset_folder, renderer):
    with server(renderer) as served:
        served.sick = True
        failing = of_server(tmp_path, model, dataset_folder, served)
    unreachable = of_server(tmp_path, model, dataset_folder, served)
    for result in (failing, unreachable):
        assert type(result.error) is EngineError
        assert (result.error.key, result.error.value) == ("engine.settings.servers", served.url)
    assert ["/v1/models" in result.message for result in (failing, unreachable)] == [True, False]


def test_a_server_of_another_model(tmp_path, model, dataset_folder, renderer):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (other / "config.json").write_text(json.dumps(config))
    with server(renderer, root=str(other)) as served:
        result = of_server(tmp_path, model, dataset_folder, served)
    assert (result.error.key, result.error.value) == ("engine.settings.servers", served.url)
    assert all(value in result.message for value in (str(other), "text_config.num_hidden_layers"))


def test_a_checkpoint_that_is_not_on_this_machine_is_reported_as_not_compared(
    tmp_path, model, dataset_folder, renderer
):
    with server(renderer, root="Qwen/Qwen3-VL-4B-Instruct") as served:
        result = of_server(tmp_path, model, dataset_folder, served)
    assert result.is_ok
    assert "its config is not on this machine and was not compared" in result.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({}, None, ("4089",)),
        ({"seeded": False}, None, ("4089", "--enable-deterministic-inference")),
        ({"context": 1024}, "environment.settings.max_context_tokens", ("1024", "--context-length 1031")),
        ({"lacks": ("/pause_generation",)}, "engine.settings.servers", ("/pause_generation", "0.5.23")),
        ({"lacks": ("/server_info",)}, "engine.settings.servers", ("0.5.23",)),
    ],
)
def test_an_sglang_server(tmp_path, model, dataset_folder, options, key, words):
    with sglang_server(model, **options) as served:
        result = of_server(tmp_path, model, dataset_folder, served, engine="sglang")
    assert (result.error.key if result.error else None) == key, result.message
    assert all(word in result.message for word in words)
    assert ("--enable-deterministic-inference" in result.message) == (options == {"seeded": False})
    assert not served.orders


def test_no_server_at_all(tmp_path, model, dataset_folder):
    settings = ["engine={name: vllm, settings: {servers: []}}"]
    problems = find_failed(
        check("tiny/para_grpo", *settings, folder=tmp_path / "run", model=model, data=dataset_folder)
    )
    assert problems["servers"] == "engine.settings.servers"


def test_servers_are_probed_without_a_local_model(tmp_path, renderer):
    with server(renderer) as served:
        settings = ["engine.name=vllm", f"engine.settings.servers=[{served.url}]"]
        seen = check("tiny/para_grpo", *settings, folder=tmp_path / "run", stage=["rl"])
    result = seen[f"server {served.url}"]
    assert result.is_ok
    assert all(value in result.message for value in ("models/m", "4096"))
