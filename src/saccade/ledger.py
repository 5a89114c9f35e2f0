"""Define the ledger: the append-only, token-level trajectory of one conversation.

A ledger is an immutable tuple of segments. `append` returns a longer one; `observe` (tokens from the environment),
`prefill` (tokens put into the model's reply), `append_completion` (tokens sampled by the engine) and `append_text` (a
chat API's reply) build the segment, too. Everything else (unexpanded ids, input ids, the loss mask, logprobs, images)
is a view derived from the segments, in this module alone.

There are two token sequences. *Unexpanded* ids (`unexpanded_ids`) hold one placeholder per image, as servers take
them; *expanded* ids (`input_ids`) repeat the placeholder once per visual token, as a forward pass takes them. Masks,
logprobs and versions are aligned with the expanded ids.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain


class Origin(StrEnum):
    """The source of a segment's tokens."""

    PROMPT = "prompt"  # the environment's first messages
    PREFILL = "prefill"  # the start of a reply that was put in, not sampled
    SAMPLED = "sampled"  # the engine
    OBSERVATION = "observation"  # what the environment returned after a reply: tool results or anything else


Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are exclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """A reference to an image, a video frame or a pair of frames, without its pixels.

    A pair takes the visual tokens of one image: the model sees it as a video of two frames.

    >>> frame = ImageRef(path="clip.mp4", digest="9f2c", time=12.5, width=64, height=32)
    >>> frame.key
    '9f2c@12.5:64x32'
    >>> pair = replace(frame, second_time=13.5)
    >>> pair.key, pair.mean_time, [part.time for part in pair.frames]
    ('9f2c@12.5+13.5:64x32', 13.0, [12.5, 13.5])
    """

    path: str  # of the file
    digest: str  # of the file's content
    time: float | None  # of the frame, in seconds; None for a still image
    width: int  # as the model sees it, in pixels
    height: int  # as the model sees it, in pixels
    box: Box | None = None  # a part of a still image, in pixels of the file
    # of a pair's second frame, in seconds; that of the first one if the frame is paired with itself
    second_time: float | None = field(default=None, metadata={"omit_none": True})

    @property
    def key(self) -> str:
        """Return the identity of the pixels: equal keys mean equal pixels."""
        second = "" if self.second_time is None else f"+{self.second_time}"
        part = "" if self.box is None else f"{list(self.box)}"
        return f"{self.digest}@{self.time}{second}{part}:{self.width}x{self.height}"

    @property
    def is_pair(self) -> bool:
        """Return whether this is a pair of video frames."""
        return self.second_time is not None

    @property
    def frames(self) -> tuple["ImageRef", ...]:
        """Return the distinct frames of a pair in order; an image or frame alone."""
        if self.second_time is None:
            return (self,)
        first = replace(self, second_time=None)
        return (first,) if self.second_time == self.time else (first, replace(first, time=self.second_time))

    @property
    def mean_time(self) -> float | None:
        """Return the time that stands for a frame or a pair in a prompt, seconds; None for a still image."""
        if self.time is None or self.second_time is None:
            return self.time
        return (self.time + self.second_time) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, such as `Message(role="user", parts=("What is this?", frame))`."""

    role: str  # system | user | assistant | tool
    parts: tuple[str | ImageRef, ...]  # texts and images, in order
    # Encode structural tags such as `<think>` as their special tokens, as in replies. Turn and vision tokens never are.
    tags_as_tokens: bool = False

    @property
    def text(self) -> str:
        """Return the text parts, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlot:
    """An image's position."""

    index: int  # of the placeholder among the segment's unexpanded tokens
    image: ImageRef  # what it represents
    num_tokens: int  # number of its visual tokens


