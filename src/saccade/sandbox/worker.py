"""The jailed interpreter: keeps its state from call to call and serves one host over one socket.

    host ──RUN──> compile, execute in `__main__` ──> IMAGE_SHOWN*, VIDEO_REQUEST/REPLY* ──> DONE (status, traceback)
      └─SIGUSR1─> raises `TimeLimitExceeded` in the running code, never during an exchange with the host

The code shares this process and may damage anything in it. That affects only its own episode: the host checks every
message and replaces a worker that violates the protocol.
"""

import _signal  # the wrappers in `signal` take longer than a short cell
import base64
import builtins
import gc
import io
import linecache
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.sandbox import figure_capture
from saccade.sandbox.limits import FORBIDDEN_HINT, Limits, format_omitted_images
from saccade.sandbox.protocol import (
    HEADER,
    IMAGE_LOCATION,
    MAX_BYTES_PER_REQUEST,
    MAX_ERROR_BYTES,
    MAX_FRAMES_PER_REQUEST,
    CompletionStatus,
    Header,
    MessageKind,
    VideoMetadata,
    unpack_header,
)
from saccade.sandbox.video_reader import VideoReader, VideoSource, cpu

MAX_TRACEBACK_CHARS = 6000
_RESERVE_BYTES = 4 * 2**20
_RECV_BYTES = 1 << 16
_RECURSION_LIMIT = 1000
_STDOUT_OPTIONS: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n", "line_buffering": True}
_compile, _execute, _AnyError = compile, exec, BaseException  # code may replace the built-in ones


class TimeLimitExceeded(BaseException):
    """Interrupts a call at its time limit. Not an Exception, so that `except Exception` doesn't catch it."""


class StdoutStream(io.TextIOWrapper):
    """Standard output; any change that code makes to it shows in its `vars`."""

    def reconfigure(self, **changes: Any) -> None:
        """Change the options, and record that they changed."""
        vars(self)["changed"] = True
        super().reconfigure(**changes)


def open_stdout() -> StdoutStream:
    """Open a line-buffered stream on descriptor 1, which stays open when the stream is closed."""
    return StdoutStream(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), **_STDOUT_OPTIONS)


class SharedImage(Image.Image):
    """An image that reads its RGB pixels from an offset of a shared descriptor at first use, lazily like `Image.open`.

    Reading moves no position, so threads may read other images from the same descriptor.
    """

    format = "RGB"
    _source: tuple[int, int] | None = None  # until the pixels are read: the descriptor and the offset

    def __init__(self, fd: int, offset: int, size: tuple[int, int]) -> None:
        super().__init__()
        self._mode, self._size, self._source = "RGB", size, (fd, offset)

    def load(self) -> Any:
        """Read the pixels unless they have been read; return their access object."""
        if self._source is not None:
            data = os.pread(self._source[0], 3 * self.width * self.height, self._source[1])
            self.im = Image.frombytes("RGB", self.size, data).im
            self._source = None
        return super().load()


