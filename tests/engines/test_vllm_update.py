"""Weight sync with fake servers: unfinished replies, failures, rollback."""

import asyncio
import threading
import time

import generate_server
import pytest
import torch
from error_cases import raises
from generate_server import RESETS, reply_to, server
from polling import wait_until

from saccade.config.schema import ModelConfig
from saccade.engines.remote import weight_sync
from saccade.engines.sglang import Sglang
from saccade.engines.vllm import Vllm
from saccade.errors import BrokenEngineError, ConfigError, EngineError
from saccade.ledger import Ledger
from saccade.models.lora import get_adapter_weights
from saccade.models.vlm import VisionLanguageModel
from saccade.rollouts.runner import append_completion
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams

pytestmark = pytest.mark.slow  # some servers are down for a while


@pytest.fixture(scope="module")
def vlm(tiny_folder):
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))


@pytest.fixture
def engine_at(vlm):
    """A factory of engines; the servers' logprobs are made up, so the weight comparison is replaced."""

    def make(*served, **settings):
        given = {
            "verify_weights": False,
            "retry_backoff": 0.01,
            "down_timeout": 300.0,
            "request_timeout": 300.0,
            **settings,
        }
        given = {"replies_on_sync": "continue", **given}
        engine = Vllm(vlm.renderer, FakeMediaLoader(), servers=tuple(fake.url for fake in served), **given)

        async def check(server, source, weight_label=""):
            return 0.0

        engine._logprob_check.check = check
        return engine

    return make


def prompt(renderer, text="What?"):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=(text,)),)),))


def start_replies(engine, renderer, sampling, texts=("What?",)):
    """Start requests; return their tasks."""
    return [asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer, text), sampling))) for text in texts]


async def update_during_replies(engine, vlm, served, *, tokens, at, texts=("What?",), is_draining=False):
    """Return replies, during which weights are updated when each has the numbers of tokens `at`, and a later reply.

    The replies are held during an update, or, if it `is_draining`, only until it has begun.
    """
    renderer = vlm.renderer
    sampling = SamplingParams(max_tokens=tokens, forbidden_ids=renderer.forbidden_ids)
    await engine.sync_weights(vlm, 1)
    gate = served.hold_replies(at[0])
    tasks = start_replies(engine, renderer, sampling, texts)
    for version, num_tokens in enumerate(at, 2):
        gate.open(num_tokens)
        await wait_until(lambda: gate.sampled == [num_tokens] * len(texts))  # noqa: B023 (awaited in the loop)
        update = asyncio.create_task(engine.sync_weights(vlm, version))
        if is_draining:
            await asyncio.sleep(0)  # the update begins: it waits for the replies
            gate.open()
        await update
    gate.open()
    later_completion = asyncio.create_task(engine.generate(GenerationRequest(prompt(renderer), sampling)))
    replies = await asyncio.gather(*tasks, later_completion, return_exceptions=True)
    await engine.close()
    return replies


def test_a_reply_continues_over_updates_with_a_version_per_token(vlm, engine_at):
    renderer = vlm.renderer
    with server(renderer) as served:
        engine = engine_at(served)
        *reply, later_completion = asyncio.run(
            update_during_replies(engine, vlm, served, tokens=30, at=(8, 15), texts=("one", "two", "three"))
        )
    for completion in reply:
        versions = completion.token_versions
        assert len(versions) == len(completion.tokens) == len(completion.logprobs) == 30
        assert versions == (1,) * 8 + (2,) * 7 + (3,) * 15
        assert completion.version == 3
        ledger = append_completion(prompt(renderer), completion)
        assert ledger.versions()[-30:] == versions
        assert ledger.logprobs()[-30:] == completion.logprobs
        assert ledger.sampled_tokens() == completion.tokens
    assert (later_completion.version, later_completion.token_versions) == (3, ())
    assert len(served.bodies) == 4, "a reply was restarted"


