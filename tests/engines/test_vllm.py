"""The vLLM engine with a real vLLM server on this machine's CPU."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import httpx
import pytest
import torch
from error_cases import raises
from small_rl import small_rl

import saccade
from saccade.config.load import load_recipe
from saccade.config.schema import ModelConfig
from saccade.engines.remote import vllm_api
from saccade.engines.vllm import Vllm
from saccade.errors import BrokenEngineError, ConfigError
from saccade.ledger import ImageRef, Ledger
from saccade.media.image import encode_png
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.runner import append_completion
from saccade.runs import pipeline
from saccade.testing import FakeMediaLoader, check_engine
from saccade.training.packing import pack
from saccade.types import FinishReason, GenerationRequest, Message, SamplingParams, TrainingSample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
each_weight_sync = pytest.mark.parametrize("weight_sync", ["files", pytest.param("gloo", marks=pytest.mark.soak)])


@pytest.fixture
def vlm(vllm_server):
    return VisionLanguageModel(ModelConfig(path=str(vllm_server.config.model), num_threads=1))


def engine_of(vlm, server, **settings):
    given = {"retry_backoff": 0.1, "down_timeout": 600.0, **settings}
    return Vllm(
        vlm.renderer,
        FakeMediaLoader(),
        load_weights=lambda: vlm,
        servers=(server.config.url,),
        **given,
    )


def make_sampling(renderer, **settings):
    return SamplingParams(stop_ids=renderer.stop_ids, forbidden_ids=renderer.forbidden_ids, **settings)


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def frame(rng, factor):
    sides = rng.choice([(1, 1), (2, 1), (1, 3), (2, 2), (4, 3)])
    return ImageRef(
        path="clip.mp4",
        digest="painted clip.mp4",
        time=float(rng.randrange(64)),
        width=sides[0] * factor,
        height=sides[1] * factor,
    )


def test_contract(vllm_server, vlm):
    asyncio.run(check_engine(engine_of(vlm, vllm_server), vlm.renderer, vlm))


@pytest.mark.parametrize("num_conversations", [24, pytest.param(120, marks=pytest.mark.soak)])
def test_ledger_and_server_agree_in_conversations_with_images(vllm_server, vlm, num_conversations):
    """Conversations of 5 turns; the engine compares every reply with the ledger and raises if they differ."""
    renderer, turns = vlm.renderer, []

    async def converse(engine, seed):
        rng = random.Random(seed)
        ledger = prompt(renderer, *(frame(rng, renderer.factor) for _ in range(seed % 4)), f"Question {seed}?")
        for turn in range(5):
            sampling = make_sampling(renderer, max_tokens=rng.randrange(1, 9), seed=seed * 5 + turn)
            reply = await engine.generate(GenerationRequest(ledger, sampling))
            turns.append((ledger, reply))
            ledger = ledger.append_completion(reply.tokens, logprobs=reply.logprobs, version=reply.version)
            images = [frame(rng, renderer.factor) for _ in range(rng.randrange(3))]
            result = Message(role="tool", parts=("Look:", *images))
            ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, (result,))))

    async def body():
        engine = engine_of(vlm, vllm_server)
        await asyncio.gather(*(converse(engine, seed) for seed in range(num_conversations)))
        await engine.close()

    asyncio.run(body())
    assert len(turns) == 5 * num_conversations
    assert sum(bool(ledger.images()) for ledger, _ in turns) > 3 * num_conversations
    assert max(len(ledger.images()) for ledger, _ in turns) >= 6
    # The trainer's logprobs equal the server's in every turn.
    pixels = FakeMediaLoader().load_pixels
    diffs = [diff for ledger, reply in turns[::20] for diff in logprob_diffs(vlm, pixels, ledger, reply)]
    assert max(diffs) <= 1e-3, f"logprobs differ by {max(diffs)}"


@torch.inference_mode()
def list_logprobs(vlm, pixels, ledger, tokens):
    """Return the trainer's logprobs [T, V] at the position of each sampled token, by one plain forward pass."""
    whole = ledger.append_completion(tokens, logprobs=(0.0,) * len(tokens), version=0)
    ids, length = torch.tensor([whole.input_ids()]), len(whole)
    features = vlm.encode_images(whole.images(), pixels)
    hidden = vlm.policy.compute_hidden_states(
        ids,
        torch.from_numpy(vlm.renderer.compute_position_ids(whole))[:, None],
        torch.ones(length, length, dtype=torch.bool).tril()[None],
        features=type(features[0]).cat(features) if features else None,
    )
    return torch.log_softmax(vlm.policy.compute_logits(hidden[0]), dim=-1)[len(ledger) - 1 : -1]


