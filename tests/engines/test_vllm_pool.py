"""The vLLM engine beside servers that answer well, slowly, wrongly, with garbage, or not at all."""

import asyncio
import contextlib
import re
import socket
import time

import pytest
from generate_server import reply_to, server

from saccade.agents._loop import act
from saccade.config import Model
from saccade.engines._served import pool, vllm_dialect, wire
from saccade.engines._served.server import Server
from saccade.engines.vllm import vllm
from saccade.errors import BrokenEngineError, ConfigError, EngineError, MediaError
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.testing import PaintedMedia
from saccade.types import Message, Sampling, Stop
from saccade.waiting import PausableClock

pytestmark = pytest.mark.slow  # together some twenty seconds, most of it in servers that are slow on purpose


@pytest.fixture(scope="module")
def backbone(tiny_folder):
    return Backbone(Model(path=tiny_folder, threads=1))


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def sampling_of(renderer, **settings):
    return Sampling(**{"max_tokens": 4, "forbidden_ids": renderer.forbidden_ids, **settings})


def frame(renderer, time, wide=1):
    return Picture(path="a.mp4", digest="d", time=time, width=wide * renderer.factor, height=renderer.factor)


@contextlib.asynccontextmanager
async def engine_of(backbone, *urls, **settings):
    given = {"parity": False, "wait": 0.01, "patience": 5.0, "seconds": 5.0, **settings}
    engine = vllm(backbone, PaintedMedia(), servers=urls, **given)
    try:
        yield engine
    finally:
        await engine.close()


def ask(backbone, *served, texts=("What?",), sampling=None, **settings):
    """One request per text, all at once; completions or the errors that were raised."""

    async def body():
        async with engine_of(backbone, *(each.url for each in served), **settings) as engine:
            wanted = sampling or sampling_of(backbone.renderer)
            waiting = [engine.generate(prompt(backbone.renderer, text), wanted) for text in texts]
            return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(body())


def test_a_request_holds_compact_ids_and_every_picture(backbone):
    renderer = backbone.renderer
    ledger = prompt(renderer, frame(renderer, 1.0), "and", frame(renderer, 2.0, wide=3), "?")

    async def body(url):
        async with engine_of(backbone, url) as engine:
            return await engine.generate(ledger, sampling_of(renderer, seed=3, stop_ids=renderer.stop_ids))

    with server(renderer) as served:
        said = asyncio.run(body(served.url))
    (sent,) = served.bodies
    assert sent["token_ids"] == list(ledger.compact())
    assert len(sent["content_parts"]) == 2
    assert sent["sampling_params"]["bad_words"] == [renderer.decode([each]) for each in renderer.forbidden_ids]
    assert sent["sampling_params"]["stop_token_ids"] == list(renderer.stop_ids)
    assert (said.logprobs, said.version, said.stop) == ((-1.0, -2.0, -3.0, -4.0), 0, Stop.LENGTH)


def test_a_group_stays_with_its_server_and_groups_are_spread(backbone):
    renderer = backbone.renderer
    with server(renderer, lambda *_: 0.05) as one, server(renderer, lambda *_: 0.05) as other:

        async def body():
            async with engine_of(backbone, one.url, other.url) as engine:
                await engine.generate(prompt(renderer, "warm"), sampling_of(renderer))
                while not all(each.up for each in engine._pool.servers):
                    await asyncio.sleep(0.01)
                ledgers = [prompt(renderer, f"group {number}") for number in range(8) for _ in range(4)]
                first = await asyncio.gather(*(engine.generate(each, sampling_of(renderer)) for each in ledgers))
                later = [
                    each.act(said.tokens, logprobs=said.logprobs, version=0)
                    for each, said in zip(ledgers, first, strict=True)
                ]
                await asyncio.gather(*(engine.generate(each, sampling_of(renderer)) for each in later))

        asyncio.run(body())
    length = len(prompt(renderer, "group 0"))
    heads = [{tuple(body["token_ids"][:length]) for body in each.bodies} for each in (one, other)]
    assert not heads[0] & heads[1], "a group was asked of two servers"
    assert min(len(each.bodies) for each in (one, other)) >= 28