class SandboxWorker:
    """One interpreter and its connection to the host."""

    def __init__(self, host_fd: int, limits: Limits, seed: int, shared_fds: Sequence[int] = ()) -> None:
        self._host, self._read_buffer = socket.socket(fileno=host_fd), b""
        self._shared_fds = shared_fds
        self._nonce = b""
        self._is_running_code = False  # the host may interrupt only running code
        self._in_exchange = self._stop_pending = False
        self._exchange_lock = threading.Lock()  # guards the socket; held by `serve` except while code runs
        self._main_thread_id = threading.get_ident()
        self._next_image = self._images_left = self._image_bytes_left = 0
        self._num_refused: dict[int | str, int] = {}  # images of this call, by the limit that they exceed
        self._cell_index = -1  # the first cell is the host's empty setup call
        self._limits = limits
        self._hint_given = False
        self._memory_reserve: NDArray[np.uint8] | None = np.empty(_RESERVE_BYTES, np.uint8)  # never touched
        self._builtins, self._original_builtins = vars(builtins), dict(vars(builtins))
        self._original_names = frozenset(self._original_builtins)
        self._main_module = ModuleType("__main__")
        sys.modules["__main__"] = self._main_module
        self.namespace = vars(self._main_module)
        self.namespace.update(np=np, Image=Image, io=io, base64=base64, VideoReader=VideoReader, cpu=cpu)
        self.namespace.update(figure_capture.build_namespace())
        self._stdout, self._stdout_stat = open_stdout(), os.fstat(1)
        figure_capture.connect(self._send_image, limits.max_image_pixels)
        warnings.formatwarning = format_warning
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def serve(self) -> NoReturn:
        """Serve the host's requests until it closes the socket."""
        self._exchange_lock.acquire()
        while True:
            self._read_buffer = self._read_buffer or self._host.recv(_RECV_BYTES)
            self._nonce, header = unpack_header(self._read(HEADER.size))
            if header.kind == MessageKind.VIDEO:
                source = VideoSource(header.a, self._request_video_metadata, self._request_frames)
                self.namespace[f"video_clue_{header.a}"] = VideoReader(source)
                continue
            payload = self._read(header.payload_size)
            if header.kind == MessageKind.IMAGE:
                self._bind_image(header.c, Image.frombytes("RGB", (header.a, header.b), payload))
            elif header.kind == MessageKind.MAPPED_IMAGE:
                index, offset = IMAGE_LOCATION.unpack(payload)
                self._bind_image(header.c, SharedImage(self._shared_fds[index], offset, (header.a, header.b)))
            else:
                _, self._next_image, self._images_left, self._image_bytes_left, _ = header
                self._num_refused = {}
                self._run_cell(payload.decode())

    def _bind_image(self, number: int, image: Image.Image) -> None:
        self.namespace[f"image_clue_{number}"] = self.namespace[f"image_hint_{number}"] = image

    # ---- a call ----------------------------------------------------------------------------------------------------

    def _run_cell(self, code: str) -> None:
        self._restore_state()  # threads of earlier cells may have changed it since
        self._cell_index += 1
        name = f"<cell {self._cell_index}>"
        linecache.cache[name] = len(code), None, [line + "\n" for line in code.split("\n")], name
        self._exchange_lock.release()  # threads of earlier cells may be waiting for it
        status, text = CompletionStatus.OK, ""
        try:
            self._is_running_code = True
            try:
                _execute(_compile(code, name, "exec", dont_inherit=True), self.namespace)
            finally:
                self._is_running_code = False
        except _AnyError as error:  # model-written code may raise anything
            self._restore_state()
            status, text = self._describe_error_safely(error)
        self._restore_state()  # after the exception: its __str__ and finalizers are model-written code too
        self._exchange_lock.acquire()  # waits for a thread's exchange to finish
        for limit, count in self._num_refused.items():
            self._stdout.write(format_omitted_images(count, limit))
        if self._memory_reserve is None:
            self._memory_reserve = np.empty(_RESERVE_BYTES, np.uint8)
        if not os.path.samestat(os.fstat(1), self._stdout_stat):
            raise OSError("the code closed or replaced standard output")
        self._send(MessageKind.DONE, status, payload=text.encode("utf-8", "backslashreplace"))

    def _restore_state(self) -> None:
        """Undo changes that code may have made to the interpreter, as far as the next call needs it."""
        _signal.signal(signal.SIGUSR1, self._handle_stop_signal)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(_RECURSION_LIMIT)
        sys.modules["__main__"] = self._main_module
        self.namespace["__builtins__"] = builtins
        gc.callbacks.clear()
        sys.unraisablehook, threading.excepthook = self._print_unraisable, self._print_unraisable
        for name in self._original_names.difference(self._builtins):
            self._builtins[name] = self._original_builtins[name]
        self._host.setblocking(True)
        if self._stdout.closed:
            self._stdout = open_stdout()
        if vars(self._stdout):
            self._stdout.reconfigure(**_STDOUT_OPTIONS)
            vars(self._stdout).clear()
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = self._stdout  # type: ignore[misc]

    def _print_unraisable(self, unraisable: Any) -> None:
        """Print an exception raised in a thread or a finalizer."""
        if unraisable.exc_value is not None and not isinstance(unraisable.exc_value, TimeLimitExceeded | SystemExit):
            self._stdout.write(f"{format_traceback(unraisable.exc_value)}\n")

    def _describe_error_safely(self, error: BaseException) -> tuple[CompletionStatus, str]:
        """Return the completion status, and the error text for the model."""
        try:
            self._is_running_code = True
            try:
                return self._describe_error(error)
            finally:
                self._is_running_code = False
        except TimeLimitExceeded:
            return CompletionStatus.INTERRUPTED, ""
        except _AnyError:  # its __str__ is model-written code too
            return CompletionStatus.RAISED, "The code raised an exception that can't be described."

    def _describe_error(self, error: BaseException) -> tuple[CompletionStatus, str]:
        if isinstance(error, TimeLimitExceeded):
            return CompletionStatus.INTERRUPTED, ""
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                self._stdout.write(f"{error.code}\n")
            return CompletionStatus.OK, ""
        is_memory_error = isinstance(error, MemoryError)
        if is_memory_error:
            self._memory_reserve = None  # frees memory to format the traceback
        text = format_traceback(error)
        if isinstance(error, PermissionError) and not self._hint_given:
            self._hint_given, text = True, f"{text}\n{FORBIDDEN_HINT}"
        status = CompletionStatus.OUT_OF_MEMORY if is_memory_error else CompletionStatus.RAISED
        return status, text or type(error).__name__

    @contextmanager
    def _defer_stop(self) -> Iterator[None]:
        """Hold the socket for an exchange with the host; delay an interrupt until the exchange is over."""
        if threading.get_ident() != self._main_thread_id:  # signals interrupt only the main thread
            with self._exchange_lock:
                yield
            return
        self._in_exchange = True
        try:
            with self._exchange_lock:
                yield
        finally:
            self._in_exchange = False
            stop_pending, self._stop_pending = self._stop_pending, False
            if stop_pending:
                raise TimeLimitExceeded  # replaces any other exception of the exchange

    def _handle_stop_signal(self, *_: object) -> None:
        if self._in_exchange:
            self._stop_pending = True
        elif self._is_running_code:
            raise TimeLimitExceeded

    # ---- images and videos -----------------------------------------------------------------------------------------

    def _send_image(self, image: Image.Image) -> None:
        """Send an image that the code showed, and bind it to the next `image_clue_*` variable."""
        with self._defer_stop():
            num_bytes = 3 * image.width * image.height
            if self._images_left <= 0 or num_bytes > self._image_bytes_left:
                limit = self._limits.max_images if self._images_left <= 0 else f"{self._limits.images_mib} MiB"
                self._num_refused[limit] = self._num_refused.get(limit, 0) + 1
                return
            self._send(MessageKind.IMAGE_SHOWN, *image.size, payload=image.tobytes())
            self.namespace[f"image_clue_{self._next_image}"] = image
            self._next_image, self._images_left = self._next_image + 1, self._images_left - 1
            self._image_bytes_left -= num_bytes

    def _request_video_metadata(self, video: int) -> VideoMetadata:
        with self._defer_stop():
            self._send(MessageKind.VIDEO_REQUEST, video)
            return VideoMetadata.unpack(self._read(self._read_reply().payload_size))

    def _request_frames(self, video: int, size: tuple[int, int], numbers: list[int]) -> NDArray[np.uint8]:
        """Return frames by number, uint8 [n, height, width, 3], requested in batches of the size the host allows."""
        width, height = size
        pixels = np.empty((len(numbers), height, width, 3), np.uint8)
        batch_size = min(MAX_FRAMES_PER_REQUEST, max(1, MAX_BYTES_PER_REQUEST // (3 * width * height)))
        for start in range(0, len(numbers), batch_size):
            batch = numbers[start : start + batch_size]
            with self._defer_stop():
                payload = struct.pack(f"<{len(batch)}I", *batch)
                self._send(MessageKind.VIDEO_REQUEST, video, width, height, payload=payload)
                self._read_reply()
                self._fill(pixels[start : start + batch_size].data.cast("B"))
        return pixels

    def _read_reply(self) -> Header:
        """Read the header of the host's reply. Raises RuntimeError with the host's reason if it refuses."""
        _, header = unpack_header(self._read(HEADER.size))
        if header.kind == MessageKind.REFUSED:
            raise RuntimeError(self._read(header.payload_size).decode())
        return header

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _send(self, kind: MessageKind, a: int = 0, b: int = 0, c: int = 0, payload: bytes = b"") -> None:
        try:  # noqa: SIM105 (code may have replaced what `suppress` calls)
            self._stdout.flush()
        except _AnyError:  # code may have closed it
            pass
        header = Header(kind, a, b, c, len(payload)).pack(self._nonce)
        if len(payload) > MAX_ERROR_BYTES:
            self._host.sendall(header)
            self._host.sendall(payload)
        else:  # in one send, so that the host wakes up once
            self._host.sendall(header + payload)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        buffered, self._read_buffer = self._read_buffer[: view.nbytes], self._read_buffer[view.nbytes :]
        view[: len(buffered)] = buffered
        view = view[len(buffered) :]
        while view.nbytes:
            count = self._host.recv_into(view)
            if not count:
                os._exit(0)  # the host closed the socket
            view = view[count:]


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning for the model: with a location only if that is in a cell."""
    location = f"{filename}:{lineno}: " if filename.startswith("<cell ") else ""
    return f"{location}{category.__name__}: {message}\n"


def format_traceback(error: BaseException) -> str:
    """Format a traceback for the model: only the frames of its own cells, with source lines, and the message."""
    root = traceback.TracebackException.from_exception(error, compact=True)
    queue: list[traceback.TracebackException] = [root]
    for entry in queue:  # grows while it is iterated
        own_frames = [frame for frame in entry.stack if frame.filename.startswith("<cell ")]
        entry.stack = traceback.StackSummary.from_list(own_frames)
        queue += [linked for linked in (entry.__cause__, entry.__context__) if linked is not None]
        queue += entry.exceptions or ()
    text = "".join(root.format()).rstrip()
    return text if len(text) <= MAX_TRACEBACK_CHARS else "[…]\n" + text[-MAX_TRACEBACK_CHARS:]
