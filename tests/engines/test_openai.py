"""The engine that asks in words, beside a real HTTP server of chat completions, and a real vLLM on this CPU."""

import asyncio
import base64
import io
import json
import time

import httpx
import pytest
from chat_server import completion, server
from PIL import Image

from saccade.chat.render import load_renderer
from saccade.chat.text import TextRenderer, read, spell
from saccade.data.record import plain, typed
from saccade.engines._chat import sent
from saccade.engines._urls import Urls
from saccade.engines.openai import openai
from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.ledger import Ledger, Origin, Picture, Segment
from saccade.testing import PaintedMedia, check_engine, check_family
from saccade.types import Message, Sampling, Stop

FRAME = Picture(path="clip.mp4", digest="painted clip.mp4", time=3.0, width=64, height=32)


def made(served, media=None, context=0, **settings):
    given = {"url": served.url, "retries": 0, "wait": 0.0, "seconds": 10.0, **settings}
    return openai(media or PaintedMedia(), context, **given)


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts or ("What?",)),)),))


def said(served, ledger=None, sampling=None, **settings):
    async def body():
        engine = made(served, **settings)
        try:
            return await engine.generate(ledger or prompt(engine.renderer), sampling or Sampling(max_tokens=8))
        finally:
            await engine.close()

    return asyncio.run(body())


def drawn(number, body):
    """A reply that the request alone decides, cut where it is too long for it."""
    words = [f"w{(body['seed'] * 7 + place * 5) % 100}" for place in range(6 + body["seed"] % 9)]
    room = body["max_tokens"]
    cut = len(words) >= room
    return completion(" ".join(words[:room]), "length" if cut else "stop", room if cut else len(words) + 1)


# ---- text ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", "two words", "ünïcode 🙂 日本語", "<|im_end|><think>\n", "x" * 5000])
@pytest.mark.parametrize("count", [0, 1, 3, 64, 9000])
def test_text_survives_as_ids(text, count):
    ids = spell(text, count)
    assert read(ids) == text
    if len(text.encode()) <= 1024 * count:
        assert len(ids) == count
    assert json.loads(json.dumps(ids)) == [*ids]


def test_a_half_character_is_read_as_a_question_mark():
    assert read(spell("a\ud800b")) == "a?b"


def test_the_renderer_keeps_the_contract_of_families():
    check_family(TextRenderer(32))


def test_messages_are_what_was_rendered():
    renderer = TextRenderer(32)
    system, asked = Message(role="system", parts=("Be brief.\nLook.",)), Message(role="user", parts=(FRAME, "Which?"))
    tool = {"type": "function", "function": {"name": "zoom", "description": "d", "parameters": {}}}
    ledger = Ledger(segments=(renderer.render(Ledger(), (system, asked), tools=(tool,)),))
    ledger = ledger.force(renderer.encode("<think>\n")).act(
        (*spell("I zoom.", 3), *renderer.stop_ids), logprobs=(), version=None
    )
    told = [Message(role="tool", parts=("Here <|im_end|>:", FRAME)), Message(role="tool", parts=("Error: no",))]
    ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, told))).force(renderer.encode("<think>\n"))
    first, *rest = renderer.messages(ledger)
    assert (first.role, first.text.startswith("Be brief.\nLook.\n\n# Tools")) == ("system", True)
    assert '"name": "zoom"' in first.text
    results = (
        "<tool_response>\nHere <|im_end|>:",
        FRAME,
        "\n</tool_response>\n<tool_response>\nError: no\n</tool_response>",
    )
    assert [(each.role, each.parts) for each in rest] == [
        ("user", (FRAME, "Which?")),
        ("assistant", ("<think>\nI zoom.",)),
        ("user", results),
        ("assistant", ("<think>\n",)),
    ]


def test_a_reply_in_words_is_no_sample():
    ledger = Ledger().observe((300,)).act((400, 500), logprobs=(), version=None)
    assert ledger.mask() == (False, False, False)
    assert ledger.sampled_tokens() == (400, 500)
    assert typed(plain(ledger), Ledger, "here") == ledger
    with pytest.raises(ValueError, match="or neither"):
        Segment(tokens=(1, 2), origin=Origin.SAMPLED, logprobs=(-0.5, -0.5))


