"""The stages of a run: what each starts from, and what it rejects."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import RL, SFT, SYNTHETIC, count_visual_tokens, fail, good
from error_cases import raises
from safetensors.torch import load_file, save_file
from signal_handlers import handle_signal

from saccade.checks import run_checks
from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.config.schema import Recipe, RewardTerm
from saccade.data.digests import DIGESTS_FILE
from saccade.errors import ConfigError, ModelError, RunError
from saccade.evaluation import records
from saccade.evaluation.compare import read_evaluations
from saccade.media.cache import CachingMediaLoader
from saccade.models.tiny import make_tiny_model
from saccade.runs import evaluation, pipeline
from saccade.runs.demo import run_demo
from saccade.runs.run_folder import Run
from saccade.sandbox import IsolationLayers, IsolationReport

SHORT = ["sampling.max_tokens=8"]


def interrupt_sft(folder, model, dataset_folder, *, at):
    """An SFT run that is stopped in its step `at`; how it was started."""

    def stop(step, values):
        if step == at:
            raise KeyboardInterrupt

    settings = [*SFT, *RL, *SHORT]
    recipe = pipeline.with_paths(load_recipe("tiny/para_grpo", settings), model=Path(model), data=dataset_folder)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run_sft(folder, recipe, on_step=stop)
    return ["tiny/para_grpo", *settings, "--model", model, "--data", dataset_folder, "--out", folder]


@pytest.mark.slow
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.soak), 3])  # before the first checkpoint, after it
def test_rl_rejects_an_unfinished_sft(tmp_path, tiny_folder, dataset_folder, at):
    folder = tmp_path / "run"
    start = interrupt_sft(folder, tiny_folder, dataset_folder, at=at)
    assert f"--out {folder} --resume" in fail(RunError, "rl", *start, "--resume", key=folder / "sft")
    assert not (folder / "rl").exists()
    good("sft", *start, "--resume")
    assert "rl/step-000004" in good("rl", *start, "--resume")


@pytest.mark.slow
def test_interrupted_rl_resumes(tmp_path, tiny_folder, dataset_folder, caplog):
    folder = tmp_path / "run"
    settings = [*SFT, *RL, *SHORT]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", folder]
    good("sft", *start)
    recipe = pipeline.with_paths(load_recipe("tiny/para_grpo", settings), model=Path(tiny_folder), data=dataset_folder)

    def stop(step, values):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run_rl(folder, recipe, resume=True, on_step=stop)
    assert [path.name for path in (folder / "rl").iterdir()] == ["step-000002"]
    good("rl", *start, "--resume")
    assert [line["step"] for line in Run.open(folder).read_metrics("rl")] == [1, 2, 3, 4]
    metrics = folder / "metrics.jsonl"
    assert metrics not in [argument for record in caplog.records for argument in record.args or ()]
    metrics.unlink()
    pipeline.run_rl(folder, recipe.with_values({"rl.steps": 5}), resume=True, on_step=lambda step, values: None)
    assert metrics in [argument for record in caplog.records for argument in record.args or ()]


@pytest.mark.slow
def test_sft_resumes_with_changed_data_only_if_they_are_accepted(tmp_path, tiny_folder, dataset_folder):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(dataset_folder, data)
    start = interrupt_sft(folder, tiny_folder, data, at=1)
    file = data / "train/demonstrations.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*rows[2:], *rows[:2]]))
    error = fail(RunError, "sft", *start, "--resume", key="data.demonstrations")
    assert "--accept-changed-data" in error
    assert not list((folder / "sft").glob("step-*"))
    good("sft", *start, "sft.steps=1", "--resume", "--accept-changed-data")
    assert len(Run.open(folder).read_json(DIGESTS_FILE)["sources"]["data.demonstrations"]) == 2


@pytest.mark.slow
def test_rl_is_not_resumed_with_other_datasets_or_validation(tmp_path, tiny_folder, dataset_folder):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(dataset_folder, data)
    files = {name: data / name / "tasks.jsonl" for name in ("train", "validation", "test")}
    settings = [
        *(f"data.train={{{files['train']}: 2, {files['test']}: 1}}", f"data.validation={files['validation']}"),
        *(*RL, *SHORT, "validation.every=4", f"model.path={tiny_folder}"),
    ]
    recipe = load_recipe("tiny/para_grpo", settings)

    def train(**options):
        def stop(step, values):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pipeline.run_rl(folder, recipe, on_step=stop, **options)

    train()
    for file, key in (
        (files["train"], f"data.train.{files['train']}"),
        (files["test"], f"data.train.{files['test']}"),
        (files["validation"], "data.validation"),
    ):
        content = file.read_text()
        file.write_text(content.replace('"question":"', '"question":"Look: ', 1))
        with raises(RunError, key=key):
            train(resume=True)
        file.write_text(content)
    train(resume=True)


# ---- what results depend on ------------------------------------------------------------------------------------------


def read_results(folder, name="test"):
    return (folder / "evaluations" / f"{name}.jsonl").read_bytes()


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory, tiny_folder, dataset_folder):
    """A finished run with an evaluation."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    settings = [*SFT, *SHORT, "sft.steps=2"]
    good("sft", "tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", folder)
    good("eval", folder)
    return folder


