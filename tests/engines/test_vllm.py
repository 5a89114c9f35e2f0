"""The vLLM engine beside a real vLLM server on this machine's CPU."""

import asyncio
import os
import random
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_rl import small_rl

from saccade import checkup, stages
from saccade.config import Model, load_recipe
from saccade.engines._served import vllm_transfer
from saccade.engines.vllm import vllm
from saccade.errors import BrokenEngineError, ConfigError
from saccade.ledger import Ledger, Picture
from saccade.media.image import png
from saccade.model.backbone import Backbone
from saccade.testing import PaintedMedia, check_engine
from saccade.types import Message, Sampling, Stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def backbone(vllm_server):
    return Backbone(Model(path=str(vllm_server.wanted.model), threads=1))


def engine_of(backbone, server, **settings):
    given = {"wait": 0.1, "patience": 60.0, **settings}
    return vllm(backbone, PaintedMedia(), servers=(server.wanted.url,), **given)


def sampling_of(renderer, **settings):
    return Sampling(stop_ids=renderer.stop_ids, forbidden_ids=renderer.forbidden_ids, **settings)


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def frame(chance, factor):
    sides = chance.choice([(1, 1), (2, 1), (1, 3), (2, 2), (4, 3)])
    return Picture(
        path="clip.mp4",
        digest="painted clip.mp4",
        time=float(chance.randrange(64)),
        width=sides[0] * factor,
        height=sides[1] * factor,
    )


def test_contract(vllm_server, backbone):
    asyncio.run(check_engine(engine_of(backbone, vllm_server), backbone.renderer))


def test_ledger_and_server_agree_in_600_requests_of_many_turns_and_pictures(vllm_server, backbone):
    """120 conversations of 5 turns; every reply was compared with the ledger by the engine, or it would have raised."""
    renderer, seen = backbone.renderer, []

    async def talk(engine, seed):
        chance = random.Random(seed)
        ledger = prompt(renderer, *(frame(chance, renderer.factor) for _ in range(seed % 4)), f"Question {seed}?")
        for turn in range(5):
            sampling = sampling_of(renderer, max_tokens=chance.randrange(1, 9), seed=seed * 5 + turn)
            said = await engine.generate(ledger, sampling)
            seen.append((ledger, said))
            ledger = ledger.act(said.tokens, logprobs=said.logprobs, version=said.version)
            pictures = [frame(chance, renderer.factor) for _ in range(chance.randrange(3))]
            told = Message(role="tool", parts=("Look:", *pictures))
            ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, (told,))))

    async def body():
        engine = engine_of(backbone, vllm_server)
        await asyncio.gather(*(talk(engine, seed) for seed in range(120)))
        await engine.close()

    asyncio.run(body())
    assert len(seen) == 600
    assert sum(bool(ledger.pictures()) for ledger, _ in seen) > 400
    assert max(len(ledger.pictures()) for ledger, _ in seen) >= 6
    # What was sampled is as likely to the trainer as the server said, wherever it stands in a conversation.
    pixels = PaintedMedia().pixels
    gaps = [gap for ledger, said in seen[::20] for gap in gaps_of(backbone, pixels, ledger, said)]
    assert max(gaps) <= 1e-3, f"logprobs differ by {max(gaps)}"


@torch.inference_mode()
def gaps_of(backbone, pixels, ledger, said):
    """|engine - trainer| of every sampled logprob, the trainer's by one plain forward pass."""
    whole = ledger.act(said.tokens, logprobs=said.logprobs, version=0)
    ids, length = torch.tensor([whole.expanded()]), len(whole)
    features = backbone.features(whole.pictures(), pixels)
    hidden = backbone.hidden(
        ids,
        torch.from_numpy(backbone.renderer.positions(whole))[:, None],
        torch.ones(length, length, dtype=torch.bool).tril()[None],
        features=type(features[0]).cat(features) if features else None,
    )
    logp = torch.log_softmax(backbone.logits(hidden[0]), dim=-1)
    first = len(ledger)
    return [
        abs(float(logp[first + place - 1, token]) - said.logprobs[place]) for place, token in enumerate(said.tokens)
    ]