def logprob_diffs(vlm, pixels, ledger, reply):
    """Return |engine - trainer| of every sampled logprob."""
    logp_TV = list_logprobs(vlm, pixels, ledger, reply.tokens)
    return [
        abs(float(logp_V[token]) - logprob)
        for token, logp_V, logprob in zip(reply.tokens, logp_TV, reply.logprobs, strict=True)
    ]


def test_logprobs_include_the_temperature(vllm_server, vlm):
    renderer = vlm.renderer
    ledger = prompt(renderer, "What?")

    async def body():
        engine = engine_of(vlm, vllm_server)
        reply = await engine.generate(
            GenerationRequest(ledger, make_sampling(renderer, max_tokens=8, temperature=0.5, seed=3))
        )
        greedy = await engine.generate(
            GenerationRequest(ledger, make_sampling(renderer, max_tokens=8, temperature=0.0))
        )
        await engine.close()
        return reply, greedy

    reply, greedy = asyncio.run(body())
    pixels = FakeMediaLoader().load_pixels
    assert max(logprob_diffs(vlm, pixels, ledger, greedy)) <= 1e-3  # greedy logprobs are those of temperature 1
    assert max(logprob_diffs(vlm, pixels, ledger, reply)) > 1e-2
    vlm.model.lm_head.weight.data *= 2.0  # equals a temperature of one half
    assert max(logprob_diffs(vlm, pixels, ledger, reply)) <= 1e-3


def test_an_export_samples_greedily_as_the_run_that_wrote_it(vllm_server):
    """The server has the exported folder, whose adapters are merged; the run's policy has them beside the base."""
    saved = vllm_server.config.model.with_name("run") / "rl" / "step-000001"
    policy = VisionLanguageModel(ModelConfig(path=str(saved), num_threads=1, lora_rank=2))
    renderer, pixels = policy.renderer, FakeMediaLoader().load_pixels
    ledger = prompt(renderer, frame(random.Random(0), renderer.factor), "What?")

    async def body():
        engine = engine_of(policy, vllm_server)
        sampling = make_sampling(renderer, max_tokens=12, temperature=0.0)
        reply = await engine.generate(GenerationRequest(ledger, sampling))
        await engine.close()
        return reply

    tokens = asyncio.run(body()).tokens
    assert len(tokens) > 1
    logp_TV = list_logprobs(policy, pixels, ledger, tokens)
    # Not the index of the largest: rounding may exchange two that are nearly equal.
    assert all(logp_V[token] >= logp_V.max() - 1e-4 for token, logp_V in zip(tokens, logp_TV, strict=True))


def test_a_stop_id_ends_a_reply_and_is_part_of_it(vllm_server, vlm):
    renderer = vlm.renderer

    async def body():
        engine = engine_of(vlm, vllm_server)
        ledger = prompt(renderer, "What?")
        free = await engine.generate(GenerationRequest(ledger, make_sampling(renderer, max_tokens=12, seed=5)))
        ended = await engine.generate(
            GenerationRequest(
                ledger, replace(make_sampling(renderer, max_tokens=12, seed=5), stop_ids=(free.tokens[4],))
            )
        )
        await engine.close()
        return free, ended

    free, ended = asyncio.run(body())
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert ended.finish_reason is FinishReason.STOP


