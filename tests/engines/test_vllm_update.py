"""Weight sync with fake servers: unfinished replies, failures, rollback."""

import asyncio
import time

import pytest
from error_cases import raises
from generate_server import RESETS, server

from saccade.config.schema import ModelConfig
from saccade.engines.vllm import Vllm
from saccade.errors import BrokenEngineError, EngineError
from saccade.ledger import Ledger
from saccade.models.backbone import Backbone
from saccade.rollouts.runner import append_completion
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams

pytestmark = pytest.mark.slow  # the servers sample slowly


@pytest.fixture(scope="module")
def backbone(tiny_folder):
    return Backbone(ModelConfig(path=tiny_folder, num_threads=1))


@pytest.fixture
def engine_at(backbone):
    """A factory of engines; the servers' logprobs are made up, so the weight comparison is replaced."""

    def make(*served, **settings):
        given = {
            "verify_weights": False,
            "retry_backoff": 0.01,
            "down_timeout": 60.0,
            "request_timeout": 60.0,
            **settings,
        }
        given = {"in_flight": "continue", **given}
        engine = Vllm(backbone.renderer, FakeMediaLoader(), servers=tuple(each.url for each in served), **given)

        async def check(server, source, weight_label=""):
            return 0.0

        engine._logprob_check.check = check
        return engine

    return make


def prompt(renderer, text="What?"):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


async def start_replies(engine, renderer, served, sampling, texts=("What?",)):
    """Start requests; return their tasks when the server samples all of them."""
    tasks = [
        asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer, text), sampling))) for text in texts
    ]
    while served.open < len(texts):
        await asyncio.sleep(0.001)
    return tasks


async def update_during_replies(engine, backbone, served, *, tokens, at, texts=("What?",)):
    """Return replies during which weights are updated at `at` seconds, and one reply requested afterwards."""
    renderer = backbone.renderer
    sampling = SamplingParams(max_tokens=tokens, forbidden_ids=renderer.forbidden_ids)
    await engine.sync_weights(backbone, 1)
    tasks = await start_replies(engine, renderer, served, sampling, texts)
    delays = [later - earlier for earlier, later in zip((0.0, *at), at, strict=False)]
    for version, delay in enumerate(delays, 2):
        await asyncio.sleep(delay)
        await engine.sync_weights(backbone, version)
    late = asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer), sampling)))
    replies = await asyncio.gather(*tasks, late, return_exceptions=True)
    await engine.close()
    return replies


def test_a_reply_continues_over_updates_with_a_version_per_token(backbone, engine_at):
    renderer = backbone.renderer
    with server(renderer, pace=0.02) as served:
        engine = engine_at(served)
        *reply, late = asyncio.run(
            update_during_replies(engine, backbone, served, tokens=30, at=(0.15, 0.3), texts=("one", "two", "three"))
        )
    for each in reply:
        versions = each.token_versions
        assert len(versions) == len(each.tokens) == len(each.logprobs) == 30
        assert versions == tuple(sorted(versions))
        assert set(versions) == {1, 2, 3}
        assert each.version == 3
        ledger = append_completion(prompt(renderer), each)
        assert ledger.versions()[-30:] == versions
        assert ledger.logprobs()[-30:] == each.logprobs
        assert ledger.sampled_tokens() == each.tokens
    assert (late.version, late.token_versions) == (3, ())
    assert len(served.bodies) == 4, "a reply was restarted"


def test_drain_gives_replies_of_one_version(backbone, engine_at):
    renderer = backbone.renderer
    with server(renderer, pace=0.02) as served:
        engine = engine_at(served, in_flight="drain")
        one, two, late = asyncio.run(
            update_during_replies(engine, backbone, served, tokens=10, at=(0.1,), texts=("one", "two"))
        )
    assert [(each.version, each.token_versions) for each in (one, two, late)] == [(1, ()), (1, ()), (2, ())]


