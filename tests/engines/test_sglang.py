"""The SGLang engine beside a server that speaks as SGLang's source does, with a real model behind it."""

import asyncio
import contextlib
import random
import re
from pathlib import Path

import pytest
import torch
from sglang_server import ORDERS, server
from small_rl import small_rl

from saccade import stages
from saccade.config import Model
from saccade.engines._served import sglang_dialect
from saccade.engines.sglang import sglang
from saccade.errors import BrokenEngineError, EngineError
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.testing import PaintedMedia, check_engine
from saccade.types import Message, Sampling, Stop

pytestmark = pytest.mark.slow  # a model samples, token by token


@pytest.fixture
def backbone(tiny_folder):
    return Backbone(Model(path=tiny_folder, threads=1))


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def sampling_of(renderer, **settings):
    given = {"max_tokens": 6, "stop_ids": renderer.stop_ids, "forbidden_ids": renderer.forbidden_ids, **settings}
    return Sampling(**given)


def frame(renderer, time, wide=1):
    digest = "painted a.mp4"
    return Picture(path="a.mp4", digest=digest, time=time, width=wide * renderer.factor, height=renderer.factor)


@contextlib.asynccontextmanager
async def engine_of(backbone, *served, **settings):
    given = {"wait": 0.01, "patience": 60.0, "seconds": 60.0, **settings}
    engine = sglang(backbone, PaintedMedia(), servers=tuple(each.url for each in served), **given)
    try:
        yield engine
    finally:
        await engine.close()


def ask(backbone, served, *ledgers, sampling=None, **settings):
    """One request per ledger, all at once; completions, or the errors that were raised."""

    async def body():
        async with engine_of(backbone, served, **settings) as engine:
            wanted = sampling or sampling_of(backbone.renderer)
            asked = ledgers or (prompt(backbone.renderer, "What?"),)
            return await asyncio.gather(*(engine.generate(each, wanted) for each in asked), return_exceptions=True)

    return asyncio.run(body())


@torch.inference_mode()
def gap(backbone, ledger, said):
    """The largest |server - trainer| of the logprobs of a reply."""
    whole = ledger.act(said.tokens, logprobs=said.logprobs, version=0)
    features = backbone.features(whole.pictures(), PaintedMedia().pixels)
    hidden = backbone.hidden(
        torch.tensor([whole.expanded()]),
        torch.from_numpy(backbone.renderer.positions(whole))[:, None],
        torch.ones(len(whole), len(whole), dtype=torch.bool).tril()[None],
        features=type(features[0]).cat(features) if features else None,
    )
    logits = backbone.logits(hidden[0, len(ledger) - 1 : -1])
    logits[:, list(backbone.renderer.forbidden_ids)] = -torch.inf
    theirs = torch.tensor(said.logprobs)
    return float((logits.log_softmax(-1)[range(len(said.tokens)), list(said.tokens)] - theirs).abs().max())


def test_contract(tiny_folder, backbone):
    with server(tiny_folder) as served:
        engine = sglang(backbone, PaintedMedia(), servers=(served.url,))
        asyncio.run(check_engine(engine, backbone.renderer))
    assert not served.refused


# ---- what is said and understood -----------------------------------------------------------------------------------


