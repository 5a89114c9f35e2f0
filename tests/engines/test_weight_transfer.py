"""Weight broadcast: fake servers whose workers take part in real broadcasts, some of which fail."""

import asyncio
import contextlib
import threading

import pytest
import torch
from error_cases import raises
from generate_server import RESETS, server
from polling import wait_until
from safetensors.torch import load_file
from workers import Workers

from saccade.config.schema import ModelConfig
from saccade.engines.remote import vllm_api
from saccade.engines.sglang import Sglang
from saccade.engines.vllm import Vllm
from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import EngineRequirements
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams

pytestmark = pytest.mark.slow  # process groups are created and torn down


@pytest.fixture
def vlm(tiny_folder):
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))


def engine_at(vlm, *served, check=None, **settings):
    """Create an engine of fake servers; their logprobs are made up, so `check` replaces the weight comparison."""
    given = {
        "verify_weights": False,
        "retry_backoff": 0.01,
        "down_timeout": 300.0,
        "request_timeout": 300.0,
        "weight_sync": "gloo",
        **settings,
    }
    engine = Vllm(vlm.renderer, FakeMediaLoader(), servers=tuple(fake.url for fake in served), **given)

    async def accept(server, source, weight_label=""):
        return 0.0

    engine._logprob_check.check = check or accept
    return engine


def change_weights(vlm):
    """Change the weights, as a training step does."""
    with torch.no_grad():
        for parameter in vlm.trainable_parameters:
            parameter.mul_(1.1)


@pytest.fixture
def read_weights(vlm, tmp_path):
    """A function that returns the trainer's current weights as saved in a checkpoint."""

    def read():
        vlm.save(tmp_path)
        return load_file(tmp_path / "model.safetensors")

    return read


def has_weights(served, weights):
    """Return whether every worker of a server has exactly these weights."""
    return all(
        worker.keys() == weights.keys() and all(torch.equal(worker[name], value) for name, value in weights.items())
        for worker in served.workers.weights
    )


def prompt(renderer, text="What?"):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


async def generate_all(engine, renderer, texts=("What?",), tokens=2):
    sampling = SamplingParams(max_tokens=tokens, forbidden_ids=renderer.forbidden_ids)
    return await asyncio.gather(
        *(engine.generate(GenerationRequest(prompt(renderer, text), sampling)) for text in texts)
    )


