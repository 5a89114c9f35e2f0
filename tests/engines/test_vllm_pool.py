"""The vLLM engine with fake servers that reply correctly, slowly, wrongly, with garbage, or not at all."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from error_cases import raises
from generate_server import reply_to, server
from polling import wait_until

from saccade.config.schema import ModelConfig
from saccade.engines.remote import pool, vllm_api
from saccade.engines.remote.server import Server, ServerRequest
from saccade.engines.vllm import Vllm
from saccade.errors import BrokenEngineError, ConfigError, EngineError, MediaError
from saccade.ledger import ImageRef, Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.runner import append_completion
from saccade.testing import FakeMediaLoader
from saccade.types import FinishReason, GenerationRequest, Message, SamplingParams
from saccade.utils.async_utils import PausableClock

pytestmark = pytest.mark.slow  # about twenty seconds in total, most of it in slow servers


@pytest.fixture(scope="module")
def vlm(tiny_folder):
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def make_sampling(renderer, **settings):
    return SamplingParams(**{"max_tokens": 4, "forbidden_ids": renderer.forbidden_ids, **settings})


def frame(renderer, time, wide=1):
    return ImageRef(path="a.mp4", digest="d", time=time, width=wide * renderer.factor, height=renderer.factor)


@contextlib.asynccontextmanager
async def engine_of(vlm, *urls, **settings):
    given = {"verify_weights": False, "retry_backoff": 0.01, "down_timeout": 300.0, "request_timeout": 300.0}
    engine = Vllm(vlm.renderer, FakeMediaLoader(), servers=urls, **{**given, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def generate_all(vlm, *served, texts=("What?",), sampling=None, **settings):
    """Send one request per text concurrently; return completions or exceptions."""

    async def body():
        async with engine_of(vlm, *(fake.url for fake in served), **settings) as engine:
            used = sampling or make_sampling(vlm.renderer)
            requests = [engine.generate(GenerationRequest(prompt(vlm.renderer, text), used)) for text in texts]
            return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(body())


def test_a_request_has_unexpanded_ids_and_every_image(vlm):
    renderer = vlm.renderer
    ledger = prompt(renderer, frame(renderer, 1.0), "and", frame(renderer, 2.0, wide=3), "?")

    async def body(url):
        async with engine_of(vlm, url) as engine:
            return await engine.generate(
                GenerationRequest(ledger, make_sampling(renderer, seed=3, stop_ids=renderer.stop_ids))
            )

    with server(renderer) as served:
        replies = asyncio.run(body(served.url))
    (sent,) = served.bodies
    assert sent["token_ids"] == list(ledger.unexpanded_ids())
    assert len(sent["content_parts"]) == 2
    assert sent["sampling_params"]["bad_words"] == [
        renderer.decode([forbidden_id]) for forbidden_id in renderer.forbidden_ids
    ]
    assert sent["sampling_params"]["stop_token_ids"] == list(renderer.stop_ids)
    assert (replies.logprobs, replies.version, replies.finish_reason) == (
        (-1.0, -2.0, -3.0, -4.0),
        0,
        FinishReason.LENGTH,
    )


def test_groups_are_sticky_and_balanced(vlm):
    renderer = vlm.renderer
    with server(renderer) as one, server(renderer) as other:

        async def body():
            async with engine_of(vlm, one.url, other.url) as engine:
                await engine.generate(GenerationRequest(prompt(renderer, "warm"), make_sampling(renderer)))
                await wait_until(lambda: all(server.is_up for server in engine._pool.servers))
                ledgers = [prompt(renderer, f"group {number}") for number in range(8) for _ in range(4)]
                first = await asyncio.gather(
                    *(engine.generate(GenerationRequest(ledger, make_sampling(renderer))) for ledger in ledgers)
                )
                later = [
                    ledger.append_completion(replies.tokens, logprobs=replies.logprobs, version=0)
                    for ledger, replies in zip(ledgers, first, strict=True)
                ]
                await asyncio.gather(
                    *(engine.generate(GenerationRequest(ledger, make_sampling(renderer))) for ledger in later)
                )

        asyncio.run(body())
    length = len(prompt(renderer, "group 0"))
    heads = [{tuple(body["token_ids"][:length]) for body in fake.bodies} for fake in (one, other)]
    assert not heads[0] & heads[1], "a group was sent to two servers"
    assert min(len(fake.bodies) for fake in (one, other)) >= 28


@pytest.mark.parametrize("behavior", ["hang up", 500, 503, 429, b"<html>", b'{"choices": []}', b"[" * 9000])
def test_a_failed_request_is_retried(vlm, behavior):
    with server(vlm.renderer, lambda number, body: behavior if number < 2 else None) as served:
        (replies,) = generate_all(vlm, served)
    assert replies.tokens, replies
    assert len(served.bodies) == 3


@pytest.mark.parametrize("behavior", ["hang up", 500, 429, b"<html>"])
def test_a_lasting_failure_ends_the_episode_and_not_the_run(vlm, behavior):
    with server(vlm.renderer, lambda number, body: behavior) as served:
        (error,) = generate_all(vlm, served, max_retries=2)
    assert type(error) is EngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert len(served.bodies) == 3


def test_a_request_that_times_out_is_retried_and_ends_the_episode(vlm, monkeypatch):
    generate = Server.generate

    async def generate_within(self, *args, **settings):
        # Only this request: a slow handshake must not time out.
        usual, self._client.timeout = self._client.timeout, 0.2
        try:
            return await generate(self, *args, **settings)
        finally:
            self._client.timeout = usual

    monkeypatch.setattr(Server, "generate", generate_within)
    with server(vlm.renderer, lambda number, body: "hang") as served:
        (error,) = generate_all(vlm, served, max_retries=2)
    assert type(error) is EngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert len(served.bodies) == 3
    assert "0.2" in str(error)


def test_a_refused_request_is_not_retried(vlm):
    with server(vlm.renderer, lambda number, body: 400) as served:
        (error,) = generate_all(vlm, served)
    assert type(error) is EngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert len(served.bodies) == 1


WRONG = {
    "no logprobs": {"logprobs": None},
    "too few logprobs": {"logprobs": {"content": [{"logprob": -1.0}]}},
    "a positive logprob": {"logprobs": {"content": [{"logprob": 0.5}] * 4}},
    "the lowest logprob": {"logprobs": {"content": [{"logprob": -9999.0}] * 4}},
    "no number": {"logprobs": {"content": [{"logprob": float("nan")}] * 4}},
    "a logprob of minus infinity": {"logprobs": {"content": [{"logprob": float("-inf")}] * 4}},
    "null for a logprob": {"logprobs": {"content": [{"logprob": None}] * 4}},
    "text for a logprob": {"logprobs": {"content": [{"logprob": "-1.0"}] * 4}},
    "too few tokens": {"token_ids": [5, 6]},
    "too many tokens": {"token_ids": [5, 6, 7, 8, 9]},
    "an id beyond the vocabulary": {"token_ids": [5, 6, 10**9, 8]},
    "a negative id": {"token_ids": [5, 6, -1, 8]},
    "an id of 400 digits": {"token_ids": [5, 6, 10**400, 8]},
    "a logprob of 400 digits": {"logprobs": {"content": [{"logprob": -(10**400)}] * 4}},
    "text for ids": {"token_ids": ["5", "6", "7", "8"]},
    "aborted": {"finish_reason": "abort"},
    "no versions": {"weight_versions": None},
    "versions out of order": {
        "weight_versions": [{"version": "default", "start": s, "end": e} for s, e in ((0, 10**12), (10**12, 4))]
    },
    "a version at infinity": {"weight_versions": [{"version": "default", "start": 0, "end": float("inf")}]},
    "a gap between versions": {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_reply_is_refused(vlm, name):
    renderer = vlm.renderer
    with server(renderer, lambda number, body: reply_to(body, renderer, **WRONG[name])) as served:
        (error,) = generate_all(vlm, served, max_retries=1)
    assert type(error) is EngineError, error
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert len(served.bodies) == 2


def test_a_reply_with_a_forbidden_id_is_refused(vlm):
    renderer = vlm.renderer
    bad = [5, 6, 7, renderer.forbidden_ids[0]]
    with server(renderer, lambda number, body: reply_to(body, renderer, token_ids=bad)) as served:
        (error,) = generate_all(vlm, served, max_retries=0)
    assert type(error) is EngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)


@pytest.mark.parametrize(
    ("change", "at"), [(lambda ids: [*ids, 5], -1), (lambda ids: ids[:-1], -2), (lambda ids: [1 + ids[0], *ids[1:]], 0)]
)
def test_a_prompt_that_differs_from_the_ledger_stops_the_run(vlm, change, at):
    renderer = vlm.renderer

    def behave(number, body):
        return reply_to(body, renderer, prompt_token_ids=change(body["token_ids"]))

    with server(renderer, behave) as served:
        (error,) = generate_all(vlm, served)
    length = len(prompt(renderer, "What?"))
    assert type(error) is BrokenEngineError
    assert f" {[length, length - 1, 0][(-1, -2, 0).index(at)]} " in str(error)
    assert len(served.bodies) == 1


def test_a_reply_from_unknown_weights_is_refused(vlm):
    """A server that was restarted between two requests passes a new handshake, and the request is retried."""
    renderer = vlm.renderer
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "theirs", "start": 1, "end": 4}]

    def behave(number, body):
        return reply_to(body, renderer, weight_versions=spans) if number in (0, 2, 3) else None

    with server(renderer, behave) as served:
        (replies,) = generate_all(vlm, served, max_retries=1)
        (error,) = generate_all(vlm, served, max_retries=1)
    assert replies.version == 0
    assert type(error) is EngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)


def test_a_reply_may_have_several_versions(vlm):
    renderer = vlm.renderer
    ledger, sampling = prompt(renderer, "What?"), make_sampling(renderer)
    request = ServerRequest(ledger, sampling)
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}]
    reply = reply_to(vllm_api.build_request(request), renderer, weight_versions=spans)
    away = Server("http://127.0.0.1:9", 1.0, vllm_api)
    away.version_by_label, away.vocab_size = {"a": 3, "b": 4}, renderer.vocab_size

    async def post(path, body):
        return reply

    away.post = post
    replies, labels = asyncio.run(away.generate(request))
    assert labels == {"a", "b"}
    assert (replies.version, replies.token_versions) == (4, (3, 4, 4, 4))
    longer = append_completion(ledger, replies)
    assert longer.versions()[-4:] == (3, 4, 4, 4)
    assert longer.sampled_tokens() == replies.tokens
    assert longer.logprobs()[-4:] == replies.logprobs


def test_requests_of_a_dead_server_move_to_the_others(vlm):
    renderer = vlm.renderer
    with server(renderer, lambda *_: "hang up") as dead, server(renderer) as well:
        replies = generate_all(vlm, dead, well, texts=[f"What is {number}?" for number in range(16)], max_retries=8)
    assert all(reply.tokens for reply in replies)
    assert len(well.bodies) == 16


def test_an_unreachable_server_does_not_block_the_others(vlm):
    with socket.socket() as unused, server(vlm.renderer) as served:
        unused.bind(("127.0.0.1", 0))
        away = type(served)()
        away.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        replies = generate_all(vlm, away, served, texts=("one", "two", "three"))
    assert all(reply.tokens for reply in replies)


def test_late_failures_of_old_requests_do_not_mark_a_reconnected_server_down(vlm):
    renderer, all_received, has_reconnected = vlm.renderer, threading.Event(), threading.Event()

    def behave(number, body):
        if number < 4:  # the first fails when all are received, the others after the server has reconnected
            if number == 3:
                all_received.set()
            (has_reconnected if number else all_received).wait()
            return "hang up"
        return None

    async def body(url):
        async with engine_of(vlm, url, max_retries=4) as engine:
            (home,) = engine._pool.servers
            requests = [
                engine.generate(GenerationRequest(prompt(renderer, text), make_sampling(renderer))) for text in "abcd"
            ]
            replies = asyncio.gather(*requests)
            await wait_until(lambda: home.incarnation == 2)
            has_reconnected.set()
            while not replies.done():
                assert home.is_up, "it was marked down a second time"
                await asyncio.sleep(0.01)
            return await replies, home.incarnation

    with server(renderer, behave) as served:
        replies, incarnation = asyncio.run(body(served.url))
    assert all(reply.tokens for reply in replies)
    assert len(served.bodies) == 8
    assert incarnation == 2


def test_no_server_for_too_long_stops_the_run(vlm):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def body():
            async with engine_of(vlm, url, down_timeout=0.3) as engine:
                started = time.monotonic()
                requests = [
                    engine.generate(GenerationRequest(prompt(vlm.renderer, text), make_sampling(vlm.renderer)))
                    for text in "ab"
                ]
                return await asyncio.gather(*requests, return_exceptions=True), time.monotonic() - started

        errors, took = asyncio.run(body())
    assert {type(error) for error in errors} == {BrokenEngineError}
    assert (errors[0].key, errors[0].value) == ("engine.settings.servers", [url])
    assert took >= 0.3


def generate_once(engine, renderer):
    return engine.generate(GenerationRequest(prompt(renderer, "What?"), make_sampling(renderer)))


def test_servers_that_were_never_reached_stop_a_command_soon(vlm, monkeypatch):
    monkeypatch.setattr(pool, "FIRST_CONNECTION_TIMEOUT", 0.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def body():
            async with engine_of(vlm, url, down_timeout=900.0) as engine:
                await generate_once(engine, vlm.renderer)

        with raises(BrokenEngineError, key="engine.settings.servers", value=[url]) as error:
            asyncio.run(body())
    assert url in str(error.value)


def test_the_engine_waits_for_a_server_that_was_up_before(vlm, monkeypatch):
    monkeypatch.setattr(pool, "FIRST_CONNECTION_TIMEOUT", 0.0)
    renderer = vlm.renderer

    async def body():
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(server(renderer, lambda number, body: "hang up" if number else None))
            async with engine_of(vlm, first.url, down_timeout=900.0, max_retries=100) as engine:
                (home,) = engine._pool.servers
                await generate_once(engine, renderer)
                stack.close()
                task = asyncio.create_task(generate_once(engine, renderer))
                while "All connection attempts failed" not in home.down_reason:  # a handshake was refused
                    await asyncio.sleep(0.01)
                with server(renderer, port=int(first.url.rpartition(":")[2])) as second:
                    return await task, second.bodies

    replies, bodies = asyncio.run(body())
    assert replies.tokens
    assert len(bodies) == 1


def test_a_server_that_is_still_loading_is_waited_for(vlm, monkeypatch):
    monkeypatch.setattr(pool, "FIRST_CONNECTION_TIMEOUT", 0.0)

    async def body(served):
        async with engine_of(vlm, served.url, down_timeout=900.0) as engine:
            (home,) = engine._pool.servers
            task = asyncio.create_task(generate_once(engine, vlm.renderer))
            while not home.was_reached:
                await asyncio.sleep(0.01)
            served.sick = False
            return await task

    with server(vlm.renderer) as served:
        served.sick = True
        assert asyncio.run(body(served)).tokens


def test_a_run_waits_for_a_server_and_continues(vlm, caplog):
    renderer = vlm.renderer

    async def body():
        with server(renderer) as served:
            port = int(served.url.rpartition(":")[2])
            async with engine_of(vlm, served.url, max_retries=8) as engine:
                await engine.generate(GenerationRequest(prompt(renderer, "before"), make_sampling(renderer)))
                served.sick = True
                task = asyncio.create_task(
                    engine.generate(GenerationRequest(prompt(renderer, "during"), make_sampling(renderer)))
                )
                await wait_until(lambda: caplog.records)
                assert not task.done()
                served.sick = False
                replies = await task
                return port, replies

    _, replies = asyncio.run(body())
    assert replies.tokens
    outage, recovery = [record.args for record in caplog.records]
    assert (outage[0], outage[-1], len(recovery)) == ("vLLM", 300.0, 1)


def test_a_server_that_goes_down_is_logged(vlm, caplog):
    renderer = vlm.renderer

    async def body(one, other):
        async with engine_of(vlm, one.url, other.url) as engine:
            await engine.generate(GenerationRequest(prompt(renderer, "warm"), make_sampling(renderer)))
            await wait_until(lambda: len(engine._pool.servers_up) == 2)
            one.sick = True
            for number in range(8):
                await engine.generate(GenerationRequest(prompt(renderer, f"{number}"), make_sampling(renderer)))
            assert [other_server.url for other_server in engine._pool.servers_up] == [other.url]
            one.sick = False
            await wait_until(lambda: len(engine._pool.servers_up) == 2)

    with server(renderer) as one, server(renderer) as other:
        asyncio.run(body(one, other))
    (url, _, *counts), recovery = [record.args for record in caplog.records]
    assert (url, counts, recovery) == (one.url, [1, 2], (one.url,))


def test_a_hanging_server_is_marked_down_before_its_requests_time_out(vlm, monkeypatch, caplog):
    """It accepts connections and never responds; its requests move to the other server."""
    monkeypatch.setattr(pool, "_HEALTH_CHECK_INTERVAL", 0.3)
    renderer = vlm.renderer

    async def body(one, other):
        async with engine_of(vlm, one.url, other.url, max_retries=1000) as engine:
            await engine.generate(GenerationRequest(prompt(renderer, "warm"), make_sampling(renderer)))
            await wait_until(lambda: len(engine._pool.servers_up) == 2)
            one.well.clear()
            asked = [
                engine.generate(GenerationRequest(prompt(renderer, f"{number}"), make_sampling(renderer)))
                for number in range(8)
            ]
            replies = await asyncio.gather(*asked)
            one.well.set()
            return replies

    with server(renderer) as one, server(renderer) as other:
        replies = asyncio.run(body(one, other))
    assert all(reply.tokens for reply in replies)
    assert one.url in [record.args[0] for record in caplog.records]


def test_waiting_for_a_server_does_not_count_toward_the_episode_timeout(vlm, caplog):
    renderer, clock = vlm.renderer, PausableClock()

    async def body(served):
        async with engine_of(vlm, served.url, max_retries=8) as engine:
            await engine.generate(GenerationRequest(prompt(renderer, "before"), make_sampling(renderer)))
            served.sick = True
            async with clock.timeout_at(clock.time() + 300) as limit:
                before = limit.when()
                task = asyncio.create_task(
                    engine.generate(GenerationRequest(prompt(renderer, "during"), make_sampling(renderer)))
                )
                await wait_until(lambda: caplog.records)
                assert limit.when() is None, "the timeout is not paused"
                await asyncio.sleep(0.1)
                served.sick = False
                replies = await task
                return replies, limit.when() - before

    with server(renderer) as served:
        replies, postponement = asyncio.run(body(served))
    assert replies.tokens
    assert postponement >= 0.1


def test_duplicate_servers_are_merged(vlm):
    async def body(url):
        async with engine_of(vlm, url, f"{url}/") as engine:
            return len(engine._pool.servers)

    with server(vlm.renderer) as served:
        assert asyncio.run(body(served.url)) == 1


@pytest.mark.parametrize(
    ("options", "key", "hint"),
    [
        ({"lacks": ("/inference/v1/generate",)}, "engine.settings.servers", "--enable-scale-out"),
        ({"lacks": ("/detokenize",)}, "engine.settings.servers", "/detokenize"),
        ({"words": "other words"}, "engine.settings.servers", "models/m"),
        ({"context": 8}, "environment.settings.max_context_tokens", "--max-model-len"),
    ],
)
def test_an_unusable_server_stops_the_run_with_a_hint(vlm, options, key, hint):
    with server(vlm.renderer, **options) as served:
        (error,) = generate_all(vlm, served)
    assert type(error) is BrokenEngineError
    assert error.key == key
    assert hint in str(error)
    assert not served.bodies


def test_a_too_small_context_fails_the_handshake(vlm):
    with server(vlm.renderer, context=1000) as served:
        (error,) = generate_all(vlm, served, context_length=1024)
        assert type(error) is BrokenEngineError
        assert (error.key, error.value) == ("environment.settings.max_context_tokens", 1024)
        assert not served.bodies
        assert generate_all(vlm, served, context_length=1000)[0].tokens


def test_logprobs_of_another_distribution_stop_the_run(vlm, monkeypatch):
    renderer = vlm.renderer
    import generate_server

    raw = generate_server.reply_to
    monkeypatch.setattr(
        generate_server,
        "reply_to",
        lambda body, renderer, **changes: raw(body, renderer, logprobs={"content": [{"logprob": -3.0}]}),
    )
    with server(renderer) as served:
        (error,) = generate_all(vlm, served)
    assert type(error) is BrokenEngineError
    assert (error.key, error.value) == ("engine.settings.servers", served.url)


def test_cancelling_closes_the_connection_and_leaves_the_others_alone(vlm):
    renderer = vlm.renderer
    release = threading.Event()
    with server(renderer, lambda *_: release.wait() and None) as served:

        async def body():
            async with engine_of(vlm, served.url) as engine:
                tasks = [
                    asyncio.create_task(
                        engine.generate(GenerationRequest(prompt(renderer, f"{number}"), make_sampling(renderer)))
                    )
                    for number in range(4)
                ]
                await wait_until(lambda: len(served.bodies) == 4)
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.wait(tasks[1:])
                release.set()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                return ends, engine._pool.servers[0].num_in_flight

        ends, load = asyncio.run(body())
    assert ends[0].tokens
    assert all(isinstance(end, asyncio.CancelledError) for end in ends[1:])
    assert load == 0


def test_an_unreadable_image_ends_only_the_episode(vlm):
    renderer = vlm.renderer

    class Gone(FakeMediaLoader):
        def load_pixels(self, image):
            raise MediaError("the file was deleted", key="clip.mp4")

    async def body(url):
        engine = Vllm(vlm.renderer, Gone(), servers=(url,), verify_weights=False)
        with raises(EngineError, key="clip.mp4"):
            await engine.generate(GenerationRequest(prompt(renderer, frame(renderer, 1.0)), make_sampling(renderer)))
        assert (await engine.generate(GenerationRequest(prompt(renderer, "What?"), make_sampling(renderer)))).tokens
        await engine.close()

    with server(renderer) as served:
        asyncio.run(body(served.url))


def test_close_fails_waiting_requests(vlm):
    async def body():
        async with engine_of(vlm, "http://127.0.0.1:9") as engine:
            task = asyncio.create_task(
                engine.generate(GenerationRequest(prompt(vlm.renderer, "a"), make_sampling(vlm.renderer)))
            )
            await asyncio.sleep(0.1)
            await engine.close()
            with raises(BrokenEngineError):
                await task

    asyncio.run(body())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "localhost", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://a b"]
)
def test_an_invalid_address_is_refused(vlm, url):
    with raises(ConfigError, key="engine.settings.servers", value=url):
        Vllm(vlm.renderer, FakeMediaLoader(), servers=(url,))


def test_an_engine_without_servers_is_refused(vlm):
    with raises(ConfigError, key="engine.settings.servers", value=()):
        Vllm(vlm.renderer, FakeMediaLoader(), servers=())


def test_drained_waits_for_replies_and_holds_back_new_ones(vlm):
    renderer, seen, release = vlm.renderer, [], threading.Event()

    async def body(served):
        async with engine_of(vlm, served.url) as engine:

            async def ask(text):
                await engine.generate(GenerationRequest(prompt(renderer, text), make_sampling(renderer)))
                seen.append(text)

            async def drain():
                async with engine._pool.drain(300.0):
                    seen.append("drained")
                    await asyncio.sleep(0.3)
                    assert len(served.bodies) == 2, "a request was sent"

            await ask("warm")
            early_request = asyncio.create_task(ask("early"))
            await wait_until(lambda: len(served.bodies) == 2)
            draining = asyncio.create_task(drain())
            await asyncio.sleep(0)  # from here on requests are held back
            late_request = asyncio.create_task(ask("late"))
            await asyncio.sleep(0.1)
            assert seen == ["warm"]
            release.set()
            await asyncio.gather(early_request, draining, late_request)

    with server(renderer, lambda number, body: release.wait() and None if number == 1 else None) as served:
        asyncio.run(body(served))
    assert seen == ["warm", "early", "drained", "late"]
