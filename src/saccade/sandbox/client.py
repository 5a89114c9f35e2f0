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
from saccade.sandbox.limits import (
    MIB,
    ExecutionResult,
    FailureReason,
    IsolationMode,
    Limits,
    ShownImage,
    format_memory_shortage,
)
from saccade.sandbox.media import SealedImage, SealedMemory, Video, seal_images
from saccade.sandbox.protocol import IMAGE_LOCATION, Header, MessageKind

SETUP_TIMEOUT = 60.0
SHORTAGE_TIMEOUT = 5.0  # of a machine without memory, after which a worker that holds much of it is replaced
MIN_HELD_BYTES = 512 * MIB  # that make a worker a possible cause
_JOINED_BYTES = 2**16
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
        self._image_bytes_left = limits.images_mib * MIB  # of these
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

        Wait while this process has no descriptors for one more. Raises ConfigError if the machine is weaker than
        `isolation` requires, SandboxError if the sandbox itself fails.
        """
        if fork_server is None:
            fork_server = await asyncio.to_thread(forkserver_client.get_shared_server, isolation)
        async with fork_server.reserve_sandbox():
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
            new_images = new_images or {}
            self._later_images.update(new_images)
            self._next_number = max([self._next_number, *(number + 1 for number in new_images)])
            if shortage_result := await self._wait_for_memory():
                return shortage_result
            setup_messages = _pack_shown_images(new_images) if self._worker is not None else []
            execution = Execution(
                worker=self._worker or await self._start_worker(),
                limits=self._limits,
                videos=self._videos,
                next_number=self._next_number,
                images_left=self._images_left,
                image_bytes_left=self._image_bytes_left,
                count_threads=not self._fork_server.report.isolation.per_worker_user,
                slot=slot,
            )
            result = await self._execute(execution, code, setup_messages)
            self._later_images.update(enumerate(result.images, self._next_number))
            self._next_number += len(result.images)
            self._images_left -= len(result.images)
            self._image_bytes_left -= sum(len(image.rgb_bytes) for image in result.images)
            return result

    async def _wait_for_memory(self) -> ExecutionResult | None:
        """Wait until the machine has memory; return None, or the call's result if the worker held what is missing.

        Such a worker is dropped. Raises SandboxError if there is no memory although the worker isn't the cause.
        """
        monitor = forkserver_client.MEMORY_MONITOR
        if self._worker is not None and monitor.measure_shortage() > 0:
            with contextlib.suppress(SandboxError):
                await monitor.wait_for_memory(timeout=SHORTAGE_TIMEOUT)
            # A private file system is memory too; how much of it is used isn't visible from here.
            held_bytes = self._worker.read_memory_bytes()
            is_cause = held_bytes + self._limits.disk_mib * MIB >= max(MIN_HELD_BYTES, monitor.measure_shortage())
            if is_cause and monitor.measure_shortage() > 0:
                self._drop_worker()
                return ExecutionResult(
                    text="",
                    images=(),
                    error=format_memory_shortage(held_bytes),
                    failure_reason=FailureReason.MEMORY,
                    variables_kept=False,
                    seconds=0.0,
                )
        await monitor.wait_for_memory()
        return None

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
        if self._later_images:  # read at first use: they may be larger than the worker's memory
            with convert_errors(SandboxError, "shown images can't be restored"):
                parts = [image.rgb_bytes for image in self._later_images.values()]
                memories.append(await asyncio.to_thread(SealedMemory, parts))
            offset = 0
            for number, shown in self._later_images.items():
                header = Header(MessageKind.MAPPED_IMAGE, shown.width, shown.height, number, IMAGE_LOCATION.size)
                setup_messages.append(header.pack() + IMAGE_LOCATION.pack(len(memories) - 1, offset))
                offset += len(shown.rgb_bytes)
        setup_messages += [Header(MessageKind.VIDEO, number).pack() for number in range(len(self._videos))]
        setup_messages = _join_small(setup_messages)
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


def _join_small(messages: Sequence[bytes]) -> list[bytes]:
    """Join messages that are sent in a row, so that thousands of them take few sends."""
    joined: list[list[bytes]] = []
    size = _JOINED_BYTES
    for message in messages:
        if size + len(message) > _JOINED_BYTES:
            joined.append([])
            size = 0
        joined[-1].append(message)
        size += len(message)
    return [b"".join(parts) for parts in joined]


def _pack_shown_images(images: Mapping[int, ShownImage]) -> list[bytes]:
    """Pack messages that bind these images under their numbers."""
    messages = []
    for number, image in images.items():
        header = Header(MessageKind.IMAGE, image.width, image.height, number, len(image.rgb_bytes))
        messages += [header.pack(), image.rgb_bytes]
    return messages
