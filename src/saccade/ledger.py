"""The append-only record of one conversation as tokens.

A ledger is a tuple of segments. Three verbs append to it and nothing changes it: `observe` (what the environment
said), `force` (what the model was made to say), `act` (what the engine sampled). Everything else (prompt ids, trainer
ids, the loss mask, logprobs, pictures, text) is a view derived from it here, and nowhere else.

Two lengths exist. *Compact* ids hold one placeholder per picture (what servers take); *expanded* ids repeat the
placeholder once per visual token (what a forward pass takes). Masks and logprobs are aligned with the expanded ids.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Who wrote a segment."""

    PROMPT = "prompt"
    FORCED = "forced"
    SAMPLED = "sampled"
    TOOL = "tool"


Box = tuple[int, int, int, int]  # left, top, right, bottom; the last two stand just outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A reference to pixels: never the pixels themselves.

    `path` and `time` (seconds; None for a still image) say where they come from, `digest` is the content digest of the
    file, `width` and `height` (pixels) are the size the model sees. Of a part of a still image `box` holds the left,
    top, right and bottom side, in pixels of the file.

    >>> frame = Picture(path="clip.mp4", digest="9f2c", time=12.5, width=64, height=32)
    >>> frame.key
    '9f2c@12.5:64x32'
    """

    path: str
    digest: str
    time: float | None
    width: int
    height: int
    box: Box | None = None

    @property
    def key(self) -> str:
        """The identity of the pixels: equal keys mean equal pixels."""
        part = "" if self.box is None else f"{list(self.box)}"
        return f"{self.digest}@{self.time}{part}:{self.width}x{self.height}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a picture: the placeholder at index `at` of its segment stands for `tokens` visual tokens.

    >>> Slot(at=3, picture=Picture(path="a.png", digest="d", time=None, width=64, height=32), tokens=2).tokens
    2
    """

    at: int
    picture: Picture
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of compact tokens of one origin.

    Sampled segments carry one logprob per token (of the distribution that was sampled from) and the version of the
    weights; all others carry none. A reply that an engine gave as text has neither: its tokens spell what was said, but
    are not those that were sampled, and nothing can be learned from them. Pictures sit in slots, in order, one
    placeholder each.

    >>> exact = Segment(tokens=(5, 7), origin=Origin.SAMPLED, logprobs=(-0.1, -2.0), version=3)
    >>> spelled = Segment(tokens=(5, 7), origin=Origin.SAMPLED)
    >>> exact.sampled, exact.exact, spelled.sampled, spelled.exact
    (True, True, True, False)
    """

    tokens: tuple[int, ...]
    origin: Origin
    logprobs: tuple[float, ...] = ()
    version: int | None = None
    slots: tuple[Slot, ...] = ()

    def __post_init__(self) -> None:
        places = [slot.at for slot in self.slots]
        if places != sorted(set(places)) or any(not 0 <= at < len(self.tokens) for at in places):
            raise ValueError(f"picture slots {places} don't fit a segment of {len(self.tokens)} tokens")
        if any(slot.tokens < 1 for slot in self.slots):
            raise ValueError("a picture needs at least one visual token")
        known = 0 if self.version is None else len(self.tokens)  # of a reply that came as text, nothing is
        if self.sampled and (len(self.logprobs) != known or self.slots):
            raise ValueError("a sampled segment has a logprob per token and a weight version, or neither; no pictures")
        if not self.sampled and (self.logprobs or self.version is not None):
            raise ValueError(f"a segment of origin {self.origin.value} has no logprobs and no version")

    @property
    def sampled(self) -> bool:
        """Whether the engine said this."""
        return self.origin is Origin.SAMPLED

    @property
    def exact(self) -> bool:
        """Whether these are the very tokens that the engine sampled, so that the trainer can train on them."""
        return self.sampled and self.version is not None

    @property
    def repeats(self) -> tuple[int, ...]:
        """How many expanded tokens each compact token stands for."""
        counts = [1] * len(self.tokens)
        for slot in self.slots:
            counts[slot.at] = slot.tokens
        return tuple(counts)

    def expanded(self) -> tuple[int, ...]:
        """The tokens with each placeholder repeated once per visual token."""
        if not self.slots:
            return self.tokens
        pairs = zip(self.tokens, self.repeats, strict=True)
        return tuple(token for token, count in pairs for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What was said, token for token, and by whom.

    >>> frame = Picture(path="clip.mp4", digest="9f2c", time=0.5, width=64, height=32)
    >>> start = Ledger().observe((1, 9, 2), slots=(Slot(at=1, picture=frame, tokens=2),))
    >>> turn = start.force((6,)).act((5, 7), logprobs=(-0.1, -2.0), version=0)
    >>> turn.compact(), turn.expanded()
    ((1, 9, 2, 6, 5, 7), (1, 9, 9, 2, 6, 5, 7))
    >>> turn.mask()
    (False, False, False, False, False, True, True)
    >>> turn.logprobs()[-2:], turn.sampled_tokens()
    ((-0.1, -2.0), (5, 7))
    """

    segments: tuple[Segment, ...] = ()

    # ---- the three verbs -------------------------------------------------------------------------------------------

    def observe(self, tokens: Sequence[int], *, slots: Sequence[Slot] = (), origin: Origin = Origin.PROMPT) -> "Ledger":
        """Append what the environment said: a prompt, or results of tools."""
        return self._with(Segment(tokens=tuple(tokens), origin=origin, slots=tuple(slots)))

    def force(self, tokens: Sequence[int]) -> "Ledger":
        """Append what the model was made to say: seen by rewards, never trained on."""
        return self._with(Segment(tokens=tuple(tokens), origin=Origin.FORCED))

    def act(self, tokens: Sequence[int], *, logprobs: Sequence[float], version: int | None) -> "Ledger":
        """Append what the engine sampled, with its logprobs and the version of the weights; of text, without either."""
        return self._with(
            Segment(tokens=tuple(tokens), origin=Origin.SAMPLED, logprobs=tuple(logprobs), version=version)
        )

    def _with(self, segment: Segment) -> "Ledger":
        return Ledger(segments=(*self.segments, segment)) if segment.tokens else self

    def fork(self, length: int) -> "Ledger":
        """The ledger of the first `length` segments, where a template has to rewrite what came after."""
        return Ledger(segments=self.segments[:length])

    # ---- the views -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of expanded tokens."""
        return sum(sum(segment.repeats) for segment in self.segments)

    def compact(self) -> tuple[int, ...]:
        """One placeholder per picture: what a server is sent."""
        return tuple(token for segment in self.segments for token in segment.tokens)

    def expanded(self) -> tuple[int, ...]:
        """One placeholder per visual token: what a forward pass is fed."""
        return tuple(token for segment in self.segments for token in segment.expanded())

    def mask(self) -> tuple[bool, ...]:
        """True where the engine sampled this very token; aligned with `expanded()`."""
        return tuple(segment.exact for segment in self.segments for _ in segment.expanded())

    def logprobs(self) -> tuple[float, ...]:
        """Sampling logprobs, 0.0 where there are none; aligned with `expanded()`."""
        return tuple(
            value for segment in self.segments for value in segment.logprobs or (0.0,) * len(segment.expanded())
        )

    def versions(self) -> tuple[int, ...]:
        """Weight versions, −1 where there are none; aligned with `expanded()`."""
        return tuple(
            -1 if segment.version is None else segment.version for segment in self.segments for _ in segment.expanded()
        )

    def sampled_tokens(self) -> tuple[int, ...]:
        """What the engine said, in order."""
        return tuple(token for segment in self.segments if segment.sampled for token in segment.tokens)

    def slots(self) -> tuple[Slot, ...]:
        """Every picture's slot, `at` counted in expanded tokens from the start of the ledger."""
        return tuple(self._absolute_slots())

    def _absolute_slots(self) -> Iterator[Slot]:
        start = 0
        for segment in self.segments:
            extra = 0  # visual tokens before this slot, beyond one per placeholder
            for slot in segment.slots:
                yield Slot(at=start + slot.at + extra, picture=slot.picture, tokens=slot.tokens)
                extra += slot.tokens - 1
            start += len(segment.tokens) + extra

    def pictures(self) -> tuple[Picture, ...]:
        """The pictures in order, one per placeholder."""
        return tuple(slot.picture for segment in self.segments for slot in segment.slots)

    def keys(self) -> tuple[str, ...]:
        """A digest per segment of everything up to its end: equal keys mean equal prefixes, pictures included."""
        chain, keys = hashlib.sha256(), []
        for segment in self.segments:
            chain.update(repr((segment.tokens, [(slot.at, slot.picture.key) for slot in segment.slots])).encode())
            keys.append(chain.hexdigest())
        return tuple(keys)