@pytest.mark.parametrize(
    ("in_flight", "mode", "query"), [("continue", "keep", "reset_running_requests=true"), ("drain", "wait", "")]
)
def test_the_order_of_weight_update_requests(backbone, engine_at, in_flight, mode, query):
    with server(backbone.renderer) as served:
        engine = engine_at(served, in_flight=in_flight)
        asyncio.run(update_during_replies(engine, backbone, served, tokens=1, at=(0.0,), texts=()))
    prefix, *others = RESETS
    once = [("/pause", f"mode={mode}"), ("/collective_rpc", ""), ("/update_weight_version", ""), (prefix, query)]
    assert served.orders == [*once, *((path, "") for path in others), ("/resume", "")] * 2


def test_a_reply_with_tokens_of_rolled_back_weights_is_discarded(backbone, engine_at):
    """The comparison fails after the server resumed: what it sampled meanwhile must not be used."""
    renderer = backbone.renderer

    async def body(served):
        engine, failing = engine_at(served, max_retries=0), asyncio.Event()

        async def check(server, source, weight_label=""):
            if failing.is_set():
                await asyncio.sleep(0.1)
                raise BrokenEngineError("other weights", key="engine.settings.servers")

        engine._logprob_check.check = check
        sampling = SamplingParams(max_tokens=30, forbidden_ids=renderer.forbidden_ids)
        await engine.sync_weights(backbone, 1)
        (task,) = await start_replies(engine, renderer, served, sampling)
        await asyncio.sleep(0.1)
        failing.set()
        with raises(BrokenEngineError, key="engine.settings.servers"):
            await engine.sync_weights(backbone, 2)
        failing.clear()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        after = await engine.generate(GenerationRequest(prompt(renderer), sampling))
        await engine.close()
        return engine.version, result, after

    with server(renderer, pace=0.02) as served:
        version, result, after = asyncio.run(body(served))
    assert version == 1
    assert isinstance(result, EngineError)
    assert (result.key, result.value) == ("engine.settings.servers", served.url)
    assert (after.version, after.token_versions) == (1, ())


def test_a_server_that_samples_from_older_weights_is_not_used(backbone):
    """It accepts every update, and keeps its label."""

    async def body(served):
        engine = Vllm(
            backbone.renderer,
            FakeMediaLoader(),
            servers=(served.url,),
            verify_weights=False,
            retry_backoff=0.01,
            down_timeout=3.0,
        )
        # The trainer's logprobs are replaced by the server's, as if the update were too small to be detected.
        backbone.compute_token_logprobs = lambda ledger, tokens, pixels: [-1.0 - index for index in range(len(tokens))]
        await engine.sync_weights(backbone, 1)
        served.deaf = True
        with raises(BrokenEngineError, key="engine.settings.servers", value=[served.url]) as caught:
            await engine.sync_weights(backbone, 2)
        del backbone.compute_token_logprobs
        assert "samples from other weights" in str(caught.value)
        await engine.close()

    with server(backbone.renderer) as served:
        asyncio.run(body(served))


def test_a_failed_weight_load_is_retried_and_replies_continue(backbone, engine_at):
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served)
        sampling = SamplingParams(max_tokens=20, forbidden_ids=renderer.forbidden_ids)
        await engine.sync_weights(backbone, 1)
        (task,) = await start_replies(engine, renderer, served, sampling)
        await asyncio.sleep(0.1)
        served.refuses = "/update_weight_version"
        update = asyncio.create_task(engine.sync_weights(backbone, 2))
        await asyncio.sleep(0.2)
        assert not update.done()
        served.refuses = ""
        await update
        reply = await task
        await engine.close()
        return reply

    with server(renderer, pace=0.02) as served:
        reply = asyncio.run(body(served))
    assert set(reply.token_versions) == {1, 2}
    assert len(reply.token_versions) == 20


