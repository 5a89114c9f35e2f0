"""What is loaded to run episodes of a recipe."""

import pytest
from transformers import AutoModelForImageTextToText

from saccade.config.load import load_recipe
from saccade.models import vlm
from saccade.rollouts.components import RolloutComponents, TrainingComponents


def test_a_client_of_servers_loads_no_model(tiny_folder, monkeypatch):
    monkeypatch.setattr(vlm, "_load_model", None)
    overrides = (f"model.path={tiny_folder}", "engine.name=vllm", "environment.settings.max_context_tokens=777")
    components = RolloutComponents.from_recipe(load_recipe("tiny/para_grpo", overrides))
    assert type(components) is RolloutComponents
    assert components.renderer.encode("What?")
    assert components.engine._context_length == 777


@pytest.mark.parametrize(("executor", "num_reads"), [("local", 2), ("processes", 1)])
def test_an_engine_that_samples_nothing_has_no_copy_of_sharded_weights(tiny_folder, monkeypatch, executor, num_reads):
    reads, read = [], AutoModelForImageTextToText.from_pretrained
    monkeypatch.setattr(
        AutoModelForImageTextToText,
        "from_pretrained",
        lambda *args, **settings: reads.append(1) or read(*args, **settings),
    )
    recipe = load_recipe("tiny/para_grpo", [f"model.path={tiny_folder}", f"rollouts.executor={executor}"])
    TrainingComponents.from_recipe(recipe, vlm.VisionLanguageModel)  # the weights of one process are those of all
    assert len(reads) == num_reads