# ---- what is asked and answered ------------------------------------------------------------------------------------


def test_contract():
    with server(drawn) as served:
        engine = made(served)
        asyncio.run(check_engine(engine, engine.renderer))


def test_a_request_holds_the_messages_and_the_pixels():
    with server(lambda number, body: completion("red", "stop", 3), models=({"id": "m"},)) as served:
        ledger = prompt(TextRenderer(32), "See:", FRAME, "Which?")
        found = said(served, ledger, Sampling(temperature=0.5, max_tokens=9, seed=2**40 + 5), body={"top_p": 0.9})
    (body,) = served.bodies
    fields = {"model": "m", "temperature": 0.5, "seed": 5, "max_tokens": 9, "top_p": 0.9}
    assert {key: body[key] for key in body.keys() - {"messages"}} == fields
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text"]
    shown = message["content"][1]["image_url"]["url"].removeprefix("data:image/png;base64,")
    picture = Image.open(io.BytesIO(base64.b64decode(shown)))
    assert (picture.size, picture.getpixel((0, 0))) == ((64, 32), (3, 252, 128))
    assert (read(found.tokens), len(found.tokens), found.stop) == ("red<|im_end|>", 3, Stop.STOP)
    assert (found.logprobs, found.version) == ((), None)


@pytest.mark.parametrize(
    ("reply", "tokens", "text", "stop"),
    [
        (completion("a b", "length", 4), 4, "a b", Stop.LENGTH),
        (completion("a b", "length"), 8, "a b", Stop.LENGTH),
        (completion("twelve chars", "stop"), 4, "twelve chars<|im_end|>", Stop.STOP),
        (completion("", "stop", 1), 1, "<|im_end|>", Stop.STOP),
        (completion(None, "length", 8), 8, "", Stop.LENGTH),  # thoughts that the server keeps to itself
        (completion("é", "stop", 6), 6, "é<|im_end|>", Stop.STOP),
    ],
)
def test_a_reply_has_as_many_ids_as_the_server_counts(reply, tokens, text, stop):
    with server(lambda number, body: reply) as served:
        found = said(served)
    assert (len(found.tokens), read(found.tokens), found.stop) == (tokens, text, stop)


def test_a_prefix_is_gone_on_with_where_the_server_can():
    renderer = TextRenderer(32)
    ledger = prompt(renderer).force(renderer.encode("<think>\n"))
    with server(drawn, models=({"id": "m", "owned_by": "vllm"},)) as served:
        said(served, ledger)
        said(served, prompt(renderer))
    begun, plain_one = served.bodies
    assert begun["messages"][-1] == {"role": "assistant", "content": "<think>\n"}
    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in plain_one
    assert plain_one["messages"][-1]["role"] == "user"
    with server(drawn, models=({"id": "m", "owned_by": "somebody"},)) as served:
        with pytest.raises(ConfigError, match=r"begin a reply with '<think>': set agent\.settings\.think_prefix=false"):
            said(served, ledger)
        assert served.bodies == []
        said(served, ledger, continues=True)


def test_the_key_goes_with_every_request_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("MY_KEY", " s3cret ")
    with server(drawn) as served:
        said(served, key_variable="MY_KEY")
    assert served.headers[0]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="the environment variable MY_KEY must hold the server's key; it is not set"):
        made(served, key_variable="MY_KEY")
    with pytest.raises(ConfigError) as caught:
        made(served, key_variable="sk-123")
    assert "sk-123" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:pw@here/v1", "http://here/v1?key=pw", "http://here/v1#pw"])
