"""The scripted engine beyond the contract: order, stop ids, history."""

import asyncio

import pytest
from error_cases import raises

from saccade.engines.scripted import Scripted
from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.types import FinishReason, GenerationRequest, SamplingParams

PROMPT = Ledger().observe((1, 2, 3))


def test_replies_are_returned_in_order_as_tokens(renderer):
    async def body():
        engine = Scripted(renderer, replies=("red", "blue"))
        sampling = SamplingParams(stop_ids=renderer.stop_ids)
        return engine, [await engine.generate(GenerationRequest(PROMPT, sampling)) for _ in range(2)]

    engine, (red, blue) = asyncio.run(body())
    assert renderer.parse(red.tokens).text == "red"
    assert renderer.parse(blue.tokens).text == "blue"
    assert red.tokens == (*renderer.encode("red"), renderer.stop_ids[0])
    assert red.finish_reason is FinishReason.STOP
    assert engine.history == [(PROMPT, red), (PROMPT, blue)]


@pytest.mark.parametrize(("room", "stop"), [(0, FinishReason.LENGTH), (1, FinishReason.STOP)])
def test_a_reply_is_truncated_at_max_tokens(renderer, room, stop):
    size = len(renderer.encode("red blue"))
    engine = Scripted(renderer, replies=("red blue",))
    sampling = SamplingParams(stop_ids=renderer.stop_ids, max_tokens=size + room)
    completion = asyncio.run(engine.generate(GenerationRequest(PROMPT, sampling)))
    assert completion.finish_reason is stop
    assert len(completion.tokens) == len(completion.logprobs) == size + room


def test_close_fails_pending_and_later_requests(renderer):
    async def body():
        engine = Scripted(renderer, replies=lambda ledger: "red", latency=0.01)
        request = asyncio.ensure_future(engine.generate(GenerationRequest(PROMPT, SamplingParams())))
        await asyncio.sleep(0)
        await engine.close()
        with raises(EngineError):
            await request
        with raises(EngineError):
            await engine.generate(GenerationRequest(PROMPT, SamplingParams()))

    asyncio.run(body())