def test_an_aborted_reply_continues_after_each_update_from_its_tokens(vlm, engine_at):
    """Each part is a request of its own, whose prompt ends with the tokens of the parts before."""
    renderer = vlm.renderer
    sampling = SamplingParams(max_tokens=30, forbidden_ids=renderer.forbidden_ids)

    async def body(served):
        engine = engine_at(served, replies_on_sync="abort")
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(8)
        tasks = start_replies(engine, renderer, sampling, ("one", "two"))
        for version in (2, 3):
            await wait_until(lambda: gate.sampled == [8, 8] * (version - 1))  # noqa: B023 (awaited in the loop)
            await engine.sync_weights(vlm, version)
        gate.open()
        completions = await asyncio.gather(*tasks)
        assert engine._pool.servers[0].incarnation == 1, "the server was down"
        await engine.close()
        return completions

    with server(renderer) as served:
        completions = asyncio.run(body(served))
    for completion, text in zip(completions, ("one", "two"), strict=True):
        start = prompt(renderer, text)
        ledger = append_completion(start, completion)
        segments = [segment for segment in ledger.segments if segment.is_sampled]
        assert [(segment.version, segment.num_tokens) for segment in segments] == [(1, 8), (2, 8), (3, 14)]
        logprobs = [tuple(-1.0 - index for index in range(segment.num_tokens)) for segment in segments]
        assert [segment.logprobs for segment in segments] == logprobs  # those of the request that sampled them
        prompts = [[*ledger.prefix(len(start.segments) + index).input_ids()] for index in range(3)]
        bodies = [fake for fake in served.bodies if fake["token_ids"][: len(prompts[0])] == prompts[0]]
        assert [fake["token_ids"] for fake in bodies] == prompts
        params = [fake["sampling_params"] for fake in bodies]
        assert [values["max_tokens"] for values in params] == [30, 22, 14]
        assert len({values["seed"] for values in params}) == 3


def test_a_reply_that_is_aborted_before_its_first_token_is_sampled_with_the_new_weights(vlm, engine_at):
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served, replies_on_sync="abort", max_retries=0)
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(0)
        (task,) = start_replies(engine, renderer, SamplingParams(max_tokens=5, seed=9))
        await wait_until(lambda: gate.sampled == [0])
        await engine.sync_weights(vlm, 2)
        gate.open()
        completion = await task
        await engine.close()
        return completion

    with server(renderer) as served:
        completion = asyncio.run(body(served))
    assert (completion.version, completion.token_versions, len(completion.tokens)) == (2, (), 5)
    assert [body["sampling_params"]["seed"] for body in served.bodies] == [9, 9]


def test_a_reply_that_no_update_has_aborted_is_sampled_again(vlm, engine_at):
    """A server that shuts down aborts its requests, too; what it returned of them is discarded."""
    renderer = vlm.renderer

    def abort_first(number, body):
        return reply_to(body, renderer, finish_reason="abort", token_ids=[5, 6]) if not number else None

    async def body(served):
        engine = engine_at(served, replies_on_sync="abort")
        tasks = start_replies(engine, renderer, SamplingParams(max_tokens=5))
        (completion,) = await asyncio.gather(*tasks)
        await engine.close()
        return completion

    with server(renderer, abort_first) as served:
        completion = asyncio.run(body(served))
    assert len(completion.tokens) == 5
    assert [body["sampling_params"]["max_tokens"] for body in served.bodies] == [5, 5]


def test_sglang_refuses_to_abort_replies(vlm):
    with raises(ConfigError, key="engine.settings.replies_on_sync", value="abort"):
        Sglang(vlm.renderer, FakeMediaLoader(), servers=("http://127.0.0.1:1",), replies_on_sync="abort")


def test_drain_gives_replies_of_one_version(vlm, engine_at):
    renderer = vlm.renderer
    with server(renderer) as served:
        engine = engine_at(served, replies_on_sync="drain", drain_timeout=300.0)
        one, two, later_completion = asyncio.run(
            update_during_replies(engine, vlm, served, tokens=10, at=(5,), texts=("one", "two"), is_draining=True)
        )
    assert [(completion.version, completion.token_versions) for completion in (one, two, later_completion)] == [
        (1, ()),
        (1, ()),
        (2, ()),
    ]