@each_weight_sync
def test_new_weights_are_taken_while_it_runs(vllm_server, vlm, weight_sync):
    """Six times, with images in every cache; each version's logprobs equal the trainer's."""
    renderer, pixels = vlm.renderer, FakeMediaLoader().load_pixels
    first = {name: value.clone() for name, value in vlm.model.state_dict().items()}
    ledger = prompt(renderer, frame(random.Random(1), renderer.factor), "What?")

    async def body():
        engine = engine_of(vlm, vllm_server, weight_sync=weight_sync)
        logprobs = []
        for version in range(1, 7):
            with torch.no_grad():
                for parameter in vlm.trainable_parameters:
                    parameter.mul_(1.1)
            await engine.sync_weights(vlm, version)
            reply = await engine.generate(
                GenerationRequest(ledger, make_sampling(renderer, max_tokens=8, temperature=0.0))
            )
            assert reply.version == version == engine.version
            assert max(logprob_diffs(vlm, pixels, ledger, reply)) <= 1e-3
            logprobs.append(reply.logprobs)
        vlm.model.load_state_dict(first)
        await engine.sync_weights(vlm, 7)
        await engine.close()
        return logprobs

    assert len(set(asyncio.run(body()))) == 6


@each_weight_sync
def test_weights_that_fail_verification_are_rolled_back(vllm_server, vlm, weight_sync):
    renderer = vlm.renderer
    ledger = prompt(renderer, "What?")
    greedy = make_sampling(renderer, max_tokens=8, temperature=0.0)

    async def body():
        engine = engine_of(vlm, vllm_server, weight_sync=weight_sync)
        await engine.sync_weights(vlm, 1)
        before = await engine.generate(GenerationRequest(ledger, greedy))
        check = engine._logprob_check.check

        async def change_and_check(server, source, weight_label):  # the trainer's weights change before the comparison
            with torch.no_grad():
                vlm.model.lm_head.weight.mul_(3.0)
            await check(server, source, weight_label)

        engine._logprob_check.check = change_and_check
        with raises(BrokenEngineError, key="engine.settings.servers", value=vllm_server.config.url):
            await engine.sync_weights(vlm, 2)
        after = await engine.generate(GenerationRequest(ledger, greedy))
        await engine.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.version, after.tokens) == (1, before.tokens)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_a_server_reconnects_while_the_trainer_changes_its_weights(vllm_server, vlm):
    """As during an update, when the trainer's weights are no longer those of the current version."""
    ledger, sampling = prompt(vlm.renderer, "What?"), make_sampling(vlm.renderer, max_tokens=8)

    async def body():
        engine = engine_of(vlm, vllm_server)
        await engine.sync_weights(vlm, 1)
        before = await engine.generate(GenerationRequest(ledger, sampling))
        previous = [parameter.clone() for parameter in vlm.trainable_parameters]
        with torch.no_grad():
            for parameter in vlm.trainable_parameters:
                parameter.mul_(1.3)
        try:
            engine._pool.mark_down(engine._pool.servers[0], "it was slow")
            after = await engine.generate(GenerationRequest(ledger, sampling))
        finally:
            with torch.no_grad():
                for parameter, value in zip(vlm.trainable_parameters, previous, strict=True):
                    parameter.copy_(value)
        await engine.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.version, after.tokens, after.logprobs) == (1, before.tokens, pytest.approx(before.logprobs, abs=1e-5))


def test_a_reconnecting_server_loads_the_current_weights_first(vllm_server, vlm):
    """As after a restart: it has its initial weights until the handshake."""
    renderer, pixels = vlm.renderer, FakeMediaLoader().load_pixels
    ledger = prompt(renderer, frame(random.Random(1), renderer.factor), "What?")

    async def body():
        engine = engine_of(vlm, vllm_server)
        with torch.no_grad():
            for parameter in vlm.trainable_parameters:
                parameter.mul_(1.2)
        await engine.sync_weights(vlm, 3)
        (server,) = engine._pool.servers
        await server.api.load_weights(server, vllm_server.config.model, "fresh", "drain")
        engine._pool.mark_down(server, "it was restarted")
        reply = await engine.generate(GenerationRequest(ledger, make_sampling(renderer, max_tokens=8, temperature=0.0)))
        await server.api.load_weights(server, vllm_server.config.model, "fresh", "drain")
        await engine.close()
        return reply

    reply = asyncio.run(body())
    assert reply.version == 3
    assert max(logprob_diffs(vlm, pixels, ledger, reply)) <= 1e-3


