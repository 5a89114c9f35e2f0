import asyncio

import pytest
from reward_cases import RAN, answer, call, episode, task, text, think, turn

from saccade.config import Term
from saccade.errors import ConfigError
from saccade.rewards._compose import compose
from saccade.types import Ungraded

TASK = task("red")
LOOKED = turn(think(), call(), call(), call(), results=[RAN, RAN, RAN])


def scored(terms, attempt, of=TASK):
    return asyncio.run(compose(terms)(attempt, of))


def test_value_and_named_parts():
    terms = {"accuracy": Term(), "format": Term(weight=0.5), "tools": Term(settings={"mode": "accumulative"})}
    score = scored(terms, episode(LOOKED, turn(think(), answer())))
    assert score.value == pytest.approx(1.0 + 0.5 * 1.0 + 0.3)
    assert score.parts == pytest.approx({"accuracy": 1.0, "format": 1.0, "tools": 0.3, "compliance": 1.0})


def test_compliance_counts_only_where_it_is_a_term():
    loose = episode(turn(think(), answer(), text("!")))
    tidy = episode(turn(think(), answer()))
    assert scored({"accuracy": Term()}, loose).value == 1.0
    assert scored({"accuracy": Term()}, tidy).parts["compliance"] == 1.0
    weighted = {"accuracy": Term(), "compliance": Term(weight=0.25)}
    assert (scored(weighted, loose).value, scored(weighted, tidy).value) == (1.0, 1.25)


@pytest.mark.parametrize("order", [("accuracy", "tools"), ("tools", "accuracy")])
def test_tools_share_the_accuracy_of_the_recipe(order):
    partly = episode(LOOKED, turn(think(), answer("red ball")))
    strict = {"accuracy": Term(settings={"open": "exact"}), "tools": Term()}
    assert scored({name: Term() for name in order}, partly).parts["tools"] == pytest.approx(0.8)
    assert scored({name: strict[name] for name in order}, partly).parts["tools"] == pytest.approx(0.3)
    assert scored({"tools": Term()}, partly).parts == pytest.approx({"tools": 0.8, "compliance": 1.0})


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"acuracy": Term()}, "did you mean 'accuracy'"),
        ({"format": Term(settings={"lamb": 0.1})}, "did you mean 'lam'"),
        ({"format": Term(settings={"mode": "loose"})}, "'mode' can't be 'loose'"),
        ({"tools": Term(settings={"accuracy": "mine"})}, "no setting 'accuracy'"),
        ({"accuracy": Term(settings={"oppen": "f1"})}, "did you mean 'open'"),
        ({"accuracy": Term(settings={"open": "f2"})}, "'open' can't be 'f2'"),
        ({"accuracy": Term(), "./accuracy.py": Term()}, "have one name"),
        ({"format": Term(settings={"lam": float("nan")})}, "'lam' can't be nan: input should be a finite number"),
        ({"tools": Term(settings={"threshold": float("inf")})}, "'threshold' can't be inf"),
        ({"tools": Term(settings={"cap": -1})}, "'cap' can't be -1"),
        ({"accuracy": Term(settings={"tolerance": -0.1})}, "'tolerance' can't be -0.1"),
    ],
)
def test_a_bad_recipe_is_named(terms, message):
    with pytest.raises(ConfigError, match=message):
        compose(terms)


def written(path, code):
    path.write_text("import asyncio\nfrom saccade.types import Score, Ungraded\n\n" + code)
    return str(path)


def test_a_reward_from_a_file(tmp_path):
    mine = written(
        tmp_path / "brevity.py",
        "def brevity(episode, task, *, free: int = 3) -> float:\n    return float(len(episode.turns) <= free)\n",
    )
    terms = {"accuracy": Term(), mine: Term(weight=0.5, settings={"free": 1})}
    assert scored(terms, episode(turn(think(), answer()))).value == 1.5
    assert scored(terms, episode(LOOKED, turn(think(), answer()))).parts["brevity"] == 0.0


def test_a_reward_may_be_a_class_that_waits_and_is_told_the_accuracy(tmp_path):
    mine = written(
        tmp_path / "slow.py",
        "class slow:\n"
        "    def __init__(self, *, factor: float):\n        self.factor = factor\n"
        "    async def __call__(self, episode, task, *, accuracy):\n"
        "        await asyncio.sleep(0)\n        return self.factor * accuracy\n",
    )
    partly = episode(turn(think(), answer("red ball")))
    assert scored({mine: Term(weight=3.0, settings={"factor": 0.5})}, partly).value == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="needs the setting 'factor'"):
        compose({mine: Term()})


@pytest.mark.parametrize(("code", "reason"), [("1 / 0", "division by zero"), ("'much'", "could not convert")])
def test_a_reward_that_fails_is_named_with_its_task(tmp_path, code, reason):
    mine = written(tmp_path / "hasty.py", f"async def hasty(episode, task):\n    return {code}\n")
    with pytest.raises(ConfigError, match=f"the reward 'hasty' failed on task {TASK.id}: {reason}"):
        scored({mine: Term()}, episode(turn(answer())))


def test_what_one_reward_can_not_tell_has_no_score(tmp_path):
    mine = written(tmp_path / "unsure.py", "def unsure(episode, task):\n    return Ungraded(reason='no idea')\n")
    for terms in ({"accuracy": Term(), mine: Term(weight=0.0)}, {mine: Term(), "accuracy": Term()}):
        assert scored(terms, episode(turn(answer()))) == Ungraded(reason="no idea")


def test_an_ungraded_accuracy_is_not_a_wrong_answer_for_other_rewards(tmp_path):
    mine = written(tmp_path / "accuracy.py", "async def accuracy(episode, task):\n    return Ungraded(reason='away')\n")
    attempt = episode(LOOKED, turn(think(), answer()))
    assert scored({"tools": Term(), mine: Term()}, attempt) == Ungraded(reason="away")


def test_parts_that_are_credited_apart_are_not_in_the_value(tmp_path):
    mine = written(
        tmp_path / "split.py", "def split(episode, task):\n    return Score(value=0.8, parts={'aside': 0.35})\n"
    )
    score = scored({"accuracy": Term(), mine: Term(weight=0.5)}, episode(turn(think(), answer())))
    assert score.value == pytest.approx(1.4)
    assert score.parts == pytest.approx({"accuracy": 1.0, "split": 0.8, "compliance": 1.0, "aside": 0.175})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("float('nan')", "'broken' returned nan for task t"),
        ("Score(value=1.0, parts={'aside': float('inf')})", "'aside' returned inf for task t"),
        ("Score(value=1.0, parts={'broken': 1.0})", "calls a part 'broken', as another"),
        ("Score(value=1.0, parts={'compliance': 1.0})", "calls a part 'compliance', as another"),
    ],
)
def test_a_reward_must_be_finite_and_its_parts_have_names_of_their_own(tmp_path, bad, message):
    mine = written(tmp_path / "broken.py", f"def broken(episode, task) -> float:\n    return {bad}\n")
    with pytest.raises(ConfigError, match=message):
        scored({mine: Term()}, episode(turn(answer())))