@pytest.mark.parametrize(
    ("replies_on_sync", "mode", "query"),
    [("continue", "keep", "reset_running_requests=true"), ("drain", "wait", ""), ("abort", "abort", "")],
)
def test_the_order_of_weight_update_requests(vlm, engine_at, replies_on_sync, mode, query):
    with server(vlm.renderer) as served:
        engine = engine_at(served, replies_on_sync=replies_on_sync)
        asyncio.run(update_during_replies(engine, vlm, served, tokens=1, at=(0,), texts=()))
    prefix, *others = RESETS
    once = [("/pause", f"mode={mode}"), ("/collective_rpc", ""), ("/update_weight_version", ""), (prefix, query)]
    assert served.orders == [*once, *((path, "") for path in others), ("/resume", "")] * 2


def test_a_reply_with_tokens_of_rolled_back_weights_is_discarded(vlm, engine_at):
    """The comparison fails after the server resumed: what it sampled meanwhile must not be used."""
    renderer = vlm.renderer

    async def body(served):
        engine, failing = engine_at(served, max_retries=0), asyncio.Event()

        async def check(server, source, weight_label=""):
            if failing.is_set():
                gate.open(15)
                await wait_until(lambda: gate.sampled == [15])
                raise BrokenEngineError("other weights", key="engine.settings.servers")

        engine._logprob_check.check = check
        sampling = SamplingParams(max_tokens=30, forbidden_ids=renderer.forbidden_ids)
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(10)
        (task,) = start_replies(engine, renderer, sampling)
        await wait_until(lambda: gate.sampled == [10])
        failing.set()
        with raises(BrokenEngineError, key="engine.settings.servers"):
            await engine.sync_weights(vlm, 2)
        failing.clear()
        gate.open()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        after = await engine.generate(GenerationRequest(prompt(renderer), sampling))
        await engine.close()
        return engine.version, result, after

    with server(renderer) as served:
        version, result, after = asyncio.run(body(served))
    assert version == 1
    assert isinstance(result, EngineError)
    assert (result.key, result.value) == ("engine.settings.servers", served.url)
    assert (after.version, after.token_versions) == (1, ())


def test_an_aborted_reply_continues_with_the_old_weights_after_a_rollback(vlm, engine_at):
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served, replies_on_sync="abort", max_retries=0)
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(10)
        (task,) = start_replies(engine, renderer, SamplingParams(max_tokens=30))
        await wait_until(lambda: gate.sampled == [10])

        async def check(server, source, weight_label=""):
            raise BrokenEngineError("other weights", key="engine.settings.servers")

        engine._logprob_check.check = check
        with raises(BrokenEngineError, key="engine.settings.servers"):
            await engine.sync_weights(vlm, 2)
        gate.open()
        completion = await task
        await engine.close()
        return completion

    with server(renderer) as served:
        completion = asyncio.run(body(served))
    assert (completion.version, completion.token_versions, len(completion.tokens)) == (1, (), 30)
    assert [body["sampling_params"]["max_tokens"] for body in served.bodies] == [30, 20]


def test_a_server_that_samples_from_older_weights_is_not_used(vlm):
    """It accepts every update, and keeps its label."""

    async def body(served):
        engine = Vllm(vlm.renderer, FakeMediaLoader(), servers=(served.url,), verify_weights=False, retry_backoff=0.01)
        # The trainer's logprobs are replaced by the server's, as if the update were too small to be detected.
        vlm.compute_token_logprobs = lambda ledger, tokens, pixels: [-1.0 - index for index in range(len(tokens))]
        await engine.sync_weights(vlm, 1)
        served.deaf, engine._pool._down_timeout = True, 0.5
        with raises(BrokenEngineError, key="engine.settings.servers", value=[served.url]):
            await engine.sync_weights(vlm, 2)
        del vlm.compute_token_logprobs
        await engine.close()

    with server(vlm.renderer) as served:
        asyncio.run(body(served))


