"""The stages of a run: what each begins from, and what it refuses to begin from."""

import os
import shutil
from pathlib import Path

import pytest
from commands import RL, SFT, WORLD, bad, good
from safetensors.torch import load_file, save_file

from saccade import exams, preflight, stages
from saccade.config import Recipe, Term, load_recipe
from saccade.errors import ConfigError
from saccade.evaluation import report
from saccade.media.cache import Library
from saccade.model.tiny import make_tiny
from saccade.runlog import Run
from saccade.tools._sandbox.walls import Walls
from saccade.tools._sandbox.walls import report as report_on

SHORT = ["sampling.max_tokens=8"]


def interrupted(folder, model, world, *, at):
    """An SFT run that is stopped in its step `at`; how it was started."""

    def stop(step, values):
        if step == at:
            raise KeyboardInterrupt

    settings = [*SFT, *RL, *SHORT]
    recipe = stages.with_paths(load_recipe("tiny/para_grpo", settings), model=Path(model), world=world)
    with pytest.raises(KeyboardInterrupt):
        stages.sft(folder, recipe, on_step=stop)
    return ["tiny/para_grpo", *settings, "--model", model, "--world", world, "--out", folder]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3])  # before the first checkpoint, after it
def test_rl_does_not_begin_from_half_a_cold_start(tmp_path, tiny_folder, world, at):
    folder = tmp_path / "run"
    start = interrupted(folder, tiny_folder, world, at=at)
    said = bad("train", *start, "--resume")
    assert f"the SFT in {folder} was stopped before its end" in said
    assert f"`saccade sft … --out {folder} --resume`" in said
    assert not (folder / "rl").exists()
    good("sft", *start, "--resume")
    assert "rl/step-000004" in good("train", *start, "--resume")


@pytest.mark.slow
def test_an_interrupted_rl_goes_on(tmp_path, tiny_folder, world):
    folder = tmp_path / "run"
    settings = [*SFT, *RL, *SHORT]
    start = ["tiny/para_grpo", *settings, "--model", tiny_folder, "--world", world, "--out", folder]
    good("sft", *start)
    recipe = stages.with_paths(load_recipe("tiny/para_grpo", settings), model=Path(tiny_folder), world=world)

    def stop(step, values):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.rl(folder, recipe, resume=True, on_step=stop)
    assert [path.name for path in (folder / "rl").iterdir()] == ["step-000002"]
    good("train", *start, "--resume")
    assert [line["step"] for line in Run.open(folder).metrics("rl")] == [1, 2, 3, 4]


# ---- what results depend on ------------------------------------------------------------------------------------------


def kept(folder, name="test"):
    return (folder / "evaluations" / f"{name}.jsonl").read_bytes()


@pytest.fixture
def judged(tmp_path, tiny_folder, world):
    """A finished run with an evaluation, and its one checkpoint."""
    folder = tmp_path / "run"
    settings = [*SFT, *SHORT, "sft.steps=2"]
    good("sft", "tiny/para_grpo", *settings, "--model", tiny_folder, "--world", world, "--out", folder)
    good("eval", folder)
    return folder, folder / "sft" / "step-000002"


@pytest.mark.slow
def test_the_same_weights_elsewhere_keep_their_results(judged, tmp_path):
    folder, weights = judged
    before = kept(folder)
    shutil.copytree(weights, tmp_path / "copy")
    (tmp_path / "copy" / "optimizer.pt").unlink()
    (tmp_path / "copy" / "notes.json").write_text('{"seen": 3}')
    good("eval", folder, "--model", tmp_path / "copy")
    assert kept(folder) == before
    folder.rename(tmp_path / "moved")
    good("eval", tmp_path / "moved")
    assert kept(tmp_path / "moved") == before


@pytest.mark.slow
def test_other_weights_in_the_same_place_do_not(judged):
    folder, weights = judged
    before, file = kept(folder), weights / "model.safetensors"
    status = file.stat()
    tensors = load_file(file)
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name].flatten()[tensors[name].numel() // 3] += 0.5  # one number of a million
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    assert "holds results of other weights; delete it or give this evaluation another name" in bad("eval", folder)
    assert kept(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "what"),
    [("model.dtype=bfloat16", "precision"), ("agent.settings.max_turns=1", "agent"), ("seed=9", "seed")],
)
def test_other_settings_do_not_either(judged, setting, what):
    assert f"holds results of other {what}; delete it" in bad("eval", judged[0], setting)


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_no_results(judged):
    said = bad("eval", judged[0], "agent.settings.context_tokens=20", "--name", "small")
    assert "every attempt of the evaluation 'small' broke, the first with: " in said
    assert "no room for a reply in a context of 20" in said