def test_a_temperature_is_part_of_the_logprobs(vllm_server, backbone):
    renderer = backbone.renderer
    ledger = prompt(renderer, "What?")

    async def body():
        engine = engine_of(backbone, vllm_server)
        said = await engine.generate(ledger, sampling_of(renderer, max_tokens=8, temperature=0.5, seed=3))
        greedy = await engine.generate(ledger, sampling_of(renderer, max_tokens=8, temperature=0.0))
        await engine.close()
        return said, greedy

    said, greedy = asyncio.run(body())
    pixels = PaintedMedia().pixels
    assert max(gaps_of(backbone, pixels, ledger, greedy)) <= 1e-3  # of temperature 1, as the protocol says
    assert max(gaps_of(backbone, pixels, ledger, said)) > 1e-2
    backbone.model.lm_head.weight.data *= 2.0  # is a temperature of one half
    assert max(gaps_of(backbone, pixels, ledger, said)) <= 1e-3


def test_a_stop_id_ends_a_reply_and_is_part_of_it(vllm_server, backbone):
    renderer = backbone.renderer

    async def body():
        engine = engine_of(backbone, vllm_server)
        ledger = prompt(renderer, "What?")
        free = await engine.generate(ledger, sampling_of(renderer, max_tokens=12, seed=5))
        ended = await engine.generate(
            ledger, replace(sampling_of(renderer, max_tokens=12, seed=5), stop_ids=(free.tokens[4],))
        )
        await engine.close()
        return free, ended

    free, ended = asyncio.run(body())
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert ended.stop is Stop.STOP


@pytest.mark.parametrize("transfer", ["files", "gloo"])
def test_new_weights_are_taken_while_it_runs(vllm_server, backbone, transfer):
    """Six times, with pictures in every cache; each version's tokens are as likely to the trainer as it says."""
    renderer, pixels = backbone.renderer, PaintedMedia().pixels
    first = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    ledger = prompt(renderer, frame(random.Random(1), renderer.factor), "What?")

    async def body():
        engine = engine_of(backbone, vllm_server, transfer=transfer)
        likely = []
        for version in range(1, 7):
            with torch.no_grad():
                for parameter in backbone.parameters:
                    parameter.mul_(1.1)
            await engine.publish(None, version)
            said = await engine.generate(ledger, sampling_of(renderer, max_tokens=8, temperature=0.0))
            assert said.version == version == engine.version
            assert max(gaps_of(backbone, pixels, ledger, said)) <= 1e-3
            likely.append(said.logprobs)
        await engine.publish(first, 7)
        await engine.close()
        return likely

    assert len(set(asyncio.run(body()))) == 6


@pytest.mark.parametrize("transfer", ["files", "gloo"])
def test_new_weights_that_the_server_has_otherwise_are_taken_back(vllm_server, backbone, transfer):
    renderer = backbone.renderer
    ledger = prompt(renderer, "What?")
    greedy = sampling_of(renderer, max_tokens=8, temperature=0.0)

    async def body():
        engine = engine_of(backbone, vllm_server, transfer=transfer)
        await engine.publish(None, 1)
        before = await engine.generate(ledger, greedy)
        check = engine._parity.check

        async def changed(server, edition):  # the trainer's weights move between writing and comparing
            with torch.no_grad():
                backbone.model.lm_head.weight.mul_(3.0)
            await check(server, edition)

        engine._parity.check = changed
        with pytest.raises(BrokenEngineError, match=r"not taken.*other weights than the trainer's"):
            await engine.publish(None, 2)
        after = await engine.generate(ledger, greedy)
        await engine.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.version, after.tokens) == (1, before.tokens)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_a_server_comes_back_while_the_trainer_moves(vllm_server, backbone):
    """As in the middle of an update, when nothing can be said of the published weights by looking at the trainer's."""
    ledger, wanted = prompt(backbone.renderer, "What?"), sampling_of(backbone.renderer, max_tokens=8)

    async def body():
        engine = engine_of(backbone, vllm_server)
        await engine.publish(None, 1)
        before = await engine.generate(ledger, wanted)
        kept = [parameter.clone() for parameter in backbone.parameters]
        with torch.no_grad():
            for parameter in backbone.parameters:
                parameter.mul_(1.3)
        try:
            engine._pool.lose(engine._pool.servers[0], "it was slow")
            after = await engine.generate(ledger, wanted)
        finally:
            with torch.no_grad():
                for parameter, value in zip(backbone.parameters, kept, strict=True):
                    parameter.copy_(value)
        await engine.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.version, after.tokens, after.logprobs) == (1, before.tokens, pytest.approx(before.logprobs, abs=1e-5))