@pytest.mark.parametrize("replies_on_sync", ["continue", "abort"])
def test_a_failed_weight_load_is_retried_and_replies_continue(vlm, engine_at, replies_on_sync):
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served, replies_on_sync=replies_on_sync)
        sampling = SamplingParams(max_tokens=20, forbidden_ids=renderer.forbidden_ids)
        await engine.sync_weights(vlm, 1)
        gate = served.hold_replies(10)
        (task,) = start_replies(engine, renderer, sampling)
        await wait_until(lambda: gate.sampled == [10])
        served.refuses = "/update_weight_version"
        update = asyncio.create_task(engine.sync_weights(vlm, 2))
        await wait_until(lambda: served.num_refused >= 2)
        assert not update.done()
        served.refuses = ""
        await update
        gate.open()
        reply = await task
        await engine.close()
        return reply

    with server(renderer) as served:
        reply = asyncio.run(body(served))
    assert reply.token_versions == (1,) * 10 + (2,) * 10


def test_a_reply_beyond_the_drain_timeout_restarts_with_the_new_weights(vlm, engine_at, caplog):
    """Neither the trainer nor new requests wait for the longest reply."""
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served, replies_on_sync="drain", drain_timeout=0.3)
        await engine.sync_weights(vlm, 1)
        long, short = SamplingParams(max_tokens=100), SamplingParams(max_tokens=5)
        gate = served.hold_replies(5)
        (short_task,), (long_task,) = (start_replies(engine, renderer, sampling) for sampling in (short, long))
        await wait_until(lambda: gate.sampled == [5, 5])
        first = await short_task
        served.gate = None  # for the restarted reply
        started = time.monotonic()
        await engine.sync_weights(vlm, 2)
        took = time.monotonic() - started
        reply = first, await long_task
        await engine.close()
        return took, reply

    with server(renderer) as served:
        took, (short, long) = asyncio.run(body(served))
    assert took >= 0.3
    # The server never samples the end of the first long reply, so the sync did not wait for it.
    assert (short.version, short.token_versions) == (1, ())
    assert (long.version, long.token_versions, len(long.tokens)) == (2, (), 100)
    assert len(served.bodies) == 3
    assert (1, 0.3) in [record.args for record in caplog.records]


def test_weights_that_no_server_loads_are_rolled_back(vlm, engine_at):
    """The run stops; its server is not paused, and has the previous weights."""
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served)
        await engine.sync_weights(vlm, 1)
        served.refuses, engine._pool._down_timeout = "saccade-2-", 0.5
        with raises(BrokenEngineError, key="engine.settings.servers", value=[served.url]):
            await engine.sync_weights(vlm, 2)
        await wait_until(lambda: engine._pool.servers_up)
        state = engine.version, served.paused, served.label
        reply = await engine.generate(GenerationRequest(prompt(renderer), SamplingParams(max_tokens=3)))
        await engine.close()
        return state, reply

    with server(renderer) as served:
        (version, paused, label), reply = asyncio.run(body(served))
    assert (version, paused) == (1, False)
    assert label.startswith("saccade-1-")
    assert (reply.version, reply.token_versions) == (1, ())


# ---- what a weight sync costs ----------------------------------------------------------------------------------------


def count_loads(served):
    return [path for path, _ in served.orders].count("/collective_rpc")


@pytest.mark.parametrize("path", ["/pause", "/update_weight_version", *RESETS, "/resume"])
def test_a_transient_error_costs_no_second_load(vlm, engine_at, path):
    async def body(served):
        engine = engine_at(served)
        await engine.sync_weights(vlm, 1)
        served.refuses, served.num_refusals = path, 1
        await engine.sync_weights(vlm, 2)
        assert served.num_refused == 1
        assert engine._pool.servers[0].incarnation == 1, "the server was down"
        await engine.close()

    with server(vlm.renderer) as served:
        asyncio.run(body(served))
    assert count_loads(served) == 2
    assert served.label.startswith("saccade-2-")
    assert not served.paused