def test_a_plugins_own_file_is_part_of_it_and_its_place_is_not(tmp_path):
    def rewards(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(text)
        terms = {"rewards": {str(tmp_path / folder / "mine.py"): {"weight": 1.0}}}
        return exams.identity(Recipe.model_validate(terms), tmp_path)["rewards"]

    assert rewards("a", "one") == rewards("b", "one") != rewards("b", "two")


@pytest.mark.parametrize("end", ["yaml", "yml"])
def test_the_reader_that_a_protocols_file_names_is_part_of_it(tmp_path, end):
    def agent(folder, text):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(text)
        (tmp_path / folder / f"spoken.{end}").write_text("syntax: ./mine.py\n")
        settings = {"protocol": str(tmp_path / folder / f"spoken.{end}")}
        recipe = {"agent": {"name": "foreign", "settings": settings}}
        return exams.identity(Recipe.model_validate(recipe), tmp_path)["agent"]

    assert agent("a", "one") == agent("b", "one") != agent("b", "two")


JUDGE = """
from pathlib import Path

from saccade.types import Episode, Task, Ungraded


def accuracy(episode: Episode, task: Task) -> float | Ungraded:
    state = Path(__file__).with_name("state").read_text()
    if state == "silent" or (state == "shy" and task.id.endswith("0")):
        return Ungraded(reason="the judge is silent")
    return 1.0
"""


@pytest.mark.slow
def test_what_could_not_be_graded_is_said_and_graded_later(tmp_path, tiny_folder, world):
    folder, state = tmp_path / "run", tmp_path / "state"
    (tmp_path / "accuracy.py").write_text(JUDGE)
    (tmp_path / "judged.yaml").write_text(
        f"extends: tiny/para_grpo\nrewards:\n  accuracy: null\n  tools: null\n"
        f"  {tmp_path / 'accuracy.py'}: {{weight: 1.0}}\n"
    )
    settings = [*SFT, *SHORT, "sft.steps=1"]
    good("sft", tmp_path / "judged.yaml", *settings, "--model", tiny_folder, "--world", world, "--out", folder)
    state.write_text("silent")
    assert "no attempt of the evaluation 'test' could be graded (the judge is silent)" in bad("eval", folder)
    state.write_text("shy")
    said = good("eval", folder)
    assert "2 of 4 attempts could not be graded (the judge is silent); the same command tries them again" in said
    assert "2 / 2" in said  # tasks / episodes
    state.write_text("awake")
    said = good("eval", folder)
    assert "could not be graded" not in said
    assert "4 / 4" in said


# ---- a folder that moves ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_holds_everything_can_be_moved(tmp_path, monkeypatch):
    """World, model and checkpoints below the run: resumed, evaluated, asked and reported from its new place."""
    folder, moved = tmp_path / "here" / "run", tmp_path / "there" / "run"
    settings = [*SFT, *RL, *SHORT, "evaluation.limit=2"]
    good("data", "world", folder / "world", *WORLD)
    good("model", "tiny", folder / "model")
    start = ["tiny/para_grpo", *settings, "--model", folder / "model", "--world", folder / "world", "--out", folder]
    good("sft", *start)
    good("eval", folder)
    assert str(tmp_path) not in "".join(
        path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml")
    )
    moved.parent.mkdir()
    folder.rename(moved)
    monkeypatch.chdir(moved.parent)
    results = kept(moved)
    good("eval", "run")
    assert kept(moved) == results
    start = ["tiny/para_grpo", *settings, "--model", "run/model", "--world", "run/world", "--out", "run"]
    assert "rl/step-000004" in good("train", *start, "--resume")
    assert "visual tokens" in good("ask", "What?", "--video", "run/world/test/clips/00000.mp4", "--model", "run")
    scored = report.read_evaluations(Path("run"))["test"][0]
    pixels = Library().pixels
    assert [pixels(picture).shape for picture in scored.episode.ledger.pictures()]
    assert Path(scored.episode.task.media[0].path).is_file()


def test_where_a_recipes_paths_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (tmp_path / "other").mkdir()

    def path_of(path, **given):
        recipe = load_recipe("tiny/base", [f"model.path={path}"])
        return stages.with_paths(recipe, **{"folder": folder, **given}).model.path

    assert path_of("model") == "model"
    assert path_of("other") == str(tmp_path / "other")
    assert path_of(folder / "model") == "model"
    assert path_of("''") == ""
    assert path_of("model", model=Path("other")) == str(tmp_path / "other")
    assert path_of("model", folder=None) == str(tmp_path / "model")
    named = stages.with_paths(load_recipe("tiny/base"), folder=folder, world=Path("run/world")).data
    assert (named.train, named.traces) == ("world/train/tasks.jsonl", "world/train/traces.jsonl")
    assert stages.with_paths(load_recipe("tiny/base"), folder=folder, world=Path("w")).data.test == str(
        tmp_path / "w" / "test" / "tasks.jsonl"
    )


@pytest.mark.slow
def test_a_question_and_a_cold_start_need_no_judge(tmp_path, tiny_folder, world, monkeypatch):
    """The judge's key is wanted where something is graded, and not before."""
    monkeypatch.delenv("SACCADE_TEST_KEY", raising=False)
    judge = "{weight: 1.0, settings: {url: http://127.0.0.1:9/v1, model: m, key_variable: SACCADE_TEST_KEY}}"
    given = ["tiny/para_grpo", *SFT, *RL, *SHORT, f"rewards.judge={judge}"]
    start = [*given, "--model", tiny_folder, "--world", world, "--out", tmp_path / "run"]
    good("sft", *start)
    assert "SACCADE_TEST_KEY" in bad("train", *start, "--resume")
    clip = world / "test" / "clips" / "00000.mp4"
    good("ask", "When?", "--video", clip, "--model", tmp_path / "run")


def test_a_published_shape_is_asked_on_the_cpu_where_there_is_no_gpu(tmp_path, world, monkeypatch):
    monkeypatch.setattr(stages.torch.cuda, "is_available", lambda: False)
    make_tiny(str(tmp_path / "model"), patch=16)
    clip = world / "test" / "clips" / "00000.mp4"
    good("ask", "When?", "--video", clip, "--model", tmp_path / "model", "sampling.max_tokens=4")


@pytest.mark.parametrize("rewards", [{}, {"accuracy": Term(weight=0.0), "tools": Term(weight=0.0)}])
def test_rewards_that_are_never_anything_but_0_are_refused(rewards):
    recipe = load_recipe("tiny/para_grpo").model_copy(update={"rewards": rewards})
    with pytest.raises(ConfigError, match="no term with a weight other than 0"):
        preflight.check(recipe)


def test_a_machine_too_weak_for_a_recipe_is_refused_before_there_is_a_run(tmp_path, tiny_folder, world, monkeypatch):
    weak = report_on(Walls(namespaces="", landlock=6, seccomp=True, own_user=False), {"namespaces": "not allowed"})
    monkeypatch.setattr(preflight.server.Server, "start", lambda isolation: weak.check(isolation))
    strict = ("tiny/pyvision_video", ["agent.settings.tools.python.isolation=strict"])
    recipe = stages.with_paths(load_recipe(*strict), folder=tmp_path / "run", model=Path(tiny_folder), world=world)
    with pytest.raises(ConfigError, match=r"isolation strict wants every wall, but namespaces are missing"):
        stages.rl(tmp_path / "run", recipe, on_step=lambda *_: None)
    assert not (tmp_path / "run").exists()


def test_a_family_that_is_not_there_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"model\.family: there is no family 'qwen3vl'"):
        preflight.check(load_recipe("tiny/para_grpo", ["model.family=qwen3vl"]))