def test_a_server_that_comes_back_is_given_the_published_weights_first(vllm_server, backbone):
    """As after a restart: it has the weights that it was started with, until it is greeted."""
    renderer, pixels = backbone.renderer, PaintedMedia().pixels
    ledger = prompt(renderer, frame(random.Random(1), renderer.factor), "What?")

    async def body():
        engine = engine_of(backbone, vllm_server)
        with torch.no_grad():
            for parameter in backbone.parameters:
                parameter.mul_(1.2)
        await engine.publish(None, 3)
        (server,) = engine._pool.servers
        await server.dialect.load(server, vllm_server.wanted.model, "fresh", "wait")
        engine._pool.lose(server, "it was restarted")
        said = await engine.generate(ledger, sampling_of(renderer, max_tokens=8, temperature=0.0))
        await server.dialect.load(server, vllm_server.wanted.model, "fresh", "wait")
        await engine.close()
        return said

    said = asyncio.run(body())
    assert said.version == 3
    assert max(gaps_of(backbone, pixels, ledger, said)) <= 1e-3


def test_a_server_that_failed_halfway_is_not_sampled_from_until_it_has_whole_weights(vllm_server, backbone):
    """Nobody can start it again here: files, which it reads as a whole, are what mends it for the tests after this."""
    ledger, wanted = prompt(backbone.renderer, "What?"), sampling_of(backbone.renderer, max_tokens=8)

    async def body():
        engine = engine_of(backbone, vllm_server, transfer="gloo", patience=5.0)
        await engine.publish(None, 1)
        before = await engine.generate(ledger, wanted)
        expect = vllm_transfer.expect

        async def broken(server, values):
            await expect(server, {f"nobodys.{name}": value for name, value in values.items()})

        engine._weights._make.__self__._orders = SimpleNamespace(**{**vars(vllm_transfer), "expect": broken})
        with pytest.raises(BrokenEngineError, match="a part of new weights, and is not used before it was started"):
            await engine.publish(None, 2)
        await engine.close()
        other = engine_of(backbone, vllm_server)
        await other.publish(None, 3)
        after = await other.generate(ledger, wanted)
        await other.close()
        return before, after

    before, after = asyncio.run(body())
    assert (after.tokens, after.logprobs) == (before.tokens, pytest.approx(before.logprobs, abs=1e-5))


def test_a_server_of_other_weights_is_refused(vllm_server, backbone):
    with torch.no_grad():
        backbone.model.lm_head.weight.mul_(1.5)

    async def body():
        engine = engine_of(backbone, vllm_server)
        with pytest.raises(BrokenEngineError, match="other weights than the trainer's"):
            await engine.generate(prompt(backbone.renderer, "What?"), sampling_of(backbone.renderer, max_tokens=2))
        await engine.close()

    asyncio.run(body())


