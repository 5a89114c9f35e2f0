"""The scripted engine beyond the contract: order, stops, what it remembers."""

import asyncio

import pytest

from saccade.engines.scripted import scripted
from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.types import Sampling, Stop

PROMPT = Ledger().observe((1, 2, 3))


def test_replies_are_said_in_order_as_tokens(renderer):
    async def body():
        engine = scripted(renderer, replies=("red", "blue"))
        sampling = Sampling(stop_ids=renderer.stop_ids)
        return engine, [await engine.generate(PROMPT, sampling) for _ in range(2)]

    engine, (red, blue) = asyncio.run(body())
    assert renderer.parse(red.tokens).text == "red"
    assert renderer.parse(blue.tokens).text == "blue"
    assert red.tokens == (*renderer.encode("red"), renderer.stop_ids[0])
    assert red.stop is Stop.STOP
    assert engine.served == [(PROMPT, red), (PROMPT, blue)]


@pytest.mark.parametrize(("room", "stop"), [(0, Stop.LENGTH), (1, Stop.STOP)])
def test_a_reply_is_cut_where_its_stop_does_not_fit(renderer, room, stop):
    size = len(renderer.encode("red blue"))
    engine = scripted(renderer, replies=("red blue",))
    sampling = Sampling(stop_ids=renderer.stop_ids, max_tokens=size + room)
    completion = asyncio.run(engine.generate(PROMPT, sampling))
    assert completion.stop is stop
    assert len(completion.tokens) == len(completion.logprobs) == size + room


def test_a_closed_engine_fails_what_waits_and_what_comes(renderer):
    async def body():
        engine = scripted(renderer, replies=lambda ledger: "red", seconds=0.01)
        waiting = asyncio.ensure_future(engine.generate(PROMPT, Sampling()))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="while a reply was under way"):
            await waiting
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(PROMPT, Sampling())

    asyncio.run(body())
