"""How the config of a served checkpoint is compared with the model's."""

import pytest

from saccade.engines.remote.handshake import find_config_differences


@pytest.mark.parametrize("empty", [{}, {"factor": None}, {"dtype": "float32"}, None])
def test_section_without_values_equals_a_missing_one(empty):
    for model in ({}, {"text_config": {}}, {"text_config": None}):
        assert not list(find_config_differences({"text_config": empty}, model))
        assert not list(find_config_differences(model, {"text_config": empty}))


@pytest.mark.parametrize("other", [0, False, 3, {"num_hidden_layers": 0}])
def test_other_values_differ(other):
    for model in ({}, {"text_config": None}, {"text_config": {"num_hidden_layers": 2}}):
        (difference,) = find_config_differences({"text_config": other}, model)
        assert "text_config" in difference