def test_a_reply_beyond_the_drain_timeout_restarts_with_the_new_weights(backbone, engine_at, caplog):
    """Neither the trainer nor new requests wait for the longest reply."""
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served, in_flight="drain", drain_timeout=0.3)
        await engine.sync_weights(backbone, 1)
        long, short = SamplingParams(max_tokens=100), SamplingParams(max_tokens=5)
        tasks = [
            asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer), each))) for each in (long, short)
        ]
        while served.open < 2:
            await asyncio.sleep(0.001)
        started = time.monotonic()
        await engine.sync_weights(backbone, 2)
        took = time.monotonic() - started
        reply = await asyncio.gather(*tasks)
        await engine.close()
        return took, reply

    with server(renderer, pace=0.02) as served:
        took, (long, short) = asyncio.run(body(served))
    assert took >= 0.3
    # It was restarted, so the sync did not wait for its end.
    assert (short.version, short.token_versions) == (1, ())
    assert (long.version, long.token_versions, len(long.tokens)) == (2, (), 100)
    assert len(served.bodies) == 3
    assert "1 replies were unfinished after 0.3 seconds" in caplog.text


def test_weights_that_no_server_loads_are_rolled_back(backbone, engine_at):
    """The run stops; its server is not paused, and has the previous weights."""
    renderer = backbone.renderer

    async def body(served):
        engine = engine_at(served, down_timeout=3.0)
        await engine.sync_weights(backbone, 1)
        served.refuses = "saccade-2-"
        with raises(BrokenEngineError, key="engine.settings.servers", value=[served.url]):
            await engine.sync_weights(backbone, 2)
        state = engine.version, served.paused, served.label
        while not engine._pool.servers_up:
            await asyncio.sleep(0.01)
        reply = await engine.generate(GenerationRequest(prompt(renderer), SamplingParams(max_tokens=3)))
        await engine.close()
        return state, reply

    with server(renderer) as served:
        (version, paused, label), reply = asyncio.run(body(served))
    assert (version, paused) == (1, False)
    assert label.startswith("saccade-1-")
    assert (reply.version, reply.token_versions) == (1, ())


# ---- several servers, of which one fails -----------------------------------------------------------------------------


async def wait_until(is_true):
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.01)


async def start_two(engine, backbone):
    """Publish version 1 to both servers."""
    await engine.sync_weights(backbone, 1)
    await wait_until(lambda: len(engine._pool.servers_up) == 2)


async def sample_versions(engine, renderer):
    """The versions of replies of several groups, which are spread over all servers that are up."""
    prompts = [prompt(renderer, f"What is {number}?") for number in range(8)]
    replies = await asyncio.gather(
        *(engine.generate(GenerationRequest(each, SamplingParams(max_tokens=3))) for each in prompts)
    )
    return {reply.version for reply in replies}


@pytest.mark.parametrize("in_flight", ["drain", "continue"])
def test_a_server_that_fails_to_load_is_down_until_it_has_the_new_version(backbone, engine_at, in_flight):
    renderer = backbone.renderer

    async def body(first, second):
        engine = engine_at(first, second, in_flight=in_flight, retry_backoff=0.05)
        await start_two(engine, backbone)
        second.refuses = "saccade-2-"
        await engine.sync_weights(backbone, 2)  # the first server has loaded version 2 before the second fails
        assert [server.url for server in engine._pool.servers_up] == [first.url]
        assert await sample_versions(engine, renderer) == {2}
        assert not [body for body in second.bodies if body["sampling_params"]["max_tokens"] == 3]
        second.refuses = ""
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        assert await sample_versions(engine, renderer) == {2}
        await engine.close()

    with server(renderer) as first, server(renderer) as second:
        asyncio.run(body(first, second))
    assert first.label == second.label
    assert first.label.startswith("saccade-2-")
    assert not first.paused
    assert not second.paused