def test_an_address_with_a_key_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="more than an address") as caught:
        openai(PaintedMedia(), url=url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "here:80", "ftp://here", "http://", "http://a b/v1", "http://[::1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="give one such as"):
        openai(PaintedMedia(), url=url)


@pytest.mark.parametrize("field", ["messages", "max_tokens", "stream"])
def test_a_field_of_the_engine_can_not_be_overwritten(field):
    with pytest.raises(ConfigError, match=field):
        openai(PaintedMedia(), url="http://here/v1", body={field: 1})


# ---- which model ---------------------------------------------------------------------------------------------------


def test_the_model_is_the_only_one_or_the_one_that_is_named():
    both = ({"id": "small"}, {"id": "large"})
    with server(drawn) as served:
        said(served)
    assert served.bodies[0]["model"] == "m"
    with server(drawn, models=both) as served:
        said(served, model="large")
        assert served.bodies[0]["model"] == "large"
        with pytest.raises(ConfigError, match=r"offers small, large; name one with engine\.settings\.model"):
            said(served)
        with pytest.raises(ConfigError, match="has no model 'larg', it offers small, large"):
            said(served, model="larg")
    with (
        server(drawn, models=tuple({"id": f"m{i}"} for i in range(50))) as served,
        pytest.raises(ConfigError, match="m19 and 30 more;"),
    ):
        said(served)


def test_a_server_without_a_list_is_believed():
    with server(drawn, models=(404, "no")) as served:
        said(served, model="large")
        assert served.bodies[0]["model"] == "large"
        with pytest.raises(BrokenEngineError, match="answered 404 Not Found: no; mend its address"):
            said(served)
    with server(drawn, models=(200, '{"models": []}')) as served:
        said(served, model="large")
        with pytest.raises(EngineError, match="no list of models"):
            said(served)


def test_a_context_that_is_too_small_is_said_first():
    with server(drawn, models=({"id": "m", "max_model_len": 512},)) as served:
        with pytest.raises(BrokenEngineError, match=r"takes 512 tokens, and a conversation may have 4096; .*=512"):
            said(served, context=4096)
        said(served, context=512)
    assert len(served.bodies) == 1


# ---- what goes wrong -----------------------------------------------------------------------------------------------

PICTURED = prompt(TextRenderer(32), FRAME, "Which?")


def words(text):
    return json.dumps({"error": {"message": text, "type": "invalid_request_error"}})


@pytest.mark.parametrize(
    ("status", "text", "kind", "sentence"),
    [
        (401, "Incorrect API key", BrokenEngineError, "401 Unauthorized: Incorrect API key; name the variable"),
        (403, "no", BrokenEngineError, "key_variable"),
        (404, "The model `m` does not exist", BrokenEngineError, "does not exist; mend its address"),
        (400, "At most 0 image(s) may be provided in one prompt.", EngineError, "1 pictures were shown: serve a model"),
        (500, "image input is not supported", EngineError, "1 pictures were shown"),
        (400, "maximum context length is 512 tokens", EngineError, r"lower agent\.settings\.context_tokens"),
        (413, "Payload Too Large", EngineError, "lower agent"),
        (422, "temperature must be 1", EngineError, "422 Unprocessable Entity: temperature must be 1$"),
        (429, "slow down", EngineError, "429 Too Many Requests: slow down"),
    ],
)
def test_a_refusal_becomes_a_sentence(status, text, kind, sentence):
    with server(lambda number, body: (status, words(text))) as served, pytest.raises(kind, match=sentence):
        said(served, PICTURED)
    assert len(served.bodies) == 1


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"choices": []}', '{"error": "broken"}', "null"])
def test_what_is_no_completion_is_asked_again_and_then_said(body):
    with (
        server(lambda number, asked: (200, body)) as served,
        pytest.raises(EngineError, match=r"no chat completion \(2 attempts\)"),
    ):
        said(served, retries=1)
    with server(lambda number, asked: (200, body) if number == 0 else "red") as served:
        assert read(said(served, retries=1).tokens) == "red<|im_end|>"


def test_an_end_for_other_reasons_is_said():
    with (
        server(lambda number, body: completion("I", "content_filter", 1)) as served,
        pytest.raises(EngineError, match="for a reason of its own: content_filter"),
    ):
        said(served)


def test_no_server_is_said():
    with server(drawn) as served:
        pass
    with pytest.raises(BrokenEngineError, match=r"can't be reached.*start the server"):
        said(served)