@pytest.mark.parametrize("replies_on_sync", ["drain", "continue"])
def test_a_server_with_the_current_label_is_not_loaded_again(vlm, engine_at, replies_on_sync):
    """It fails in the rest of an update, then in a request; at last it is restarted."""
    renderer = vlm.renderer

    async def body(served):
        engine = engine_at(served, replies_on_sync=replies_on_sync, max_retries=9)
        await engine.sync_weights(vlm, 1)
        assert count_loads(served) == 1
        served.refuses, served.num_refusals = "/resume", 3  # more than one update retries
        await engine.sync_weights(vlm, 2)
        assert (served.num_refused, count_loads(served), served.paused) == (3, 2, False)
        resets = [path for path, _ in served.orders].count(RESETS[0])
        assert resets == 3, "the update was not finished after its failure"
        served.refuses, served.num_refusals = '"token_ids"', 1
        (reply,) = await asyncio.gather(*start_replies(engine, renderer, SamplingParams(max_tokens=3)))
        assert (reply.version, served.num_refused, count_loads(served)) == (2, 4, 2)
        assert [path for path, _ in served.orders].count(RESETS[0]) == resets
        served.label = "default"
        (reply,) = await asyncio.gather(*start_replies(engine, renderer, SamplingParams(max_tokens=3)))
        assert (reply.version, count_loads(served)) == (2, 3)
        await engine.close()

    with server(renderer) as served:
        asyncio.run(body(served))


def test_all_servers_load_at_once(vlm, engine_at):
    renderer, barrier = vlm.renderer, threading.Barrier(3)

    async def body(*fakes):
        engine = engine_at(*fakes)
        await engine.generate(GenerationRequest(prompt(renderer), SamplingParams(max_tokens=1)))
        await wait_until(lambda: len(engine._pool.servers_up) == 3)
        for fake in fakes:
            obey = fake.obey

            def wait_for_others(path, body, obey=obey):
                if path == "/collective_rpc":
                    barrier.wait(120)  # broken, with an error, unless all load at the same time
                return obey(path, body)

            fake.obey = wait_for_others
        metrics = await engine.sync_weights(vlm, 1)
        assert len(engine._pool.servers_up) == 3
        await engine.close()
        return metrics

    with server(renderer) as one, server(renderer) as two, server(renderer) as three:
        metrics = asyncio.run(body(one, two, three))
    assert not barrier.broken
    assert len({fake.label for fake in (one, two, three)}) == 1
    assert 0 <= metrics["weight_sync/drain_seconds"] <= metrics["weight_sync/pause_seconds"]
    assert metrics["weight_sync/copy_seconds"] > 0


def test_rollouts_continue_while_the_weights_are_copied(vlm, engine_at):
    """The copy ends only when a request that began after it has its reply."""
    renderer, is_copying, has_reply = vlm.renderer, threading.Event(), threading.Event()

    class SlowSource:
        dtype, has_adapters = vlm.dtype, False
        state_dict = vlm.state_dict

        def save(self, folder):
            is_copying.set()
            assert has_reply.wait(120), "no request had a reply"
            vlm.save(folder)

    async def body(served):
        engine = engine_at(served, replies_on_sync="drain")
        await engine.sync_weights(vlm, 1)
        update = asyncio.create_task(engine.sync_weights(SlowSource(), 2))
        await wait_until(is_copying.is_set)
        (reply,) = await asyncio.gather(*start_replies(engine, renderer, SamplingParams(max_tokens=3)))
        has_reply.set()
        await update
        await engine.close()
        return reply

    with server(renderer) as served:
        assert asyncio.run(body(served)).version == 1
    assert served.label.startswith("saccade-2-")


