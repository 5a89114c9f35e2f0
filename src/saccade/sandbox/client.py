"""A sandbox for one episode: a Python interpreter that keeps its state between calls and runs code a model wrote.

    async with Sandbox.open(Limits(timeout=10), images=[image]) as sandbox:
        result = await sandbox.run("print(image_clue_0.size)")

A lost worker (killed at a limit, crashed) is replaced at the next call with media and shown images restored and
variables lost; the result of the call that lost it reports this. Cancelling a call kills the worker, not the sandbox.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from PIL import Image

from saccade.errors import SandboxError, convert_errors
from saccade.sandbox import forkserver_client
from saccade.sandbox.execution import Execution
from saccade.sandbox.forkserver_client import ForkServerClient, WorkerHandle
from saccade.sandbox.limits import ExecutionResult, IsolationMode, Limits, ShownImage
from saccade.sandbox.media import SealedImage, Video, seal_images
from saccade.sandbox.protocol import IMAGE_LOCATION, Header, MessageKind

SETUP_TIMEOUT = 60.0
MAX_SHARED_IMAGES = 200  # memory descriptors passed to a worker; further images are copied over the socket


class Sandbox:
    """The interpreter of one episode; see `open`. Concurrent calls run one after the other."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        limits: Limits,
        images: Sequence[SealedImage],
        videos: Sequence[Video],
        seed: int,
    ) -> None:
        self._fork_server, self._limits, self._seed = fork_server, limits, seed
        self._images, self._videos = images, videos
        self._next_number = len(images)
        self._later_images: dict[int, ShownImage] = {}  # images shown after the initial ones, by number
        self._images_left = limits.max_images  # that the code may still show
        self._worker: WorkerHandle | None = None
        self._call_lock = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        limits: Limits | None = None,
        *,
        images: Sequence[Image.Image | SealedImage] = (),
        videos: Sequence[Video] = (),
        seed: int = 0,
        isolation: IsolationMode = "best_effort",
        fork_server: ForkServerClient | None = None,
    ) -> AsyncIterator["Sandbox"]:
        """Open a sandbox whose media are the variables `image_clue_0`, … and `video_clue_0`, …, for the block.

        `images` may have any mode (they are converted to RGB); sandboxes may share a SealedImage. Images that the code
        shows continue their numbers. `seed` seeds random and numpy. Without `fork_server`, the process shares one fork
        server per isolation mode.

        Raises ConfigError if the machine is weaker than `isolation` requires, SandboxError if the sandbox itself fails.
        """
        if fork_server is None:
            fork_server = await asyncio.to_thread(forkserver_client.get_shared_server, isolation)
        with convert_errors(SandboxError, "images can't be loaded for an interpreter"):
            sealed = iter(await asyncio.to_thread(seal_images, [i for i in images if isinstance(i, Image.Image)]))
        all_sealed = [next(sealed) if isinstance(image, Image.Image) else image for image in images]
        sandbox = cls(fork_server, limits or Limits(), all_sealed, videos, seed)
        try:
            await sandbox._start_worker()
            yield sandbox
        finally:
            sandbox._drop_worker()

    async def run(self, code: str, new_images: Mapping[int, ShownImage] | None = None) -> ExecutionResult:
        """Run Python code and return its result, also if it fails. Raises SandboxError if the sandbox fails.

        `new_images` are images that other tools showed since the last call, by number; they become
        `image_clue_<number>`.
        """
        async with self._call_lock, self._fork_server.request_slot() as slot:
            await forkserver_client.MEMORY_MONITOR.wait_for_memory()
            new_images = new_images or {}
            self._later_images.update(new_images)
            self._next_number = max([self._next_number, *(number + 1 for number in new_images)])
            setup_messages = _pack_shown_images(new_images) if self._worker is not None else []
            execution = Execution(
                worker=self._worker or await self._start_worker(),
                limits=self._limits,
                videos=self._videos,
                next_number=self._next_number,
                images_left=self._images_left,
                count_threads=not self._fork_server.report.isolation.per_worker_user,
                slot=slot,
            )
            result = await self._execute(execution, code, setup_messages)
            self._later_images.update(enumerate(result.images, self._next_number))
            self._next_number += len(result.images)
            self._images_left -= len(result.images)
            return result

    async def _start_worker(self) -> WorkerHandle:
        """Start a worker that has all images and videos of the episode so far."""
        memories = list(dict.fromkeys(image.memory for image in self._images))[:MAX_SHARED_IMAGES]
        setup_messages = []
        for number, image in enumerate(self._images):
            if image.memory in memories:
                header = Header(MessageKind.MAPPED_IMAGE, image.width, image.height, number, IMAGE_LOCATION.size)
                location = IMAGE_LOCATION.pack(memories.index(image.memory), image.offset)
                setup_messages.append(header.pack() + location)
            else:
                header = Header(MessageKind.IMAGE, image.width, image.height, number, image.num_bytes)
                setup_messages += [header.pack(), image.read_bytes()]
        setup_messages += _pack_shown_images(self._later_images)
        setup_messages += [Header(MessageKind.VIDEO, number).pack() for number in range(len(self._videos))]
        with contextlib.ExitStack() as stack:
            shared_fds = [stack.enter_context(memory.open_fd()) for memory in memories]
            self._worker = await self._fork_server.spawn(self._limits, self._seed, shared_fds)
        setup = Execution(worker=self._worker, limits=replace(self._limits, timeout=SETUP_TIMEOUT), is_setup=True)
        result = await self._execute(setup, "", setup_messages)
        if self._worker is None or not result.ok:
            raise SandboxError(f"the sandbox can't prepare an interpreter: {result.error}")
        return self._worker

    async def _execute(self, execution: Execution, code: str, setup_messages: Sequence[bytes] = ()) -> ExecutionResult:
        """Run a call; drop the worker if it is lost, also when the call raises or is cancelled."""
        is_worker_reusable = False
        try:
            result = await execution.run(code, setup_messages)
            is_worker_reusable = result.variables_kept
            return result
        finally:
            if not is_worker_reusable:
                self._drop_worker()

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _pack_shown_images(images: Mapping[int, ShownImage]) -> list[bytes]:
    """Pack messages that bind these images under their numbers."""
    messages = []
    for number, image in images.items():
        header = Header(MessageKind.IMAGE, image.width, image.height, number, len(image.rgb_bytes))
        messages += [header.pack(), image.rgb_bytes]
    return messages