@pytest.mark.soak
def test_a_server_with_partial_weights_is_not_used_until_it_has_complete_ones(vllm_server, vlm, monkeypatch):
    """It can't be restarted here; loading complete weights from files repairs it for the next tests."""
    ledger, sampling = prompt(vlm.renderer, "What?"), make_sampling(vlm.renderer, max_tokens=8)

    async def body():
        engine = engine_of(vlm, vllm_server, weight_sync="gloo")
        await engine.sync_weights(vlm, 1)
        before = await engine.generate(GenerationRequest(ledger, sampling))
        receive_tensors = vllm_api.receive_tensors

        async def broken(server, values):
            await receive_tensors(server, {f"unknown.{name}": value for name, value in values.items()})

        monkeypatch.setattr(vllm_api, "receive_tensors", broken)
        engine._pool._down_timeout = 5.0
        with raises(BrokenEngineError, key="engine.settings.servers") as caught:
            await engine.sync_weights(vlm, 2)
        assert vllm_api._PARTIAL_HINT in str(caught.value)
        await engine.close()
        other = engine_of(vlm, vllm_server)
        await other.sync_weights(vlm, 3)
        after = await other.generate(GenerationRequest(ledger, sampling))
        await other.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.tokens, after.logprobs) == (before.tokens, pytest.approx(before.logprobs, abs=1e-5))


def test_a_server_of_other_weights_is_refused(vllm_server, vlm):
    with torch.no_grad():
        vlm.model.lm_head.weight.mul_(1.5)

    async def body():
        engine = engine_of(vlm, vllm_server)
        with raises(BrokenEngineError, key="engine.settings.servers", value=vllm_server.config.url):
            await engine.generate(
                GenerationRequest(prompt(vlm.renderer, "What?"), make_sampling(vlm.renderer, max_tokens=2))
            )
        await engine.close()

    asyncio.run(body())


def test_a_server_of_another_vocabulary_is_refused(vllm_server, tmp_path):
    from saccade.models.tiny import make_tiny_model

    make_tiny_model(
        tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",), tie_word_embeddings=False
    )
    other = VisionLanguageModel(ModelConfig(path=str(tmp_path / "other"), num_threads=1))

    async def body():
        engine = engine_of(other, vllm_server)
        with raises(BrokenEngineError, key="engine.settings.servers", value=vllm_server.config.url):
            await engine.generate(
                GenerationRequest(prompt(other.renderer, "What?"), make_sampling(other.renderer, max_tokens=2))
            )
        await engine.close()

    asyncio.run(body())


def test_doctor_reports_usable_and_unusable_servers(vllm_server, tmp_path):
    """`saccade doctor RECIPE` with a usable server, a too small context, and another model."""
    from saccade.models.tiny import make_tiny_model

    url, model = vllm_server.config.url, vllm_server.config.model
    make_tiny_model(
        tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",), tie_word_embeddings=False
    )

    def check(*settings, model=model):
        more = ("engine.name=vllm", f"engine.settings.servers=[{url}]", *settings)
        recipe = pipeline.with_paths(load_recipe("tiny/para_grpo", more), folder=tmp_path / "run", model=model)
        results = pipeline.check_run(tmp_path / "run", recipe, ["rl"])
        (result,) = [result for result in results if result.name == f"server {url}"]
        return result.is_ok, result.message

    is_ok, reply = check()
    assert is_ok, reply
    assert all(value in reply for value in (str(model), "4096"))
    is_ok, reply = check("environment.settings.max_context_tokens=8192")
    assert not is_ok
    assert "--max-model-len 8192" in reply
    is_ok, reply = check(model=tmp_path / "other")
    assert not is_ok
    assert str(model) in reply