@pytest.mark.slow
def test_a_busy_server_is_asked_again_when_it_says():
    def reply(number, body):
        return (429, words("slow down")) if number < 2 else "red"

    with server(reply, headers=(("Retry-After", "1"),)) as served:
        started = time.perf_counter()
        assert read(said(served, retries=2).tokens) == "red<|im_end|>"
        assert time.perf_counter() - started > 2
    assert len(served.bodies) == 3


@pytest.mark.slow
def test_a_slow_server_fails_the_attempt_alone():
    with (
        server(drawn, seconds=1.0) as served,
        pytest.raises(EngineError, match=r"did not answer within 0\.2 seconds"),
    ):
        said(served, seconds=0.2)


@pytest.mark.slow
def test_closing_and_cancelling_end_what_is_under_way():
    async def body(served):
        engine = made(served)
        ledger, sampling = prompt(engine.renderer), Sampling(max_tokens=8)
        one, other = (asyncio.ensure_future(engine.generate(ledger, sampling)) for _ in range(2))
        await asyncio.sleep(0.3)
        one.cancel()
        await engine.close()
        ends = await asyncio.gather(one, other, return_exceptions=True)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(ledger, sampling)
        return ends

    with server(drawn, seconds=1.0) as served:
        started = time.perf_counter()
        ends = asyncio.run(body(served))
        assert time.perf_counter() - started < 0.9
    assert isinstance(ends[0], asyncio.CancelledError | EngineError)
    assert isinstance(ends[1], EngineError)


def test_no_more_are_asked_at_once_than_allowed():
    async def body(served):
        engine = made(served, at_once=3)
        ledger = prompt(engine.renderer)
        await asyncio.gather(*(engine.generate(ledger, Sampling(max_tokens=4, seed=i)) for i in range(12)))

    with server(drawn, seconds=0.02) as served:
        asyncio.run(body(served))
    assert (len(served.bodies), served.most) == (12, 3)


def test_a_ledger_of_another_renderer_is_refused(renderer):
    with server(drawn) as served, pytest.raises(EngineError, match="the engine's own renderer"):
        said(served, prompt(renderer))


# ---- a real server -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_vllm_is_talked_to(vllm_server):
    """Pictures, a begun reply and a tool's turn go through its own template, whose prompt is as long as ours."""
    url = f"{vllm_server.wanted.url}/v1"
    local = load_renderer(str(vllm_server.wanted.model))
    frame = Picture(path="clip.mp4", digest="painted clip.mp4", time=3.0, width=64, height=32)

    async def body():
        engine = openai(PaintedMedia(), 4096, url=url, factor=local.factor)
        await check_engine(openai(PaintedMedia(), url=url, factor=local.factor), engine.renderer)
        renderer, sampling = engine.renderer, Sampling(max_tokens=8, seed=3)
        ledgers = []
        for each in (renderer, local):
            asked = (Message(role="system", parts=("Look.",)), Message(role="user", parts=(frame, "Which?")))
            ledgers.append(Ledger(segments=(each.render(Ledger(), asked),)).force(each.encode("<think>")))
        first = await engine.generate(ledgers[0], sampling)
        await engine.close()
        return ledgers, first

    (words, ours), reply = asyncio.run(body())
    assert 1 <= len(reply.tokens) <= 8
    # The same request by hand: what vLLM's template and processor made of it is the local renderer's ledger.
    sent_body = {
        "model": str(vllm_server.wanted.model),
        "messages": [sent(each, Urls(PaintedMedia())) for each in TextRenderer(local.factor).messages(words)],
        **{"max_tokens": 1, "return_token_ids": True, "add_generation_prompt": False, "continue_final_message": True},
    }
    with httpx.Client(trust_env=False, timeout=60) as client:
        told = client.post(f"{url}/chat/completions", json=sent_body).json()
        refused = client.post(f"{url}/chat/completions", json={**sent_body, "model": "other"})
    # It takes the tiny template for one of plain text, and so puts a line break between a picture and what follows.
    prompt_seen = local.decode(told["prompt_token_ids"]).replace("<|vision_end|>\n", "<|vision_end|>")
    assert prompt_seen == local.decode(ours.expanded())
    assert refused.status_code == 404
