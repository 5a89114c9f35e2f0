"""Weights through groups of processes: servers whose workers really take part in the broadcasts, some of which fail."""

import asyncio
import contextlib

import pytest
import torch
from generate_server import RESETS, server
from safetensors.torch import load_file
from workers import Workers

from saccade.config import Model
from saccade.engines._served import vllm_transfer
from saccade.engines.sglang import sglang
from saccade.engines.vllm import vllm
from saccade.errors import BrokenEngineError, ConfigError
from saccade.ledger import Ledger
from saccade.model.backbone import Backbone
from saccade.protocols import Needs
from saccade.testing import PaintedMedia
from saccade.types import Message, Sampling

pytestmark = pytest.mark.slow  # groups come together and fall apart


@pytest.fixture
def backbone(tiny_folder):
    return Backbone(Model(path=tiny_folder, threads=1))


def engine_at(backbone, *served, check=None, **settings):
    """An engine of servers whose logprobs are made up: comparing them with the trainer's is left out, or `check`."""
    given = {"parity": False, "wait": 0.01, "patience": 60.0, "seconds": 30.0, "transfer": "gloo", **settings}
    engine = vllm(backbone, PaintedMedia(), servers=tuple(each.url for each in served), **given)

    async def alike(server, edition=""):
        return 0.0

    engine._parity.check = check or alike
    return engine


def moved(backbone):
    """The weights after a step; what they are on disk."""
    with torch.no_grad():
        for parameter in backbone.parameters:
            parameter.mul_(1.1)


@pytest.fixture
def saved(backbone, tmp_path):
    """What the trainer's weights are now, by another way: as its checkpoint would hold them."""

    def read():
        backbone.save(tmp_path)
        return load_file(tmp_path / "model.safetensors")

    return read


def has(served, weights):
    """Whether every worker of a server has exactly these."""
    return all(
        found.keys() == weights.keys() and all(torch.equal(found[name], value) for name, value in weights.items())
        for found in served.workers.weights
    )


def prompt(renderer, text="What?"):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


async def asked(engine, renderer, texts=("What?",), tokens=2):
    sampling = Sampling(max_tokens=tokens, forbidden_ids=renderer.forbidden_ids)
    return await asyncio.gather(*(engine.generate(prompt(renderer, text), sampling) for text in texts))


async def until(so):
    async with asyncio.timeout(60):
        while not so():
            await asyncio.sleep(0.01)


