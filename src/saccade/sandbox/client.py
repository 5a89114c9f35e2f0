"""A sandbox for one episode: Python that keeps its state, for code that a model wrote.

    async with Sandbox.open(Limits(seconds=10), media=task.media) as box:
        outcome = await box.run("print(image_clue_0.size)")

A guest that is lost (killed at a limit, crashed) is replaced at the next call: media and shown pictures are there
again, variables aren't, and the outcome said so. Cancelling a call loses the guest, never the sandbox.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from PIL import Image

from saccade.errors import SandboxError, boundary
from saccade.tools._sandbox import films, server
from saccade.tools._sandbox.call import Call
from saccade.tools._sandbox.limits import Isolation, Limits, Outcome, Shown
from saccade.tools._sandbox.server import Guest, Server
from saccade.tools._sandbox.walls import Report
from saccade.tools._sandbox.wire import NO_NONCE, PART, Head, Kind
from saccade.types import Media, MediaKind

SET_UP_SECONDS = 60.0
MOST_SHARED = 200  # descriptors with pictures; the rest is copied
Clue = Media | Image.Image


class Sandbox:
    """One episode's interpreter; see `open`. Calls are made one after the other."""

    def __init__(self, host: Server, limits: Limits, media: Sequence[Clue], first: int | None, seed: int) -> None:
        self._server, self._limits, self._seed = host, limits, seed
        self._clues: list[str | Image.Image] = []
        self._laid_out: list[films.Still] = []  # those of them that no file holds
        videos: list[str] = []
        for each in media:
            if isinstance(each, Image.Image):
                self._clues.append(each)
            else:
                (self._clues if each.kind is MediaKind.IMAGE else videos).append(each.path)
        self._films = [films.Film(path, f"video_clue_{number}") for number, path in enumerate(videos)]
        self._next = len(self._clues) if first is None else first
        self._later: dict[int, Shown] = {}  # pictures that came after the first ones, by number
        self._count = 0  # of those that were shown here
        self._guest: Guest | None = None
        self._calling = asyncio.Lock()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        limits: Limits | None = None,
        *,
        media: Sequence[Clue] = (),
        first: int | None = None,
        seed: int = 0,
        isolation: Isolation = "best_effort",
        host: Server | None = None,
    ) -> AsyncIterator["Sandbox"]:
        """A sandbox with its media as `image_clue_0`, … and `video_clue_0`, …; gone at the end of the block.

        `media` are files, and pictures that are there already (any mode; RGB inside), each kind counted in its order.
        The first picture that is shown becomes `image_clue_<first>` (default: after the images of `media`). `seed`
        seeds random and numpy. `host` is a server of one's own; otherwise the process shares one per isolation. Raises
        ConfigError where the machine is weaker than `isolation` allows, MediaError, SandboxError.
        """
        found = await asyncio.to_thread(server.shared, isolation) if host is None else host
        box = cls(found, limits or Limits(), media, first, seed)
        try:
            await box._begin()
            yield box
        finally:
            box._drop()

    @property
    def report(self) -> Report:
        """What its guests are locked up with."""
        return self._server.report

    @property
    def pictures_left(self) -> int:
        """How many pictures may still be shown."""
        return self._limits.pictures - self._count

    async def run(self, source: str, clues: Mapping[int, Shown] | None = None) -> Outcome:
        """Run some Python; whatever it does comes back as an outcome. Raises SandboxError where the sandbox failed.

        `clues` are pictures that were shown elsewhere meanwhile, by number: `image_clue_<number>` from here on.
        """
        async with self._calling, self._server.turn() as turn:
            await server.MEMORY.room()
            before = []
            if clues:
                self._later.update(clues)
                self._next = max(self._next, *(number + 1 for number in clues))
                before = _hung(clues) if self._guest is not None else []
            guest = self._guest or await self._begin()
            call = Call(
                guest=guest,
                limits=self._limits,
                films=self._films,
                number=self._next,
                left=self.pictures_left,
                count_threads=not self._server.report.walls.own_user,
                turn=turn,
            )
            outcome = await self._made(call, source, before)
            self._later.update(enumerate(outcome.pictures, self._next))
            self._next += len(outcome.pictures)
            self._count += len(outcome.pictures)
            return outcome

    async def _begin(self) -> Guest:
        """A fresh guest that has everything the model was promised."""
        stills = await asyncio.get_running_loop().run_in_executor(films.pool(), self._stills)
        sheets = list(dict.fromkeys(still.sheet for still in stills))[:MOST_SHARED]
        before = [
            _shared(number, still, sheets.index(still.sheet)) if still.sheet in sheets else _copied(number, still)
            for number, still in enumerate(stills)
        ]
        before += _hung(self._later)
        before += [Head(Kind.FILM, number).packed(NO_NONCE) for number in range(len(self._films))]
        with contextlib.ExitStack() as stack:
            places = [stack.enter_context(sheet.opened()) for sheet in sheets]
            self._guest = await self._server.spawn(self._limits, self._seed, places)
        patient = replace(self._limits, seconds=SET_UP_SECONDS)
        call = Call(guest=self._guest, limits=patient, films=(), number=0, left=0, count_threads=False, first=True)
        outcome = await self._made(call, "", before)
        if self._guest is None or not outcome.ok:
            raise SandboxError(f"the sandbox can't prepare an interpreter: {outcome.error}")
        return self._guest

    def _stills(self) -> list[films.Still]:
        """The pictures of `media`, in their order. Raises MediaError, SandboxError."""
        with boundary(SandboxError, "pictures can't be held for an interpreter"):
            loose = [each for each in self._clues if isinstance(each, Image.Image)]
            self._laid_out = self._laid_out or films.laid_out(loose)
            left = iter(self._laid_out)
            return [
                films.still(each, f"image_clue_{number}") if isinstance(each, str) else next(left)
                for number, each in enumerate(self._clues)
            ]

    async def _made(self, call: Call, source: str, before: Sequence[bytes] = ()) -> Outcome:
        """The call's outcome; whatever happens, a guest that can't be used again is dropped."""
        kept = False
        try:
            outcome = await call.make(source, before)
            kept = outcome.kept
            return outcome
        finally:
            if not kept:
                self._drop()

    def _drop(self) -> None:
        if self._guest is not None:
            self._guest.close()
            self._guest = None


def _shared(number: int, still: films.Still, place: int) -> bytes:
    """The message that names this picture, which lies behind that one of the guest's descriptors."""
    head = Head(Kind.MAPPED, still.width, still.height, number, PART.size)
    return head.packed(NO_NONCE) + PART.pack(place, still.offset)


def _copied(number: int, still: films.Still) -> bytes:
    return Head(Kind.STILL, still.width, still.height, number, still.size).packed(NO_NONCE) + still.pixels()


def _hung(pictures: Mapping[int, Shown]) -> list[bytes]:
    """Messages that give a guest these pictures under their numbers."""
    found = []
    for number, shown in pictures.items():
        found.append(Head(Kind.STILL, shown.width, shown.height, number, len(shown.rgb)).packed(NO_NONCE))
        found.append(shown.rgb)
    return found
