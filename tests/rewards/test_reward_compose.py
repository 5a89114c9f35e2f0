import asyncio
import math
from dataclasses import replace

import pytest
from error_cases import raises
from reward_cases import RAN, answer, call, episode, task, text, think, turn

from saccade.config.schema import RewardTerm
from saccade.errors import ConfigError
from saccade.rewards.compose import compose_rewards, select_episode_rewards
from saccade.types import Credit, Span, Ungraded

TASK = task("red")
LOOKED = turn(think(), *[call(start_time=i) for i in range(3)], results=[RAN, RAN, RAN])


def compute_score(terms, attempt, of=TASK):
    [score] = asyncio.run(compose_rewards(terms)([replace(attempt, task=of)]))
    return score


def test_value_and_parts():
    terms = {
        "accuracy": RewardTerm(is_accuracy=True),
        "format_reward": RewardTerm(weight=0.5),
        "tool_use": RewardTerm(settings={"mode": "accumulative"}),
    }
    score = compute_score(terms, episode(LOOKED, turn(think(), answer())))
    assert score.value == pytest.approx(1.0 + 0.5 * 1.0 + 0.3)
    assert score.parts == pytest.approx(
        {"accuracy": 1.0, "format_reward": 1.0, "tool_use": 0.3, "format_compliance": 1.0}
    )


def test_format_compliance_counts_only_as_a_term():
    loose = episode(turn(think(), answer(), text("!")))
    tidy = episode(turn(think(), answer()))
    assert compute_score({"accuracy": RewardTerm(is_accuracy=True)}, loose).value == 1.0
    assert compute_score({"accuracy": RewardTerm(is_accuracy=True)}, tidy).parts["format_compliance"] == 1.0
    weighted = {"accuracy": RewardTerm(is_accuracy=True), "format_compliance": RewardTerm(weight=0.25)}
    assert (compute_score(weighted, loose).value, compute_score(weighted, tidy).value) == (1.0, 1.25)


@pytest.mark.parametrize("order", [("accuracy", "tool_use"), ("tool_use", "accuracy")])
def test_tools_share_the_accuracy_of_the_recipe(order):
    partly = episode(LOOKED, turn(think(), answer("red ball now")))
    settings = {"answer_types": {"open": {"mode": "exact"}}}
    strict = {"accuracy": RewardTerm(is_accuracy=True, settings=settings), "tool_use": RewardTerm()}
    loose = {"accuracy": RewardTerm(is_accuracy=True), "tool_use": RewardTerm()}
    of = task("red ball")
    assert compute_score({name: loose[name] for name in order}, partly, of).parts["tool_use"] == pytest.approx(0.8)
    assert compute_score({name: strict[name] for name in order}, partly, of).parts["tool_use"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("format_reward", "anchor_weigt", 0.1),
        ("format_reward", "mode", "loose"),
        ("tool_use", "correct", 1.0),
        ("accuracy", "oppen", "f1"),
        ("format_reward", "anchor_weight", math.nan),
        ("tool_use", "threshold", math.inf),
        ("tool_use", "cap", -1),
    ],
)
def test_invalid_settings_raise(name, setting, value):
    with raises(ConfigError, key=f"rewards.{name}.settings.{setting}") as caught:
        compose_rewards({name: RewardTerm(settings={setting: value})})
    assert caught.value.value is value


def test_the_accuracy_can_not_depend_on_the_accuracy():
    terms = {"accuracy": RewardTerm(), "tool_use": RewardTerm(is_accuracy=True)}
    with raises(ConfigError, key="rewards.tool_use.is_accuracy", value=True):
        compose_rewards(terms)


def test_invalid_names_raise():
    with raises(ConfigError, key="rewards.acuracy", value="acuracy"):
        compose_rewards({"acuracy": RewardTerm()})
    with raises(ConfigError, key="rewards", value=("accuracy", "./accuracy.py")):
        compose_rewards({"accuracy": RewardTerm(is_accuracy=True), "./accuracy.py": RewardTerm()})


def write_reward(path, code):
    path.write_text("import asyncio\nfrom saccade.types import Credit, Score, Span, Ungraded\n\n" + code)
    return str(path)


def test_a_reward_from_a_file(tmp_path):
    mine = write_reward(
        tmp_path / "brevity.py",
        "def brevity(episode, *, free: int = 3) -> float:\n    return float(len(episode.turns) <= free)\n",
    )
    terms = {"accuracy": RewardTerm(is_accuracy=True), mine: RewardTerm(weight=0.5, settings={"free": 1})}
    assert compute_score(terms, episode(turn(think(), answer()))).value == 1.5
    assert compute_score(terms, episode(LOOKED, turn(think(), answer()))).parts["brevity"] == 0.0