@pytest.mark.parametrize("does", ["hang up", 500, 503, 429, b"<html>", b'{"choices": []}', b"[" * 9000])
def test_a_failure_is_tried_again(backbone, does):
    with server(backbone.renderer, lambda number, body: does if number < 2 else None) as served:
        (said,) = ask(backbone, served)
    assert said.tokens, said
    assert len(served.bodies) == 3


@pytest.mark.parametrize("does", ["hang up", 500, 429, b"<html>", 5.0])
def test_a_failure_that_stays_ends_the_attempt_and_not_the_run(backbone, does):
    with server(backbone.renderer, lambda number, body: does) as served:
        (error,) = ask(backbone, served, retries=2, seconds=0.2)
    assert type(error) is EngineError
    assert "(3 attempts)" in str(error)
    assert len(served.bodies) == 3


def test_a_refused_request_is_not_tried_again(backbone):
    with server(backbone.renderer, lambda number, body: 400) as served:
        (error,) = ask(backbone, served)
    assert type(error) is EngineError
    assert "refused a request" in str(error)
    assert "told to say 400" in str(error)
    assert len(served.bodies) == 1


WRONG = {
    "no logprobs": {"logprobs": None},
    "too few logprobs": {"logprobs": {"content": [{"logprob": -1.0}]}},
    "a positive logprob": {"logprobs": {"content": [{"logprob": 0.5}] * 4}},
    "the floor of logprobs": {"logprobs": {"content": [{"logprob": -9999.0}] * 4}},
    "no number": {"logprobs": {"content": [{"logprob": float("nan")}] * 4}},
    "too few tokens": {"token_ids": [5, 6]},
    "too many tokens": {"token_ids": [5, 6, 7, 8, 9]},
    "words": {"token_ids": ["5", "6", "7", "8"]},
    "aborted": {"finish_reason": "abort"},
    "no versions": {"weight_versions": None},
    "a gap between versions": {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_reply_is_never_learned_from(backbone, what):
    renderer = backbone.renderer
    with server(renderer, lambda number, body: reply_to(body, renderer, **WRONG[what])) as served:
        (error,) = ask(backbone, served, retries=1)
    assert type(error) is EngineError, error
    assert "(2 attempts)" in str(error)


def test_a_forbidden_id_is_never_taken(backbone):
    renderer = backbone.renderer
    bad = [5, 6, 7, renderer.forbidden_ids[0]]
    with server(renderer, lambda number, body: reply_to(body, renderer, token_ids=bad)) as served:
        (error,) = ask(backbone, served, retries=0)
    assert "forbidden id" in str(error)


@pytest.mark.parametrize(
    ("change", "at"), [(lambda ids: [*ids, 5], -1), (lambda ids: ids[:-1], -2), (lambda ids: [1 + ids[0], *ids[1:]], 0)]
)
def test_another_prompt_than_the_ledgers_stops_the_run(backbone, change, at):
    renderer = backbone.renderer

    def behave(number, body):
        return reply_to(body, renderer, prompt_token_ids=change(body["token_ids"]))

    with server(renderer, behave) as served:
        (error,) = ask(backbone, served)
    length = len(prompt(renderer, "What?"))
    assert type(error) is BrokenEngineError
    assert f"from token {[length, length - 1, 0][(-1, -2, 0).index(at)]} on" in str(error)
    assert len(served.bodies) == 1


def test_weights_that_nobody_here_published_are_never_learned_from(backbone):
    """A server that was restarted behind our back, between two requests, is greeted anew and asked again."""
    renderer = backbone.renderer
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "theirs", "start": 1, "end": 4}]

    def behave(number, body):
        return reply_to(body, renderer, weight_versions=spans) if number in (0, 2, 3) else None

    with server(renderer, behave) as served:
        (said,) = ask(backbone, served, retries=1)
        (error,) = ask(backbone, served, retries=1)
    assert said.version == 0
    assert type(error) is EngineError
    assert "'theirs': it was restarted, or another run publishes to it (2 attempts)" in str(error)


