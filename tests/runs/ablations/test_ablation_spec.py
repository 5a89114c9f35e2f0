"""Specs: every packaged one fits its time; mistakes are named."""

import pytest
from ablation_cases import SET
from error_cases import raises

from saccade.errors import ConfigError
from saccade.runs.ablations.schedule import Ablation, estimate_minutes
from saccade.runs.ablations.spec import list_spec_names, load_spec

EXPECTED = {"anchoring", "claims", "selection", "dispatch", "prior", "turns"}


@pytest.fixture
def write_spec(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_packaged_specs():
    assert set(list_spec_names()) >= EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("name", list_spec_names())
def test_packaged_spec_fits_its_time_and_has_conditions(name):
    full, quick = Ablation.from_spec(name), Ablation.from_spec(name, quick=True)
    assert full.seeds == 3
    assert quick.seeds == 1
    assert estimate_minutes(full.build_jobs()) <= 60
    assert estimate_minutes(quick.build_jobs()) <= 10
    assert len(full.conditions) >= 2
    assert {"accuracy"} <= {table.metric for table in full.spec.tables}
    assert full.spec.claim
    assert full.spec.hypothesis


def test_unknown_spec_suggests_the_nearest():
    with raises(ConfigError, key="ablation", value="anchorin") as caught:
        load_spec("anchorin")
    assert "'anchoring'" in str(caught.value)
    with raises(ConfigError, key="nowhere.yaml"):
        load_spec("nowhere.yaml")


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("baseline: plain", "baseline: plan", "variants", "plan"),
        ("variants: [stuck]", "variants: [stick]", "variants", "stick"),
        ("checkpoint: other", "checkpoint: others", "initial_checkpoints", "others"),
        ("continues_from: base_sft", "continues_from: other", "continues_from", "other"),
        ("minus: tools_off", "minus: sampled", "evaluations", "sampled"),
        ("steps: 4\nbaseline", "steps: 0\nbaseline", "steps", 0),
        ("hypothesis: whether", "hypotesis: whether", "hypotesis", "whether an ablation works"),
        ("hypothesis: whether an ablation works", "", "hypothesis", None),
        ("python_style_fraction: 0.5", "python_style: 0.5", "initial_checkpoints.other.python_style", 0.5),
        ("  hot: {", "  a/b: {", "variants", "a/b"),
        ("  one: {", "  data: {", "conditions", "data"),
        ("title: A miniature", "title: [", "{path}", None),
        (SET, "- a", "the ablation file {path}", ["a"]),
    ],
)
def test_mistake_has_its_key_and_value(write_spec, old, new, key, value):
    assert old in SET
    path = write_spec(SET.replace(old, new))
    with raises(ConfigError, key=key.format(path=path), value=value):
        load_spec(path)


def test_binary_file_is_rejected(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    with raises(ConfigError, key=str(tmp_path / "mine.yaml")):
        load_spec(str(tmp_path / "mine.yaml"))