def test_a_server_of_another_vocabulary_is_refused(vllm_server, tmp_path):
    from saccade.model.tiny import make_tiny

    make_tiny(tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",), tied=False)
    other = Backbone(Model(path=str(tmp_path / "other"), threads=1))

    async def body():
        engine = engine_of(other, vllm_server)
        with pytest.raises(BrokenEngineError, match="vocabulary is another"):
            await engine.generate(prompt(other.renderer, "What?"), sampling_of(other.renderer, max_tokens=2))
        await engine.close()

    asyncio.run(body())


def test_doctor_tells_what_a_run_would_stumble_over(vllm_server, tmp_path):
    """`saccade doctor RECIPE`, before any weights are loaded, of a server that will do and of two that won't."""
    from saccade.model.tiny import make_tiny

    url, model = vllm_server.wanted.url, vllm_server.wanted.model
    make_tiny(tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",), tied=False)

    def asked(*settings, model=model):
        more = ("engine.name=vllm", f"engine.settings.servers=[{url}]", *settings)
        recipe = stages.with_paths(load_recipe("tiny/para_grpo", more), folder=tmp_path / "run", model=model)
        case = checkup.Case(recipe=recipe, folder=tmp_path / "run", stages=("rl",))
        (found,) = [each for each in checkup.examine(case) if each.name == f"server {url}"]
        return found.good, found.found

    fine, said = asked()
    assert fine, said
    assert f"serves {model}, 4096 tokens" in said
    fine, said = asked("agent.settings.context_tokens=8192")
    assert not fine
    assert "takes 4096 tokens, and a conversation may have 8192; start it with --context 8192" in said
    fine, said = asked(model=tmp_path / "other")
    assert not fine
    assert "serves another model" in said
    assert "serve the checkpoint of this run" in said


def test_a_conversation_beyond_the_context_says_so(vllm_server, backbone):
    async def body():
        engine = engine_of(backbone, vllm_server)
        with pytest.raises(BrokenEngineError, match=r"takes 4096 tokens.*--context"):
            await engine.generate(prompt(backbone.renderer, "What?"), sampling_of(backbone.renderer, max_tokens=4096))
        await engine.close()

    asyncio.run(body())


def test_already_expanded_ids_are_found_out(vllm_server, backbone):
    """The known corruption: a server expands expanded ids once more, without a word."""
    renderer = backbone.renderer
    ledger = prompt(renderer, frame(random.Random(5), renderer.factor), "What?")

    async def body():
        engine = engine_of(backbone, vllm_server)
        slot = ledger.segments[0].slots[0]
        doubled = replace(slot, tokens=slot.tokens + 1)
        wrong = Ledger(segments=(replace(ledger.segments[0], slots=(doubled,)),))
        with pytest.raises(BrokenEngineError, match="disagree about a prompt from token"):
            await engine.generate(wrong, sampling_of(renderer, max_tokens=2))
        await engine.close()

    asyncio.run(body())


def test_a_cancelled_request_is_aborted_on_the_server(vllm_server, backbone):
    renderer = backbone.renderer

    async def running(engine):
        text = (await engine._pool.servers[0]._client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.split()[-1]) for line in lines)

    async def body():
        engine = engine_of(backbone, vllm_server)
        await engine.generate(prompt(renderer, "What?"), sampling_of(renderer, max_tokens=1))
        long = replace(sampling_of(renderer, max_tokens=1900), stop_ids=())
        task = asyncio.create_task(engine.generate(prompt(renderer, "What?"), long))
        while not await running(engine):
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begun = time.monotonic()
        while await running(engine):
            assert time.monotonic() - begun < 2, "the server goes on with a request that nobody waits for"
            await asyncio.sleep(0.05)
        await engine.close()

    asyncio.run(body())


def test_replies_go_on_over_new_weights_and_each_token_is_of_its_own_version(vllm_server, backbone):
    """Two updates in the middle of replies that have seen pictures: what each version sampled is, token by token, as
    likely to the trainer's weights of that version as the server said, all before it included.
    """
    renderer, pixels = backbone.renderer, PaintedMedia().pixels
    long = replace(sampling_of(renderer, max_tokens=600), stop_ids=())
    ledgers = [
        prompt(renderer, *(frame(random.Random(seed), renderer.factor) for _ in range(seed)), f"What is {seed}?")
        for seed in range(4)
    ]
    states = {}

    def moved(version):
        with torch.no_grad():
            for parameter in backbone.parameters:
                parameter.mul_(1.1)
        states[version] = {name: value.clone() for name, value in backbone.model.state_dict().items()}

    async def body():
        engine = engine_of(backbone, vllm_server, pause="keep")
        await engine.generate(ledgers[1], sampling_of(renderer, max_tokens=1))
        moved(1)
        await engine.publish(None, 1)
        tasks = [asyncio.create_task(engine.generate(each, long)) for each in ledgers]
        while engine._pool.servers[0].load < len(tasks):
            await asyncio.sleep(0.01)
        for version in (2, 3):
            await asyncio.sleep(0.5)
            moved(version)
            await engine.publish(None, version)
            assert not any(task.done() for task in tasks), "the replies were waited for"
        said = await asyncio.gather(*tasks)
        await engine.close()
        return said

    for ledger, said in zip(ledgers, asyncio.run(body()), strict=True):
        assert len(said.versions) == len(said.tokens) == 600
        assert said.versions == tuple(sorted(said.versions))
        assert set(said.versions) == {1, 2, 3}
        for version, state in states.items():
            backbone.model.load_state_dict(state)
            gaps = gaps_of(backbone, pixels, ledger, said)
            own = [gap for gap, each in zip(gaps, said.versions, strict=True) if each == version]
            others = [gap for gap, each in zip(gaps, said.versions, strict=True) if each != version]
            assert max(own) <= 1e-3, f"version {version}: logprobs differ by {max(own)}"
            assert max(others) > 1e-2


def test_new_weights_may_come_between_replies(vllm_server, backbone):
    """A reply under way ends with the weights that it was begun with; one that was asked for meanwhile waits."""
    renderer = backbone.renderer
    long = replace(sampling_of(renderer, max_tokens=200), stop_ids=())

    async def body():
        engine = engine_of(backbone, vllm_server, pause="wait")
        await engine.publish(None, 1)
        before = asyncio.create_task(engine.generate(prompt(renderer, "What?"), long))
        while not engine._pool.servers[0].load:
            await asyncio.sleep(0.01)
        publishing = asyncio.create_task(engine.publish(None, 2))
        await asyncio.sleep(0)
        assert not before.done()
        after = asyncio.create_task(engine.generate(prompt(renderer, "What?"), long))
        said = await asyncio.gather(before, publishing, after)
        await engine.close()
        return said[0], said[2]

    one, two = asyncio.run(body())
    assert (one.version, one.versions, two.version, two.versions) == (1, (), 2, ())
    assert one.tokens == two.tokens  # the weights are the same, only their version is another


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}])
def test_what_training_can_not_account_for_is_for_evaluation_alone(vllm_server, backbone, settings):
    async def body():
        engine = engine_of(backbone, vllm_server, **settings)
        ledger = prompt(backbone.renderer, "What?")
        said = await engine.generate(ledger, sampling_of(backbone.renderer, max_tokens=4))
        assert len(said.tokens) == 4
        with pytest.raises(ConfigError, match=f"engine.settings.{next(iter(settings))} samples from another"):
            await engine.publish(None, 1)
        await engine.close()

    asyncio.run(body())