def test_a_reply_may_be_of_several_versions(backbone):
    renderer = backbone.renderer
    ledger, sampling = prompt(renderer, "What?"), sampling_of(renderer)
    body = vllm_dialect.request(ledger, sampling, urls=[], forbidden=[], filters={})
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}]
    reply = reply_to(body, renderer, weight_versions=spans)
    away = Server("http://127.0.0.1:9", 1.0, vllm_dialect)
    away.versions = {"a": 3, "b": 4}
    said = wire.completion(reply, ledger, sampling, server=away, seconds=0.0)
    assert (said.version, said.versions) == (4, (3, 4, 4, 4))
    longer = act(ledger, said)
    assert longer.versions()[-4:] == (3, 4, 4, 4)
    assert longer.sampled_tokens() == said.tokens
    assert longer.logprobs()[-4:] == said.logprobs


def test_a_dead_servers_requests_move_to_the_others(backbone):
    renderer = backbone.renderer
    with server(renderer, lambda *_: "hang up") as dead, server(renderer) as well:
        said = ask(backbone, dead, well, texts=[f"What is {number}?" for number in range(16)], retries=8)
    assert all(each.tokens for each in said)
    assert len(well.bodies) == 16


def test_a_server_that_is_not_there_is_no_hindrance(backbone):
    with socket.socket() as nobody, server(backbone.renderer) as served:
        nobody.bind(("127.0.0.1", 0))
        away = type(served)()
        away.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        said = ask(backbone, away, served, texts=("one", "two", "three"))
    assert all(each.tokens for each in said)


def test_late_failures_of_old_requests_are_not_held_against_a_server_that_came_back(backbone):
    renderer = backbone.renderer

    def behave(number, body):
        if number < 4:  # the first fails at once, the others when the server is long up again
            time.sleep(0.4 * (number > 0))
            return "hang up"
        return None

    async def body(url):
        async with engine_of(backbone, url, retries=4) as engine:
            (home,) = engine._pool.servers
            waiting = [engine.generate(prompt(renderer, text), sampling_of(renderer)) for text in "abcd"]
            said = asyncio.gather(*waiting)
            while home.greeted < 2:
                await asyncio.sleep(0.01)
            while not said.done():
                assert home.up, "it was lost a second time"
                await asyncio.sleep(0.01)
            return await said, home.greeted

    with server(renderer, behave) as served:
        said, greeted = asyncio.run(body(served.url))
    assert all(each.tokens for each in said)
    assert len(served.bodies) == 8
    assert greeted == 2


def test_no_server_for_too_long_stops_the_run(backbone):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"

        async def body():
            async with engine_of(backbone, url, patience=0.3) as engine:
                begun = time.monotonic()
                waiting = [
                    engine.generate(prompt(backbone.renderer, text), sampling_of(backbone.renderer)) for text in "ab"
                ]
                return await asyncio.gather(*waiting, return_exceptions=True), time.monotonic() - begun

        errors, took = asyncio.run(body())
    assert {type(error) for error in errors} == {BrokenEngineError}
    assert "saccade serve" in str(errors[0])
    assert took < 2


def test_a_run_waits_for_a_server_and_goes_on(backbone, caplog):
    renderer = backbone.renderer

    async def body():
        with server(renderer) as served:
            port = int(served.url.rpartition(":")[2])
            async with engine_of(backbone, served.url, retries=8) as engine:
                await engine.generate(prompt(renderer, "before"), sampling_of(renderer))
                served.sick = True
                task = asyncio.create_task(engine.generate(prompt(renderer, "during"), sampling_of(renderer)))
                await asyncio.sleep(0.3)
                assert not task.done()
                served.sick = False
                said = await task
                return port, said

    _, said = asyncio.run(body())
    assert said.tokens
    assert "no vLLM server answers" in caplog.text
    assert caplog.text.count("the run waits") == 1
    assert "answers again; the run goes on" in caplog.text