@pytest.mark.parametrize("in_flight", ["drain", "continue"])
@pytest.mark.parametrize("refused", ["/collective_rpc", "/update_weight_version", "/reset_mm_cache", "/resume"])
def test_a_refused_update_is_rolled_back_on_all_servers(backbone, engine_at, in_flight, refused):
    """The second server refuses after the first has loaded the new version; both end on the version before."""
    renderer = backbone.renderer

    async def body(first, second):
        engine = engine_at(first, second, in_flight=in_flight)
        await start_two(engine, backbone)
        second.refuses, second.refusal_status, second.num_refusals = refused, 400, 1
        with raises(EngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(backbone, 2)
        assert len(engine._pool.servers_up) == 2
        assert engine.version == 1
        labels = first.label, second.label
        assert await sample_versions(engine, renderer) == {1}
        await engine.sync_weights(backbone, 3)
        assert await sample_versions(engine, renderer) == {3}
        await engine.close()
        return labels

    with server(renderer) as first, server(renderer) as second:
        one, other = asyncio.run(body(first, second))
    assert one == other
    assert one.startswith("saccade-1-")


def test_a_server_that_can_not_be_rolled_back_is_down(backbone, engine_at):
    """The first server has the new version and refuses the old one; only the second is used until it recovers."""
    renderer = backbone.renderer

    async def body(first, second):
        engine = engine_at(first, second, retry_backoff=0.05)
        await start_two(engine, backbone)

        async def check(server, source, weight_label=""):
            if weight_label.startswith("saccade-2-") and server.url == second.url:
                first.refuses = "saccade-1-"
                raise BrokenEngineError("other weights", key="engine.settings.servers", value=server.url)
            return 0.0

        engine._logprob_check.check = check
        with raises(BrokenEngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(backbone, 2)
        assert await sample_versions(engine, renderer) == {1}
        assert [server.url for server in engine._pool.servers_up] == [second.url]
        first.refuses = ""
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        assert await sample_versions(engine, renderer) == {1}
        await engine.close()

    with server(renderer) as first, server(renderer) as second:
        asyncio.run(body(first, second))
    assert first.label == second.label
    assert first.label.startswith("saccade-1-")


def test_a_first_update_that_is_rolled_back_leaves_its_servers_down(backbone, engine_at):
    """Without a previous version, the server with the new weights is not used as if it had the initial ones."""
    renderer = backbone.renderer

    async def body(first, second):
        engine = engine_at(first, second, retry_backoff=0.05)
        await engine.generate(GenerationRequest(prompt(renderer), SamplingParams(max_tokens=1)))
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        second.refuses, second.refusal_status, second.num_refusals = "/pause", 400, 1
        with raises(EngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(backbone, 1)
        await wait_until(lambda: [server.url for server in engine._pool.servers_up] == [second.url])
        assert await sample_versions(engine, renderer) == {0}
        assert [server.url for server in engine._pool.servers_up] == [second.url]
        await engine.close()

    with server(renderer) as first, server(renderer) as second:
        asyncio.run(body(first, second))
    assert first.label.startswith("saccade-1-")
    assert second.label == "default"


def test_cancelling_an_update_rolls_it_back_on_all_servers(backbone, engine_at):
    renderer = backbone.renderer

    async def body(first, second):
        engine, is_loading = engine_at(first, second), asyncio.Event()
        await start_two(engine, backbone)

        async def check(server, source, weight_label=""):
            if weight_label.startswith("saccade-2-"):
                is_loading.set()
                await asyncio.sleep(60)
            return 0.0

        engine._logprob_check.check = check
        update = asyncio.create_task(engine.sync_weights(backbone, 2))
        await is_loading.wait()
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        assert update.cancelled()
        assert engine.version == 1
        assert await sample_versions(engine, renderer) == {1}
        await engine.close()

    with server(renderer) as first, server(renderer) as second:
        asyncio.run(body(first, second))
    assert first.label == second.label
    assert first.label.startswith("saccade-1-")