def test_all_workers_of_all_servers_receive_the_checkpoints_weights(vlm, read_weights):
    async def body(*servers):
        engine = engine_at(vlm, *servers)
        for version in (1, 2, 3):
            change_weights(vlm)
            await engine.sync_weights(vlm, version)
            await wait_until(lambda: all(connected.is_up for connected in engine._pool.servers))
            assert all(has_weights(server, read_weights()) for server in servers)
            assert [reply.version for reply in await generate_all(engine, vlm.renderer)] == [version]
        await engine.close()

    with (
        server(vlm.renderer, workers=Workers(1)) as one,
        server(vlm.renderer, workers=Workers(2)) as two,
    ):
        asyncio.run(body(one, two))
    assert one.workers.joined == two.workers.joined == 1, "a working group was created again"
    assert not torch.distributed.is_initialized()
    once = ["/pause", "/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [path for path, _ in two.orders] == [vllm_api._INIT_PATH, *[*once, *RESETS, "/resume"] * 3]


def test_a_reply_continues_over_an_update_without_partial_weights(vlm):
    async def body(served):
        engine = engine_at(vlm, served, replies_on_sync="continue")
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(10)
        task = asyncio.create_task(generate_all(engine, vlm.renderer, tokens=30))
        await wait_until(lambda: gate.sampled == [10])
        await engine.sync_weights(vlm, 2)
        gate.open()
        (reply,) = await task
        await engine.close()
        return reply

    with server(vlm.renderer, workers=Workers(2)) as served:
        reply = asyncio.run(body(served))
    assert reply.token_versions == (1,) * 10 + (2,) * 20


def limit_transfer(engine, is_limited, seconds):
    """Limit the transfers for which `is_limited(server)` is true when they begin; the others keep their limit."""
    transport, usual = engine._broadcaster, engine._broadcaster._timeout
    run_both = transport._run_both

    async def run_both_within(server, *parts):
        transport._timeout = seconds if is_limited(server) else usual
        await run_both(server, *parts)

    transport._run_both = run_both_within


@pytest.mark.parametrize("behavior", ["die", "hang", "refuse", "deny"])
def test_a_server_with_partial_weights_is_not_used_until_it_is_restarted(vlm, read_weights, behavior, caplog):
    """The other server continues. After a restart it loads the current version, not the trainer's newer weights."""
    renderer, texts = vlm.renderer, [f"What is {number}?" for number in range(6)]

    async def body(bad, healthy):
        engine = engine_at(vlm, bad, healthy)
        await engine.sync_weights(vlm, 1)
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        num_lists = bad.workers.num_lists
        bad.workers.behave = lambda number: behavior if number == num_lists + 2 else None
        if behavior == "hang":
            limit_transfer(engine, lambda to: to.url == bad.url and bad.workers.num_lists == num_lists + 2, 1.0)
        change_weights(vlm)
        published = read_weights()
        await engine.sync_weights(vlm, 2)
        assert [connected.url for connected in engine._pool.servers_up] == [healthy.url]
        assert has_weights(healthy, published)
        num_requests = len(bad.bodies)
        assert {reply.version for reply in await generate_all(engine, renderer, texts)} == {2}
        await asyncio.sleep(0.5)  # its handshakes fail meanwhile
        assert len(bad.bodies) == num_requests
        assert len(engine._pool.servers_up) == 1
        change_weights(vlm)
        await wait_until(lambda: bad.workers.num_lists == num_lists + 3)  # it has received the list at which it fails
        bad.restart()
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        assert has_weights(bad, published)
        assert {reply.version for reply in await generate_all(engine, renderer, texts)} == {2}
        change_weights(vlm)
        await engine.sync_weights(vlm, 3)
        assert has_weights(bad, read_weights())
        assert has_weights(healthy, read_weights())
        await engine.close()

    with server(renderer, workers=Workers(2)) as bad, server(renderer, workers=Workers(1)) as healthy:
        asyncio.run(body(bad, healthy))
    assert bad.mixed == healthy.mixed == 0
    assert vllm_api._PARTIAL_HINT in caplog.text


def test_a_run_waits_for_its_only_server_that_failed(vlm, read_weights):
    async def body(served):
        engine = engine_at(vlm, served)
        await engine.sync_weights(vlm, 1)
        num_lists = served.workers.num_lists
        served.workers.behave = lambda number: "die" if number == num_lists + 1 else None
        change_weights(vlm)
        update = asyncio.create_task(engine.sync_weights(vlm, 2))
        await wait_until(lambda: served.sick)
        await asyncio.sleep(0.2)
        assert not update.done()
        served.restart()
        await update
        assert has_weights(served, read_weights())
        assert [reply.version for reply in await generate_all(engine, vlm.renderer)] == [2]
        await engine.close()

    with server(vlm.renderer, workers=Workers(1)) as served:
        asyncio.run(body(served))


def test_a_server_restarted_unnoticed_joins_a_new_group(vlm, read_weights):
    async def body(served):
        engine = engine_at(vlm, served)
        await engine.sync_weights(vlm, 1)
        served.restart()
        change_weights(vlm)
        await engine.sync_weights(vlm, 2)
        assert has_weights(served, read_weights())
        assert len(engine._pool.servers_up) == 1
        await engine.close()

    with server(vlm.renderer, workers=Workers(2)) as served:
        asyncio.run(body(served))
    assert served.workers.joined == 2


def test_weights_that_fail_verification_are_rolled_back_on_all_servers(vlm, read_weights):
    """Bit for bit, from the copy: the trainer has other weights by then."""

    async def body(*servers):
        failing = set()

        async def check(server, source, weight_label=""):
            if weight_label in failing or (failing == {"next"} and not failing.discard("next")):
                raise BrokenEngineError("other weights", key="engine.settings.servers")
            return 0.0

        engine = engine_at(vlm, *servers, check=check)
        await engine.sync_weights(vlm, 1)
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        before = read_weights()
        change_weights(vlm)
        failing.add("next")
        with raises(BrokenEngineError, key="engine.settings.servers"):
            await engine.sync_weights(vlm, 2)
        assert all(has_weights(fake, before) for fake in servers)
        assert [reply.version for reply in await generate_all(engine, vlm.renderer)] == [1]
        await engine.close()

    with (
        server(vlm.renderer, workers=Workers(1)) as one,
        server(vlm.renderer, workers=Workers(1)) as two,
    ):
        asyncio.run(body(one, two))
    assert one.label == two.label
    assert one.label.startswith("saccade-1-")


def test_cancelling_a_broadcast_leaves_complete_weights(vlm, read_weights, caplog):
    async def body(served):
        engine = engine_at(vlm, served)
        await engine.sync_weights(vlm, 1)
        before, num_lists = read_weights(), served.workers.num_lists
        has_begun, may_continue = threading.Event(), threading.Event()

        def behave(number):
            if number == num_lists + 1:
                has_begun.set()
                may_continue.wait()

        served.workers.behave = behave
        change_weights(vlm)
        update = asyncio.create_task(engine.sync_weights(vlm, 2))
        await wait_until(has_begun.is_set)
        update.cancel()
        await wait_until(lambda: (served.url,) in [record.args for record in caplog.records])
        may_continue.set()
        with contextlib.suppress(asyncio.CancelledError):
            await update
        assert update.cancelled()
        assert has_weights(served, before)
        assert [reply.version for reply in await generate_all(engine, vlm.renderer)] == [1]
        await engine.close()

    with server(vlm.renderer, workers=Workers(2)) as served:
        asyncio.run(body(served))
    assert served.mixed == 0
    assert [record.args for record in caplog.records if record.module == "broadcast"] == [(served.url,)]


def test_a_server_without_weight_transfer_is_refused(vlm):
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(vlm, served)
        with raises(BrokenEngineError, key="engine.settings.weight_sync", value=served.url):
            await engine.sync_weights(vlm, 1)
        await engine.close()
        requirements = EngineRequirements(model_path="models/m", renderer=renderer, context_length=64, is_training=True)
        return await Vllm.probe(requirements, servers=(served.url,), weight_sync="gloo")

    with server(renderer, workers=Workers(1, configured=False)) as served:
        (reply,) = asyncio.run(body(served)).values()
    assert isinstance(reply, EngineError)
    assert reply.key == "engine.settings.weight_sync"


def test_probe_joins_no_group(vlm):
    requirements = EngineRequirements(model_path="models/m", renderer=vlm.renderer, context_length=64, is_training=True)
    with server(vlm.renderer, workers=Workers(1)) as served:
        (reply,) = asyncio.run(Vllm.probe(requirements, servers=(served.url,), weight_sync="gloo")).values()
    assert isinstance(reply, str), reply
    assert not served.workers.joined


@pytest.mark.parametrize(
    ("engine", "settings", "key", "value"),
    [
        (Vllm, {"weight_sync": "nccl"}, "engine.settings.weight_sync", "nccl"),
        (Vllm, {"weight_sync": "gloo", "weight_dir": "/tmp"}, "engine.settings.weight_dir", "/tmp"),
        (Sglang, {"weight_sync": "nccl"}, "engine.settings.weight_sync", "nccl"),
    ],
)
def test_an_unsupported_weight_sync_is_refused(vlm, engine, settings, key, value):
    with raises(ConfigError, key=key, value=value):
        engine(vlm.renderer, FakeMediaLoader(), **settings)