def test_all_processes_of_all_servers_get_what_a_checkpoint_holds(backbone, saved):
    async def body(*servers):
        engine = engine_at(backbone, *servers)
        for version in (1, 2, 3):
            moved(backbone)
            await engine.publish(None, version)
            await until(lambda: all(each.up for each in engine._pool.servers))
            assert all(has(each, saved()) for each in servers)
            assert [each.version for each in await asked(engine, backbone.renderer)] == [version]
        await engine.close()

    with server(backbone.renderer, workers=Workers(1)) as one, server(backbone.renderer, workers=Workers(2)) as two:
        asyncio.run(body(one, two))
    assert one.workers.joined == two.workers.joined == 1, "a group that was well was made anew"
    assert not torch.distributed.is_initialized()
    once = ["/pause", "/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [path for path, _ in two.orders] == [vllm_transfer._JOIN, *[*once, *RESETS, "/resume"] * 3]


def test_a_reply_goes_on_over_an_update_and_no_token_is_of_weights_in_part(backbone):
    async def body(served):
        engine = engine_at(backbone, served, pause="keep")
        await engine.publish(None, 1)
        task = asyncio.create_task(asked(engine, backbone.renderer, tokens=30))
        await until(lambda: served.open)
        await asyncio.sleep(0.15)
        await engine.publish(None, 2)
        (said,) = await task
        await engine.close()
        return said

    with server(backbone.renderer, pace=0.02, workers=Workers(2)) as served:
        said = asyncio.run(body(served))
    assert set(said.versions) == {1, 2}
    assert said.versions == tuple(sorted(said.versions))


@pytest.mark.parametrize("does", ["die", "hang", "refuse", "deny"])
def test_a_server_that_fails_halfway_is_not_used_before_it_was_started_again(backbone, saved, does, caplog):
    """The other one goes on. Started again, it gets what was published, though the trainer has moved on since."""
    renderer, texts = backbone.renderer, [f"What is {number}?" for number in range(6)]

    async def body(bad, well):
        engine = engine_at(backbone, bad, well, seconds=5.0)
        await engine.publish(None, 1)
        await until(lambda: len(engine._pool.up) == 2)
        told = bad.workers.told
        bad.workers.behave = lambda number: does if number == told + 2 else None
        moved(backbone)
        published = saved()
        await engine.publish(None, 2)
        assert [each.url for each in engine._pool.up] == [well.url]
        assert has(well, published)
        asks = len(bad.bodies)
        assert {each.version for each in await asked(engine, renderer, texts)} == {2}
        await asyncio.sleep(0.5)  # it is greeted in vain
        assert len(bad.bodies) == asks
        assert len(engine._pool.up) == 1
        moved(backbone)
        bad.restart()
        await until(lambda: len(engine._pool.up) == 2)
        assert has(bad, published)
        assert {each.version for each in await asked(engine, renderer, texts)} == {2}
        moved(backbone)
        await engine.publish(None, 3)
        assert has(bad, saved())
        assert has(well, saved())
        await engine.close()

    with server(renderer, workers=Workers(2)) as bad, server(renderer, workers=Workers(1)) as well:
        asyncio.run(body(bad, well))
    assert bad.mixed == well.mixed == 0
    assert "has a part of new weights, and is not used before it was started again" in caplog.text


def test_without_another_server_a_run_waits_for_the_one_that_failed(backbone, saved):
    async def body(served):
        engine = engine_at(backbone, served)
        await engine.publish(None, 1)
        told = served.workers.told
        served.workers.behave = lambda number: "die" if number == told + 1 else None
        moved(backbone)
        publishing = asyncio.create_task(engine.publish(None, 2))
        await until(lambda: served.sick)
        await asyncio.sleep(0.2)
        assert not publishing.done()
        served.restart()
        await publishing
        assert has(served, saved())
        assert [each.version for each in await asked(engine, backbone.renderer)] == [2]
        await engine.close()

    with server(backbone.renderer, workers=Workers(1)) as served:
        asyncio.run(body(served))


def test_a_server_that_was_started_again_unseen_joins_a_group_of_its_own(backbone, saved):
    async def body(served):
        engine = engine_at(backbone, served)
        await engine.publish(None, 1)
        served.restart()
        moved(backbone)
        await engine.publish(None, 2)
        assert has(served, saved())
        assert len(engine._pool.up) == 1
        await engine.close()

    with server(backbone.renderer, workers=Workers(2)) as served:
        asyncio.run(body(served))
    assert served.workers.joined == 2


def test_new_weights_that_a_server_has_otherwise_are_taken_back_by_all(backbone, saved):
    """To the bit, from the copy: the trainer has others by then."""

    async def body(*servers):
        failing = set()

        async def check(server, edition=""):
            if edition in failing or (failing == {"next"} and not failing.discard("next")):
                raise BrokenEngineError("other weights")
            return 0.0

        engine = engine_at(backbone, *servers, check=check)
        await engine.publish(None, 1)
        await until(lambda: len(engine._pool.up) == 2)
        before = saved()
        moved(backbone)
        failing.add("next")
        with pytest.raises(BrokenEngineError, match="not taken: other weights"):
            await engine.publish(None, 2)
        assert all(has(each, before) for each in servers)
        assert [each.version for each in await asked(engine, backbone.renderer)] == [1]
        await engine.close()

    with server(backbone.renderer, workers=Workers(1)) as one, server(backbone.renderer, workers=Workers(1)) as two:
        asyncio.run(body(one, two))
    assert one.label == two.label
    assert one.label.startswith("saccade-1-")


def test_who_is_stopped_while_weights_are_sent_leaves_whole_ones_behind(backbone, saved, caplog):
    async def body(served):
        engine = engine_at(backbone, served)
        await engine.publish(None, 1)
        before, told, began = saved(), served.workers.told, asyncio.Event()
        loop = asyncio.get_running_loop()

        def behave(number):
            if number == told + 1:
                loop.call_soon_threadsafe(began.set)

        served.workers.behave = behave
        moved(backbone)
        publishing = asyncio.create_task(engine.publish(None, 2))
        await began.wait()
        publishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await publishing
        assert publishing.cancelled()
        assert has(served, before)
        assert [each.version for each in await asked(engine, backbone.renderer)] == [1]
        await engine.close()

    with server(backbone.renderer, workers=Workers(2)) as served:
        asyncio.run(body(served))
    assert served.mixed == 0
    assert f"waiting until {served.url} has taken all of the weights" in caplog.text


def test_a_server_that_was_started_without_it_is_refused_with_the_mend(backbone):
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(backbone, served)
        with pytest.raises(BrokenEngineError, match=r"saccade serve --transfer nccl.*--weight-transfer-config"):
            await engine.publish(None, 1)
        await engine.close()
        needs = Needs(model="models/m", renderer=renderer, context=64, training=True)
        return await vllm.visit(needs, servers=(served.url,), transfer="gloo")

    with server(renderer, workers=Workers(1, configured=False)) as served:
        (said,) = asyncio.run(body(served)).values()
    assert "--weight-transfer-config" in str(said)
    assert isinstance(said, Exception)


def test_a_visit_joins_nothing(backbone):
    needs = Needs(model="models/m", renderer=backbone.renderer, context=64, training=True)
    with server(backbone.renderer, workers=Workers(1)) as served:
        (said,) = asyncio.run(vllm.visit(needs, servers=(served.url,), transfer="gloo")).values()
    assert isinstance(said, str), said
    assert not served.workers.joined


@pytest.mark.parametrize(
    ("engine", "settings", "sentence"),
    [
        (vllm, {"transfer": "nccl"}, "transfer=nccl takes a trainer on a GPU: set model.device=cuda"),
        (vllm, {"transfer": "gloo", "folder": "/tmp"}, "engine.settings.folder is for transfer=files"),
        (sglang, {"transfer": "nccl"}, "the engine sglang takes new weights as files alone"),
    ],
)
def test_a_transfer_that_can_not_be_is_refused(backbone, engine, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        engine(backbone, PaintedMedia(), **settings)
