"""Schedules: recipes, jobs, shared work, estimated time."""

import pytest
from ablation_cases import SET, SMALL
from error_cases import raises

from saccade.errors import ConfigError, RunError
from saccade.runs.ablations.run import resolve_ablation
from saccade.runs.ablations.schedule import Ablation, Job, estimate_minutes


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.yaml").write_text(SET)
    return str(tmp_path / "mine.yaml")


def job(name, seconds, *needs):
    return Job(name=name, stage="variant", seed=0, depends_on=needs, expected_seconds=seconds)


def test_jobs_follow_their_dependencies_and_share_them(path):
    jobs = Ablation.from_spec(path, seeds=2).build_jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for place, job in enumerate(jobs):
        assert set(job.depends_on) <= set(names[:place])
    # Per seed: data, two initial checkpoints, one evaluation of each, three variants.
    assert len(jobs) == 2 * (1 + 2 + 2 + 3)
    assert [job.stage for job in jobs].count("initial_evaluation") == 4


def test_variants_with_other_settings_have_their_own_initial_evaluation(path, tmp_path):
    text = SET.replace("hot: {description", "hot: {recipe: tiny/vanilla_grpo, description")
    (tmp_path / "mine.yaml").write_text(text)
    ablation = Ablation.from_spec(path, seeds=1)
    assert ablation.get_initial_evaluation_folder("one", "hot", 0) != ablation.get_initial_evaluation_folder(
        "one", "plain", 0
    )
    assert (
        ablation.get_initial_evaluation_folder("two", "stuck", 0).split("-")[-1]
        == ablation.get_initial_evaluation_folder("one", "plain", 0).split("-")[-1]
    )


def test_later_settings_override(path):
    ablation = Ablation.from_spec(path, settings=["rl.prompts_per_step=3", "sft.steps=7"])
    assert ablation.build_recipe("one", "hot").rl.optim.lr == 1e-2
    assert ablation.build_recipe("one", "plain").rl.optim.lr == 1.5e-4
    assert ablation.build_recipe("one", "plain", 5).seed == 5
    assert ablation.build_recipe("one", "plain").rl.prompts_per_step == 3
    assert ablation.build_recipe("one", "plain").rl.save_every == 1
    assert ablation.build_recipe("one", "plain").rl.steps == 4
    assert ablation.build_initial_checkpoint_recipe("other").sft.steps == 7


def test_quick_is_one_seed_of_a_part(path):
    ablation = Ablation.from_spec(path, quick=True)
    assert (ablation.seeds, ablation.conditions) == (1, ("one",))
    assert ablation.list_cells() == [("one", "plain"), ("one", "hot")]
    assert ablation.build_recipe("one", "plain").rl.steps == 2
    assert ablation.build_recipe("one", "plain").synthetic.test == 1
    with raises(ConfigError, key="--condition", value=("two",)):
        Ablation.from_spec(path, quick=True, conditions=["two"])


def test_initial_checkpoints_have_no_think_prefill(path):
    ablation = Ablation.from_spec(path)
    assert ablation.build_initial_checkpoint_recipe("base_sft").environment.settings["force_think"] is False
    assert ablation.build_recipe("one", "plain").environment.settings["force_think"] is True
    assert (
        ablation.build_initial_checkpoint_recipe("base_sft").rewards
        == ablation.build_initial_checkpoint_recipe("other").rewards
    )


def test_variant_with_its_own_data_is_rejected(path, tmp_path):
    (tmp_path / "mine.yaml").write_text(SET.replace("[rl.optim.lr=1e-2]", "['synthetic.events=[1,2]']"))
    with raises(ConfigError, key="synthetic"):
        Ablation.from_spec(path)
    assert Ablation.from_spec(path, settings=["synthetic.events=[1,2]"]).build_recipe(
        "two", "stuck"
    ).synthetic.events == (1, 2)


def test_an_initial_checkpoint_with_its_own_model_size_is_rejected(path, tmp_path):
    steps = "    python_style_fraction: 0.5\n"
    (tmp_path / "mine.yaml").write_text(SET.replace(steps, f"{steps}    settings: [synthetic.model.hidden_size=64]\n"))
    with raises(ConfigError, key="synthetic"):
        Ablation.from_spec(path)
    (tmp_path / "mine.yaml").write_text(SET)
    ablation = Ablation.from_spec(path, settings=["synthetic.model.hidden_size=64"])
    assert ablation.build_initial_checkpoint_recipe("other").synthetic.model.hidden_size == 64


def test_a_set_names_the_recipe_of_its_data_and_checkpoints(path, tmp_path):
    text = SET.replace("steps: 4\nbaseline", "base_recipe: tiny/cost\nsteps: 4\nbaseline")
    text = text.replace("para_grpo", "cost").replace("hot: {", "hot: {recipe: tiny/cost, ")
    text = text.replace("stuck: {", "stuck: {recipe: tiny/cost, ")
    (tmp_path / "mine.yaml").write_text(text)
    ablation = Ablation.from_spec(path, settings=["synthetic.test=7"])
    assert ablation.build_initial_checkpoint_recipe("base_sft").synthetic.tasks == "cost"
    assert ablation.count_tasks(ablation.build_recipe("one", "plain")) == 7  # one per clip


def test_invalid_arguments(path):
    for seeds in (0, -1):
        with raises(ConfigError, key="--seeds", value=seeds):
            Ablation.from_spec(path, seeds=seeds)
    with raises(ConfigError, key="--condition", value="on"):
        Ablation.from_spec(path, conditions=["on"])
    with raises(ConfigError, key="rl.step"):
        Ablation.from_spec(path, settings=["rl.step=3"])


def test_minutes_of_two_processes_with_dependencies():
    assert estimate_minutes([]) == 0.0
    # a and b side by side, then c alone, since it needs both
    assert estimate_minutes([job("a", 60), job("b", 120), job("c", 60, "a", "b")]) == 3.0
    assert estimate_minutes([job("a", 60), job("b", 120), job("c", 60, "a", "b")], ["a", "b"]) == 1.0
    assert estimate_minutes([job(name, 60) for name in "abc"]) == 2.0


def test_jobs_that_cannot_run_take_no_time():
    assert estimate_minutes([job("a", 60), job("b", 60, "lost")]) == 1.0


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_other_folders_are_rejected(path, tmp_path):
    ablation, folder = Ablation.from_spec(path, settings=SMALL), tmp_path / "out"
    assert resolve_ablation(folder, ablation, resume=True) == ablation
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with raises(RunError, key=str(folder)):
        resolve_ablation(folder, ablation, resume=True)
    (folder / "ablation.json").write_text("{")
    with raises(RunError, key=str(folder / "ablation.json")):
        resolve_ablation(folder, ablation, resume=True)
