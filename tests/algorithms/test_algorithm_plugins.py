"""Estimators, losses and filters as plugins: from files, and with settings that their signatures type."""

from pathlib import Path

import numpy as np
import pytest
import torch
from error_cases import raises

from saccade.algorithms.group_advantages import resolve_estimator
from saccade.algorithms.group_filter import filter_by_advantage, resolve_filters, select_groups
from saccade.algorithms.policy_loss import compute_policy_loss
from saccade.checks import run_checks
from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.config.schema import LossConfig
from saccade.errors import ConfigError, SaccadeError
from saccade.ledger import Ledger
from saccade.types import AnswerType, Episode, EpisodeStatus, Group, Score, ScoredEpisode, Task


def make_group(name, rewards):
    task = Task(id=name, question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="red")
    episode = Episode(task=task, environment="a", ledger=Ledger(), turns=(), status=EpisodeStatus.ANSWERED)
    return Group(
        task=task, scored_episodes=tuple(ScoredEpisode(episode=episode, score=Score(value=one)) for one in rewards)
    )


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rl.advantage.estimator=gpro", "rl.advantage.estimator", "gpro"),
        ("rl.advantage.settings.sigma=1", "rl.advantage.settings.sigma", 1),
        ("rl.advantage.settings.std=both", "rl.advantage.settings.std", "both"),
        ("rl.advantage.estimator=reinforce_plus_plus", "rl.advantage.whiten", "none"),
        ("rl.loss.name=cliped", "rl.loss.name", "cliped"),
        ("rl.loss.settings.dual_clip=0.5", "rl.loss.settings.dual_clip", 0.5),
        ("rl.filters.statuses.drop=[lenght]", "rl.filters.statuses.drop", ["lenght"]),
        ("rl.filters.lenght={}", "rl.filters.lenght", "lenght"),
    ],
)
def test_unknown_algorithms_and_settings_raise_before_a_run(override, key, value):
    with raises(ConfigError, key=key, value=value):
        check_recipe(load_recipe("tiny/para_grpo", [override]))


def test_an_estimator_that_reads_correctness_needs_a_marked_reward():
    settings = ["rewards.accuracy.is_accuracy=false", "rl.advantage.estimator=accuracy_baseline"]
    with raises(ConfigError, key="rewards", value=("accuracy",)):
        check_recipe(load_recipe("tiny/base", settings))
    check_recipe(load_recipe("tiny/base", settings[1:]))
    with raises(ConfigError, key="rewards.accuracy.weight", value=0.5):
        check_recipe(load_recipe("tiny/base", [*settings[1:], "rewards.accuracy.weight=0.5"]))


def test_an_estimator_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def median(rewards_G, total_rewards_G, *, scale: float = 1.0):\n    return scale * rewards_G\n")
    assert resolve_estimator(f"{file}:median", {"scale": 2.0})([1.0, 3.0]).tolist() == [2.0, 6.0]
    with raises(ConfigError, key="rl.advantage.settings.scale", value="large"):
        resolve_estimator(f"{file}:median", {"scale": "large"})([1.0, 3.0])


def test_a_loss_from_a_file(tmp_path):
    file = tmp_path / "reinforce.py"
    file.write_text("def reinforce(logp_N, old_logp_N, adv_N, seq_N):\n    return -adv_N * logp_N, {'nll': -logp_N}\n")
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    weight = torch.tensor([0.5, 0.5])
    loss, stats = compute_policy_loss(
        logp, None, torch.tensor([3.0, -1.0]), weight, settings=LossConfig(name=str(file))
    )
    loss.backward()
    assert (loss.item(), logp.grad.tolist(), stats["nll"].item()) == (0.5, [-1.5, 0.5], 1.5)


def test_filters_are_distinguished_by_their_parameters(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def first(scored):\n    return True\n\ndef second(group):\n    return True\n\n"
        "def third(scored, *, advantage):\n    return True\n"
    )
    resolved = resolve_filters({f"{file}:{name}": {} for name in ("first", "second", "third")})
    assert {kind: list(filters) for kind, filters in resolved.items()} == {
        "scored": ["first"],
        "group": ["second"],
        "advantage": ["third"],
    }


