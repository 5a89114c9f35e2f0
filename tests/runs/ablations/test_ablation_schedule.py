"""Plans: which recipes, which jobs, what is shared, how long it takes."""

import pytest
from lab_cases import SET, SMALL

from saccade.errors import ConfigError, RunError
from saccade.lab.plan import Job, Lab, minutes
from saccade.lab.run import prepare


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.yaml").write_text(SET)
    return str(tmp_path / "mine.yaml")


def job(name, seconds, *needs):
    return Job(name=name, kind="arm", seed=0, needs=needs, seconds=seconds)


def test_jobs_come_after_what_they_need_and_share_it(path):
    jobs = Lab.of(path, seeds=2).jobs()
    names = [each.name for each in jobs]
    assert len(set(names)) == len(names)
    for place, each in enumerate(jobs):
        assert set(each.needs) <= set(names[:place])
    # Per seed: a world, two starts, exams of both starts (all arms are examined alike), three arms.
    assert len(jobs) == 2 * (1 + 2 + 2 + 3)
    assert [each.kind for each in jobs].count("before") == 4


def test_arms_that_are_examined_otherwise_have_exams_of_their_own(path, tmp_path):
    text = SET.replace("hot: {about", "hot: {recipe: tiny/vanilla_grpo, about")
    (tmp_path / "mine.yaml").write_text(text)
    lab = Lab.of(path, seeds=1)
    assert lab.before("one", "hot", 0) != lab.before("one", "plain", 0)
    assert lab.before("two", "stuck", 0).split("-")[-1] == lab.before("one", "plain", 0).split("-")[-1]


def test_later_settings_count(path):
    lab = Lab.of(path, settings=["rl.prompts=3", "sft.steps=7"])
    assert lab.recipe("one", "hot").rl.optim.lr == 1e-2
    assert lab.recipe("one", "plain").rl.optim.lr == 1.5e-4
    assert lab.recipe("one", "plain", 5).seed == 5
    assert lab.recipe("one", "plain").rl.prompts == 3
    assert lab.recipe("one", "plain").rl.save_every == 1
    assert lab.recipe("one", "plain").rl.steps == 4
    assert lab.start_recipe("other").sft.steps == 7


def test_quick_is_one_seed_of_a_part(path):
    lab = Lab.of(path, quick=True)
    assert (lab.seeds, lab.conditions, lab.arms("one")) == (1, ("one",), ["plain", "hot"])
    assert lab.recipe("one", "plain").rl.steps == 2
    assert lab.recipe("one", "plain").world.test == 1
    with pytest.raises(ConfigError, match="no arm in two with --quick"):
        Lab.of(path, quick=True, conditions=["two"])


def test_a_start_learns_to_think_by_itself_and_every_arm_begins_there(path):
    lab = Lab.of(path)
    assert lab.start_recipe("usual").agent.settings["think_prefix"] is False
    assert lab.recipe("one", "plain").agent.settings["think_prefix"] is True
    assert lab.start_recipe("usual").rewards == lab.start_recipe("other").rewards


def test_a_world_of_an_arms_own_is_refused(path, tmp_path):
    (tmp_path / "mine.yaml").write_text(SET.replace("[rl.optim.lr=1e-2]", "['world.events=[1,2]']"))
    with pytest.raises(ConfigError, match="hot in one has a world of its own"):
        Lab.of(path)
    assert Lab.of(path, settings=["world.events=[1,2]"]).recipe("two", "stuck").world.events == (1, 2)


def test_what_can_not_be_asked_for(path):
    for seeds in (0, -1):
        with pytest.raises(ConfigError, match="--seeds can't be"):
            Lab.of(path, seeds=seeds)
    with pytest.raises(ConfigError, match="no condition 'on'; did you mean 'one'"):
        Lab.of(path, conditions=["on"])
    with pytest.raises(ConfigError, match=r"no key 'rl\.step'"):
        Lab.of(path, settings=["rl.step=3"])


def test_minutes_are_those_of_two_processes_that_wait_for_each_other():
    assert minutes([]) == 0.0
    # a and b side by side, then c alone, since it needs both
    assert minutes([job("a", 60), job("b", 120), job("c", 60, "a", "b")]) == 3.0
    assert minutes([job("a", 60), job("b", 120), job("c", 60, "a", "b")], ["a", "b"]) == 1.0
    assert minutes([job(name, 60) for name in "abc"]) == 2.0


def test_jobs_that_can_never_run_take_no_time():
    assert minutes([job("a", 60), job("b", 60, "lost")]) == 1.0


# ---- whose folder ----------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused(path, tmp_path):
    lab, folder = Lab.of(path, settings=SMALL), tmp_path / "out"
    assert prepare(folder, lab, resume=True) == lab
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no lab"):
        prepare(folder, lab, resume=True)
    (folder / "lab.json").write_text("{")
    with pytest.raises(RunError, match=r"lab\.json can't be read"):
        prepare(folder, lab, resume=True)