def test_a_conversation_beyond_the_context_raises(vllm_server, vlm):
    async def body():
        engine = engine_of(vlm, vllm_server)
        with raises(BrokenEngineError, key="environment.settings.max_context_tokens"):
            await engine.generate(
                GenerationRequest(prompt(vlm.renderer, "What?"), make_sampling(vlm.renderer, max_tokens=4096))
            )
        await engine.close()

    asyncio.run(body())


def test_already_expanded_ids_are_detected(vllm_server, vlm):
    """A known corruption: a server silently expands already expanded ids again."""
    renderer = vlm.renderer
    ledger = prompt(renderer, frame(random.Random(5), renderer.factor), "What?")

    async def body():
        engine = engine_of(vlm, vllm_server)
        slot = ledger.segments[0].slots[0]
        doubled = replace(slot, num_tokens=slot.num_tokens + 1)
        wrong = Ledger(segments=(replace(ledger.segments[0], slots=(doubled,)),))
        with raises(BrokenEngineError, key="engine.settings.servers", value=vllm_server.config.url):
            await engine.generate(GenerationRequest(wrong, make_sampling(renderer, max_tokens=2)))
        await engine.close()

    asyncio.run(body())


async def read_metric(server, name):
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        text = (await client.get(f"{server.config.url}/metrics")).raise_for_status().text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


def test_a_cancelled_request_is_aborted_on_the_server(vllm_server, vlm):
    renderer = vlm.renderer

    long = replace(make_sampling(renderer, max_tokens=3500), stop_ids=())

    async def attempt(engine):
        """Return whether a request could be cancelled before its end, and how many tokens the server sampled."""
        num_before = await read_metric(vllm_server, "generation_tokens_total")
        task = asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer, "What?"), long)))
        while not task.done() and await read_metric(vllm_server, "generation_tokens_total") < num_before + 2:
            await asyncio.sleep(0.01)
        was_cancelled = task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while await read_metric(vllm_server, "num_requests_running"):
            await asyncio.sleep(0.05)
        return was_cancelled, await read_metric(vllm_server, "generation_tokens_total") - num_before

    async def body():
        engine = engine_of(vlm, vllm_server)
        await engine.generate(GenerationRequest(prompt(renderer, "What?"), make_sampling(renderer, max_tokens=1)))
        for _ in range(20):  # on a busy machine the server may sample everything before this process sees that it began
            was_cancelled, num_sampled = await attempt(engine)
            if was_cancelled and num_sampled < 3500:
                break
        else:
            raise AssertionError("every request ended before it could be aborted")
        await engine.close()

    asyncio.run(body())


