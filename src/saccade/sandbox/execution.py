"""One call on one worker: the message exchange, the time limit, and the result.

    Execution.run ──RUN──> worker ──IMAGE_SHOWN, VIDEO_REQUEST, DONE──> _read_until_done, the only reader of the socket
       └─ _start_monitoring, after MONITORING_DELAY, for calls that are still running:
           ├─ StdoutCapture      drains the stdout pipe from the event loop
           ├─ _end_time_slice    periodically: lets the scheduler pause a long cell in favor of others
           ├─ _check_time_limit  checks the cell's clock (time_limit.py) twice a second, and at the limit
           │    └─ _interrupt: SIGUSR1 repeatedly; after the grace period SIGKILL, which closes the socket
           ├─ _check_threads     forty times a second  ┐ where the kernel doesn't
           └─ _check_files       four times a second   ┘ limit them; files on a thread, since that takes long

Between calls a worker is stopped (SIGSTOP): its threads can't run, print or write during the model's turn. Its seccomp
filter refuses whatever could continue it; CPU time that it uses nevertheless, such as the rest of a long system call,
is charged to the next call. The host writes the request before it sends SIGCONT, so most calls finish before monitoring
starts.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import MediaError, SandboxError
from saccade.sandbox import limits, workdir
from saccade.sandbox.forkserver_client import WorkerHandle, receive_status
from saccade.sandbox.limits import ExecutionResult, FailureReason, Limits, ShownImage, is_too_narrow
from saccade.sandbox.media import Video, VideoRequest, get_decoder_pool
from saccade.sandbox.protocol import (
    BROKEN_EXIT_CODE,
    HEADER,
    NO_NONCE,
    NONCE_BYTES,
    CompletionStatus,
    Header,
    MessageKind,
    ProtocolError,
    parse_checked_header,
)
from saccade.sandbox.scheduler import CpuSlot
from saccade.sandbox.streams import StdoutCapture, wait_readable
from saccade.sandbox.time_limit import CellClock

INTERRUPT_INTERVAL, CLOCK_CHECK_INTERVAL = 0.5, 0.5
THREADS_CHECK_INTERVAL, FILES_CHECK_INTERVAL = 0.025, 0.25
EXIT_TIMEOUT = 5.0  # of a worker whose socket closed; on a busy machine a crashed process takes seconds to exit
MONITORING_DELAY = 0.005  # calls that finish earlier are never monitored
SHORT_SLICE_SECONDS, LONG_SLICE_SECONDS = 0.05, 0.5  # after which a short cell, a long cell gives up its slot
MAX_STOPPED_CPU_SECONDS = 0.03  # a worker that uses more CPU while it should be stopped is charged for that
_FAILURE_REASONS = {
    CompletionStatus.OK: None,
    CompletionStatus.RAISED: FailureReason.RAISED,
    CompletionStatus.INTERRUPTED: FailureReason.TIMEOUT,
    CompletionStatus.OUT_OF_MEMORY: FailureReason.MEMORY,
}
_SIGNAL_DESCRIPTIONS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGABRT: "abort",
    signal.SIGILL: "illegal instruction",
    signal.SIGSYS: "forbidden system call",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Execution:
    """One call; `next_number` is the number of the next shown image.

    `images_left` images, of `image_bytes_left` bytes together, may still be shown.
    """

    worker: WorkerHandle
    limits: Limits
    videos: Sequence[Video] = ()
    next_number: int = 0
    images_left: int = 0
    image_bytes_left: int = 0
    count_threads: bool = False
    slot: CpuSlot | None = None  # None: the call isn't scheduled
    is_setup: bool = False  # the worker's first call, before any of the model's code has run in it
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE_BYTES))
    images: list[ShownImage] = field(default_factory=list)
    kill_reason: FailureReason | None = None  # why the host killed the worker
    is_worker_lost: bool = False
    is_finished: bool = False
    _refusals: list[str] = field(default_factory=list)  # notes on images that aren't shown
    _num_image_bytes: int = 0  # of the shown ones
    _timed_out: asyncio.Event = field(default_factory=asyncio.Event)
    _files_check: asyncio.Task[None] | None = None
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _clock: CellClock = field(init=False)
    _is_final_read_done: bool = False
    _cpu_seconds_at_pause: float = 0.0

    def __post_init__(self) -> None:
        self._clock = CellClock(self.limits.timeout)

    async def run(self, code: str, setup_messages: Sequence[bytes] = ()) -> ExecutionResult:
        """Run the code and return its result; `setup_messages` are sent first.

        Raises SandboxError if the sandbox itself fails; the worker can't be used afterwards.
        """
        stdout = StdoutCapture(self.worker.stdout_fd, self.limits.max_chars)
        reason: FailureReason | None
        status, error = CompletionStatus.OK, ""
        try:
            status, error = await self._run_code(code, setup_messages, stdout)
            self.worker.send_signal(signal.SIGSTOP)
            self._finish(stdout)
            self._check_threads()
            await self._check_files()
        except ProtocolError:
            self._kill(FailureReason.PROTOCOL)
        except (EOFError, ConnectionError):
            await self._wait_for_exit()
        finally:
            self._finish(stdout)
        seconds = self._clock.elapsed
        if self.is_worker_lost:
            reason, error = await self._explain_loss(seconds)
        else:
            self.worker.cpu_seconds_at_stop = self.worker.read_cpu_seconds()
            reason, error = self._explain_completion(status, error, seconds)
        stdout.drain()
        text = stdout.decode_text()
        if self._refusals:
            text += "" if not text or text.endswith("\n") else "\n"
            text += "".join(self._refusals)
        return ExecutionResult(
            text=text,
            images=tuple(self.images),
            error=error if reason else None,
            failure_reason=reason,
            variables_kept=not self.is_worker_lost,
            seconds=seconds,
        )

    def _finish(self, stdout: StdoutCapture) -> None:
        """Stop monitoring, and the clock."""
        self.is_finished = True
        if not self._clock.is_paused:
            self._clock.pause()
        if self._files_check is not None:
            self._files_check.cancel()
        for timer in self._timers.values():
            timer.cancel()
        stdout.stop()

    async def _run_code(
        self, code: str, setup_messages: Sequence[bytes], stdout: StdoutCapture
    ) -> tuple[CompletionStatus, str]:
        connection, payload = self.worker.connection, code.encode("utf-8", "replace")
        stopped_cpu_seconds = self.worker.read_cpu_seconds() - self.worker.cpu_seconds_at_stop
        if not self.is_setup and stopped_cpu_seconds >= MAX_STOPPED_CPU_SECONDS:
            self._clock.charge(stopped_cpu_seconds)
        numbers = self.next_number, self.images_left, min(self.image_bytes_left, 2**32 - 1)
        header = Header(MessageKind.RUN, *numbers, payload_size=len(payload)).pack(self.nonce)
        if not self.is_setup and not connection.is_idle():
            raise ProtocolError("the worker sent bytes before its request")
        first, *others = *setup_messages, header + payload
        rest = connection.send_nowait(first)
        self.worker.send_signal(signal.SIGCONT)
        self._start_timer(min(MONITORING_DELAY, self.limits.timeout), self._start_monitoring, stdout)
        if rest:
            await connection.send(rest)
        for message in others:
            await connection.send(message)
        return await self._read_until_done()

    # ---- messages ----------------------------------------------------------------------------------------------------

    async def _read_until_done(self) -> tuple[CompletionStatus, str]:
        """Read messages until the call is done; return its status and error text."""
        while True:
            data = await self.worker.connection.read_exactly(HEADER.size)
            # A worker may report that its own setup failed only before any of the model's code has run.
            is_setup_failure = self.is_setup and data[:NONCE_BYTES] == NO_NONCE
            nonce = NO_NONCE if is_setup_failure else self.nonce
            header = parse_checked_header(data, nonce, self.limits, len(self.videos))
            size = header.payload_size
            if header.kind == MessageKind.IMAGE_SHOWN:
                self._check_image_limits(size)
            payload = bytes(await self.worker.connection.read_exactly(size)) if size else b""
            if is_setup_failure:
                reason = payload.decode("utf-8", "replace")
                raise SandboxError(f"the sandbox can't jail an interpreter: {reason}")
            if header.kind == MessageKind.DONE:
                return CompletionStatus(header.a), payload.decode("utf-8", "replace")
            if header.kind == MessageKind.VIDEO_REQUEST:
                await self._serve_video_request(header, memoryview(payload).cast("I").tolist())
            elif is_too_narrow(header.a, header.b):  # an intact worker doesn't send it
                self._refusals.append(limits.format_image_refusal(header.a, header.b, limits.TOO_NARROW))
            else:
                name = f"image_clue_{self.next_number + len(self.images)}"
                self.images.append(ShownImage(name=name, width=header.a, height=header.b, rgb_bytes=payload))
                self._num_image_bytes += size
            if header.kind == MessageKind.IMAGE_SHOWN:  # thousands may have arrived: other episodes run in between
                await asyncio.sleep(0)

    def _check_image_limits(self, size: int) -> None:
        """Check the number and total size of the call's images before another is read. Raises ProtocolError."""
        if len(self.images) + len(self._refusals) >= self.images_left:
            raise ProtocolError("more images than allowed")
        if self._num_image_bytes + size > self.image_bytes_left:
            raise ProtocolError("larger images than allowed")

    async def _serve_video_request(self, header: Header, numbers: list[int]) -> None:
        """Answer a request for frames or metadata of a video; refuse it after the time limit.

        Waiting for a decoder isn't charged. Decoding stops when the time limit is reached or the worker exits.
        """
        parts = _build_refusal("stopped")
        if not self._timed_out.is_set():
            video, name = self.videos[header.a], f"video_clue_{header.a}"
            request = VideoRequest(video, name, (header.b, header.c), numbers)
            try:
                if await self._load_video_request(request):
                    reply = Header(MessageKind.VIDEO_REPLY, payload_size=sum(map(len, request.parts))).pack()
                    parts = [reply, *request.parts]
            except MediaError as error:
                parts = _build_refusal(str(error))
        for part in parts:
            await self.worker.connection.send(part)

    async def _load_video_request(self, request: VideoRequest) -> bool:
        """Load a request slice by slice; return False if nothing waits for it anymore. Raises MediaError."""
        loop = asyncio.get_running_loop()
        stops: list[asyncio.Future[Any]] = [
            loop.create_task(self._timed_out.wait()),
            loop.create_task(wait_readable(self.worker.pidfd)),
        ]
        try:
            while not request.is_loaded:  # the pool serves slices first come, first served: episodes take turns
                self._clock.begin_decode_wait()
                loading = loop.run_in_executor(get_decoder_pool(), self._load_slice, request)
                try:
                    await asyncio.wait([loading, *stops], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._clock.end_decode_wait()
                    loading.cancel()
                if any(stop.done() for stop in stops):
                    return False
                loading.result()
            return True
        finally:
            request.cancel()
            for stop in stops:
                stop.cancel()

    def _load_slice(self, request: VideoRequest) -> None:
        """On a thread of the decoder pool: load a slice; from now on the time is charged."""
        self._clock.end_decode_wait()
        request.load_slice()

    # ---- the time limit ----------------------------------------------------------------------------------------------

    def _start_timer(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        self._cancel_timer(callback)
        self._timers[callback.__name__] = asyncio.get_running_loop().call_later(seconds, callback, *arguments)

    def _cancel_timer(self, callback: Callable[..., None]) -> None:
        if timer := self._timers.pop(callback.__name__, None):
            timer.cancel()

    def _start_monitoring(self, stdout: StdoutCapture) -> None:
        stdout.start()
        self._update_clock(self._clock.start, self._start_monitoring)
        self._start_timers(SHORT_SLICE_SECONDS - MONITORING_DELAY)
        self._check_threads()
        if self.worker.work_dir:
            self._start_timer(FILES_CHECK_INTERVAL, self._start_files_check)

    def _start_timers(self, seconds: float) -> None:
        """Start the expiry timer, and end the time slice after `seconds`."""
        self._start_expiry_timer(self._clock.remaining)
        if self.slot is not None:
            self._start_timer(seconds, self._end_time_slice, self.slot)

    def _end_time_slice(self, slot: CpuSlot) -> None:
        self._start_timer(LONG_SLICE_SECONDS, self._end_time_slice, slot)
        slot.end_time_slice(self)

    def pause(self) -> None:
        """Stop the worker until `resume`; the time until then isn't charged."""
        self._cpu_seconds_at_pause = self.worker.read_cpu_seconds()
        self.worker.send_signal(signal.SIGSTOP)
        self._update_clock(self._clock.update, self._check_time_limit)
        self._clock.pause()
        self._cancel_timer(self._end_time_slice)  # last, so that no failure leaves a cell running without a time limit
        self._cancel_timer(self._check_time_limit)

    def resume(self) -> None:
        """Let the worker run again."""
        if not self._clock.is_paused or self.is_finished:
            return
        self._clock.resume(
            is_charged=self.worker.read_cpu_seconds() - self._cpu_seconds_at_pause >= MAX_STOPPED_CPU_SECONDS
        )
        self._start_timers(LONG_SLICE_SECONDS)
        self.worker.send_signal(signal.SIGCONT)

    def _start_expiry_timer(self, seconds: float) -> None:
        self._start_timer(min(max(seconds, MONITORING_DELAY), CLOCK_CHECK_INTERVAL), self._check_time_limit)

    def _update_clock(self, update: Callable[[float, float, float], float], callback: Callable[..., None]) -> float:
        """Update the clock by what the worker has used, and by how many seconds the timer of `callback` is late."""
        timer = self._timers.get(callback.__name__)
        delay = 0.0 if timer is None else asyncio.get_running_loop().time() - timer.when()
        return update(delay, self.worker.read_queue_seconds(), self.worker.read_cpu_seconds())

    def _check_time_limit(self) -> None:
        self._update_clock(self._clock.update, self._check_time_limit)
        remaining = self._clock.remaining
        if remaining > 0:
            self._start_expiry_timer(remaining)
        elif not self._is_final_read_done and not self.worker.connection.is_idle():  # DONE may be waiting to be read
            self._is_final_read_done = True
            self._start_expiry_timer(MONITORING_DELAY)
        else:
            self._cancel_timer(self._end_time_slice)  # a pause would delay the end
            self._timed_out.set()
            self._interrupt(time.monotonic() + self.limits.grace_seconds)

    def _interrupt(self, deadline: float) -> None:
        deadline += self._update_clock(self._clock.update, self._interrupt)
        left = deadline - time.monotonic()
        if left <= 0:
            self._kill(FailureReason.TIMEOUT)
            return
        self.worker.send_signal(signal.SIGUSR1)
        self._start_timer(min(INTERRUPT_INTERVAL, left), self._interrupt, deadline)

    def _check_threads(self) -> None:
        """Kill a worker with too many threads, where the kernel doesn't limit them."""
        if not self.count_threads:
            return
        if self.worker.count_threads() > self.limits.max_threads:
            self._kill(FailureReason.THREADS)
        elif not self.is_finished:
            self._start_timer(THREADS_CHECK_INTERVAL, self._check_threads)

    def _start_files_check(self) -> None:
        self._files_check = asyncio.get_running_loop().create_task(self._check_files())

    async def _check_files(self) -> None:
        """Kill a worker with too many or too large files, where the kernel doesn't limit them."""
        if not self.worker.work_dir:
            return
        max_bytes, max_files = self.limits.disk_mib * limits.MIB, self.limits.max_files
        folder, proc_dir = self.worker.work_dir, self.worker.find_proc_dir()
        size, count = await asyncio.to_thread(workdir.measure_usage, folder, max_files, proc_dir)
        if size > max_bytes or count >= max_files:
            self._kill(FailureReason.DISK)
        elif not self.is_finished:
            self._start_timer(FILES_CHECK_INTERVAL, self._start_files_check)

    def _kill(self, reason: FailureReason) -> None:
        self.kill_reason, self.is_worker_lost = self.kill_reason or reason, True
        self.worker.send_signal(signal.SIGKILL)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _wait_for_exit(self) -> None:
        """Wait for the worker to exit after its socket closed; kill it if only its code closed the socket."""
        self.is_worker_lost = True
        try:
            async with asyncio.timeout(EXIT_TIMEOUT):
                await wait_readable(self.worker.pidfd)
        except TimeoutError:
            self._kill(FailureReason.PROTOCOL)

    async def _explain_loss(self, seconds: float) -> tuple[FailureReason, str]:
        """Return why the worker was lost, and the sentence for it. Raises SandboxError if the zygote ended too."""
        self.worker.send_signal(signal.SIGKILL)
        status, _ = await receive_status(self.worker.status_socket)
        is_cpu_limit_reached = status["cpu"] >= self.limits.cpu_seconds
        reason, detail = explain_exit(status["status"], is_cpu_limit_reached=is_cpu_limit_reached)
        if os.waitstatus_to_exitcode(status["status"]) == -signal.SIGKILL:  # else it exited before the host's kill
            reason = self.kill_reason or reason
        if reason is FailureReason.TIMEOUT:
            return reason, limits.format_timeout(self.limits, seconds, variables_kept=False)
        return reason, limits.format_restart(reason, self.limits, detail)

    def _explain_completion(
        self, status: CompletionStatus, error: str, seconds: float
    ) -> tuple[FailureReason | None, str]:
        """Return why a completed call failed, None if it didn't, and the text for the model."""
        reason = _FAILURE_REASONS[status]
        # The worker can't be trusted about time: a call timed out exactly if the host interrupted it.
        if self._timed_out.is_set() and reason in (None, FailureReason.TIMEOUT):
            return FailureReason.TIMEOUT, limits.format_timeout(self.limits, seconds, variables_kept=True)
        if reason is FailureReason.TIMEOUT:
            return FailureReason.RAISED, limits.INTERRUPTED_MESSAGE
        return reason, error


def explain_exit(status: int, *, is_cpu_limit_reached: bool = False) -> tuple[FailureReason, str]:
    """Return why a worker exited, from its wait status and whether it used up its CPU time, and a detail in words."""
    code = os.waitstatus_to_exitcode(status)
    if code == BROKEN_EXIT_CODE:
        return FailureReason.BROKEN, ""
    if code >= 0:
        return FailureReason.EXITED, f"exit code {code}"
    number = -code
    if number == signal.SIGXCPU or (number == signal.SIGKILL and is_cpu_limit_reached):  # code may ignore SIGXCPU
        return FailureReason.CPU, ""
    if number == signal.SIGKILL:  # sent by the code itself, or by the kernel when memory ran out
        return FailureReason.KILLED, ""
    name = signal.Signals(number).name if number in set(signal.Signals) else number  # real-time signals have no names
    return FailureReason.CRASHED, _SIGNAL_DESCRIPTIONS.get(number, f"signal {name}")


def _build_refusal(reason: str) -> list[Any]:
    text = reason.encode("utf-8", "replace")  # a file's name may hold lone surrogates
    return [Header(MessageKind.REFUSED, payload_size=len(text)).pack(), text]