def test_async_class_reward_receives_the_accuracy(tmp_path):
    mine = write_reward(
        tmp_path / "slow.py",
        "class slow:\n"
        "    def __init__(self, *, factor: float):\n        self.factor = factor\n"
        "    async def __call__(self, episode, *, correct):\n"
        "        await asyncio.sleep(0)\n        return self.factor * correct\n",
    )
    partly = episode(turn(think(), answer("red ball")))
    assert compute_score(
        {"accuracy": RewardTerm(weight=0.0, is_accuracy=True), mine: RewardTerm(weight=3.0, settings={"factor": 0.5})},
        partly,
    ).value == pytest.approx(0.5)
    with raises(ConfigError, key=f"rewards.{mine}.settings.factor"):
        compose_rewards({mine: RewardTerm()})


@pytest.mark.parametrize(
    ("code", "cause"), [("1 / 0", ZeroDivisionError), ("'much'", ValueError), ("exit(3)", SystemExit)]
)
def test_failing_reward_raises(tmp_path, code, cause):
    mine = write_reward(tmp_path / "hasty.py", f"async def hasty(episode):\n    return {code}\n")
    with raises(ConfigError, key="rewards.hasty", value=TASK.id) as caught:
        compute_score({mine: RewardTerm()}, episode(turn(answer())))
    assert type(caught.value.__cause__) is cause


def test_a_class_that_cannot_be_made_is_named(tmp_path):
    mine = write_reward(
        tmp_path / "hasty.py", "class hasty:\n    def __init__(self):\n        raise RuntimeError('no')\n"
    )
    with raises(ConfigError, key=f"rewards.{mine}") as caught:
        compose_rewards({mine: RewardTerm()})
    assert "can't be made: no" in str(caught.value)


def test_one_ungraded_reward_leaves_no_score(tmp_path):
    mine = write_reward(tmp_path / "unsure.py", "def unsure(episode):\n    return Ungraded(reason='no idea')\n")
    for terms in (
        {"accuracy": RewardTerm(is_accuracy=True), mine: RewardTerm(weight=0.0)},
        {mine: RewardTerm(), "accuracy": RewardTerm(is_accuracy=True)},
    ):
        assert compute_score(terms, episode(turn(answer()))) == Ungraded(reason="no idea")


def test_an_ungraded_accuracy_is_not_a_wrong_answer_for_other_rewards(tmp_path):
    mine = write_reward(tmp_path / "accuracy.py", "async def accuracy(episode):\n    return Ungraded(reason='away')\n")
    attempt = episode(LOOKED, turn(think(), answer()))
    assert compute_score({"tool_use": RewardTerm(), mine: RewardTerm(is_accuracy=True)}, attempt) == Ungraded(
        reason="away"
    )


def test_credits_are_weighted_and_not_in_the_value(tmp_path):
    credit = "Credit(span=Span(kind='turn', turn=0), value=0.35)"
    mine = write_reward(
        tmp_path / "split.py",
        f"def split(episode):\n    return Score(value=0.8, parts={{'detail': 3.0}}, credits=({credit},))\n",
    )
    terms = {"accuracy": RewardTerm(is_accuracy=True), mine: RewardTerm(weight=0.5)}
    score = compute_score(terms, episode(turn(think(), answer())))
    assert (score.value, score.total, score.correct) == (pytest.approx(1.4), pytest.approx(1.575), 1.0)
    assert score.parts == {"accuracy": 1.0, "split": 0.8, "format_compliance": 1.0, "split/detail": 3.0}
    assert score.credits == (Credit(span=Span(kind="turn", turn=0), value=pytest.approx(0.175)),)


CALL = Span(kind="call", turn=0, call=0)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("float('-inf')", -math.inf),
        ("Score(value=1.0, parts={'extra': float('inf')})", math.inf),
        ("Score(value=1.0, credits=(Credit(span=Span(kind='tags'), value=float('inf')),))", math.inf),
        ("Score(value=1.0, credits=(Credit(span=Span(kind='turn', turn=1), value=1.0),))", Span(kind="turn", turn=1)),
        ("Score(value=1.0, credits=(Credit(span=Span(kind='call', turn=0, call=0), value=1.0),))", CALL),
    ],
)
def test_infinite_rewards_and_credits_of_missing_spans_raise(tmp_path, code, value):
    broken = write_reward(tmp_path / "broken.py", f"def broken(episode) -> float:\n    return {code}\n")
    with raises(ConfigError, key="rewards.broken", value=value):
        compute_score({broken: RewardTerm()}, episode(turn(answer())))


