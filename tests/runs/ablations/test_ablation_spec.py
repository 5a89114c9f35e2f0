"""Sets: every packaged one can be run in its time; mistakes in one are named."""

import pytest
from lab_cases import SET

from saccade.errors import ConfigError
from saccade.lab.design import read_set, set_names
from saccade.lab.plan import Lab, minutes

WANTED = {"anchoring", "gating", "collapse", "selection", "dispatch", "prior", "turns", "off_policy"}


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_the_sets_are_there():
    assert set(set_names()) >= WANTED


@pytest.mark.slow
@pytest.mark.parametrize("name", set_names())
def test_a_packaged_set_fits_its_time_and_varies_its_conditions(name):
    whole, quick = Lab.of(name), Lab.of(name, quick=True)
    assert whole.seeds == 3
    assert quick.seeds == 1
    assert minutes(whole.jobs()) <= 60
    assert minutes(quick.jobs()) <= 10
    assert len(whole.conditions) >= 2
    assert {"accuracy"} <= {table.measure for table in whole.set.tables}
    assert whole.set.claim
    assert whole.set.asks


def test_an_unknown_set_names_the_nearest():
    with pytest.raises(ConfigError, match="no set 'anchorin'; did you mean 'anchoring'"):
        read_set("anchorin")
    with pytest.raises(ConfigError, match=r"there is no set file nowhere\.yaml"):
        read_set("nowhere.yaml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("baseline: plain", "baseline: plan", "no 'plan' among its arms; did you mean 'plain'"),
        ("arms: [stuck]", "arms: [stick]", "no 'stick' among its arms"),
        ("start: other", "start: others", "no 'others' among its starts"),
        ("after: usual", "after: other", "can't go on from 'other'"),
        ("exam: greedy, less: tools_off", "exam: greedy, less: alone", "no 'alone' among its exams"),
        ("steps: 4\nbaseline", "steps: 0\nbaseline", "steps can't be used"),
        ("asks: whether a lab works", "ask: whether a lab works", "there is no key 'ask'; did you mean 'asks'?"),
        ("asks: whether a lab works", "", "the key 'asks' is missing"),
        ("leaked: 0.5", "leaks: 0.5", "no key 'starts.other.leaks'"),
        ("  hot: {", "  a/b: {", "'a/b' can't be a folder's name"),
        ("  one: {", "  world: {", "no condition can be called 'world'"),
        ("title: A miniature", "title: [", "isn't valid YAML"),
        (SET, "- a", "must be a mapping"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(written, old, new, said):
    assert old in SET
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        read_set(written(SET.replace(old, new)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_set_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        read_set(str(tmp_path / "mine.yaml"))
