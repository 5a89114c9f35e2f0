"""A worker process of the executor `processes`: `python -m saccade.rollouts.worker_process DESCRIPTOR NUMBER`.

It ends with its executor, whose end closes the pipe.
"""

import asyncio
import io
import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Serve the executor at the other end of the connection whose file descriptor is the first argument."""
    connection, inbox = Connection(int(sys.argv[1])), asyncio.Queue[bytes]()
    loop = asyncio.new_event_loop()
    # From now on, so that the executor needn't wait until everything is imported.
    threading.Thread(target=_read, args=(connection, loop, inbox), name="saccade-rollouts", daemon=True).start()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_serve(connection, inbox, sys.argv[2]))


def _read(connection: Connection, loop: asyncio.AbstractEventLoop, inbox: "asyncio.Queue[bytes]") -> None:
    try:
        while True:
            loop.call_soon_threadsafe(inbox.put_nowait, connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)  # the executor has ended


async def _serve(connection: Connection, inbox: "asyncio.Queue[bytes]", number: str) -> None:
    from saccade.rollouts import messages
    from saccade.rollouts.worker import RolloutWorker

    worker = RolloutWorker(number)

    async def run_group(request: messages.GroupRequest) -> None:
        result = await worker.run_group(request, None)
        connection.send(messages.Finished(result or await worker.score_group(request.key)))

    async def handle(message: object) -> None:
        match message:
            case messages.WorkerSetup():
                if error := await worker.start(message):
                    connection.send(messages.Fatal(error))
                    raise SystemExit
            case messages.RunGroups(requests):
                for request in requests:
                    groups.create_task(run_group(request))
                await asyncio.sleep(0)  # they can be cancelled from now on
            case messages.Cancel(key):
                await worker.cancel(key)
            case messages.LoadWeights(state, version):
                await worker.pause()
                source: Any = _LoadedWeights(state)
                await worker.engine.sync_weights(source, version)
                await worker.resume(None)
                connection.send(messages.Synced(version))
            case messages.Close():
                raise SystemExit

    async with asyncio.TaskGroup() as groups:  # what isn't a group's own error ends the process
        while True:
            await handle(pickle.loads(await inbox.get()))


class _LoadedWeights:
    """Weights that another process has sent."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def state_dict(self) -> Any:
        import torch

        return torch.load(io.BytesIO(self._state), map_location="cpu", weights_only=True)


if __name__ == "__main__":
    main()