def test_a_different_loss_or_estimator_drops_the_settings_of_the_recipe_below():
    recipe = load_recipe("tiny/base", ["rl.loss.name=gspo", "rl.advantage={estimator: rloo}"])
    assert (recipe.rl.loss.settings, recipe.rl.loss.aggregation) == ({}, "token_mean")
    assert resolve_estimator(recipe.rl.advantage.estimator, {})([1.0, 0.0]).tolist() == np.array([1.0, -1.0]).tolist()


FAILING = """
def none(*, most: int = 4):
    return True

def scored(scored):
    raise KeyError("a")

def group(group):
    return group.nothing

def late(scored, *, advantage):
    return 1 / 0

def estimator(rewards_G, total_rewards_G):
    return rewards_G.nothing

def sums(rewards_G, total_rewards_G):
    return rewards_G.sum()

def loss(logp_N, old_logp_N, adv_N, seq_N):
    return logp_N

def mean(logp_N, old_logp_N, adv_N, seq_N):
    return logp_N.mean(), {}

def surplus(scored):
    return True
"""


@pytest.fixture
def failing_file(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    return tmp_path / "failing.py"


def test_a_filter_that_fails_names_its_task(failing_file):
    group = make_group("one", [1.0, 0.0])
    for name in ("scored", "group"):
        plugin = f"{failing_file}:{name}"
        with raises(ConfigError, key=f"rl.filters.{plugin}", value="one"):
            select_groups([group], {plugin: {}}, target=1)
    with raises(ConfigError, key=f"rl.filters.{failing_file}:late", value="one"):
        filter_by_advantage([group], [np.array([1.0, -1.0])], {f"{failing_file}:late": {}})


def test_a_filter_must_read_something(failing_file):
    plugin = f"{failing_file}:none"
    with raises(ConfigError, key=f"rl.filters.{plugin}", value=plugin):
        check_recipe(load_recipe("tiny/para_grpo").with_values({"rl.filters": {plugin: {}}}))


def test_filters_have_names_of_their_own(failing_file, tmp_path):
    other = tmp_path / "length.py"
    other.write_text("def length(scored):\n    return True\n")
    for filters, plugin in [
        ({"length": {"max_tokens": 8}, str(other): {}}, str(other)),
        ({f"{failing_file}:surplus": {}}, f"{failing_file}:surplus"),
    ]:
        with raises(ConfigError, key=f"rl.filters.{plugin}", value=Path(plugin.rpartition(":")[2]).stem):
            resolve_filters(filters)


@pytest.mark.parametrize("name", ["estimator", "sums"])
def test_an_estimator_that_fails_is_an_error_of_the_recipe(failing_file, name):
    with raises(ConfigError, key="rl.advantage.estimator", value=f"{failing_file}:{name}"):
        resolve_estimator(f"{failing_file}:{name}", {})([1.0, 3.0])


@pytest.mark.parametrize("name", ["loss", "mean"])
def test_a_loss_that_fails_is_an_error_of_the_recipe(failing_file, name):
    values = torch.tensor([-1.0, -2.0])
    with raises(ConfigError, key="rl.loss.name", value=f"{failing_file}:{name}"):
        compute_policy_loss(values, None, values, values, settings=LossConfig(name=f"{failing_file}:{name}"))


@pytest.mark.parametrize("metric", ["loss", "entropy", "grad_norm", "lr", "tokens", "approx_kl", "staleness_max"])
def test_a_statistic_of_a_loss_may_not_replace_a_metric(tmp_path, metric):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(logp_N, old_logp_N, adv_N, seq_N):\n    return -logp_N, {{'{metric}': logp_N}}\n")
    values = torch.tensor([-1.0, -2.0])
    with raises(ConfigError, key="rl.loss.name", value=str(file)):
        compute_policy_loss(values, None, values, values, settings=LossConfig(name=str(file)))


def test_a_check_that_fails_itself_is_an_error_of_one_line(monkeypatch, tmp_path):
    def fail():
        raise IndexError("list index out of range")

    monkeypatch.setattr(run_checks, "list_recipe_checks", lambda *_: [run_checks.Check(name="broken", run=fail)])
    recipe = load_recipe("tiny/para_grpo")
    with raises(SaccadeError, key="broken"):
        run_checks.require_checks(run_checks.PlannedRun(recipe=recipe, folder=tmp_path, stages=["rl"]))
    with raises(SaccadeError, key="broken"):
        check_recipe(recipe)
