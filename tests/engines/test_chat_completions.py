"""The chat completions engine with a fake HTTP server, and with a real vLLM on this CPU."""

import asyncio
import base64
import io
import json
import math
import threading
import time

import httpx
import pytest
from chat_server import completion, server
from error_cases import raises
from PIL import Image
from polling import wait_until

from saccade.chat.message_renderer import MessageRenderer
from saccade.chat.renderer import load_renderer
from saccade.engines.chat_completions import ChatCompletions, build_error, format_message
from saccade.engines.image_urls import encode_data_url
from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.ledger import ImageRef, Ledger, Origin, Segment
from saccade.media.image import encode_png
from saccade.media.relocation import map_media_paths
from saccade.testing import FakeMediaLoader, check_engine
from saccade.types import Completion, FinishReason, GenerationRequest, Message, SamplingParams
from saccade.utils.http_client import RequestFailed
from saccade.utils.jsonl import to_jsonable, validate_as

FRAME = ImageRef(path="clip.mp4", digest="painted clip.mp4", time=3.0, width=64, height=32)


def make_engine(served, media=None, context=0, **settings):
    given = {"url": served.url, "max_retries": 0, "retry_backoff": 0.0, "request_timeout": 300.0, **settings}
    return ChatCompletions(media or FakeMediaLoader(), context, **given)


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts or ("What?",)),)),))


def generate(served, ledger=None, sampling=None, **settings):
    async def body():
        engine = make_engine(served, **settings)
        try:
            return await engine.generate(
                GenerationRequest(ledger or prompt(engine.renderer), sampling or SamplingParams(max_tokens=8))
            )
        finally:
            await engine.close()

    return asyncio.run(body())


def reply_by_seed(number, body):
    """A reply determined by the request's seed, truncated at max_tokens."""
    words = [f"w{(body['seed'] * 7 + index * 5) % 100}" for index in range(6 + body["seed"] % 9)]
    limit = body["max_tokens"]
    is_cut = len(words) >= limit
    return completion(" ".join(words[:limit]), "length" if is_cut else "stop", limit if is_cut else len(words) + 1)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", "two words", "ünïcode 🙂 日本語", "<|im_end|><think>\n", "x" * 5000])