def test_cancelling_the_copy_deletes_it_and_keeps_the_old_version(vlm, engine_at, tmp_path):
    is_copying, may_end = threading.Event(), threading.Event()

    class SlowSource:
        has_adapters = False

        def save(self, folder):
            is_copying.set()
            may_end.wait(120)
            vlm.save(folder)

    async def body(served):
        engine = engine_at(served, weight_dir=str(tmp_path))
        await engine.sync_weights(vlm, 1)
        (kept,) = tmp_path.iterdir()
        update = asyncio.create_task(engine.sync_weights(SlowSource(), 2))
        await wait_until(is_copying.is_set)
        update.cancel()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
        await asyncio.gather(update, return_exceptions=True)
        assert update.cancelled()
        assert may_end.is_set(), "the weights may change before they are copied"
        assert (engine.version, [*tmp_path.iterdir()]) == (1, [kept])
        await engine.close()

    with server(vlm.renderer) as served:
        asyncio.run(body(served))
    assert served.label.startswith("saccade-1-")


def test_labels_of_old_versions_are_forgotten(vlm, engine_at, monkeypatch):
    """A client in another process receives all labels with each group."""
    monkeypatch.setattr(weight_sync, "_MAX_LABELS", 2)

    async def body(served):
        engine = engine_at(served)
        for version in range(1, 5):
            await engine.sync_weights(vlm, version)
        state = engine.get_sync_state()
        await engine.close()
        return state

    with server(vlm.renderer) as served:
        state = asyncio.run(body(served))
    assert [*state.version_by_label.values()] == [3, 4]


def test_the_size_of_weights_gathers_none_of_them(vlm, monkeypatch):
    """The folder for weights is chosen by their size."""
    assert vlm.num_bytes == sum(tensor.nbytes for tensor in vlm.state_dict().values())
    monkeypatch.setattr(type(vlm), "state_dict", None)
    assert vlm.num_bytes > 0


# ---- LoRA adapters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora_vlm(tiny_folder):
    return VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1, lora_rank=4))


def test_adapters_are_loaded_beside_the_base_weights(lora_vlm, engine_at, tmp_path):
    """Each version replaces the one before; a restarted server, which has none, loads the current one."""
    renderer, sampling = lora_vlm.renderer, SamplingParams(max_tokens=3)

    async def reply_of(engine):
        (reply,) = await asyncio.gather(*start_replies(engine, renderer, sampling))
        return reply.version

    async def body(served):
        engine = engine_at(served, lora="adapters", replies_on_sync="drain", weight_dir=str(tmp_path), max_retries=9)
        assert await reply_of(engine) == 0
        assert "model" not in served.bodies[-1]
        for version in (1, 2):
            for value in get_adapter_weights(lora_vlm.model).values():
                value.add_(1)
            if version == 2:
                served.refuses, served.num_refusals = "/update_weight_version", 4  # the update fails, and is repeated
            await engine.sync_weights(lora_vlm, version)
            assert await reply_of(engine) == version
            assert served.bodies[-1]["model"] == served.label
            assert [*served.adapters] == [served.label]
            (folder,) = tmp_path.iterdir()
            assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        loaded = served.adapters.pop(served.label)
        served.label = "default"
        assert await reply_of(engine) == 2
        assert [*served.adapters] == [served.label]
        await engine.close()
        return loaded

    with server(renderer) as served:
        loaded = asyncio.run(body(served))
    assert count_loads(served) == 0
    weights = get_adapter_weights(lora_vlm.model)
    assert loaded.keys() == {f"base_model.model.{name.replace('.default.', '.')}" for name in weights}
    for name, value in weights.items():
        assert torch.equal(loaded[f"base_model.model.{name.replace('.default.', '.')}"], value)


