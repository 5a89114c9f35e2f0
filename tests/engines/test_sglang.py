"""The SGLang engine with a fake server that follows SGLang's source, with a real model behind it."""

import asyncio
import contextlib
import json
import random
from pathlib import Path

import pytest
import torch
from error_cases import raises
from polling import wait_until
from sglang_server import ORDERS, server
from small_rl import small_rl

from saccade.config.schema import ModelConfig
from saccade.engines.image_urls import join_json
from saccade.engines.remote import sglang_api
from saccade.engines.remote.server import ServerRequest
from saccade.engines.sglang import Sglang
from saccade.errors import BrokenEngineError, EngineError
from saccade.ledger import ImageRef, Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.runs import pipeline
from saccade.testing import FakeMediaLoader, check_engine
from saccade.types import FinishReason, GenerationRequest, Message, SamplingParams

pytestmark = pytest.mark.slow  # a model samples, token by token


@pytest.fixture
def vlm(tiny_folder):
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def make_sampling(renderer, **settings):
    given = {"max_tokens": 6, "stop_ids": renderer.stop_ids, "forbidden_ids": renderer.forbidden_ids, **settings}
    return SamplingParams(**given)


def frame(renderer, time, wide=1):
    digest = "painted a.mp4"
    return ImageRef(path="a.mp4", digest=digest, time=time, width=wide * renderer.factor, height=renderer.factor)


@contextlib.asynccontextmanager
async def engine_of(vlm, *served, **settings):
    given = {"retry_backoff": 0.01, "down_timeout": 300.0, "request_timeout": 300.0, **settings}
    engine = Sglang(
        vlm.renderer,
        FakeMediaLoader(),
        load_weights=lambda: vlm,
        servers=tuple(fake.url for fake in served),
        **given,
    )
    try:
        yield engine
    finally:
        await engine.close()


def generate_all(vlm, served, *ledgers, sampling=None, **settings):
    """Send one request per ledger concurrently; return completions or exceptions."""
    params = sampling or make_sampling(vlm.renderer)
    prompts = ledgers or (prompt(vlm.renderer, "What?"),)

    async def body():
        async with engine_of(vlm, served, **settings) as engine:
            requests = [engine.generate(GenerationRequest(ledger, params)) for ledger in prompts]
            return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(body())


@torch.inference_mode()
def max_logprob_diff(vlm, ledger, reply):
    """Return the largest |server - trainer| difference of a reply's logprobs."""
    whole = ledger.append_completion(reply.tokens, logprobs=reply.logprobs, version=0)
    features = vlm.encode_images(whole.images(), FakeMediaLoader().load_pixels)
    hidden = vlm.policy.compute_hidden_states(
        torch.tensor([whole.input_ids()]),
        torch.from_numpy(vlm.renderer.compute_position_ids(whole))[:, None],
        torch.ones(len(whole), len(whole), dtype=torch.bool).tril()[None],
        features=type(features[0]).cat(features) if features else None,
    )
    logits = vlm.policy.compute_logits(hidden[0, len(ledger) - 1 : -1])
    logits[:, list(vlm.renderer.forbidden_ids)] = -torch.inf
    theirs = torch.tensor(reply.logprobs)
    return float((logits.log_softmax(-1)[range(len(reply.tokens)), list(reply.tokens)] - theirs).abs().max())


def test_contract(tiny_folder, vlm):
    with server(tiny_folder) as served:
        engine = Sglang(vlm.renderer, FakeMediaLoader(), load_weights=lambda: vlm, servers=(served.url,))
        asyncio.run(check_engine(engine, vlm.renderer, vlm))
    assert not served.refused


# ---- requests and responses -----------------------------------------------------------------------------------------


