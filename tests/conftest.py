"""What every test shares: passive threads before torch comes in, and a tiny checkpoint."""

import pytest

from saccade.cli import settle

settle()

collect_ignore_glob = ["*conftest.py"]  # they hold no doctests, and modules of one name would clash


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny checkpoint, random weights."""
    from saccade.model.tiny import make_tiny

    folder = str(tmp_path_factory.mktemp("tiny"))
    make_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(tiny_folder):
    from saccade.chat.render import load_renderer

    return load_renderer(tiny_folder)