@pytest.mark.soak
@pytest.mark.parametrize("replies_on_sync", ["continue", "abort"])
def test_replies_continue_over_new_weights_with_a_version_per_token(vllm_server, vlm, replies_on_sync):
    """A sync within replies about images: the ledger has a segment per version, and each token's logprob, also the one
    that the loss gets, is that of its version's weights, given all tokens before it.
    """
    renderer, pixels = vlm.renderer, FakeMediaLoader().load_pixels
    long = replace(
        make_sampling(renderer, max_tokens=3500), stop_ids=()
    )  # so long that two syncs fit in on any machine
    ledgers = [
        prompt(renderer, *(frame(random.Random(seed), renderer.factor) for _ in range(seed)), f"What is {seed}?")
        for seed in range(4)
    ]
    states = {}

    def change_weights(version):
        if version % 2:  # the first version of an attempt
            states.clear()
        with torch.no_grad():
            for parameter in vlm.trainable_parameters:
                parameter.mul_(1.1 if version % 2 else 1 / 1.1)
        states[version] = {name: value.clone() for name, value in vlm.model.state_dict().items()}

    async def wait_for_tokens(tasks):
        num_before = await read_metric(vllm_server, "generation_tokens_total")
        while await read_metric(vllm_server, "generation_tokens_total") < num_before + 8:
            if any(task.done() for task in tasks):
                break
            await asyncio.sleep(0.01)

    async def attempt(engine, first):
        change_weights(first)
        await engine.sync_weights(vlm, first)
        tasks = [asyncio.create_task(engine.generate(GenerationRequest(ledger, long))) for ledger in ledgers]
        await wait_for_tokens(tasks)
        change_weights(first + 1)
        await engine.sync_weights(vlm, first + 1)
        replies = await asyncio.gather(*tasks)
        return replies if all(len(set(reply.token_versions)) == 2 for reply in replies) else None

    async def body():
        engine = engine_of(vlm, vllm_server, replies_on_sync=replies_on_sync)
        await engine.generate(GenerationRequest(ledgers[1], make_sampling(renderer, max_tokens=1)))
        # On a busy machine the server may finish a reply before the sync begins: then they are sampled again.
        for first in (1, 3, 5):
            replies = await attempt(engine, first)
            if replies is not None:
                break
        await engine.close()
        assert replies is not None, "the update waited for the replies"
        return replies

    for ledger, reply in zip(ledgers, asyncio.run(body()), strict=True):
        assert len(reply.token_versions) == len(reply.tokens) == 3500
        assert reply.token_versions == tuple(sorted(reply.token_versions))
        assert set(reply.token_versions) == states.keys()
        whole = append_completion(ledger, reply)
        segments = [segment for segment in whole.segments if segment.is_sampled]
        assert [segment.version for segment in segments] == sorted(states)
        assert sum((segment.logprobs for segment in segments), ()) == reply.logprobs
        (batch,) = pack(
            [TrainingSample(ledger=whole, advantages=(0.0,) * len(ledger) + (1.0,) * len(reply.tokens))],
            compute_positions=renderer.compute_position_ids,
            pack_length=4096,
            micro_batch_size=1,
        )
        assert batch.engine_logp_N.tolist() == pytest.approx(reply.logprobs, rel=1e-6)
        assert tuple(batch.version_N.tolist()) == reply.token_versions
        for version, state in states.items():
            vlm.model.load_state_dict(state)
            diffs = logprob_diffs(vlm, pixels, ledger, reply)
            same_version = [
                diff
                for diff, token_version in zip(diffs, reply.token_versions, strict=True)
                if token_version == version
            ]
            other_versions = [
                diff
                for diff, token_version in zip(diffs, reply.token_versions, strict=True)
                if token_version != version
            ]
            assert max(same_version) <= 1e-3, f"version {version}: logprobs differ by {max(same_version)}"
            assert max(other_versions) > 1e-2


@pytest.mark.soak
def test_a_reply_aborted_before_its_first_token_is_sampled_with_the_new_weights(vllm_server, vlm):
    """The server is paused before it receives the request, so that it has sampled nothing at the weight sync."""
    renderer = vlm.renderer

    async def body():
        engine = engine_of(vlm, vllm_server, replies_on_sync="abort", max_retries=0)
        await engine.sync_weights(vlm, 1)
        (server,) = engine._pool.servers
        await server.post("/pause", mode="keep")
        request = GenerationRequest(prompt(renderer, "What?"), make_sampling(renderer, max_tokens=8, seed=5))
        task = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(1.0)  # if the server receives it later, it is held instead
        await engine.sync_weights(vlm, 2)
        interrupted, whole = await task, await engine.generate(request)
        await engine.close()
        return interrupted, whole

    interrupted, whole = asyncio.run(body())
    assert (interrupted.version, interrupted.token_versions) == (2, ())
    assert interrupted.tokens == whole.tokens