@dataclass(frozen=True, kw_only=True)  # no slots: a ledger of many turns reads each segment's length and ids again
class Segment:
    """Consecutive unexpanded tokens of one origin; raises ValueError for fields that contradict each other.

    A conversation with a chat API, which returns no tokens, consists of `messages`. The trainer can't train on it.
    """

    tokens: tuple[int, ...]  # unexpanded
    origin: Origin  # where they came from
    logprobs: tuple[float, ...] = ()  # one per sampled token, of the distribution that was sampled from
    version: int | None = None  # of the weights that sampled it; None for other origins
    slots: tuple[ImageSlot, ...] = ()  # one per image placeholder, in token order
    # of a chat API's conversation
    messages: tuple[Message, ...] | None = field(default=None, metadata={"omit_none": True})
    # length of `messages`: as the server counts a reply, else an estimate
    num_message_tokens: int | None = field(default=None, metadata={"omit_none": True})

    def __post_init__(self) -> None:
        if self.messages is not None:
            if self.tokens or self.logprobs or self.num_message_tokens is None:
                raise ValueError("a segment of messages has a token count, and neither tokens nor logprobs")
            return
        indices = [slot.index for slot in self.slots]
        if indices != sorted(set(indices)) or any(not 0 <= index < len(self.tokens) for index in indices):
            raise ValueError(f"image slots {indices} don't fit a segment of {len(self.tokens)} tokens")
        if any(slot.num_tokens < 1 for slot in self.slots):
            raise ValueError("an image needs at least one visual token")
        num_logprobs = 0 if self.version is None else len(self.tokens)
        if self.is_sampled and (len(self.logprobs) != num_logprobs or self.slots):
            raise ValueError("a sampled segment has a logprob per token and a weight version, or neither; no images")
        if not self.is_sampled and (self.logprobs or self.version is not None):
            raise ValueError(f"a segment of origin {self.origin.value} has no logprobs and no version")

    @property
    def is_sampled(self) -> bool:
        """Return whether the engine generated this segment."""
        return self.origin is Origin.SAMPLED

    @cached_property
    def num_tokens(self) -> int:
        """Return the number of expanded tokens."""
        if self.num_message_tokens is not None:
            return self.num_message_tokens
        return len(self.tokens) + sum(slot.num_tokens - 1 for slot in self.slots)

    @property
    def repeat_counts(self) -> tuple[int, ...]:
        """Return the number of expanded tokens per unexpanded token."""
        counts = [1] * len(self.tokens)
        for slot in self.slots:
            counts[slot.index] = slot.num_tokens
        return tuple(counts)

    def input_ids(self) -> tuple[int, ...]:
        """Return the tokens with each placeholder repeated once per visual token."""
        return self._input_ids

    @cached_property
    def _input_ids(self) -> tuple[int, ...]:
        if not self.slots or self.messages is not None:
            return self.tokens
        expanded, start = list[int](), 0
        for slot in self.slots:
            expanded += self.tokens[start : slot.index]
            expanded += self.tokens[slot.index : slot.index + 1] * slot.num_tokens
            start = slot.index + 1
        return (*expanded, *self.tokens[start:])

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of the tokens and images."""
        content = (self.tokens, [(slot.index, slot.image.key) for slot in self.slots])
        return hashlib.sha256(repr(content).encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The token-level trajectory of one conversation.

    >>> frame = ImageRef(path="clip.mp4", digest="9f2c", time=0.5, width=64, height=32)
    >>> start = Ledger().observe((1, 9, 2), slots=(ImageSlot(index=1, image=frame, num_tokens=2),))
    >>> turn = start.prefill((6,)).append_completion((5, 7), logprobs=(-0.1, -2.0), version=0)
    >>> turn.unexpanded_ids(), turn.input_ids()
    ((1, 9, 2, 6, 5, 7), (1, 9, 9, 2, 6, 5, 7))
    >>> turn.loss_mask()
    (False, False, False, False, False, True, True)
    >>> turn.logprobs()[-2:], turn.sampled_tokens()
    ((-0.1, -2.0), (5, 7))
    """

    segments: tuple[Segment, ...] = ()  # in order

    # ---- appending -------------------------------------------------------------------------------------------------

    def append(self, segment: Segment) -> "Ledger":
        """Append a segment; an empty one changes nothing."""
        return Ledger(segments=(*self.segments, segment)) if segment.num_tokens else self

    def observe(
        self, tokens: Sequence[int], *, slots: Sequence[ImageSlot] = (), origin: Origin = Origin.PROMPT
    ) -> "Ledger":
        """Append tokens of the environment: a prompt, or tool results."""
        return self.append(Segment(tokens=tuple(tokens), origin=origin, slots=tuple(slots)))

    def prefill(self, tokens: Sequence[int]) -> "Ledger":
        """Append a prefix of the reply that the model did not sample: visible to rewards, never trained on."""
        return self.append(Segment(tokens=tuple(tokens), origin=Origin.PREFILL))

    def append_completion(self, tokens: Sequence[int], *, logprobs: Sequence[float], version: int | None) -> "Ledger":
        """Append a completion with its logprobs (nats, one per token) and weight version."""
        return self.append(
            Segment(tokens=tuple(tokens), origin=Origin.SAMPLED, logprobs=tuple(logprobs), version=version)
        )

    def append_text(self, text: str, num_tokens: int) -> "Ledger":
        """Append a reply of a chat API."""
        messages = (Message(role="assistant", parts=(text,)),)
        return self.append(
            Segment(tokens=(), origin=Origin.SAMPLED, messages=messages, num_message_tokens=max(num_tokens, 1))
        )

    def prefix(self, num_segments: int) -> "Ledger":
        """Return the ledger of the first `num_segments` segments."""
        return Ledger(segments=self.segments[:num_segments])

    # ---- views -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of expanded tokens."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of sampled tokens."""
        return sum(segment.num_tokens for segment in self.segments if segment.is_sampled)

    def messages(self) -> tuple[Message, ...]:
        """Return the messages of a conversation with a chat API; a reply includes its prefill."""
        joined: list[Message] = []
        for message in (message for segment in self.segments for message in segment.messages or ()):
            if joined and joined[-1].role == message.role == "assistant":
                message = Message(role="assistant", parts=(joined.pop().text + message.text,))
            joined.append(message)
        return tuple(joined)

    def unexpanded_ids(self) -> tuple[int, ...]:
        """Return the ids of all segments, with one placeholder per image: the input of a server."""
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments))

    def input_ids(self) -> tuple[int, ...]:
        """Return the expanded ids, with one placeholder per visual token: the input of a forward pass."""
        ids = list[int]()
        for segment in self.segments:
            ids += segment.input_ids()
        return tuple(ids)

    def loss_mask(self) -> tuple[bool, ...]:
        """Return True for each token that the engine sampled with a logprob; aligned with `input_ids()`."""
        return tuple(segment.version is not None for segment in self.segments for _ in segment.input_ids())

    def logprobs(self) -> tuple[float, ...]:
        """Return the sampling logprobs, 0.0 where there are none; aligned with `input_ids()`."""
        return tuple(
            value for segment in self.segments for value in segment.logprobs or (0.0,) * len(segment.input_ids())
        )

    def versions(self) -> tuple[int, ...]:
        """Return the weight versions, −1 where there are none; aligned with `input_ids()`."""
        return tuple(
            -1 if segment.version is None else segment.version for segment in self.segments for _ in segment.input_ids()
        )

    def sampled_tokens(self) -> tuple[int, ...]:
        """Return the tokens of all sampled segments, in order."""
        return tuple(token for segment in self.segments if segment.is_sampled for token in segment.tokens)

    def slots(self) -> tuple[ImageSlot, ...]:
        """Return every image's slot, with `index` counted in expanded tokens from the start of the ledger."""
        slots, start = list[ImageSlot](), 0
        for segment in self.segments:
            extra = 0  # visual tokens before this slot, beyond one per placeholder
            for slot in segment.slots:
                slots.append(replace(slot, index=start + slot.index + extra))
                extra += slot.num_tokens - 1
            start += len(segment.tokens) + extra
        return tuple(slots)

    def images(self) -> tuple[ImageRef, ...]:
        """Return the images in order, one per placeholder."""
        return tuple(slot.image for segment in self.segments for slot in segment.slots)

    def prefix_hashes(self) -> tuple[str, ...]:
        """Return a digest per segment of all tokens and images up to its end: equal hashes mean equal prefixes."""
        chain, hashes = hashlib.sha256(), []
        for segment in self.segments:
            chain.update(segment.digest)
            hashes.append(chain.hexdigest())
        return tuple(hashes)
