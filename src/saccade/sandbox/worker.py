"""Inside the jail: an interpreter that keeps its state from call to call, serving one host over one socket.

    host ──RUN──> compile, execute in `__main__` ──> SHOWN*, ASK/FRAMES* ──> DONE (verdict, traceback)
      └─SIGUSR1─> raises `Stopped` in the running code, never in the middle of an exchange with the host

The code shares this process and may damage anything in it. That can only hurt its own episode: the host believes
nothing that it can't check, and replaces a guest that breaks the rules.
"""

import _signal  # what `signal` wraps around these calls takes longer than a short cell
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
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from saccade.tools._sandbox import gallery
from saccade.tools._sandbox.limits import FORBIDDEN_HINT, Limits
from saccade.tools._sandbox.reader import Facts, Film, VideoReader, cpu
from saccade.tools._sandbox.wire import (
    ASK_BYTES,
    ASK_FRAMES,
    ERROR_BYTES,
    FACTS,
    HEAD,
    PART,
    Head,
    Kind,
    Verdict,
    unpack,
)

TRACE_CHARACTERS = 6000
_BALLAST = 4 * 2**20
_AT_ONCE = 1 << 16  # bytes that are read ahead of their use
_RECURSION = 1000
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n", "line_buffering": True}
_compile, _execute = compile, exec  # code may change the built-in ones for itself


class Stopped(BaseException):
    """The call has run for too long. Not an Exception, so that `except Exception` doesn't catch it."""


class Caught:
    """Whatever is raised in its block ends there and is kept: a guest exists to run code that may raise anything."""

    error: BaseException | None = None

    def __enter__(self) -> "Caught":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return True


class Text(io.TextIOWrapper):
    """What is printed; whatever is changed about it leaves something in its `vars`."""

    def reconfigure(self, **changes: Any) -> None:
        """Change how it is written."""
        vars(self)["changed"] = True
        super().reconfigure(**changes)


class Window(io.RawIOBase):
    """A file to read from, at a place of its own: threads may read other pictures from the same descriptor."""

    def __init__(self, place: int) -> None:
        self._place, self._at = place, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte, counted from the beginning."""
        self._at = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; how many bytes there were."""
        count = os.preadv(self._place, [buffer], self._at)
        self._at += count
        return count


class StillImageFile(ImageFile.ImageFile):
    """A picture whose pixels are read at first use, as those of `Image.open` are: raw RGB from a byte of a file on."""

    format = "RGB"

    def __init__(self, file: Any, size: tuple[int, int], offset: int) -> None:
        self._asked, self._offset = size, offset
        super().__init__(file)

    def _open(self) -> None:
        self._size, self._mode = self._asked, "RGB"
        self.tile = [ImageFile._Tile("raw", (0, 0, *self._asked), self._offset, ("RGB", 0, 1))]