def test_a_server_that_is_lost_is_told_of(backbone, caplog):
    renderer = backbone.renderer

    async def body(one, other):
        async with engine_of(backbone, one.url, other.url) as engine:
            await engine.generate(prompt(renderer, "warm"), sampling_of(renderer))
            while len(engine._pool.up) < 2:
                await asyncio.sleep(0.01)
            one.sick = True
            for number in range(8):
                await engine.generate(prompt(renderer, f"{number}"), sampling_of(renderer))
            assert [each.url for each in engine._pool.up] == [other.url]
            one.sick = False
            while len(engine._pool.up) < 2:
                await asyncio.sleep(0.01)

    with server(renderer) as one, server(renderer) as other:
        asyncio.run(body(one, other))
    assert caplog.text.count(f"{one.url} is out (") == 1
    assert "; 1 of 2 go on" in caplog.text
    assert f"{one.url} answers again" in caplog.text


def test_a_server_that_hangs_is_lost_long_before_its_requests_are_late(backbone, monkeypatch, caplog):
    """It takes connections and says nothing: what it was asked is asked of another."""
    monkeypatch.setattr(pool, "_LOOK", 0.3)
    renderer = backbone.renderer

    async def body(one, other):
        async with engine_of(backbone, one.url, other.url, seconds=60.0) as engine:
            await engine.generate(prompt(renderer, "warm"), sampling_of(renderer))
            while len(engine._pool.up) < 2:
                await asyncio.sleep(0.01)
            one.well.clear()
            begun = time.monotonic()
            asked = [engine.generate(prompt(renderer, f"{number}"), sampling_of(renderer)) for number in range(8)]
            said = await asyncio.gather(*asked)
            one.well.set()
            return said, time.monotonic() - begun

    with server(renderer) as one, server(renderer) as other:
        said, took = asyncio.run(body(one, other))
    assert all(each.tokens for each in said)
    assert took < 20
    assert f"{one.url} hangs" in caplog.text


def test_an_attempt_is_not_charged_for_a_server_that_is_away(backbone):
    renderer, clock = backbone.renderer, PausableClock()

    async def body(served):
        async with engine_of(backbone, served.url, retries=8) as engine:
            await engine.generate(prompt(renderer, "before"), sampling_of(renderer))
            served.sick = True
            asyncio.get_running_loop().call_later(1.0, setattr, served, "sick", False)
            begun = time.monotonic()
            async with clock.timeout_at(clock.time() + 0.5):
                said = await engine.generate(prompt(renderer, "during"), sampling_of(renderer))
            return said, time.monotonic() - begun

    with server(renderer) as served:
        said, took = asyncio.run(body(served))
    assert said.tokens
    assert took >= 1.0


def test_a_server_that_is_named_twice_is_one(backbone):
    async def body(url):
        async with engine_of(backbone, url, f"{url}/") as engine:
            return len(engine._pool.servers)

    with server(backbone.renderer) as served:
        assert asyncio.run(body(served.url)) == 1


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"lacks": ("/inference/v1/generate",)}, "--enable-scale-out"),
        ({"lacks": ("/detokenize",)}, "address of a vLLM server"),
        ({"words": "other words"}, "vocabulary is another"),
        ({"context": 8}, r"takes 8 tokens.*--context"),
    ],
)
def test_a_server_that_can_not_be_used_stops_the_run_with_its_mend(backbone, how, sentence):
    with server(backbone.renderer, **how) as served:
        (error,) = ask(backbone, served)
    assert type(error) is BrokenEngineError
    assert re.search(sentence, str(error))
    assert not served.bodies