@pytest.fixture
def run_copy(evaluated_run, tmp_path):
    """A copy of a finished run with an evaluation, and its one checkpoint."""
    folder = Path(shutil.copytree(evaluated_run, tmp_path / "run"))
    return folder, folder / "sft" / "step-000002"


@pytest.mark.slow
def test_copied_weights_keep_their_results(run_copy, tmp_path):
    folder, weights = run_copy
    before = read_results(folder)
    shutil.copytree(weights, tmp_path / "copy")
    (tmp_path / "copy" / "optimizer.pt").unlink()
    (tmp_path / "copy" / "trainer_state.json").write_text('{"seen": 3}')
    good("eval", folder, "--model", tmp_path / "copy")
    assert read_results(folder) == before
    folder.rename(tmp_path / "moved")
    good("eval", tmp_path / "moved")
    assert read_results(tmp_path / "moved") == before


@pytest.mark.slow
def test_a_finished_evaluation_loads_no_model_and_parses_its_file_once(run_copy, monkeypatch):
    folder, _ = run_copy
    before, parsed = read_results(folder), []
    real = records.read_jsonl
    monkeypatch.setattr(evaluation, "load_components", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(
        records, "read_jsonl", lambda path, *args, **more: [parsed.append(path), real(path, *args, **more)][1]
    )
    good("eval", folder)
    assert read_results(folder) == before
    assert parsed == [folder / "evaluations" / "test.jsonl"]


@pytest.mark.slow
def test_finished_results_are_read_without_torch(run_copy, tmp_path, tiny_folder, dataset_folder):
    folder, _ = run_copy
    before = read_results(folder)
    by_recipe = ["eval", "tiny/base", "evaluation.num_tasks=2", "sampling.max_tokens=8", "--model", tiny_folder]
    by_recipe = [*map(str, by_recipe), f"--tasks={dataset_folder / 'test/tasks.jsonl'}", f"--out={tmp_path / 'home'}"]
    good(*by_recipe)
    results = str(folder / "evaluations" / "test.jsonl")
    commands = [["eval", str(folder)], ["report", str(folder)], ["eval", "compare", results, results], by_recipe]
    code = (
        "import json, sys; sys.modules |= {'torch': None, 'transformers': None}\n"  # an import of them is an error
        "from saccade.cli.app import app\n"
        "for command in json.loads(sys.argv[1]): app(command, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_results(folder) == before
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_changed_weights_are_rejected(run_copy):
    folder, weights = run_copy
    before, file = read_results(folder), weights / "model.safetensors"
    status = file.stat()
    tensors = load_file(file)
    name = max(tensors, key=lambda tensor_name: tensors[tensor_name].numel())
    tensors[name].flatten()[tensors[name].numel() // 3] += 0.5  # one number of a million
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    fail(ModelError, "eval", folder, key=file)
    (weights / "checksums.json").unlink()  # those of a change that is meant
    fail(RunError, "eval", folder, key=folder / "evaluations" / "test.jsonl", value=("weights",))
    assert read_results(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_byte_of_a_checkpoint_is_refused_before_it_is_used(run_copy, tmp_path, dataset_folder, name):
    folder, weights = run_copy
    file, clip = weights / name, next((dataset_folder / "test" / "clips").iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    fail(ModelError, "eval", folder, "--name=new", key=file)
    fail(ModelError, "ask", "Why?", "--model", folder, "--video", clip, key=file)
    fail(ModelError, "export", folder, tmp_path / "out", key=file)
    file.unlink()
    if name == "chat_template.jinja":  # without the others the folder isn't a model
        fail(ModelError, "export", folder, tmp_path / "out", key=file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("model.dtype=bfloat16", "precision"),
        ("environment.settings.max_tool_turns=1", "environment"),
        ("seed=9", "seed"),
    ],
)
def test_other_settings_are_rejected(run_copy, setting, what):
    fail(RunError, "eval", run_copy[0], setting, key=run_copy[0] / "evaluations" / "test.jsonl", value=(what,))


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_an_error(run_copy):
    arguments = ("eval", run_copy[0], "environment.settings.max_context_tokens=20", "--name", "small")
    assert "20" in fail(RunError, *arguments, key=run_copy[0] / "evaluations" / "small.jsonl")


def test_identity_has_a_plugin_files_content_not_its_path(tmp_path):
    def rewards(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(text)
        terms = {"rewards": {str(tmp_path / folder / "mine.py"): {"weight": 1.0}}}
        return evaluation.compute_identity(Recipe.model_validate(terms), tmp_path)["rewards"]

    assert rewards("a", "one") == rewards("b", "one") != rewards("b", "two")
    (missing := tmp_path / "a" / "mine.py").unlink()
    with raises(ConfigError, key=str(missing)):
        evaluation.compute_identity(Recipe.model_validate({"rewards": {str(missing): {"weight": 1.0}}}), tmp_path)


@pytest.mark.parametrize("end", ["yaml", "yml"])
def test_identity_has_the_files_named_by_a_prompt_format(tmp_path, end):
    def identity(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(text)
        (tmp_path / folder / f"spoken.{end}").write_text("tool_format: ./mine.py\n")
        settings = {"prompt_format": str(tmp_path / folder / f"spoken.{end}")}
        recipe = {"environment": {"name": "third_party_format", "settings": settings}}
        return evaluation.compute_identity(Recipe.model_validate(recipe), tmp_path)["environment"]

    assert identity("a", "one") == identity("b", "one") != identity("b", "two")


JUDGE = """
from pathlib import Path

from saccade.types import Episode, Ungraded


def accuracy(episode: Episode) -> float | Ungraded:
    state = Path(__file__).with_name("state").read_text()
    if state == "silent" or (state == "shy" and episode.task.id.endswith("0")):
        return Ungraded(reason="the judge is silent")
    return 1.0
"""


@pytest.mark.slow
def test_ungraded_episodes_are_reported_and_retried(tmp_path, tiny_folder, dataset_folder):
    folder, state = tmp_path / "run", tmp_path / "state"
    (tmp_path / "accuracy.py").write_text(JUDGE)
    (tmp_path / "judged.yaml").write_text(
        f"extends: tiny/para_grpo\nrewards:\n  accuracy: null\n  tool_use: null\n"
        f"  {tmp_path / 'accuracy.py'}: {{weight: 1.0}}\n"
    )
    settings = [*SFT, *SHORT, "sft.steps=1"]
    good("sft", tmp_path / "judged.yaml", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", folder)
    state.write_text("silent")
    assert "the judge is silent" in fail(RunError, "eval", folder, key=folder / "evaluations" / "test.jsonl")
    state.write_text("shy")
    output = good("eval", folder)
    assert "2 of 4" in output
    assert "(the judge is silent)" in output  # the reason that the reward gives
    assert re.search(r"\b2 / [12] / 2\b", output)  # tasks / clusters / episodes
    state.write_text("awake")
    output = good("eval", folder)
    assert "the judge is silent" not in output
    assert re.search(r"\b4 / [12] / 4\b", output)


# ---- a folder that moves ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_with_its_data_can_be_moved(tmp_path, monkeypatch):
    """Dataset, model and checkpoints below the run: resumed, evaluated, asked and reported from its new place."""
    folder, moved = tmp_path / "here" / "run", tmp_path / "there" / "run"
    settings = [*SFT, *RL, *SHORT, "evaluation.num_tasks=2"]
    good("data", "synth", folder / "data", *SYNTHETIC)
    good("model", "tiny", folder / "model")
    start = ["tiny/para_grpo", *settings, "--model", folder / "model", "--data", folder / "data", "--out", folder]
    good("sft", *start)
    good("eval", folder)
    lines = (folder / "evaluations" / "test.jsonl").read_text().splitlines()
    assert {json.loads(line)["checkpoint"] for line in lines} == {"sft/step-000004"}
    assert str(tmp_path) not in "".join(
        path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml")
    )
    moved.parent.mkdir()
    folder.rename(moved)
    monkeypatch.chdir(moved.parent)
    results = read_results(moved)
    good("eval", "run")
    assert read_results(moved) == results
    start = ["tiny/para_grpo", *settings, "--model", "run/model", "--data", "run/data", "--out", "run"]
    assert "rl/step-000004" in good("rl", *start, "--resume")
    output = good("ask", "What?", "--video", "run/data/test/clips/00000.mp4", "--model", "run")
    assert count_visual_tokens(output) > 0
    scored = read_evaluations(Path("run"))["test"].scored[0]
    pixels = CachingMediaLoader().load_pixels
    assert [pixels(picture).shape for picture in scored.episode.ledger.images()]
    assert Path(scored.episode.task.media[0].path).is_file()


def test_paths_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (tmp_path / "other").mkdir()

    def path_of(path, **given):
        recipe = load_recipe("tiny/base", [f"model.path={path}"])
        return pipeline.with_paths(recipe, **{"folder": folder, **given}).model.path

    assert path_of("run/model") == "model"  # of the command line: where the command is run
    assert path_of("model") == str(tmp_path / "model")
    assert path_of("other") == str(tmp_path / "other")
    assert path_of(folder / "model") == "model"
    assert path_of("''") == ""
    assert path_of("model", model=Path("other")) == str(tmp_path / "other")
    assert path_of("model", folder=None) == str(tmp_path / "model")
    named = pipeline.with_paths(load_recipe("tiny/base"), folder=folder, data=Path("run/data")).data
    assert (named.train, named.demonstrations) == ("data/train/tasks.jsonl", "data/train/demonstrations.jsonl")
    assert pipeline.with_paths(load_recipe("tiny/base"), folder=folder, data=Path("w")).data.test == str(
        tmp_path / "w" / "test" / "tasks.jsonl"
    )


def test_paths_of_a_recipe_file_start_at_its_folder(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "base.yaml").write_text(
        "extends: tiny/base\ndata: {test: ../t.jsonl, train: {a.jsonl: 1, /b.jsonl: 2}}\nmodel: {path: m}\n"
        "rewards: {./mine.py: {weight: 2}}\nloggers: [./log.py]\n"
    )
    (tmp_path / "mine.yaml").write_text("extends: recipes/base.yaml\nrewards: {recipes/mine.py: {weight: 3}}\n")
    here, folder = str(tmp_path), str(tmp_path / "recipes")
    recipe = load_recipe("mine.yaml", ["environment.name=env.py", "data.validation=v.jsonl"])
    assert recipe.data.test == f"{here}/t.jsonl"
    assert recipe.data.train == {f"{folder}/a.jsonl": 1, "/b.jsonl": 2}
    assert recipe.model.path == f"{folder}/m"
    assert recipe.loggers == (f"{folder}/log.py",)
    assert recipe.rewards[f"{folder}/mine.py"].weight == 3  # merged with that of the base
    assert recipe.environment.name == f"{here}/env.py"
    assert recipe.data.validation == f"{here}/v.jsonl"
    benchmarks = ["evaluation.benchmarks={vstar: [environment.settings.prompt_format=./mine.yaml]}"]
    assert load_recipe("tiny/base", benchmarks).evaluation.benchmarks["vstar"] == (benchmarks[0].split("[")[1][:-2],)


def test_a_demos_folder_in_the_working_directory_is_not_a_model_of_the_hub(tmp_path, monkeypatch):
    class Started(Exception):
        """The run starts."""

    def start_run(folder, recipe, stages, **options):
        raise Started(recipe.model.path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "start_run", start_run)
    with pytest.raises(Started, match=r"^model$"):
        run_demo(Path("demo"), load_recipe("tiny/quick"), add_task=lambda name: lambda *progress: None)


def test_a_run_records_its_plugins_and_refuses_changed_ones(tmp_path, monkeypatch):
    plugin, folder = tmp_path / "mine.py", tmp_path / "run"
    plugin.write_text("def mine(episode): return 1.0\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: tiny/base\nrewards: {./mine.py: {}}\ndata: {train: run/data/t.jsonl, test: /e.jsonl}\n"
    )
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    run = Run.create(folder, recipe)
    assert "train: data/t.jsonl" in (folder / "recipe.yaml").read_text()
    assert Run.open(folder).recipe == recipe
    (copy,) = folder.glob("plugins/*/mine.py")
    assert copy.read_bytes() == plugin.read_bytes()
    assert run.read_json("invocations.json")[0]["plugins"].keys() == {str(plugin)}
    assert Run.create(folder, recipe, resume=True)
    plugin.write_text("def mine(episode): return 2.0\n")
    with raises(RunError, key=str(plugin)):
        Run.create(folder, recipe, resume=True)
    plugin.unlink()
    with raises(RunError, key=str(plugin)) as caught:
        Run.open(folder).check_plugin_files()
    assert str(copy) in str(caught.value)
    plugin.write_bytes(copy.read_bytes())
    Run.open(folder).check_plugin_files()
    assert Run.create(folder, recipe, resume=True)


@pytest.mark.slow
def test_ask_and_sft_need_no_judge(tmp_path, tiny_folder, dataset_folder, monkeypatch):
    """The judge's key is read where something is graded, and not before."""
    monkeypatch.delenv("SACCADE_TEST_KEY", raising=False)
    judge = "{weight: 1.0, settings: {url: http://127.0.0.1:9/v1, model: m, api_key_env: SACCADE_TEST_KEY}}"
    given = ["tiny/para_grpo", *SFT, *RL, *SHORT, f"rewards.judge={judge}"]
    start = [*given, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    good("sft", *start)
    key = "rewards.judge.settings.api_key_env"
    fail(ConfigError, "rl", *start, "--resume", key=key, value="SACCADE_TEST_KEY")
    clip = dataset_folder / "test" / "clips" / "00000.mp4"
    good("ask", "When?", "--video", clip, "--model", tmp_path / "run")


def test_ask_uses_the_cpu_without_a_gpu(tmp_path, dataset_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_tiny_model(str(tmp_path / "model"), patch_size=16)
    clip = dataset_folder / "test" / "clips" / "00000.mp4"
    good("ask", "When?", "--video", clip, "--model", tmp_path / "model", "sampling.max_tokens=4")


@pytest.mark.parametrize("rewards", [{}, {"accuracy": RewardTerm(weight=0.0), "tool_use": RewardTerm(weight=0.0)}])
def test_zero_rewards_are_rejected(rewards):
    recipe = load_recipe("tiny/para_grpo").model_copy(update={"rewards": rewards})
    with raises(ConfigError, key="rewards"):
        check_recipe(recipe)


def test_missing_isolation_is_rejected_before_the_run_exists(tmp_path, tiny_folder, dataset_folder, monkeypatch):
    weak = IsolationReport(
        IsolationLayers(namespaces="", landlock=6, seccomp=True, per_worker_user=False), {"namespaces": "not allowed"}
    )
    monkeypatch.setattr(run_checks.sandbox, "get_shared_server", lambda isolation: weak.check(isolation))
    strict = ("tiny/pyvision_video", ["environment.settings.tools.python.isolation=strict"])
    recipe = pipeline.with_paths(
        load_recipe(*strict), folder=tmp_path / "run", model=Path(tiny_folder), data=dataset_folder
    )
    with raises(ConfigError):
        pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda *_: None)
    assert not (tmp_path / "run").exists()


def test_unknown_family_is_rejected():
    with raises(ConfigError, key="model.family", value="qwen3vl"):
        check_recipe(load_recipe("tiny/para_grpo", ["model.family=qwen3vl"]))


def test_sft_rejects_invalid_rewards(tmp_path, tiny_folder, dataset_folder):
    start = ["tiny/para_grpo", *SFT, *RL, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    key = "rewards.format_reward.settings.anchor_weigth"
    fail(ConfigError, "sft", *start, f"{key}=1", key=key, value=1)
    assert not (tmp_path / "run").exists()


def test_data_option_refuses_a_file(tmp_path):
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(RunError) as error:
        pipeline.with_paths(load_recipe("tiny/base"), data=tmp_path / "tasks.jsonl")
    assert error.value.key == "data"


def test_data_option_keeps_a_training_mixture(dataset_folder):
    mixed = load_recipe("tiny/para_grpo", ["data.train={a.jsonl: 2, b.jsonl: 1}"])
    found = pipeline.with_paths(mixed, data=dataset_folder).data
    assert found.train == mixed.data.train
    assert found.demonstrations.endswith("demonstrations.jsonl")


@pytest.mark.slow
def test_continued_sft_is_not_finished(tmp_path, tiny_folder, dataset_folder):
    start = [
        "tiny/para_grpo",
        *SFT,
        *RL,
        *SHORT,
        "--model",
        tiny_folder,
        "--data",
        dataset_folder,
        "--out",
        tmp_path / "run",
    ]
    good("sft", *start)

    def stop(step, values):
        raise KeyboardInterrupt

    recipe = Run.open(tmp_path / "run").recipe
    longer = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"steps": recipe.sft.steps + 4})})
    with pytest.raises(KeyboardInterrupt):
        pipeline.run_sft(tmp_path / "run", longer, resume=True, on_step=stop)
    fail(RunError, "rl", *start, f"sft.steps={longer.sft.steps}", "--resume", key=tmp_path / "run" / "sft")


# ---- refused before anything is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("rl.max_staleness=1", "rl.max_staleness", 1),
        ("engine={name: vllm, settings: {top_p: 0.9}}", "engine.settings.top_p", 0.9),
        ("model.device=cuda:99", "model.device", "cuda:99"),
        ("model.device=toaster", "model.device", "toaster"),
    ],
)
def test_unusable_settings_are_rejected_before_the_run_exists(
    tmp_path, tiny_folder, dataset_folder, monkeypatch, setting, key, value
):
    monkeypatch.setattr(pipeline, "load_training_components", lambda *_: pytest.fail("a model was loaded"))
    start = ["tiny/para_grpo", *RL, "--model", tiny_folder, "--data", dataset_folder, "--out", tmp_path / "run"]
    fail(ConfigError, "rl", *start, setting, key=key, value=value)
    assert not (tmp_path / "run").exists()


def test_sft_accepts_sampling_filters():
    recipe = load_recipe("tiny/para_grpo", ["engine={name: vllm, settings: {top_k: 5}}"])
    check_recipe(recipe, ["sft"])
    with raises(ConfigError, key="engine.settings.top_k", value=5):
        check_recipe(recipe)


def test_neutral_filters_are_accepted():
    check_recipe(load_recipe("tiny/para_grpo", ["engine={name: vllm, settings: {top_p: 1, top_k: 0}}"]))


@pytest.mark.slow
def test_unusable_engine_is_rejected_on_resume(tmp_path, tiny_folder, dataset_folder):
    folder, model = tmp_path / "run", Path(tiny_folder)
    settings = [*SFT, *RL, "rl.max_staleness=1", "engine.name=vllm"]
    recipe = pipeline.with_paths(
        load_recipe("tiny/para_grpo", settings), folder=folder, model=model, data=dataset_folder
    )
    Run.create(folder, recipe)
    start = ["tiny/para_grpo", *settings, "--model", model, "--data", dataset_folder, "--out", folder, "--resume"]
    fail(ConfigError, "rl", *start, "engine.name=local", key="rl.max_staleness", value=1)
    assert Run.open(folder).recipe.engine.name == "vllm"


def cut(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (cut, "model.safetensors"),
        (lambda model: (model / "model.safetensors").unlink(), ""),
        (lambda model: (model / "model.safetensors").write_bytes(b"version https://"), "model.safetensors"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "b.safetensors",
        ),
        (lambda model: (model / "model.safetensors.index.json").write_text("[]"), "model.safetensors.index.json"),
    ],
)
def test_incomplete_model_is_rejected_before_the_run_exists(tmp_path, tiny_folder, dataset_folder, spoil, name):
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    spoil(model)
    start = ["tiny/para_grpo", *SFT, "--model", model, "--data", dataset_folder, "--out", tmp_path / "run"]
    fail(ModelError, "sft", *start, key=model / name)
    assert not (tmp_path / "run").exists()


def test_ask_of_a_checkpoint_uses_the_local_engine(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}')
    name, here = pipeline.find_default_recipe(tmp_path)
    assert (name, load_recipe(name, here).engine.name) == ("paravt/para_grpo", "local")


def test_evaluation_may_use_another_engine():
    recipe = load_recipe("paravt/para_grpo", ["engine.name=local"])
    check_recipe(recipe, ["sft"])
    with raises(ConfigError, key="rl.max_staleness", value=2):
        check_recipe(recipe)


@pytest.fixture
def default_sigterm():
    with handle_signal(signal.SIGTERM, signal.SIG_DFL):
        yield


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("is_blocking", [False, True])  # an update in the main thread ends first
def test_sigterm_stops_a_run_like_ctrl_c(is_blocking):
    events = []

    class Engine:
        async def close(self):
            events.append("closed")

    async def work():
        os.kill(os.getpid(), signal.SIGTERM)
        if is_blocking:
            time.sleep(0.05)
            events.append("updated")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGTERM)  # torchrun repeats it
            await asyncio.sleep(0.05)  # the checkpoint is written
            events.append("saved")
            raise

    with pytest.raises(KeyboardInterrupt):
        pipeline.run_and_close(SimpleNamespace(engine=Engine()), work())
    assert events == [*(["updated"] if is_blocking else []), "saved", "closed"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
