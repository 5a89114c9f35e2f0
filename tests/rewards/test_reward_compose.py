import pytest
from reward_cases import RAN, answer, call, episode, task, text, think, turn

from saccade.config import Term
from saccade.errors import ConfigError
from saccade.rewards._compose import compose

TASK = task("red")
LOOKED = turn(think(), call(), call(), call(), results=[RAN, RAN, RAN])


def test_value_and_named_parts():
    score = compose(
        {"accuracy": Term(), "format": Term(weight=0.5), "tools": Term(settings={"mode": "accumulative"})},
    )(episode(LOOKED, turn(think(), answer())), TASK)
    assert score.value == pytest.approx(1.0 + 0.5 * 1.0 + 0.3)
    assert score.parts == pytest.approx({"accuracy": 1.0, "format": 1.0, "tools": 0.3, "compliance": 1.0})


def test_compliance_counts_only_where_it_is_a_term():
    loose = episode(turn(think(), answer(), text("!")))
    tidy = episode(turn(think(), answer()))
    assert compose({"accuracy": Term()})(loose, TASK).value == 1.0
    assert compose({"accuracy": Term()})(tidy, TASK).parts["compliance"] == 1.0
    weighted = compose({"accuracy": Term(), "compliance": Term(weight=0.25)})
    assert (weighted(loose, TASK).value, weighted(tidy, TASK).value) == (1.0, 1.25)


def test_tools_share_the_accuracy_of_the_recipe():
    partly = episode(LOOKED, turn(think(), answer("red ball")))
    loose = compose({"accuracy": Term(), "tools": Term()})
    strict = compose({"accuracy": Term(settings={"open": "exact"}), "tools": Term()})
    assert loose(partly, TASK).parts["tools"] == pytest.approx(0.8)
    assert strict(partly, TASK).parts["tools"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"acuracy": Term()}, "did you mean 'accuracy'"),
        ({"format": Term(settings={"lamb": 0.1})}, "did you mean 'lam'"),
        ({"format": Term(settings={"mode": "loose"})}, "'mode' can't be 'loose'"),
        ({"tools": Term(settings={"accuracy": "mine"})}, "no setting 'accuracy'"),
        ({"accuracy": Term(), "./accuracy.py": Term()}, "have one name"),
    ],
)
def test_a_bad_recipe_is_named(terms, message):
    with pytest.raises(ConfigError, match=message):
        compose(terms)


def test_a_reward_from_a_file(tmp_path):
    mine = tmp_path / "brevity.py"
    mine.write_text(
        "def brevity(episode, task, *, free: int = 3) -> float:\n    return float(len(episode.turns) <= free)\n"
    )
    terms = {"accuracy": Term(), str(mine): Term(weight=0.5, settings={"free": 1})}
    assert compose(terms)(episode(turn(think(), answer())), TASK).value == 1.5
    assert compose(terms)(episode(LOOKED, turn(think(), answer())), TASK).parts["brevity"] == 0.0


def test_a_reward_must_be_finite(tmp_path):
    mine = tmp_path / "broken.py"
    mine.write_text("def broken(episode, task) -> float:\n    return float('nan')\n")
    with pytest.raises(ConfigError, match="'broken' returned nan for task t"):
        compose({str(mine): Term()})(episode(turn(answer())), TASK)