def test_a_cold_start_refuses_a_reward_that_rl_could_not_use(tmp_path, tiny_folder, world):
    start = ["tiny/para_grpo", *SFT, *RL, "--model", tiny_folder, "--world", world, "--out", tmp_path / "run"]
    assert "did you mean 'lam'" in bad("sft", *start, "rewards.format.settings.lamm=1")
    assert not (tmp_path / "run").exists()


def test_a_world_leaves_a_mixture_as_it_was_asked_for(world):
    mixed = load_recipe("tiny/para_grpo", ["data.train={a.jsonl: 2, b.jsonl: 1}"])
    found = stages.with_paths(mixed, world=world).data
    assert found.train == mixed.data.train
    assert found.traces.endswith("traces.jsonl")


@pytest.mark.slow
def test_a_cold_start_that_goes_on_is_not_finished(tmp_path, tiny_folder, world):
    start = ["tiny/para_grpo", *SFT, *RL, *SHORT, "--model", tiny_folder, "--world", world, "--out", tmp_path / "run"]
    good("sft", *start)

    def stop(step, values):
        raise KeyboardInterrupt

    recipe = Run.open(tmp_path / "run").recipe
    longer = recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"steps": recipe.sft.steps + 4})})
    with pytest.raises(KeyboardInterrupt):
        stages.sft(tmp_path / "run", longer, resume=True, on_step=stop)
    assert "was stopped before its end" in bad("train", *start, f"sft.steps={longer.sft.steps}", "--resume")


