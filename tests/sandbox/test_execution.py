"""One call on one worker: thousands of messages don't occupy the event loop of the host."""

import asyncio
from types import SimpleNamespace

from sandbox_cases import LONG_LIMITS, run_cells

from saccade.sandbox import Limits
from saccade.sandbox.execution import Execution
from saccade.sandbox.protocol import CompletionStatus, Header, MessageKind
from saccade.sandbox.streams import WorkerConnection

NUM_IMAGES = 500


class BufferedConnection:
    """A connection whose messages have all arrived, so that no read waits."""

    def __init__(self, data):
        self._data = memoryview(data)

    async def read_exactly(self, size):
        part, self._data = self._data[:size], self._data[size:]
        return bytes(part)


def test_other_tasks_run_between_images_that_arrive_at_once():
    async def body():
        execution = Execution(worker=None, limits=Limits(), images_left=NUM_IMAGES, image_bytes_left=3 * NUM_IMAGES)
        image = Header(MessageKind.IMAGE_SHOWN, 1, 1, 0, 3).pack(execution.nonce) + b"rgb"
        data = image * NUM_IMAGES + Header(MessageKind.DONE).pack(execution.nonce)
        execution.worker = SimpleNamespace(connection=BufferedConnection(data))
        reading = asyncio.ensure_future(execution._read_until_done())
        num_turns = 0
        while not reading.done():
            num_turns += 1
            await asyncio.sleep(0)
        assert reading.result() == (CompletionStatus.OK, "")
        assert len(execution.images) == NUM_IMAGES
        return num_turns

    assert asyncio.run(body()) >= NUM_IMAGES


def test_a_replaced_worker_receives_its_images_in_few_sends(server, monkeypatch):
    sends, send = [], WorkerConnection.send

    async def count_and_send(connection, data):
        sends.append(len(data))
        await send(connection, data)

    limits = Limits(timeout=LONG_LIMITS.timeout, max_images=NUM_IMAGES)
    show, die = f"for _ in range({NUM_IMAGES}): Image.new('RGB', (1, 1), 'red').show()", "import os; os._exit(0)"
    monkeypatch.setattr(WorkerConnection, "send", count_and_send)
    *_, last = run_cells(server, show, die, f"print(image_clue_{NUM_IMAGES - 1}.getpixel((0, 0)))", limits=limits)
    assert last.text == "(255, 0, 0)\n"
    assert len(sends) < NUM_IMAGES / 10