def test_followers_sample_from_the_adapter_of_the_last_sync(lora_vlm, engine_at, tmp_path):
    """An engine of another process, as in a rollout worker, before its first request and after it."""
    renderer, sampling = lora_vlm.renderer, SamplingParams(max_tokens=3)

    async def body(served):
        engine, follower = (
            engine_at(served, lora="adapters", replies_on_sync="drain", weight_dir=str(tmp_path)) for _ in range(2)
        )
        versions = []
        for version in (1, 2):
            await engine.sync_weights(lora_vlm, version)
            async with follower.pause_requests():
                follower.follow(engine.get_sync_state())
            (reply,) = await asyncio.gather(*start_replies(follower, renderer, sampling))
            versions.append(reply.version)
            assert served.bodies[-1]["model"] == served.label
        await follower.close()
        await engine.close()
        return versions

    with server(renderer) as served:
        assert asyncio.run(body(served)) == [1, 2]


@pytest.mark.parametrize(
    ("engine_class", "settings"),
    [(Sglang, {}), (Vllm, {"replies_on_sync": "continue"}), (Vllm, {"weight_sync": "gloo"})],
)
def test_adapters_are_refused_where_they_do_not_work(vlm, engine_class, settings):
    with raises(ConfigError, key="engine.settings.lora", value="adapters"):
        engine_class(vlm.renderer, FakeMediaLoader(), lora="adapters", **settings)


@pytest.mark.parametrize(("rank", "lora"), [(0, "adapters"), (4, "merged")])
def test_weights_that_the_setting_does_not_fit_are_refused(vlm, engine_at, rank, lora):
    """Full weights as adapters, and adapters merged into bfloat16: nothing is sent."""

    class Source:
        dtype, has_adapters = "bfloat16", rank > 0

    async def body(served):
        engine = engine_at(served, lora=lora, replies_on_sync="drain")
        with raises(ConfigError, key="engine.settings.lora", value=lora):
            await engine.sync_weights(Source(), 1)
        await engine.close()

    with server(vlm.renderer) as served:
        asyncio.run(body(served))
    assert served.orders == []


# ---- several servers, of which one fails -----------------------------------------------------------------------------


async def start_two(engine, vlm):
    """Publish version 1 to both servers."""
    await engine.sync_weights(vlm, 1)
    await wait_until(lambda: len(engine._pool.servers_up) == 2)


async def sample_versions(engine, renderer):
    """The versions of replies of several groups, which are spread over all servers that are up."""
    prompts = [prompt(renderer, f"What is {number}?") for number in range(8)]
    replies = await asyncio.gather(
        *(engine.generate(GenerationRequest(ledger, SamplingParams(max_tokens=3))) for ledger in prompts)
    )
    return {reply.version for reply in replies}


@pytest.mark.parametrize("replies_on_sync", ["drain", "continue"])
def test_a_server_that_fails_to_load_is_down_until_it_has_the_new_version(vlm, engine_at, replies_on_sync):
    renderer = vlm.renderer

    async def body(first, second):
        engine = engine_at(first, second, replies_on_sync=replies_on_sync, retry_backoff=0.05)
        await start_two(engine, vlm)
        second.refuses = "saccade-2-"
        await engine.sync_weights(vlm, 2)  # the first server has loaded version 2 before the second fails
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