def test_a_server_that_stands_still_loses_nothing(vllm_server, backbone, caplog):
    """The whole group is frozen in the middle of requests, long enough to be given up, and goes on."""
    renderer = backbone.renderer

    async def body():
        engine = engine_of(backbone, vllm_server, seconds=3.0, retries=8)
        await engine.publish(None, 1)
        ledgers = [prompt(renderer, f"What is {number}?") for number in range(8)]
        sampling = sampling_of(renderer, max_tokens=24)
        before = await asyncio.gather(*(engine.generate(each, sampling) for each in ledgers))
        os.killpg(vllm_server.pid, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(engine.generate(each, sampling)) for each in ledgers]
            await asyncio.sleep(8)
        finally:
            os.killpg(vllm_server.pid, signal.SIGCONT)
        after = await asyncio.gather(*tasks)
        await engine.close()
        return [said.tokens for said in before], [said.tokens for said in after]

    before, after = asyncio.run(body())
    assert before == after
    assert "the run waits up to 60 seconds" in caplog.text
    assert "answers again" in caplog.text


def test_pixels_survive_the_journey():
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


@pytest.mark.parametrize("transfer", ["files", "gloo"])
def test_tiny_rl_trains_through_it(vllm_server, tmp_path, transfer):
    """Six steps with six new editions of the weights; engine and trainer agree about every token of every step."""
    given = f"engine.settings.transfer={transfer}"
    recipe, rows = small_rl(tmp_path, vllm_server.wanted.model, vllm_server.wanted.url, given), []
    stages.rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 6
    # The weights moved in every step: an engine that had kept old ones would have been found out.
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-3


def test_tiny_rl_learns_while_it_rolls_out(vllm_server, tmp_path):
    """Attempts go on over new weights, from reply to reply; nobody learns from what is older than one version."""
    recipe, rows = small_rl(tmp_path, vllm_server.wanted.model, vllm_server.wanted.url, "rl.max_staleness=1"), []
    stages.rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 6
    assert 0 < max(row["staleness_max"] for row in rows) <= 1
    assert min(row["grad_norm"] for row in rows) > 0