def test_a_request_as_it_is_written(backbone):
    renderer = backbone.renderer
    ledger = prompt(renderer, frame(renderer, 1.0), "and", frame(renderer, 2.0, wide=3), "?")
    sampling = Sampling(temperature=0.5, max_tokens=7, seed=3, stop_ids=(5, 6), forbidden_ids=(8, 9))
    filters = {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    said = sglang_dialect.request(ledger, sampling, urls=["data:1", "data:2"], forbidden=["a", "b"], filters=filters)
    assert said == {
        "input_ids": list(ledger.compact()),
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
    # Whatever the operator of a server prefers, the whole distribution is sampled from where nothing else is wanted.
    plain = sglang_dialect.request(prompt(renderer, "?"), Sampling(), urls=[], forbidden=[], filters={})
    assert "image_data" not in plain
    assert plain["sampling_params"].items() >= {"top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}.items()
    assert plain["sampling_params"]["ignore_eos"], "without stop ids nothing ends a reply"


def test_a_reply_as_it_is_read():
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
    said = sglang_dialect.read(reply)
    assert (said.prompt, said.tokens, said.logprobs) == ((1, 2, 2, 3), (11, 12, 13), (-0.5, -1.5, 0.0))
    assert (said.spans, said.reason) == ((("a", 0, 2), ("b", 2, 3)), "stop")


def test_conversations_of_many_turns_and_pictures_are_the_servers_own(tiny_folder, backbone):
    """Every reply was compared with the ledger by the engine, and is as likely to the trainer as the server says."""
    renderer, seen = backbone.renderer, []

    async def talk(engine, seed):
        chance = random.Random(seed)
        pictures = [frame(renderer, float(seed + place), wide=chance.choice([1, 2, 3])) for place in range(seed % 3)]
        ledger = prompt(renderer, *pictures, f"Question {seed}?")
        for turn in range(3):
            said = await engine.generate(ledger, sampling_of(renderer, seed=seed * 3 + turn))
            seen.append((ledger, said))
            ledger = ledger.act(said.tokens, logprobs=said.logprobs, version=said.version)
            told = Message(role="tool", parts=("Look:", frame(renderer, float(chance.randrange(64)))))
            ledger = Ledger(segments=(*ledger.segments, renderer.render(ledger, (told,))))

    async def body(served):
        async with engine_of(backbone, served) as engine:
            await asyncio.gather(*(talk(engine, seed) for seed in range(6)))

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert len(seen) == 18
    assert max(len(ledger.pictures()) for ledger, _ in seen) == 4
    assert max(gap(backbone, ledger, said) for ledger, said in seen) <= 1e-4


def test_a_reply_ends_at_a_stop_id_and_nowhere_without_any(tiny_folder, backbone):
    renderer = backbone.renderer
    with server(tiny_folder) as served:
        (free,) = ask(backbone, served, sampling=sampling_of(renderer, max_tokens=8, stop_ids=()))
        (ended,) = ask(backbone, served, sampling=sampling_of(renderer, max_tokens=8, stop_ids=(free.tokens[3],)))
        served.ends = {free.tokens[2]}  # the checkpoint's own, of which this run knows nothing
        (open_,) = ask(backbone, served, sampling=sampling_of(renderer, max_tokens=8, stop_ids=()), parity=False)
        (cut,) = ask(backbone, served, sampling=sampling_of(renderer, max_tokens=8), parity=False, retries=0)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert (ended.stop, free.stop, open_.tokens) == (Stop.STOP, Stop.LENGTH, free.tokens)
    assert isinstance(cut, EngineError)
    assert "without a stop id" in str(cut)


def without(*path):
    def spoil(reply):
        inner = reply
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return spoil


def changed(value, *path):
    def spoil(reply):
        inner = reply
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return spoil


WRONG = {
    "no ids": without("output_ids"),
    "words": changed(["5"] * 6, "output_ids"),
    "logprobs of others": changed([[-1.0, 1, None]] * 6, "meta_info", "output_token_logprobs"),
    "too few logprobs": changed([], "meta_info", "output_token_logprobs"),
    "no finite logprob": changed(None, "meta_info", "output_token_logprobs", 0, 0),
    "a positive logprob": changed(0.5, "meta_info", "output_token_logprobs", 0, 0),
    "no prompt": without("prompt_token_ids"),
    "no versions": without("meta_info", "weight_versions"),
    "a gap between versions": changed(1, "meta_info", "weight_versions", 0, "start"),
    "strange weights": changed("theirs", "meta_info", "weight_versions", 0, "version"),
    "aborted": changed({"type": "abort", "message": "enough"}, "meta_info", "finish_reason"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_reply_is_never_learned_from(tiny_folder, backbone, what):
    def behave(number, reply):
        if number >= 0:
            WRONG[what](reply)

    with server(tiny_folder, behave=behave) as served:
        (error,) = ask(backbone, served, parity=False, retries=1)
    assert type(error) is EngineError, error
    assert "(2 attempts)" in str(error)
    assert served.told == 2


@pytest.mark.parametrize("does", [500, 503, b"<html>", "hang up"])
def test_a_failure_is_tried_again(tiny_folder, backbone, does):
    with server(tiny_folder, behave=lambda number, _: does if number == 0 else None) as served:
        (said,) = ask(backbone, served, parity=False)
    assert said.tokens, said
    assert served.told == 2


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_server_that_sees_no_pictures_stops_the_run_with_both_shown(tiny_folder, backbone):
    renderer = backbone.renderer
    with server(tiny_folder, blind=True) as served:
        (error,) = ask(backbone, served, prompt(renderer, frame(renderer, 1.0, wide=3), "?"), parity=False)
    assert type(error) is BrokenEngineError
    pad = renderer.forbidden_ids[0]
    assert re.search(rf"disagree about a prompt from token \d+ on.*the ledger \d+, .*{pad}, {pad}, {pad}", str(error))


def old(number, reply):
    del reply["prompt_token_ids"]


def raw(number, reply):
    for place, entry in enumerate(reply["meta_info"]["output_token_logprobs"]):
        entry[0] = -1.0 - place


REFUSED = [
    ({"lacks": ("/server_info",)}, "doesn't know /server_info; give the address of an SGLang server, 0.5.23 or newer"),
    ({"lacks": ("/generate",)}, "doesn't know /generate; give the address of an SGLang server"),
    ({"behave": old}, "doesn't say which ids it read, and with which weights; it takes SGLang 0.5.23 or newer"),
    ({"behave": raw}, "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ({"context": 1024}, "takes 1017 tokens, and a conversation may have 1024; start it with --context-length 1031"),
]


@pytest.mark.parametrize(("how", "sentence"), REFUSED)
def test_a_server_that_can_not_be_used_stops_the_run_with_its_mend(tiny_folder, backbone, how, sentence):
    with server(tiny_folder, **how) as served:
        (error,) = ask(backbone, served, context=1024)
    assert type(error) is BrokenEngineError
    assert sentence in str(error)
    assert not served.bodies


def test_the_room_that_is_promised_is_there(tiny_folder, backbone):
    """Up to the last token; of one more, SGLang would say less than it was asked for."""
    ledger = prompt(backbone.renderer, "What?")
    with server(tiny_folder, context=64) as served:
        room = 64 - 7 - len(ledger)
        (said,) = ask(backbone, served, sampling=Sampling(max_tokens=room), parity=False)
        (error,) = ask(backbone, served, sampling=Sampling(max_tokens=room + 1), parity=False)
    assert len(said.tokens) == room
    assert "takes 57 tokens, and a conversation may have 58; start it with --context-length 65" in str(error)


def test_a_server_of_other_weights_or_another_vocabulary_is_refused(tiny_folder, backbone, tmp_path):
    from saccade.model.tiny import make_tiny

    make_tiny(tmp_path / "other", vocabulary_text=("quite other words make another vocabulary",))
    with server(tmp_path / "other") as served:
        (error,) = ask(backbone, served)
    assert "vocabulary is another than the model's" in str(error)
    with torch.no_grad():
        backbone.model.lm_head.weight.mul_(1.5)
    with server(tiny_folder) as served:
        (error,) = ask(backbone, served)
    assert "samples from other weights than the trainer's" in str(error)


def test_seeds_that_decide_nothing_are_told_of_and_no_hindrance(tiny_folder, backbone, caplog):
    """The servers sample differently, and can be compared all the same."""

    async def body(*served):
        async with engine_of(backbone, *served) as engine:
            await engine.publish(None, 1)
            while not all(each.up for each in engine._pool.servers):
                await asyncio.sleep(0.01)
            await engine.publish(None, 2)
            assert all(each.up for each in engine._pool.servers)

    with server(tiny_folder, seeded=False) as one, server(tiny_folder, seeded=False) as other:
        asyncio.run(body(one, other))
    assert caplog.text.count("seeds decide nothing there") == 2
    assert "--enable-deterministic-inference" in caplog.text


# ---- new weights ---------------------------------------------------------------------------------------------------


def move(backbone):
    with torch.no_grad():
        for parameter in backbone.parameters:
            parameter.mul_(1.1)


@pytest.mark.parametrize(
    ("pause", "orders"),
    [
        ("wait", [(ORDERS[1], ""), (ORDERS[2], "")]),
        ("keep", [(ORDERS[0], "retract"), (ORDERS[1], ""), (ORDERS[2], "")]),
    ],
)
def test_new_weights_are_taken_while_it_runs(tiny_folder, backbone, pause, orders):
    renderer, likely = backbone.renderer, []
    ledger = prompt(renderer, frame(renderer, 3.0), "What?")

    async def body(served):
        async with engine_of(backbone, served, pause=pause) as engine:
            for version in (1, 2, 3):
                move(backbone)
                await engine.publish(None, version)
                said = await engine.generate(ledger, sampling_of(renderer, temperature=0.0))
                assert said.version == version == engine.version
                likely.append(said.logprobs)

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert len(set(likely)) == 3
    assert served.orders == orders * 3


@pytest.mark.parametrize("pause", ["wait", "keep"])
def test_a_reply_under_way_when_new_weights_come(tiny_folder, backbone, pause):
    """It ends first, or goes on; each token is as likely to the weights of its version as the server says."""
    renderer, states = backbone.renderer, {}
    ledger = prompt(renderer, frame(renderer, 3.0), "What?")

    async def body(served):
        async with engine_of(backbone, served, pause=pause) as engine:
            for version in (1, 2):
                move(backbone)
                states[version] = {name: value.clone() for name, value in backbone.model.state_dict().items()}
                if version == 2:
                    served.pace = 0.02
                    task = asyncio.create_task(
                        engine.generate(ledger, sampling_of(renderer, max_tokens=30, stop_ids=()))
                    )
                    while not served.open:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.3)
                await engine.publish(None, version)
            return await task

    with server(tiny_folder) as served:
        said = asyncio.run(body(served))
    if pause == "wait":
        assert (said.version, said.versions) == (1, ())
        backbone.model.load_state_dict(states[1])
        assert gap(backbone, ledger, said) <= 1e-4
        return
    assert said.versions == tuple(sorted(said.versions))
    assert set(said.versions) == {1, 2}
    first = said.versions.count(1)
    for version, part in ((1, slice(0, first)), (2, slice(first, None))):
        backbone.model.load_state_dict(states[version])
        before = ledger.force(said.tokens[:first]) if version == 2 else ledger
        own = type(said)(tokens=said.tokens[part], logprobs=said.logprobs[part], version=version, stop=said.stop)
        assert gap(backbone, before, own) <= 1e-4


def test_a_server_that_comes_back_is_given_the_published_weights_first(tiny_folder, backbone):
    renderer = backbone.renderer
    ledger, greedy = prompt(renderer, "What?"), sampling_of(renderer, temperature=0.0)

    async def body():
        with server(tiny_folder) as first:
            async with engine_of(backbone, first, retries=40, patience=30.0) as engine:
                move(backbone)
                await engine.publish(None, 3)
                before = await engine.generate(ledger, greedy)
                first.behave = lambda number, reply: "hang up"
                waiting = asyncio.create_task(engine.generate(ledger, greedy))
                await asyncio.sleep(0.2)
                first.behave, first.label = None, "default"  # as after a restart
                first.run(first.engine.publish(Backbone(Model(path=tiny_folder)).model.state_dict(), 0))
                return before, await waiting

    before, after = asyncio.run(body())
    assert (after.version, after.tokens, after.logprobs) == (3, before.tokens, before.logprobs)


@pytest.mark.parametrize("pause", ["wait", "keep"])
def test_weights_that_the_server_can_not_read_are_not_published(tiny_folder, backbone, tmp_path, pause):
    """Its own words reach the user; nothing is left behind, and the server serves others as before."""

    async def body(served):
        async with engine_of(backbone, served, folder=str(tmp_path), pause=pause) as engine:
            await engine.generate(prompt(backbone.renderer, "?"), sampling_of(backbone.renderer))
            served.sees, engine._pool._patience = False, 0.5
            with pytest.raises(BrokenEngineError, match=r"no SGLang server.*with 400: Failed to get weights iterator"):
                await engine.publish(None, 1)

    with server(tiny_folder) as served:
        asyncio.run(body(served))
    assert not served.paused
    assert not list(tmp_path.glob("saccade-*"))


def test_tiny_rl_trains_through_it(tiny_folder, tmp_path):
    """Two steps with new weights after each; engine and trainer agree about every token."""
    overrides, rows = ["rl.steps=2", "rl.save_every=2", "rl.prompts=1", "sampling.max_tokens=8"], []
    with server(tiny_folder) as served:
        recipe = small_rl(tmp_path, Path(tiny_folder), served.url, *overrides, engine="sglang")
        stages.rl(tmp_path / "run", recipe, on_step=lambda step, row: rows.append(row))
    assert len(rows) == 2
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-3
    assert not served.refused