def test_drain_updates_weights_between_replies(vllm_server, vlm):
    """An unfinished reply ends with its weights; a request during the update waits."""
    renderer = vlm.renderer
    long = replace(make_sampling(renderer, max_tokens=200), stop_ids=())

    async def body():
        engine = engine_of(vlm, vllm_server, replies_on_sync="drain")
        await engine.sync_weights(vlm, 1)
        before = asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer, "What?"), long)))
        while not engine._pool.servers[0].num_in_flight:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(engine.sync_weights(vlm, 2))
        while engine._pool._accepting_requests.is_set():  # until the weights are copied
            await asyncio.sleep(0)
        after = asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer, "What?"), long)))
        reply = await asyncio.gather(before, update, after)
        await engine.close()
        return reply[0], reply[2]

    one, two = asyncio.run(body())
    assert (one.version, one.token_versions, two.version, two.token_versions) == (1, (), 2, ())
    assert one.tokens == two.tokens  # the weights are equal, only their version differs


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}])
def test_sampling_filters_are_for_evaluation_only(vllm_server, vlm, settings):
    async def body():
        engine = engine_of(vlm, vllm_server, **settings)
        ledger = prompt(vlm.renderer, "What?")
        reply = await engine.generate(GenerationRequest(ledger, make_sampling(vlm.renderer, max_tokens=4)))
        assert len(reply.tokens) == 4
        ((name, value),) = settings.items()
        with raises(ConfigError, key=f"engine.settings.{name}", value=value):
            await engine.sync_weights(vlm, 1)
        await engine.close()

    asyncio.run(body())


@pytest.mark.soak
def test_a_frozen_server_loses_no_request(vllm_server, vlm, caplog):
    """The server's process group is stopped during requests beyond their timeout, and continued."""
    renderer = vlm.renderer

    async def body():
        engine = engine_of(vlm, vllm_server, request_timeout=10.0, max_retries=8)
        await engine.sync_weights(vlm, 1)
        ledgers = [prompt(renderer, f"What is {number}?") for number in range(8)]
        sampling = make_sampling(renderer, max_tokens=24)
        before = await asyncio.gather(*(engine.generate(GenerationRequest(ledger, sampling)) for ledger in ledgers))
        os.killpg(vllm_server.pid, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(engine.generate(GenerationRequest(ledger, sampling))) for ledger in ledgers]
            while not any(record.module == "pool" for record in caplog.records):  # the outage is logged
                await asyncio.sleep(0.1)
        finally:
            os.killpg(vllm_server.pid, signal.SIGCONT)
        after = await asyncio.gather(*tasks)
        await engine.close()
        return [reply.tokens for reply in before], [reply.tokens for reply in after]

    before, after = asyncio.run(body())
    assert before == after
    (_, _, seconds), *others = [record.args for record in caplog.records if record.module == "pool"]
    assert seconds == 600.0
    assert (vllm_server.config.url,) in others


def test_encode_png_is_lossless():
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


@pytest.mark.soak
@pytest.mark.parametrize("weight_sync", ["files", "gloo"])
def test_tiny_rl_trains(vllm_server, tmp_path, weight_sync):
    """Six steps with six weight syncs; engine and trainer agree on every token of every step."""
    override = f"engine.settings.weight_sync={weight_sync}"
    recipe, rows = small_rl(tmp_path, vllm_server.config.model, vllm_server.config.url, override), []
    pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 6
    # The weights moved in every step: an engine that had previous old ones would have been found out.
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["engine_trainer_logprob_diff_max"] for row in rows) <= 1e-3


@pytest.mark.soak
@pytest.mark.parametrize("overrides", [(), ("rl.streaming=true", "engine.settings.replies_on_sync=abort")])
def test_tiny_rl_trains_asynchronously(vllm_server, tmp_path, overrides):
    """Episodes continue over new weights between or within replies; staleness is at most one version.

    A validation beside them samples from the weights of one step alone.
    """
    overrides = ("rl.max_staleness=1", "validation={every: 3, num_tasks: 4}", *overrides)
    recipe, rows = small_rl(tmp_path, vllm_server.config.model, vllm_server.config.url, *overrides), []
    pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 6
    assert 0 < max(row["staleness_max"] for row in rows) <= 1
    assert min(row["grad_norm"] for row in rows) > 0
    for step in (0, 3, 6):
        records = saccade.read_episodes(tmp_path / "run", step=step, stage="rl_validation")
        assert [record.mode for record in records] == ["greedy"] * 4 + ["sampled"] * 4
        ledgers = [record.episode.ledger for record in records]
        assert {segment.version for ledger in ledgers for segment in ledger.segments if segment.is_sampled} == {step}
