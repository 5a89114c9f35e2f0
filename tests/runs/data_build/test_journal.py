"""The teacher's journal on a disk that fills while replies are on their way."""

import asyncio
import errno
import os

import pytest

from saccade.chat.message_renderer import MessageRenderer
from saccade.errors import RunError
from saccade.protocols import ChatEngine
from saccade.runs.data_build import journal
from saccade.runs.data_build.journal import Teacher
from saccade.types import Completion, FinishReason, Message
from saccade.utils.jsonl import encode_json_line

NUM_REQUESTS = 8


class Settings:
    temperature, max_tokens = 0.0, 100


class SlowEngine(ChatEngine):
    """Replies once all requests are on their way, each after the one before."""

    def __init__(self):
        self.renderer, self.num_sent = MessageRenderer(32), 0
        self.all_sent, self.turn = asyncio.Event(), asyncio.Lock()

    async def connect(self):
        return "m"

    async def generate(self, request):
        self.num_sent += 1
        if self.num_sent >= NUM_REQUESTS:
            self.all_sent.set()
        await self.all_sent.wait()
        async with self.turn:
            await asyncio.sleep(0)
            return Completion(
                text="red " * 50,
                num_text_tokens=50,
                tokens=(),
                logprobs=(),
                version=None,
                finish_reason=FinishReason.STOP,
            )

    def stop_sending(self):
        pass

    async def close(self):
        pass


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk with room for the reserve and three lines."""
    append = journal.append_jsonl

    def append_or_fail(path, item):
        used = sum(file.stat().st_size for file in tmp_path.iterdir())
        if used + len(encode_json_line(item)) > capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, item)

    capacity = NUM_REQUESTS * Settings.max_tokens * journal.MAX_BYTES_PER_TOKEN + 1000
    monkeypatch.setattr(journal, "append_jsonl", append_or_fail)
    return tmp_path / "captions.jsonl"


async def ask_all(path, engine):
    teacher = Teacher(engine, path, identity={}, max_failures=20)
    questions = [(Message(role="user", parts=(f"What is {i}?",)),) for i in range(NUM_REQUESTS)]
    requests = [teacher.ask(question, Settings(), seed=0) for question in questions]
    results = await asyncio.gather(*requests, return_exceptions=True)
    with pytest.raises(RunError):  # nothing is sent that could not be recorded
        await teacher.ask((Message(role="user", parts=("One more?",)),), Settings(), seed=0)
    await teacher.abort()
    return results


def test_replies_on_their_way_are_recorded_on_a_full_disk(disk):
    engine = SlowEngine()
    results = asyncio.run(ask_all(disk, engine))
    assert any(isinstance(result, RunError) for result in results)
    assert engine.num_sent == NUM_REQUESTS
    assert len(disk.read_text().splitlines()) == NUM_REQUESTS
    assert [path.name for path in disk.parent.iterdir()] == [disk.name]
