"""New weights for servers that are in the middle of a reply: it goes on, or it ends first; nothing is mixed up."""

import asyncio
import time

import pytest
from generate_server import RESETS, server

from saccade.agents._loop import act
from saccade.config import Model
from saccade.engines.vllm import vllm
from saccade.errors import BrokenEngineError
from saccade.ledger import Ledger
from saccade.model.backbone import Backbone
from saccade.testing import PaintedMedia
from saccade.types import Message, Sampling

pytestmark = pytest.mark.slow  # servers take their time


@pytest.fixture(scope="module")
def backbone(tiny_folder):
    return Backbone(Model(path=tiny_folder, threads=1))


@pytest.fixture
def engine_at(backbone):
    """Engines of servers whose logprobs are made up, so that comparing them with the trainer's is left out."""

    def make(*served, **settings):
        given = {"parity": False, "wait": 0.01, "patience": 5.0, "seconds": 20.0, **settings}
        given = {"pause": "keep", **given}
        engine = vllm(backbone, PaintedMedia(), servers=tuple(each.url for each in served), **given)

        async def checked(server, edition=""):
            return 0.0

        engine._parity.check = checked
        return engine

    return make


def prompt(renderer, text="What?"):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


async def under_way(engine, renderer, served, sampling, texts=("What?",)):
    """Replies that the server has begun with."""
    tasks = [asyncio.create_task(engine.generate(prompt(renderer, text), sampling)) for text in texts]
    while served.open < len(texts):
        await asyncio.sleep(0.001)
    return tasks


async def updated(engine, renderer, served, *, tokens, at, texts=("What?",)):
    """Replies during which new weights come when one of them has made about `at[n]` tokens; the last is asked after."""
    sampling = Sampling(max_tokens=tokens, forbidden_ids=renderer.forbidden_ids)
    await engine.publish(None, 1)
    tasks = await under_way(engine, renderer, served, sampling, texts)
    pauses = [later - earlier for earlier, later in zip((0.0, *at), at, strict=False)]
    for version, pause in enumerate(pauses, 2):
        await asyncio.sleep(pause)
        await engine.publish(None, version)
    late = asyncio.create_task(engine.generate(prompt(renderer), sampling))
    found = await asyncio.gather(*tasks, late, return_exceptions=True)
    await engine.close()
    return found


def test_a_reply_goes_on_over_updates_and_every_token_keeps_its_version(backbone, engine_at):
    renderer = backbone.renderer
    with server(renderer, pace=0.02) as served:
        engine = engine_at(served)
        *said, late = asyncio.run(
            updated(engine, renderer, served, tokens=30, at=(0.15, 0.3), texts=("one", "two", "three"))
        )
    for each in said:
        versions = each.versions
        assert len(versions) == len(each.tokens) == len(each.logprobs) == 30
        assert versions == tuple(sorted(versions))
        assert set(versions) == {1, 2, 3}
        assert each.version == 3
        ledger = act(prompt(renderer), each)
        assert ledger.versions()[-30:] == versions
        assert ledger.logprobs()[-30:] == each.logprobs
        assert ledger.sampled_tokens() == each.tokens
    assert (late.version, late.versions) == (3, ())
    assert len(served.bodies) == 4, "a reply was begun anew"


def test_whoever_waits_gets_replies_of_one_version(backbone, engine_at):
    renderer = backbone.renderer
    with server(renderer, pace=0.02) as served:
        engine = engine_at(served, pause="wait")
        one, two, late = asyncio.run(updated(engine, renderer, served, tokens=10, at=(0.1,), texts=("one", "two")))
    assert [(each.version, each.versions) for each in (one, two, late)] == [(1, ()), (1, ()), (2, ())]


@pytest.mark.parametrize(("pause", "query"), [("keep", "reset_running_requests=true"), ("wait", "")])
def test_a_server_is_told_in_this_order(backbone, engine_at, pause, query):
    with server(backbone.renderer) as served:
        asyncio.run(updated(engine_at(served, pause=pause), backbone.renderer, served, tokens=1, at=(0.0,), texts=()))
    prefix, *others = RESETS
    once = [("/pause", f"mode={pause}"), ("/collective_rpc", ""), ("/update_weight_version", ""), (prefix, query)]
    assert served.orders == [*once, *((path, "") for path in others), ("/resume", "")] * 2


