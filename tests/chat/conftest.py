import pytest

from saccade.chat.render import ChatRenderer, load_renderer
from saccade.model.tiny import make_tiny

FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("tiny") / request.param)
    make_tiny(path, family=request.param, hidden=64, layers=2)
    return path


@pytest.fixture(scope="session")
def renderer(folder) -> ChatRenderer:
    return load_renderer(folder)