class Guest:
    """One interpreter and its connection."""

    def __init__(self, line: int, limits: Limits, seed: int, shared: Sequence[int] = ()) -> None:
        self._line, self._ahead = socket.socket(fileno=line), b""
        self._shared = shared
        self._nonce = b""
        self._running = False  # what the host may stop
        self._busy = self._late = False
        self._turn = threading.Lock()  # to speak on the line: the server's own but while code runs
        self._me = threading.get_ident()
        self._next = self._left = self._refused = 0
        self._cells = -1  # the first is the host's, to see that all is well
        self._pictures = limits.pictures
        self._sizes: dict[int, tuple[int, int]] = {}
        self._hinted = False
        self._ballast: NDArray[np.uint8] | None = np.empty(_BALLAST, np.uint8)  # never touched
        self._builtins, self._known = vars(builtins), dict(vars(builtins))
        self._names = frozenset(self._known)
        self._main = ModuleType("__main__")
        sys.modules["__main__"] = self._main
        self.space = vars(self._main)
        self.space.update(np=np, Image=Image, io=io, base64=base64, VideoReader=VideoReader, cpu=cpu)
        self.space.update(gallery.names())
        self._text, self._pipe = self._open_text(), os.fstat(1)
        gallery.GALLERY.open_to(self._hang, limits.pixels)
        warnings.formatwarning = warned
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def serve(self) -> NoReturn:
        """Do what the host says until it hangs up."""
        self._turn.acquire()
        while True:
            self._ahead = self._ahead or self._line.recv(_AT_ONCE)
            self._nonce, head = unpack(self._read(HEAD.size))
            if head.kind == Kind.FILM:
                film = Film(head.a, self._facts, self._frames)
                self.space[f"video_clue_{head.a}"] = VideoReader(film)
                continue
            payload = self._read(head.size)
            if head.kind == Kind.STILL:
                self._name(head.c, Image.frombytes("RGB", (head.a, head.b), payload))
            elif head.kind == Kind.MAPPED:
                place, offset = PART.unpack(payload)
                self._name(head.c, StillImageFile(Window(self._shared[place]), (head.a, head.b), offset))
            else:
                self._next, self._left, self._refused = head.a, head.b, 0
                self._run(payload.decode())

    def _name(self, number: int, picture: Image.Image) -> None:
        self.space[f"image_clue_{number}"] = self.space[f"image_hint_{number}"] = picture

    # ---- a call ----------------------------------------------------------------------------------------------------

    def _run(self, source: str) -> None:
        self._settle()  # threads of earlier code may have run since
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = len(source), None, [line + "\n" for line in source.split("\n")], name
        caught = Caught()
        self._turn.release()  # to threads of earlier code too, which have waited for it
        with caught:
            self._running = True
            try:
                _execute(_compile(source, name, "exec", dont_inherit=True), self.space)  # the purpose of all this
            finally:
                self._running = False
        self._settle()
        verdict, text = Verdict.FINE, ""
        if caught.error is not None:
            verdict, text = self._judged(caught.error)
            caught.error = None
            self._settle()  # what an exception says, and what ends with it, is code too
        self._turn.acquire()  # a thread may be in the middle of an exchange
        if self._refused:
            self._text.write(f"[{self._refused} further images not shown, limit {self._pictures}]\n")
        if self._ballast is None:
            self._ballast = np.empty(_BALLAST, np.uint8)
        if not os.path.samestat(os.fstat(1), self._pipe):
            raise OSError("an interpreter that can't print any more is of no use")
        self._send(Kind.DONE, verdict, payload=text.encode("utf-8", "backslashreplace"))

    def _settle(self) -> None:
        """Take back what code may have changed for itself, as far as the next call needs it."""
        _signal.signal(signal.SIGUSR1, self._stop)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
        sys.settrace(None)
        sys.setprofile(None)
        sys.setrecursionlimit(_RECURSION)
        sys.modules["__main__"] = self._main
        self.space["__builtins__"] = builtins
        gc.callbacks.clear()
        sys.unraisablehook, threading.excepthook = self._ignore, self._ignore
        for name in self._names.difference(self._builtins):
            self._builtins[name] = self._known[name]
        self._line.setblocking(True)
        if self._text.closed:
            self._text = self._open_text()
        if vars(self._text):
            self._text.reconfigure(**_TEXT)
            vars(self._text).clear()
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = self._text  # type: ignore[misc]

    def _ignore(self, failed: Any) -> None:
        """Tell of an exception that nobody can catch: in a thread, in a finalizer."""
        if failed.exc_value is not None and not isinstance(failed.exc_value, Stopped | SystemExit):
            self._text.write(f"{told(failed.exc_value)}\n")

    def _judged(self, error: BaseException) -> tuple[Verdict, str]:
        """The verdict on how the code ended, and the text for the model."""
        # What an exception says of itself is code of the model's too, and may raise another or run for ever.
        caught, judged = Caught(), (Verdict.RAISED, "The code raised an exception that can't be described.")
        with caught:
            self._running = True
            try:
                judged = self._verdict(error)
            finally:
                self._running = False
        return (Verdict.INTERRUPTED, "") if type(caught.error) is Stopped else judged

    def _verdict(self, error: BaseException) -> tuple[Verdict, str]:
        if isinstance(error, Stopped):
            return Verdict.INTERRUPTED, ""
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                self._text.write(f"{error.code}\n")
            return Verdict.FINE, ""
        memory = isinstance(error, MemoryError)
        if memory:
            self._ballast = None
        text = told(error)
        if isinstance(error, PermissionError) and not self._hinted:
            self._hinted, text = True, f"{text}\n{FORBIDDEN_HINT}"
        return Verdict.MEMORY if memory else Verdict.RAISED, text or type(error).__name__

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Exchange messages with the host; a stop waits until the exchange is over."""
        if threading.get_ident() != self._me:  # which alone is stopped
            with self._turn:
                yield
            return
        self._busy = True
        try:
            with self._turn:
                yield
        finally:
            self._busy = False
            late, self._late = self._late, False
            if late:
                raise Stopped  # whatever else went wrong

    def _stop(self, *_: object) -> None:
        if self._busy:
            self._late = True
        elif self._running:
            raise Stopped

    # ---- pictures and videos ---------------------------------------------------------------------------------------

    def _hang(self, picture: Image.Image) -> None:
        """Send a picture that was shown; from here on it is a variable too."""
        with self._undisturbed():
            if self._left <= 0:
                self._refused += 1
                return
            self._send(Kind.SHOWN, *picture.size, payload=picture.tobytes())
            self.space[f"image_clue_{self._next}"] = picture
            self._next, self._left = self._next + 1, self._left - 1

    def _facts(self, video: int) -> Facts:
        with self._undisturbed():
            self._send(Kind.ASK, video)
            payload = self._read(self._answer().size)
        fps, seconds, width, height, frames, keys = FACTS.unpack_from(payload)
        times = np.frombuffer(payload, "<f8", frames, FACTS.size)
        numbers = np.frombuffer(payload, "<u4", keys, FACTS.size + times.nbytes)
        self._sizes[video] = width, height
        return Facts(fps, seconds, (width, height), times, numbers.tolist())

    def _frames(self, video: int, width: int, height: int, numbers: list[int]) -> NDArray[np.uint8]:
        """The frames of these numbers, uint8 [n, height, width, 3]; asked for in portions that the host allows."""
        across, down = (width, height) if width else self._sizes[video]
        pixels = np.empty((len(numbers), down, across, 3), np.uint8)
        portion = min(ASK_FRAMES, max(1, ASK_BYTES // (3 * across * down)))
        for start in range(0, len(numbers), portion):
            some = numbers[start : start + portion]
            with self._undisturbed():
                self._send(Kind.ASK, video, width, height, payload=struct.pack(f"<{len(some)}I", *some))
                self._answer()
                self._fill(pixels[start : start + portion].data.cast("B"))
        return pixels

    def _answer(self) -> Head:
        """The head of the host's answer. Raises RuntimeError with the host's reason where it refuses."""
        _, head = unpack(self._read(HEAD.size))
        if head.kind == Kind.REFUSED:
            raise RuntimeError(self._read(head.size).decode())
        return head

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _open_text(self) -> "Text":
        raw = io.FileIO(1, "w", closefd=False)
        return Text(io.BufferedWriter(raw), **_TEXT)

    def _send(self, kind: Kind, a: int = 0, b: int = 0, c: int = 0, payload: bytes = b"") -> None:
        with Caught():  # code may have closed it
            self._text.flush()
        head = Head(kind, a, b, c, len(payload)).packed(self._nonce)
        if len(payload) > ERROR_BYTES:
            self._line.sendall(head)
            self._line.sendall(payload)
        else:  # at once: the host is woken once
            self._line.sendall(head + payload)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        here, self._ahead = self._ahead[: view.nbytes], self._ahead[view.nbytes :]
        view[: len(here)] = here
        view = view[len(here) :]
        while view.nbytes:
            count = self._line.recv_into(view)
            if not count:
                os._exit(0)  # the host has hung up
            view = view[count:]


def warned(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning as a model should read it: its place only where that is in a cell."""
    place = f"{filename}:{lineno}: " if filename.startswith("<cell ") else ""
    return f"{place}{category.__name__}: {message}\n"


def told(error: BaseException) -> str:
    """The traceback as a model should read it: the frames of its own cells with their lines, and the message."""
    report = traceback.TracebackException.from_exception(error, compact=True)
    seen: list[traceback.TracebackException] = [report]
    for each in seen:
        own = [frame for frame in each.stack if frame.filename.startswith("<cell ")]
        each.stack = traceback.StackSummary.from_list(own)
        seen += [other for other in (each.__cause__, each.__context__) if other is not None]
        seen += each.exceptions or ()
    text = "".join(report.format()).rstrip()
    return text if len(text) <= TRACE_CHARACTERS else "[…]\n" + text[-TRACE_CHARACTERS:]