@pytest.mark.parametrize("replies_on_sync", ["drain", "continue"])
@pytest.mark.parametrize("refused", ["/collective_rpc", "/update_weight_version", "/reset_mm_cache", "/resume"])
def test_a_refused_update_is_rolled_back_on_all_servers(vlm, engine_at, replies_on_sync, refused):
    """The second server refuses after the first has loaded the new version; both end on the version before."""
    renderer = vlm.renderer

    async def body(first, second):
        engine = engine_at(first, second, replies_on_sync=replies_on_sync)
        await start_two(engine, vlm)
        second.refuses, second.refusal_status, second.num_refusals = refused, 400, 1
        with raises(EngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(vlm, 2)
        assert len(engine._pool.servers_up) == 2
        assert engine.version == 1
        labels = first.label, second.label
        assert await sample_versions(engine, renderer) == {1}
        await engine.sync_weights(vlm, 3)
        assert await sample_versions(engine, renderer) == {3}
        await engine.close()
        return labels

    with server(renderer) as first, server(renderer) as second:
        one, other = asyncio.run(body(first, second))
    assert one == other
    assert one.startswith("saccade-1-")


def test_a_server_that_can_not_be_rolled_back_is_down(vlm, engine_at):
    """The first server has the new version and refuses the old one; only the second is used until it recovers."""
    renderer = vlm.renderer

    async def body(first, second):
        engine = engine_at(first, second, retry_backoff=0.05)
        await start_two(engine, vlm)

        async def check(server, source, weight_label=""):
            if weight_label.startswith("saccade-2-") and server.url == second.url:
                first.refuses = "saccade-1-"
                raise BrokenEngineError("other weights", key="engine.settings.servers", value=server.url)
            return 0.0

        engine._logprob_check.check = check
        with raises(BrokenEngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(vlm, 2)
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


def test_a_first_update_that_is_rolled_back_leaves_its_servers_down(vlm, engine_at):
    """Without a previous version, the server with the new weights is not used as if it had the initial ones."""
    renderer = vlm.renderer

    async def body(first, second):
        engine = engine_at(first, second, retry_backoff=0.05)
        await engine.generate(GenerationRequest(prompt(renderer), SamplingParams(max_tokens=1)))
        await wait_until(lambda: len(engine._pool.servers_up) == 2)
        second.refuses, second.refusal_status, second.num_refusals = "/pause", 400, 1
        with raises(EngineError, key="engine.settings.servers", value=second.url):
            await engine.sync_weights(vlm, 1)
        await wait_until(lambda: [server.url for server in engine._pool.servers_up] == [second.url])
        assert await sample_versions(engine, renderer) == {0}
        assert [server.url for server in engine._pool.servers_up] == [second.url]
        await engine.close()

    with server(renderer) as first, server(renderer) as second:
        asyncio.run(body(first, second))
    assert first.label.startswith("saccade-1-")
    assert second.label == "default"


def test_cancelling_an_update_rolls_it_back_on_all_servers(vlm, engine_at):
    renderer = vlm.renderer

    async def body(first, second):
        engine, is_loading = engine_at(first, second), asyncio.Event()
        await start_two(engine, vlm)

        async def check(server, source, weight_label=""):
            if weight_label.startswith("saccade-2-"):
                is_loading.set()
                await asyncio.Event().wait()  # until it is cancelled
            return 0.0

        engine._logprob_check.check = check
        update = asyncio.create_task(engine.sync_weights(vlm, 2))
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


@pytest.mark.parametrize(
    ("interval", "lacks", "counts"),
    [(2, (), [10, None, 10]), (0, (), [None] * 3), (2, ("/weight_checker",), [0, None, 0])],
)
def test_tensors_are_compared_by_their_checksums(vlm, engine_at, interval, lacks, counts):
    """Of the three layers: the norm before attention and the two divided projections of each, and the last norm."""
    with server(vlm.renderer, lacks=lacks) as served:

        async def body():
            engine = engine_at(served, checksum_interval=interval)
            rows = [await engine.sync_weights(vlm, version) for version in (1, 2, 3)]
            await engine.close()
            return rows

        assert [row.get("weight_sync/compared_tensors") for row in asyncio.run(body())] == counts


def test_a_tensor_that_a_server_did_not_load_is_named_and_rolled_back(vlm, engine_at, monkeypatch):
    with server(vlm.renderer) as served:

        async def body():
            engine = engine_at(served, checksum_interval=1)
            await engine.sync_weights(vlm, 1)
            key = next(name for name in served.digests if name.startswith("dp0:pp0:pcp0:tp1:") and "down_proj" in name)

            label, compute = served.label, generate_server.compute_digests
            monkeypatch.setattr(generate_server, "compute_digests", lambda folder: compute(folder) | {key: "0" * 64})
            with raises(BrokenEngineError, key="engine.settings.servers", value=served.url):
                await engine.sync_weights(vlm, 2)
            await engine.close()
            return label, engine.version

        label, version = asyncio.run(body())
        assert version == 1
        assert served.label == label
