import pytest

from saccade.chat.render import ChatRenderer, load_renderer
from saccade.model.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """A tiny checkpoint, random weights."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    make_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tiny_folder) -> ChatRenderer:
    return load_renderer(tiny_folder)
