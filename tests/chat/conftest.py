import pytest

from saccade.chat.renderer import ChatRenderer, load_renderer
from saccade.models.tiny import make_tiny_model

FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny") / request.param)
    make_tiny_model(path, family=request.param, hidden_size=64, num_layers=2)
    return path


@pytest.fixture(scope="session")
def renderer(folder) -> ChatRenderer:
    return load_renderer(folder)