def test_ids_measure_and_truncate_text(text):
    renderer = MessageRenderer(32)
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert len(ids) == -(-len(text.encode()) // 4)
    assert text.startswith(renderer.decode(ids[: len(ids) // 2]).rstrip("\ufffd"))


def test_a_lone_surrogate_decodes_as_a_question_mark():
    renderer = MessageRenderer(32)
    assert renderer.decode(renderer.encode("a\ud800b")) == "a?b"


def test_a_ledger_holds_the_messages_of_a_conversation():
    renderer = MessageRenderer(32)
    system, user = Message(role="system", parts=("Be brief.\nLook.",)), Message(role="user", parts=(FRAME, "Which?"))
    tool = {"type": "function", "function": {"name": "zoom", "description": "d", "parameters": {}}}
    start = renderer.render(Ledger(), (system, user), tools=(tool,))
    ledger = Ledger(segments=(start, renderer.render_prefill("<think>\n"))).append_text("I zoom.", 3)
    results = [Message(role="tool", parts=("Here <|im_end|>:", FRAME)), Message(role="tool", parts=("Error: no",))]
    ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, results), renderer.render_prefill("<think>\n")))
    first, *rest = ledger.messages()
    assert (first.role, first.text.startswith("Be brief.\nLook.\n\n# Tools")) == ("system", True)
    assert '"name": "zoom"' in first.text
    parts = (
        "<tool_response>\nHere <|im_end|>:",
        FRAME,
        "\n</tool_response>\n<tool_response>\nError: no\n</tool_response>",
    )
    assert [(message.role, message.parts) for message in rest] == [
        ("user", (FRAME, "Which?")),
        ("assistant", ("<think>\nI zoom.",)),
        ("user", parts),
        ("assistant", ("<think>\n",)),
    ]
    assert ledger.images() == (FRAME, FRAME)
    assert [slot.num_tokens for slot in start.slots] == [2]
    assert ledger.num_sampled_tokens == 3
    assert len(ledger) == sum(segment.num_tokens for segment in ledger.segments) > 60


def test_a_conversation_without_tokens_has_no_loss_mask():
    renderer = MessageRenderer(32)
    ledger = prompt(renderer, FRAME, "Which?").append_text("red", 2)
    assert (ledger.input_ids(), ledger.loss_mask(), ledger.logprobs()) == ((), (), ())
    assert validate_as(to_jsonable(ledger), Ledger, "here") == ledger
    with raises(ValueError, by=Segment.__post_init__):
        Segment(tokens=(1, 2), origin=Origin.SAMPLED, messages=ledger.messages(), num_message_tokens=2)


def test_the_images_of_a_conversation_move_with_its_folder():
    ledger = prompt(MessageRenderer(32), "See:", FRAME)
    moved = map_media_paths(ledger, lambda path: f"/new/{path}")
    assert [image.path for image in moved.images()] == ["/new/clip.mp4"]
    assert moved.messages()[0].parts[1] == moved.images()[0]


# ---- requests and replies --------------------------------------------------------------------------------------------


def test_contract():
    with server(reply_by_seed) as served:
        engine = make_engine(served)
        asyncio.run(check_engine(engine, engine.renderer))


def test_a_request_has_the_messages_and_the_pixels():
    with server(lambda number, body: completion("red", "stop", 3), models=({"id": "m"},)) as served:
        ledger = prompt(MessageRenderer(32), "See:", FRAME, "Which?")
        reply = generate(
            served, ledger, SamplingParams(temperature=0.5, max_tokens=9, seed=2**40 + 5), extra_body={"top_p": 0.9}
        )
    (body,) = served.bodies
    fields = {"model": "m", "temperature": 0.5, "seed": 5, "max_tokens": 9, "top_p": 0.9}
    assert {key: body[key] for key in body.keys() - {"messages"}} == fields
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text"]
    shown = message["content"][1]["image_url"]["url"].removeprefix("data:image/png;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(shown)))
    assert (image.size, image.getpixel((0, 0))) == ((64, 32), (3, 252, 128))
    assert (reply.text, reply.num_text_tokens, reply.finish_reason) == ("red", 3, FinishReason.STOP)
    assert (reply.tokens, reply.logprobs, reply.version) == ((), (), None)


@pytest.mark.parametrize(
    ("reply", "tokens", "text", "stop"),
    [
        (completion("a b", "length", 4), 4, "a b", FinishReason.LENGTH),
        (completion("a b", "length"), 8, "a b", FinishReason.LENGTH),
        (completion("twelve chars", "stop"), 4, "twelve chars", FinishReason.STOP),
        (completion("", "stop", 1), 1, "", FinishReason.STOP),
        (completion(None, "length", 8), 8, "", FinishReason.LENGTH),  # a server that hides the thoughts
        (completion("é", "stop", 6), 6, "é", FinishReason.STOP),
    ],
)
def test_a_reply_has_as_many_tokens_as_the_server_counts(reply, tokens, text, stop):
    with server(lambda number, body: reply) as served:
        completion = generate(served)
    assert (completion.num_text_tokens, completion.text, completion.finish_reason) == (tokens, text, stop)


def test_a_prefill_is_continued_if_the_server_supports_it():
    renderer = MessageRenderer(32)
    ledger = Ledger(segments=(*prompt(renderer).segments, renderer.render_prefill("<think>\n")))
    with server(reply_by_seed, models=({"id": "m", "owned_by": "vllm"},)) as served:
        generate(served, ledger)
        generate(served, prompt(renderer))
    prefilled, plain = served.bodies
    assert prefilled["messages"][-1] == {"role": "assistant", "content": "<think>\n"}
    assert (prefilled["continue_final_message"], prefilled["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in plain
    assert plain["messages"][-1]["role"] == "user"
    with server(reply_by_seed, models=({"id": "m", "owned_by": "somebody"},)) as served:
        with raises(ConfigError, key="environment.settings.force_think", value="<think>"):
            generate(served, ledger)
        assert served.bodies == []
        generate(served, ledger, supports_prefill=True)


def test_the_api_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("MY_KEY", " s3cret ")
    with server(reply_by_seed) as served:
        generate(served, api_key_env="MY_KEY")
    assert served.headers[0]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("MY_KEY")
    with raises(ConfigError, key="engine.settings.api_key_env"):
        make_engine(served, api_key_env="MY_KEY")
    with raises(ConfigError, key="engine.settings.api_key_env") as caught:
        make_engine(served, api_key_env="sk-123")
    assert "sk-123" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:pw@here/v1", "http://here/v1?key=pw", "http://here/v1#pw"])
def test_an_address_with_credentials_is_refused_without_repeating_them(url):
    with raises(ConfigError, key="engine.settings.url", value=None) as caught:
        ChatCompletions(FakeMediaLoader(), url=url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "here:80", "ftp://here", "http://", "http://a b/v1", "http://[::1", "http://here:99999/v1"]
)
def test_an_invalid_url_is_refused(url):
    with raises(ConfigError, key="engine.settings.url", value=url):
        ChatCompletions(FakeMediaLoader(), url=url)


@pytest.mark.parametrize("field", ["messages", "max_tokens", "stream"])
def test_extra_body_can_not_set_reserved_fields(field):
    with raises(ConfigError, key="engine.settings.extra_body", value=field):
        ChatCompletions(FakeMediaLoader(), url="http://here/v1", extra_body={field: 1})


# ---- which model ---------------------------------------------------------------------------------------------------


def test_the_model_is_the_only_one_or_the_configured_one():
    models = ({"id": "small"}, {"id": "large"})
    with server(reply_by_seed) as served:
        generate(served)
    assert served.bodies[0]["model"] == "m"
    with server(reply_by_seed, models=models) as served:
        generate(served, model="large")
        assert served.bodies[0]["model"] == "large"
        with raises(ConfigError, key="engine.settings.model", value="") as caught:
            generate(served)
        assert "small, large" in str(caught.value)
        with raises(ConfigError, key="engine.settings.model", value="larg"):
            generate(served, model="larg")
    with (
        server(reply_by_seed, models=tuple({"id": f"m{i}"} for i in range(50))) as served,
        raises(ConfigError, key="engine.settings.model", value=""),
    ):
        generate(served)


def test_a_server_without_a_model_list_is_accepted():
    with server(reply_by_seed, models=(404, "no")) as served:
        generate(served, model="large")
        assert served.bodies[0]["model"] == "large"
        with raises(BrokenEngineError, key="engine.settings.url", value=served.url):
            generate(served)
    with server(reply_by_seed, models=(200, '{"models": []}')) as served:
        generate(served, model="large")
        with raises(EngineError, key="engine.settings.url", value=served.url):
            generate(served)


@pytest.mark.parametrize("length", [-5, 0, True, 1.5, "512", [512], math.inf, math.nan, None])
def test_an_impossible_context_is_no_context(length):
    with server(reply_by_seed, models=({"id": "m", "max_model_len": length},)) as served:
        generate(served, context=4096)
    assert len(served.bodies) == 1


@pytest.mark.parametrize("name", [5, None, ["m"], "", "m" * 10**6], ids=lambda name: str(name)[:9])
def test_a_model_without_a_name_is_refused(name):
    with (
        server(reply_by_seed, models=({"id": name},)) as served,
        raises(EngineError, key="engine.settings.url", value=served.url) as caught,
    ):
        generate(served)
    assert "no list of models" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_too_small_context_fails_before_the_first_request():
    with server(reply_by_seed, models=({"id": "m", "max_model_len": 512},)) as served:
        with raises(BrokenEngineError, key="environment.settings.max_context_tokens", value=4096):
            generate(served, context=4096)
        generate(served, context=512)
    assert len(served.bodies) == 1


# ---- errors ----------------------------------------------------------------------------------------------------------

WITH_IMAGE = prompt(MessageRenderer(32), FRAME, "Which?")


def error_body(text):
    return json.dumps({"error": {"message": text, "type": "invalid_request_error"}})


@pytest.mark.parametrize(
    ("status", "text", "error_type", "key"),
    [
        (401, "Incorrect API key", EngineError, "engine.settings.api_key_env"),
        (403, "no", EngineError, "engine.settings.api_key_env"),
        (404, "The model `m` does not exist", EngineError, "engine.settings.url"),
        (400, "At most 0 image(s) may be provided in one prompt.", EngineError, "images"),
        (500, "image input is not supported", EngineError, "images"),
        (400, "maximum context length is 512 tokens", EngineError, "environment.settings.max_context_tokens"),
        (413, "Payload Too Large", EngineError, "environment.settings.max_context_tokens"),
        (422, "temperature must be 1", EngineError, "engine.settings.url"),
        (429, "slow down", EngineError, "engine.settings.url"),
    ],
)
def test_a_refused_request_raises_with_the_servers_message_and_a_key(status, text, error_type, key):
    with server(lambda number, body: (status, error_body(text))) as served, raises(error_type, key=key) as caught:
        generate(served, WITH_IMAGE)
    assert f"{status} " in str(caught.value)
    assert text in str(caught.value)
    assert len(served.bodies) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_only_refusals_in_a_row_break_the_engine(status):
    statuses = [status] * 7 + [200] + [status] * 8

    def answer(number, body):
        return completion("red") if statuses[number] == 200 else (statuses[number], error_body("no"))

    async def request_all(served):
        engine = make_engine(served)
        request = GenerationRequest(prompt(engine.renderer), SamplingParams(max_tokens=8))
        results = []
        for _ in statuses:
            results += await asyncio.gather(engine.generate(request), return_exceptions=True)
        return [type(result) for result in results]

    with server(answer) as served:
        results = asyncio.run(request_all(served))
    assert results == [EngineError] * 7 + [Completion] + [EngineError] * 7 + [BrokenEngineError]


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_the_list_of_models_refuses_breaks_the_engine(status):
    with (
        server(reply_by_seed, models=(status, error_body("no"))) as served,
        raises(BrokenEngineError, key="engine.settings.api_key_env"),
    ):
        generate(served)


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"choices": []}', '{"error": "broken"}', "null"])
def test_a_malformed_completion_is_retried_and_then_raises(body):
    with (
        server(lambda number, request: (200, body)) as served,
        raises(EngineError, key="engine.settings.url"),
    ):
        generate(served, max_retries=1)
    with server(lambda number, request: (200, body) if number == 0 else "red") as served:
        assert generate(served, max_retries=1).text == "red"


def test_an_unknown_finish_reason_raises():
    with (
        server(lambda number, body: completion("I", "content_filter", 1)) as served,
        raises(EngineError, key="finish_reason", value="content_filter"),
    ):
        generate(served)


def test_an_unreachable_server_raises():
    with server(reply_by_seed) as served:
        pass
    with raises(BrokenEngineError, key="engine.settings.url", value=served.url):
        generate(served)


def test_a_shortage_of_this_machine_ends_only_the_episode():
    shortage = RequestFailed("was not queried: this machine has no room for a connection", is_local=True)
    error = build_error(shortage, url="http://host/v1", api_key_env="", num_images=0)
    assert type(error) is EngineError
    assert "ulimit -n" in str(error)


@pytest.mark.slow
def test_a_busy_server_is_retried_after_its_retry_after():
    def reply(number, body):
        return (429, error_body("slow down")) if number < 2 else "red"

    with server(reply, headers=(("Retry-After", "1"),)) as served:
        started = time.perf_counter()
        assert generate(served, max_retries=2).text == "red"
        assert time.perf_counter() - started > 2
    assert len(served.bodies) == 3


@pytest.mark.slow
def test_a_timeout_ends_only_the_episode():
    released = threading.Event()
    with server(lambda number, body: str(released.wait())) as served:
        with raises(EngineError, key="engine.settings.url"):
            generate(served, request_timeout=0.2)
        released.set()


@pytest.mark.slow
def test_close_and_cancel_end_unfinished_requests():
    async def body(served):
        engine = make_engine(served)
        ledger, sampling = prompt(engine.renderer), SamplingParams(max_tokens=8)
        one, other = (asyncio.ensure_future(engine.generate(GenerationRequest(ledger, sampling))) for _ in range(2))
        await wait_until(lambda: len(served.bodies) == 2)
        one.cancel()
        await engine.close()
        ends = await asyncio.gather(one, other, return_exceptions=True)
        with raises(EngineError):
            await engine.generate(GenerationRequest(ledger, sampling))
        return ends

    released = threading.Event()  # after the requests have ended
    with server(lambda number, body: str(released.wait())) as served:
        ends = asyncio.run(body(served))
        released.set()
    assert isinstance(ends[0], asyncio.CancelledError | EngineError)
    assert isinstance(ends[1], EngineError)


def test_max_concurrency_bounds_concurrent_requests():
    async def body(served):
        engine = make_engine(served, max_concurrency=3)
        ledger = prompt(engine.renderer)
        await asyncio.gather(
            *(engine.generate(GenerationRequest(ledger, SamplingParams(max_tokens=4, seed=i))) for i in range(12))
        )

    three = threading.Barrier(3)

    def reply(number, body):
        three.wait()
        return reply_by_seed(number, body)

    with server(reply, seconds=0.02) as served:
        asyncio.run(body(served))
    assert (len(served.bodies), served.most) == (12, 3)


def test_a_ledger_of_another_renderer_is_refused(renderer):
    with server(reply_by_seed) as served, raises(EngineError):
        generate(served, prompt(renderer))


# ---- a real server -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_real_vllm_renders_the_same_prompt(vllm_server):
    """Images and a prefilled reply go through vLLM's own template, which gives the local renderer's prompt."""
    url = f"{vllm_server.config.url}/v1"
    local = load_renderer(str(vllm_server.config.model))
    frame = ImageRef(path="clip.mp4", digest="painted clip.mp4", time=3.0, width=64, height=32)

    async def body():
        engine = ChatCompletions(FakeMediaLoader(), 4096, url=url, image_token_size=local.factor)
        await check_engine(ChatCompletions(FakeMediaLoader(), url=url, image_token_size=local.factor), engine.renderer)
        renderer, sampling = engine.renderer, SamplingParams(max_tokens=8, seed=3)
        ledgers = []
        for each_renderer in (renderer, local):
            messages = (Message(role="system", parts=("Look.",)), Message(role="user", parts=(frame, "Which?")))
            ledgers.append(
                Ledger(segments=(each_renderer.render(Ledger(), messages), each_renderer.render_prefill("<think>")))
            )
        first = await engine.generate(GenerationRequest(ledgers[0], sampling))
        await engine.close()
        return ledgers, first

    (message_ledger, ledger), reply = asyncio.run(body())
    assert 1 <= reply.num_text_tokens <= 8
    # The same request without the engine: vLLM's template and processor give the ids of the local ledger.
    pixels = FakeMediaLoader().load_pixels
    sent_body = {
        "model": str(vllm_server.config.model),
        "messages": [
            format_message(message, lambda image: encode_data_url(encode_png(pixels(image))))
            for message in message_ledger.messages()
        ],
        **{"max_tokens": 1, "return_token_ids": True, "add_generation_prompt": False, "continue_final_message": True},
    }
    with httpx.Client(trust_env=False, timeout=60) as client:
        response = client.post(f"{url}/chat/completions", json=sent_body).json()
        refused = client.post(f"{url}/chat/completions", json={**sent_body, "model": "other"})
    # vLLM treats the tiny template as text-only, and inserts a line break after an image.
    prompt_seen = local.decode(response["prompt_token_ids"]).replace("<|vision_end|>\n", "<|vision_end|>")
    assert prompt_seen == local.decode(ledger.input_ids())
    assert refused.status_code == 404