def test_build_request(vlm):
    renderer = vlm.renderer
    ledger = prompt(renderer, frame(renderer, 1.0), "and", frame(renderer, 2.0, wide=3), "?")
    sampling = SamplingParams(temperature=0.5, max_tokens=7, seed=3, stop_ids=(5, 6), forbidden_ids=(8, 9))
    filters = {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    urls = {image.key: b"data:%d" % number for number, image in enumerate(ledger.images(), 1)}
    request = ServerRequest(ledger, sampling, image_urls=urls, forbidden_texts=["a", "b"], filters=filters)
    reply = json.loads(b"".join(join_json(sglang_api.build_request(request), urls)))
    assert reply == {
        "input_ids": list(ledger.unexpanded_ids()),
        "image_data": ["data:1", "data:2"],
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.1,
            "min_new_tokens": 0,
            "stop_token_ids": [5, 6],
            "ignore_eos": False,
            "logit_bias": {"8": -1e4, "9": -1e4},
            "sampling_seed": 3,
        },
    }
    # All sampling parameters are sent, so that the server's defaults never change the distribution.
    plain = sglang_api.build_request(ServerRequest(prompt(renderer, "?"), SamplingParams()))
    assert "image_data" not in plain
    assert plain["sampling_params"].items() >= {"top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}.items()
    assert plain["sampling_params"]["ignore_eos"], "without stop ids nothing ends a reply"


def test_parse_reply():
    reply = {
        "text": "It is red.",
        "output_ids": [11, 12, 13],
        "prompt_token_ids": [1, 2, 2, 3],
        "meta_info": {
            "id": "7a",
            "finish_reason": {"type": "stop", "matched": 13},
            "prompt_tokens": 4,
            "weight_version": "b",
            "num_retractions": 1,
            "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None], [0.0, 13, None]],
            "reasoning_tokens": 0,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "weight_versions": [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}],
            "e2e_latency": 0.1,
        },
    }
    reply = sglang_api.parse_reply(reply)
    assert (reply.prompt_token_ids, reply.tokens, reply.logprobs) == ((1, 2, 2, 3), (11, 12, 13), (-0.5, -1.5, 0.0))
    assert (reply.version_spans, reply.finish_reason) == ((("a", 0, 2), ("b", 2, 3)), "stop")


def test_conversations_with_many_turns_and_images_match_the_server(tiny_folder, vlm):
    """The engine compares every reply with the ledger; its logprobs equal the trainer's."""
    renderer, turns = vlm.renderer, []

    async def converse(engine, seed):
        rng = random.Random(seed)
        images = [frame(renderer, float(seed + index), wide=rng.choice([1, 2, 3])) for index in range(seed % 3)]
        ledger = prompt(renderer, *images, f"Question {seed}?")
        for turn in range(3):
            reply = await engine.generate(GenerationRequest(ledger, make_sampling(renderer, seed=seed * 3 + turn)))
            turns.append((ledger, reply))
            ledger = ledger.append_completion(reply.tokens, logprobs=reply.logprobs, version=reply.version)
            result = Message(role="tool", parts=("Look:", frame(renderer, float(rng.randrange(64)))))
            ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, (result,))))

    async def body(served):
        async with engine_of(vlm, served) as engine:
            await asyncio.gather(*(converse(engine, seed) for seed in range(6)))

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert len(turns) == 18
    assert max(len(ledger.images()) for ledger, _ in turns) == 4
    assert max(max_logprob_diff(vlm, ledger, reply) for ledger, reply in turns) <= 1e-4


def test_a_reply_ends_only_at_a_stop_id(tiny_folder, vlm):
    renderer = vlm.renderer
    with server(tiny_folder) as served:
        (free,) = generate_all(vlm, served, sampling=make_sampling(renderer, max_tokens=8, stop_ids=()))
        (ended,) = generate_all(vlm, served, sampling=make_sampling(renderer, max_tokens=8, stop_ids=(free.tokens[3],)))
        served.ends = {free.tokens[2]}  # the checkpoint's own eos id, unknown to this run
        (open_,) = generate_all(
            vlm, served, sampling=make_sampling(renderer, max_tokens=8, stop_ids=()), verify_weights=False
        )
        (cut,) = generate_all(
            vlm, served, sampling=make_sampling(renderer, max_tokens=8), verify_weights=False, max_retries=0
        )
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert (ended.finish_reason, free.finish_reason, open_.tokens) == (
        FinishReason.STOP,
        FinishReason.LENGTH,
        free.tokens,
    )
    assert isinstance(cut, EngineError)
    assert cut.key == "engine.settings.servers"