# ---- refused before anything is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["rl.max_staleness=1"], "rl.max_staleness=1 needs an engine with weights of its own"),
        (["engine={name: vllm, settings: {top_p: 0.9}}"], "engine.settings.top_p samples from another distribution"),
        (["model.device=cuda:99"], "model.device=cuda:99: t"),
        (["model.device=toaster"], "model.device=toaster can't be used"),
    ],
)
def test_what_rl_can_not_use_is_said_before_there_is_a_run(
    tmp_path, tiny_folder, world, monkeypatch, settings, sentence
):
    monkeypatch.setattr(stages, "load", lambda *_: pytest.fail("a model was loaded"))
    start = ["tiny/para_grpo", *RL, "--model", tiny_folder, "--world", world, "--out", tmp_path / "run"]
    assert sentence in bad("train", *start, *settings)
    assert not (tmp_path / "run").exists()


def test_a_cold_start_samples_nothing_so_filters_may_stay():
    recipe = load_recipe("tiny/para_grpo", ["engine={name: vllm, settings: {top_k: 5}}"])
    preflight.check(recipe, graded=False)
    with pytest.raises(ConfigError, match=r"engine\.settings\.top_k"):
        preflight.check(recipe)


def test_neutral_filters_are_none():
    preflight.check(load_recipe("tiny/para_grpo", ["engine={name: vllm, settings: {top_p: 1, top_k: 0}}"]))


@pytest.mark.slow
def test_an_engine_that_a_resumed_run_can_not_use_is_refused_as_early(tmp_path, tiny_folder, world):
    folder, model = tmp_path / "run", Path(tiny_folder)
    settings = [*SFT, *RL, "rl.max_staleness=1", "engine.name=vllm"]
    recipe = stages.with_paths(load_recipe("tiny/para_grpo", settings), folder=folder, model=model, world=world)
    Run.create(folder, recipe)
    start = ["tiny/para_grpo", *settings, "--model", model, "--world", world, "--out", folder, "--resume"]
    assert "needs an engine with weights of its own" in bad("train", *start, "engine.name=local")
    assert Run.open(folder).recipe.engine.name == "vllm"


def cut(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (cut, "model.safetensors was cut off: it has"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (lambda model: (model / "model.safetensors").write_bytes(b"version https://"), "is no file of weights"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "lacks b.safetensors, which model.safetensors.index.json names",
        ),
        (lambda model: (model / "model.safetensors.index.json").write_text("[]"), "must say which file"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_before_there_is_a_run(tmp_path, tiny_folder, world, spoil, sentence):
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    spoil(model)
    start = ["tiny/para_grpo", *SFT, "--model", model, "--world", world, "--out", tmp_path / "run"]
    assert sentence in bad("sft", *start)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_no_run_is_asked_without_a_server(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}')
    name, here = stages.guessed(tmp_path)
    assert (name, load_recipe(name, here).engine.name) == ("paravt/para_grpo", "local")


def test_what_is_only_evaluated_may_name_another_engine_than_it_was_trained_with():
    recipe = load_recipe("paravt/para_grpo", ["engine.name=local"])
    preflight.check(recipe, graded=False)
    with pytest.raises(ConfigError, match=r"rl\.max_staleness=2 needs an engine with weights of its own"):
        preflight.check(recipe)