def test_a_reply_with_tokens_of_weights_that_were_taken_back_is_thrown_away(backbone, engine_at):
    """The comparison fails after the server went on: what it said meanwhile is nobody's."""
    renderer = backbone.renderer

    async def body(served):
        engine, failing = engine_at(served, retries=0), asyncio.Event()

        async def checked(server, edition=""):
            if failing.is_set():
                await asyncio.sleep(0.1)
                raise BrokenEngineError("other weights")

        engine._parity.check = checked
        sampling = Sampling(max_tokens=30, forbidden_ids=renderer.forbidden_ids)
        await engine.publish(None, 1)
        (task,) = await under_way(engine, renderer, served, sampling)
        await asyncio.sleep(0.1)
        failing.set()
        with pytest.raises(BrokenEngineError, match="not taken"):
            await engine.publish(None, 2)
        failing.clear()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        after = await engine.generate(prompt(renderer), sampling)
        await engine.close()
        return engine.version, found, after

    with server(renderer, pace=0.02) as served:
        version, found, after = asyncio.run(body(served))
    assert version == 1
    assert "sampled from the weights 'saccade-2-" in str(found)
    assert (after.version, after.versions) == (1, ())


def test_a_server_that_answers_from_older_weights_is_not_used(backbone):
    """It says yes to every order, and keeps its label."""

    async def body(served):
        engine = vllm(backbone, PaintedMedia(), servers=(served.url,), parity=False, wait=0.01, patience=3.0)
        # The server's logprobs are made up, and so are the trainer's: as if the updates were too small to be told.
        engine._parity.score = lambda ledger, tokens: [-1.0 - place for place in range(len(tokens))]
        await engine.publish(None, 1)
        served.deaf = True
        with pytest.raises(BrokenEngineError, match="answers from other weights than those that it was given last"):
            await engine.publish(None, 2)
        await engine.close()

    with server(backbone.renderer) as served:
        asyncio.run(body(served))


def test_a_server_that_can_not_take_weights_is_given_them_again_and_its_replies_go_on(backbone, engine_at):
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served)
        sampling = Sampling(max_tokens=20, forbidden_ids=renderer.forbidden_ids)
        await engine.publish(None, 1)
        (task,) = await under_way(engine, renderer, served, sampling)
        await asyncio.sleep(0.1)
        served.refuses = "/update_weight_version"
        publishing = asyncio.create_task(engine.publish(None, 2))
        await asyncio.sleep(0.2)
        assert not publishing.done()
        served.refuses = ""
        await publishing
        said = await task
        await engine.close()
        return said

    with server(renderer, pace=0.02) as served:
        said = asyncio.run(body(served))
    assert set(said.versions) == {1, 2}
    assert len(said.versions) == 20


def test_a_reply_that_takes_too_long_begins_anew_with_the_new_weights(backbone, engine_at, caplog):
    """Whoever learns doesn't wait for the longest reply, nor do those whose next reply waits for the weights."""
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served, pause="wait", drain=0.3)
        await engine.publish(None, 1)
        long, short = Sampling(max_tokens=100), Sampling(max_tokens=5)
        tasks = [asyncio.create_task(engine.generate(prompt(renderer), each)) for each in (long, short)]
        while served.open < 2:
            await asyncio.sleep(0.001)
        begun = time.monotonic()
        await engine.publish(None, 2)
        took = time.monotonic() - begun
        said = await asyncio.gather(*tasks)
        await engine.close()
        return took, said

    with server(renderer, pace=0.02) as served:
        took, (long, short) = asyncio.run(body(served))
    assert 0.3 <= took < 1.5
    assert (short.version, short.versions) == (1, ())
    assert (long.version, long.versions, len(long.tokens)) == (2, (), 100)
    assert len(served.bodies) == 3
    assert "1 replies had not ended 0.3 seconds later" in caplog.text


def test_weights_that_no_server_can_take_are_taken_back(backbone, engine_at):
    """The run stops; its servers don't stand still, and have the weights of before."""
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served, patience=3.0)
        await engine.publish(None, 1)
        served.refuses = "saccade-2-"
        with pytest.raises(BrokenEngineError, match=r"no vLLM server could be used for 3 seconds .*told to refuse"):
            await engine.publish(None, 2)
        found = engine.version, served.paused, served.label
        while not engine._pool.up:
            await asyncio.sleep(0.01)
        said = await engine.generate(prompt(renderer), Sampling(max_tokens=3))
        await engine.close()
        return found, said

    with server(renderer) as served:
        (version, paused, label), said = asyncio.run(body(served))
    assert (version, paused) == (1, False)
    assert label.startswith("saccade-1-")
    assert (said.version, said.versions) == (1, ())