def remove(*path):
    def edit(reply):
        inner = reply
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return edit


def replace(value, *path):
    def edit(reply):
        inner = reply
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return edit


WRONG = {
    "no ids": remove("output_ids"),
    "text for ids": replace(["5"] * 6, "output_ids"),
    "ids beyond the vocabulary": replace([10**9] * 6, "output_ids"),
    "a logprob of 400 digits": replace(-(10**400), "meta_info", "output_token_logprobs", 0, 0),
    "logprobs of others": replace([[-1.0, 1, None]] * 6, "meta_info", "output_token_logprobs"),
    "too few logprobs": replace([], "meta_info", "output_token_logprobs"),
    "no finite logprob": replace(None, "meta_info", "output_token_logprobs", 0, 0),
    "a positive logprob": replace(0.5, "meta_info", "output_token_logprobs", 0, 0),
    "no prompt": remove("prompt_token_ids"),
    "no versions": remove("meta_info", "weight_versions"),
    "a gap between versions": replace(1, "meta_info", "weight_versions", 0, "start"),
    "strange weights": replace("theirs", "meta_info", "weight_versions", 0, "version"),
    "aborted": replace({"type": "abort", "message": "enough"}, "meta_info", "finish_reason"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_reply_is_refused(tiny_folder, vlm, name):
    def behave(number, reply):
        if number >= 0:
            WRONG[name](reply)

    with server(tiny_folder, behave=behave) as served:
        (error,) = generate_all(vlm, served, verify_weights=False, max_retries=1)
    assert type(error) is EngineError, error
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert served.num_generated == 2


@pytest.mark.parametrize("behavior", [500, 503, b"<html>", "hang up"])
def test_a_failed_request_is_retried(tiny_folder, vlm, behavior):
    with server(tiny_folder, behave=lambda number, _: behavior if number == 0 else None) as served:
        (reply,) = generate_all(vlm, served, verify_weights=False)
    assert reply.tokens, reply
    assert served.num_generated == 2


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_server_that_drops_images_stops_the_run_with_both_prompts(tiny_folder, vlm):
    renderer = vlm.renderer
    with server(tiny_folder, ignores_images=True) as served:
        (error,) = generate_all(vlm, served, prompt(renderer, frame(renderer, 1.0, wide=3), "?"), verify_weights=False)
    assert type(error) is BrokenEngineError
    pad = renderer.forbidden_ids[0]
    assert error.key == "engine.settings.servers"
    assert f"{pad}, {pad}, {pad}" in str(error)


def omit_prompt_token_ids(number, reply):
    del reply["prompt_token_ids"]


def return_raw_logprobs(number, reply):
    for index, entry in enumerate(reply["meta_info"]["output_token_logprobs"]):
        entry[0] = -1.0 - index


REFUSED = [
    ({"lacks": ("/server_info",)}, "engine.settings.servers", "/server_info"),
    ({"lacks": ("/generate",)}, "engine.settings.servers", "/generate"),
    ({"behave": omit_prompt_token_ids}, "engine.settings.servers", "prompt_token_ids"),
    ({"behave": return_raw_logprobs}, "engine.settings.servers", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ({"context": 1024}, "environment.settings.max_context_tokens", "--context-length 1031"),
]


@pytest.mark.parametrize(("options", "key", "hint"), REFUSED)
def test_an_unusable_server_stops_the_run_with_a_hint(tiny_folder, vlm, options, key, hint):
    with server(tiny_folder, **options) as served:
        (error,) = generate_all(vlm, served, context_length=1024)
    assert type(error) is BrokenEngineError
    assert error.key == key
    assert hint in str(error)
    assert not served.bodies


def test_the_whole_context_is_usable(tiny_folder, vlm):
    """Up to the last token; with one more, SGLang would truncate the reply."""
    ledger = prompt(vlm.renderer, "What?")
    with server(tiny_folder, context=64) as served:
        limit = 64 - 7 - len(ledger)
        (reply,) = generate_all(vlm, served, sampling=SamplingParams(max_tokens=limit), verify_weights=False)
        (error,) = generate_all(vlm, served, sampling=SamplingParams(max_tokens=limit + 1), verify_weights=False)
    assert len(reply.tokens) == limit
    assert (error.key, error.value) == ("environment.settings.max_context_tokens", 58)


def test_a_server_of_other_weights_or_another_vocabulary_is_refused(tiny_folder, vlm, tmp_path):
    from saccade.models.tiny import make_tiny_model

    make_tiny_model(tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",))
    with server(tmp_path / "other") as served:
        (error,) = generate_all(vlm, served)
    assert (type(error), error.key, error.value) == (BrokenEngineError, "engine.settings.servers", served.url)
    with torch.no_grad():
        vlm.model.lm_head.weight.mul_(1.5)
    with server(tiny_folder) as served:
        (error,) = generate_all(vlm, served)
    assert (type(error), error.key, error.value) == (BrokenEngineError, "engine.settings.servers", served.url)


def test_servers_that_ignore_seeds_work_with_a_warning(tiny_folder, vlm, caplog):
    """The servers sample different tokens; the weight comparison is greedy."""

    async def body(*served):
        async with engine_of(vlm, *served) as engine:
            await engine.sync_weights(vlm, 1)
            await wait_until(lambda: all(connected.is_up for connected in engine._pool.servers))
            await engine.sync_weights(vlm, 2)
            assert all(server.is_up for server in engine._pool.servers)

    with server(tiny_folder, seeded=False) as one, server(tiny_folder, seeded=False) as other:
        asyncio.run(body(one, other))
    assert caplog.text.count("--enable-deterministic-inference") == 2


# ---- new weights ---------------------------------------------------------------------------------------------------


def change_weights(vlm):
    with torch.no_grad():
        for parameter in vlm.trainable_parameters:
            parameter.mul_(1.1)


@pytest.mark.parametrize(
    ("replies_on_sync", "orders"),
    [
        ("drain", [(ORDERS[1], ""), (ORDERS[2], "")]),
        ("continue", [(ORDERS[0], "retract"), (ORDERS[1], ""), (ORDERS[2], "")]),
    ],
)
def test_new_weights_are_loaded_while_it_runs(tiny_folder, vlm, replies_on_sync, orders):
    renderer, logprobs = vlm.renderer, []
    ledger = prompt(renderer, frame(renderer, 3.0), "What?")

    async def body(served):
        async with engine_of(vlm, served, replies_on_sync=replies_on_sync) as engine:
            for version in (1, 2, 3):
                change_weights(vlm)
                await engine.sync_weights(vlm, version)
                reply = await engine.generate(GenerationRequest(ledger, make_sampling(renderer, temperature=0.0)))
                assert reply.version == version == engine.version
                logprobs.append(reply.logprobs)

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert len(set(logprobs)) == 3
    assert served.orders == orders * 3


@pytest.mark.parametrize("replies_on_sync", ["drain", "continue"])
def test_an_unfinished_reply_during_a_weight_sync(tiny_folder, vlm, replies_on_sync):
    """It finishes first, or continues; each logprob is that of the token's own version."""
    renderer, states = vlm.renderer, {}
    ledger = prompt(renderer, frame(renderer, 3.0), "What?")

    async def body(served):
        async with engine_of(vlm, served, replies_on_sync=replies_on_sync, drain_timeout=300.0) as engine:
            for version in (1, 2):
                change_weights(vlm)
                states[version] = {name: value.clone() for name, value in vlm.model.state_dict().items()}
                if version == 2:
                    gate = served.hold_replies(10)
                    task = asyncio.create_task(
                        engine.generate(GenerationRequest(ledger, make_sampling(renderer, max_tokens=30, stop_ids=())))
                    )
                    await wait_until(lambda gate=gate: gate.sampled == [10])
                    served.gate = None  # the weight check samples, too
                update = asyncio.create_task(engine.sync_weights(vlm, version))
                if version == 2 and replies_on_sync == "drain":
                    await asyncio.sleep(0)  # the update begins: it waits for the reply
                    gate.open()
                await update
            gate.open()
            return await task

    with server(tiny_folder) as served:
        reply = asyncio.run(body(served))
    if replies_on_sync == "drain":
        assert (reply.version, reply.token_versions) == (1, ())
        vlm.model.load_state_dict(states[1])
        assert max_logprob_diff(vlm, ledger, reply) <= 1e-4
        return
    first = 10
    assert reply.token_versions == (1,) * first + (2,) * 20
    for version, part in ((1, slice(0, first)), (2, slice(first, None))):
        vlm.model.load_state_dict(states[version])
        before = ledger.prefill(reply.tokens[:first]) if version == 2 else ledger
        part_reply = type(reply)(
            tokens=reply.tokens[part], logprobs=reply.logprobs[part], version=version, finish_reason=reply.finish_reason
        )
        assert max_logprob_diff(vlm, before, part_reply) <= 1e-4


def test_a_reconnecting_server_loads_the_current_weights_first(tiny_folder, vlm):
    renderer = vlm.renderer
    ledger, greedy = prompt(renderer, "What?"), make_sampling(renderer, temperature=0.0)

    async def body():
        with server(tiny_folder) as first:
            async with engine_of(vlm, first, max_retries=40) as engine:
                change_weights(vlm)
                await engine.sync_weights(vlm, 3)
                before = await engine.generate(GenerationRequest(ledger, greedy))
                initial_weights = VisionLanguageModel(ModelConfig(path=tiny_folder)).model.state_dict()

                def restart(number, reply):
                    # In the request's handler, so that no other request is served meanwhile.
                    first.load(initial_weights)
                    first.behave, first.label = None, "default"
                    return "hang up"

                first.behave = restart
                return before, await engine.generate(GenerationRequest(ledger, greedy))

    before, after = asyncio.run(body())
    assert (after.version, after.tokens, after.logprobs) == (3, before.tokens, before.logprobs)


@pytest.mark.parametrize("replies_on_sync", ["drain", "continue"])
def test_weights_that_the_server_can_not_read_are_rolled_back(tiny_folder, vlm, tmp_path, replies_on_sync):
    """The error contains the server's message; no files are left, and the server is not paused."""

    async def body(served):
        async with engine_of(vlm, served, weight_dir=str(tmp_path), replies_on_sync=replies_on_sync) as engine:
            await engine.generate(GenerationRequest(prompt(vlm.renderer, "?"), make_sampling(vlm.renderer)))
            served.sees, engine._pool._down_timeout = False, 0.5
            with raises(BrokenEngineError, key="engine.settings.servers", value=[served.url]):
                await engine.sync_weights(vlm, 1)

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert not served.paused
    assert not list(tmp_path.glob("saccade-*"))


def test_tiny_rl_trains(tiny_folder, tmp_path):
    """Two steps with new weights after each; engine and trainer agree on every token."""
    overrides, rows = ["rl.steps=2", "rl.save_every=2", "rl.prompts_per_step=1", "sampling.max_tokens=8"], []
    with server(tiny_folder) as served:
        recipe = small_rl(tmp_path, Path(tiny_folder), served.url, *overrides, engine="sglang")
        pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 2
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["engine_trainer_logprob_diff_max"] for row in rows) <= 1e-3
    assert not served.refused