def test_correctness_comes_from_the_marked_term(tmp_path):
    mine = write_reward(tmp_path / "mine.py", "def mine(episode):\n    return 0.7\n")
    right = episode(turn(think(), answer()))
    marked = {"accuracy": RewardTerm(), mine: RewardTerm(weight=0.0, is_accuracy=True), "tool_use": RewardTerm()}
    assert (compute_score(marked, right).correct, compute_score(marked, right).is_correct) == (0.7, True)
    unmarked = compute_score({"accuracy": RewardTerm(), mine: RewardTerm()}, right)
    assert (unmarked.correct, unmarked.is_correct) == (None, False)
    with raises(ConfigError, key="rewards", value=("accuracy", mine)):
        compose_rewards({"accuracy": RewardTerm(is_accuracy=True), mine: RewardTerm(is_accuracy=True)})
    with raises(ConfigError, key="rewards", value=None):
        compose_rewards({"accuracy": RewardTerm(), "tool_use": RewardTerm()})
    with raises(ConfigError, key="rewards", value="diversity"):
        compose_rewards({"diversity": RewardTerm(is_accuracy=True)})


def test_a_nan_reward_raises(tmp_path):
    broken = write_reward(tmp_path / "broken.py", "def broken(episode):\n    return float('nan')\n")
    with raises(ConfigError, key="rewards.broken") as caught:
        compute_score({broken: RewardTerm()}, episode(turn(answer())))
    assert math.isnan(caught.value.value)


# ---- rewards of groups -----------------------------------------------------------------------------------------------

SEEN = [episode(turn(think(), answer(body)), of=TASK) for body in ("red", "red", "blue", "green")]


def test_a_group_reward_compares_the_episodes_of_a_group():
    """Of the three others, two answer otherwise than each of the first two, and all three than the last two."""
    terms = {"accuracy": RewardTerm(is_accuracy=True), "diversity": RewardTerm(weight=0.3, settings={"of": "answer"})}
    scores = asyncio.run(compose_rewards(terms)(SEEN))
    assert [score.parts["diversity"] for score in scores] == pytest.approx([2 / 3, 2 / 3, 1.0, 1.0])
    assert [score.value for score in scores] == pytest.approx([1.2, 1.2, 0.3, 0.3])
    assert [score.correct for score in scores] == [1.0, 1.0, 0.0, 0.0]


def test_diversity_of_calls_may_count_for_correct_episodes_alone():
    wide, narrow = turn(think(), call(), call()), turn(think(), call())
    right, wrong = turn(think(), answer("red")), turn(think(), answer("blue"))
    seen = [episode(wide, right, of=TASK), episode(narrow, right, of=TASK), episode(narrow, wrong, of=TASK)]
    terms = {"accuracy": RewardTerm(is_accuracy=True), "diversity": RewardTerm(settings={"only_correct": True})}
    scores = asyncio.run(compose_rewards(terms)(seen))
    assert [score.parts["diversity"] for score in scores] == [1.0, 0.5, 0.0]
    assert [score.parts["diversity"] for score in asyncio.run(compose_rewards(terms)(seen[:1]))] == [0.0]


def test_a_group_reward_from_a_file_sees_the_scores_of_the_graded_episodes(tmp_path):
    unsure = write_reward(
        tmp_path / "unsure.py",
        "def unsure(episode):\n    return Ungraded(reason='no idea') if episode.answer == 'blue' else 0.5\n",
    )
    rank = write_reward(
        tmp_path / "rank.py",
        "async def rank(group, *, factor: float = 1.0):\n    await asyncio.sleep(0)\n"
        "    return [factor * index + member.score.value for index, member in enumerate(group.scored_episodes)]\n",
    )
    terms = {unsure: RewardTerm(), rank: RewardTerm(settings={"factor": 2.0})}
    scores = asyncio.run(compose_rewards(terms)(SEEN))
    assert [getattr(score, "value", score) for score in scores] == [1.0, 3.0, Ungraded(reason="no idea"), 5.0]

    # Rewards of single episodes may have been computed elsewhere, as by a rollout worker.
    graded = asyncio.run(compose_rewards(select_episode_rewards(terms))(SEEN))
    assert [getattr(score, "value", score) for score in graded] == [0.5, 0.5, Ungraded(reason="no idea"), 0.5]
    write_reward(tmp_path / "unsure.py", "def unsure(episode):\n    raise AssertionError\n")
    assert asyncio.run(compose_rewards(terms)(SEEN, graded)) == scores
    assert asyncio.run(compose_rewards({unsure: RewardTerm()})(SEEN, graded)) == graded


@pytest.mark.parametrize(
    ("code", "value"), [("[1.0]", 1), ("[1.0, 1.0, 1.0, float('inf')]", math.inf), ("1 / 0", TASK.id)]
)
def test_a_group_reward_that_fails_raises(tmp_path, code, value):
    broken = write_reward(tmp_path / "broken.py", f"def broken(group):\n    return {code}\n")
    with raises(ConfigError, key="rewards.broken", value=value):
        asyncio.run(compose_rewards({broken: RewardTerm()})(SEEN))


def test_an_ungraded_group_has_no_scores(tmp_path):
    away = write_reward(tmp_path / "away.py", "def away(group):\n    return Ungraded(reason='no judge')\n")
    assert asyncio.run(compose_rewards({away: RewardTerm()})(SEEN)) == [Ungraded(reason="no judge")] * 4
