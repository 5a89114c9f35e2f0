"""What is loaded to run episodes of a recipe."""

from saccade.config.load import load_recipe
from saccade.models import vlm
from saccade.rollouts.components import RolloutComponents


def test_a_client_of_servers_loads_no_model(tiny_folder, monkeypatch):
    monkeypatch.setattr(vlm, "_load_model", None)
    overrides = (f"model.path={tiny_folder}", "engine.name=vllm", "environment.settings.max_context_tokens=777")
    components = RolloutComponents.from_recipe(load_recipe("tiny/para_grpo", overrides))
    assert type(components) is RolloutComponents
    assert components.renderer.encode("What?")
    assert components.engine._context_length == 777