def test_a_context_too_small_for_the_recipe_is_found_at_once(backbone):
    with server(backbone.renderer, context=1000) as served:
        (error,) = ask(backbone, served, context=1024)
        assert type(error) is BrokenEngineError
        assert "takes 1000 tokens, and a conversation may have 1024; start it with --context 1024" in str(error)
        assert not served.bodies
        assert ask(backbone, served, context=1000)[0].tokens


def test_logprobs_of_another_distribution_stop_the_run(backbone, monkeypatch):
    renderer = backbone.renderer
    import generate_server

    raw = generate_server.reply_to
    monkeypatch.setattr(
        generate_server,
        "reply_to",
        lambda body, renderer, **changes: raw(body, renderer, logprobs={"content": [{"logprob": -3.0}]}),
    )
    with server(renderer) as served:
        (error,) = ask(backbone, served)
    assert type(error) is BrokenEngineError
    assert "--logprobs-mode processed_logprobs" in str(error)


def test_cancelling_closes_the_connection_and_leaves_the_others_alone(backbone):
    renderer = backbone.renderer
    with server(renderer, lambda *_: 0.4) as served:

        async def body():
            async with engine_of(backbone, served.url) as engine:
                tasks = [
                    asyncio.create_task(engine.generate(prompt(renderer, f"{number}"), sampling_of(renderer)))
                    for number in range(4)
                ]
                while len(served.bodies) < 4:
                    await asyncio.sleep(0.01)
                for task in tasks[1:]:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                return ends, engine._pool.servers[0].load

        ends, load = asyncio.run(body())
    assert ends[0].tokens
    assert all(isinstance(end, asyncio.CancelledError) for end in ends[1:])
    assert load == 0


def test_a_picture_that_is_gone_ends_the_attempt_alone(backbone):
    renderer = backbone.renderer

    class Gone(PaintedMedia):
        def pixels(self, picture):
            raise MediaError("the clip is gone")

    async def body(url):
        engine = vllm(backbone, Gone(), servers=(url,), parity=False)
        with pytest.raises(EngineError, match="the clip is gone"):
            await engine.generate(prompt(renderer, frame(renderer, 1.0)), sampling_of(renderer))
        assert (await engine.generate(prompt(renderer, "What?"), sampling_of(renderer))).tokens
        await engine.close()

    with server(renderer) as served:
        asyncio.run(body(served.url))


def test_closing_fails_whoever_waits(backbone):
    async def body():
        async with engine_of(backbone, "http://127.0.0.1:9") as engine:
            task = asyncio.create_task(engine.generate(prompt(backbone.renderer, "a"), sampling_of(backbone.renderer)))
            await asyncio.sleep(0.1)
            await engine.close()
            with pytest.raises(BrokenEngineError, match="closed"):
                await task

    asyncio.run(body())


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "localhost"])
def test_an_address_that_is_none_is_refused(backbone, url):
    with pytest.raises(ConfigError, match="give its address"):
        vllm(backbone, PaintedMedia(), servers=(url,))


def test_an_engine_without_servers_is_refused(backbone):
    with pytest.raises(ConfigError, match=r"engine.settings.servers"):
        vllm(backbone, PaintedMedia(), servers=())


def test_it_is_quiet_when_replies_have_ended_and_until_the_block_does(backbone):
    renderer, seen = backbone.renderer, []

    async def body(url):
        async with engine_of(backbone, url) as engine:

            async def ask(text):
                await engine.generate(prompt(renderer, text), sampling_of(renderer))
                seen.append(text)

            await ask("warm")
            early = asyncio.create_task(ask("early"))
            while not engine._pool.servers[0].load:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(10), engine._pool.quiet(5.0):
                assert seen == ["warm", "early"], "a reply was still under way"
                late = asyncio.create_task(ask("late"))
                await asyncio.sleep(0.3)
                assert len(seen) == 2, "a request was let in"
            await asyncio.gather(early, late)

    with server(renderer, lambda number, body: 0.1) as served:
        asyncio.run(body(served.url))
    assert seen == ["warm", "early", "late"]
