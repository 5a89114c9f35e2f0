"""Videos: what they are, and their frames at given times. The only file that decodes with PyAV.

    file ──survey──> Reel: the timeline, from one pass over the packets; only the first frame is decoded
    Reel + times ──decode──> frames: seek over keyframes, decode to each wanted frame, check its label
                             └─ where the file isn't as surveyed: play it from the start instead

The frame at time t is the last one whose presentation time is <= t, as a player shows it. Times are seconds since the
first frame that can be shown, never frame numbers. A seek is a short cut that is checked, never a fact that is
believed: what it finds counts only where a frame with exactly the wanted label comes out, undamaged.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from saccade.errors import MediaError, boundary
from saccade.media import files
from saccade.protocols import Clip

GRACE = 0.5  # seconds beyond the end that still show the last frame
LARGE = 640 * 360  # pixels from which on more than one thread pays

_Packet: TypeAlias = "Packet[VideoStream]"
_Row: TypeAlias = tuple[int | None, int | None, bool, int, bool]  # pts, dts, keyframe?, duration, shown?


class _Astray(Exception):
    """The short cut did not find what the survey promised."""


class _Damaged(Exception):
    """The decoder met something that it can't decode."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: its true time (seconds since the first one) and its pixels, uint8 RGB [height, width, 3]."""

    time: float
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Reel:
    """The timeline of a video.

    `labels` are the timestamps by which the decoder names the frames, in order of presentation, `unit` seconds each
    (int64 [frames]); where it gives none frames are `counted`, and labels are 0, 1, 2, ... `times` are the frames'
    presentation times in seconds (float64 [frames]); `keys` the keyframes' (pts, dts), in order, where decoding can
    begin; `identity` tells whether the file is still the one that was surveyed.
    """

    clip: Clip
    identity: tuple[str, int, int]
    times: NDArray[np.float64]
    labels: NDArray[np.int64]
    unit: float
    keys: tuple[tuple[int, int], ...]

    @property
    def counted(self) -> bool:
        """Whether frames are told apart by counting them from the start."""
        return not self.keys

    def at(self, time: float) -> int:
        """The number of the frame that is shown at `time`: the first before the start, the last just after the end.

        A time that was rounded to whole milliseconds finds the frame that it was the time of. Raises MediaError for a
        time that is more than half a second beyond the end, or no number.
        """
        if not time <= self.clip.duration + GRACE:
            end = f"{self.clip.path} ends at {self.clip.duration:.1f} s"
            raise MediaError(f"{end}: it has no frame at {time:.1f} s; ask for an earlier time")
        # a time rounded down to the millisecond lies before its frame, by half a millisecond at most
        number = int(np.searchsorted(self.times, time + 0.0005 + 1e-6, side="right")) - 1
        while number > 0 and min(self.times[number], rounded(self.times[number])) > time + 1e-6:
            number -= 1
        return max(0, number)

    def time_of(self, label: int) -> float:
        """The time in seconds of the frame that the decoder gives this label."""
        if self.counted:
            return float(self.times[min(label, len(self.times) - 1)])
        return float((label - self.labels[0]) * self.unit)

    def moment(self, time: float) -> float:
        """The true time of the frame that is shown at `time`, in seconds."""
        return float(self.times[self.at(time)])


def rounded(time: float) -> float:
    """`time` to the millisecond: how pictures name it."""
    return round(float(time) * 1000) / 1000


# ---- what a video is -------------------------------------------------------------------------------------------------


def probe(path: str) -> Clip:
    """What the video at `path` is; its size is the one shown: upright, with square pixels. Raises MediaError."""
    return survey(path).clip


def survey(path: str) -> Reel:
    """The timeline of the video at `path`; reads the whole file once. Raises MediaError."""
    identity = files.identity(path)
    first: VideoFrame | None = None
    rows: list[_Row] = []
    with boundary(MediaError, f"{path} can't be read as a video; re-encode it"), _opened(path) as (container, stream):
        for packet in _from_keyframe(_packets(container, stream)):
            if first is None:
                first = next(_decoded(packet), None)
            if packet.size and not packet.is_corrupt:
                shown = not packet.is_discard
                rows.append((packet.pts, packet.dts, packet.is_keyframe, packet.duration or 0, shown))
        if first is None or not any(row[-1] for row in rows):
            raise MediaError(f"{path} holds no frame that can be decoded; download it again or re-encode it")
        width, height = _shown_size(first, stream)
        rate = float(stream.guessed_rate or stream.average_rate or 25)
        # AVI holds decoding times only; what the demuxer makes of them is wrong where there are B-frames
        counted = container.format.name == "avi" or first.pts is None or any(row[0] is None for row in rows)
        unit = float(stream.time_base or 0)
    keys: tuple[tuple[int, int], ...] = ()
    if counted:
        times, last = _counted(rows, unit, rate)
        labels = np.arange(len(times))
    else:
        times, labels, last = _labelled(rows, unit, int(first.pts or 0), rate)
        keys = tuple(sorted((row[0] or 0, row[0] or 0 if row[1] is None else row[1]) for row in rows if row[2]))
    content = files.digest(path)
    duration = float(times[-1]) + last
    clip = Clip(path=path, digest=content, duration=duration, frames=len(times), width=width, height=height)
    return Reel(clip, identity, times, labels, unit, keys)


def _labelled(
    rows: list[_Row], unit: float, start: int, rate: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """(times, labels, seconds of the last frame) of packets that say when they are shown, from the first frame on."""
    shown = [(row[0] or 0, row[3]) for row in rows if row[-1] and (row[0] or 0) >= start] or [(start, 0)]
    labels = np.unique(np.array([start, *(pts for pts, _ in shown)], np.int64))
    times = np.asarray((labels - start) * unit, np.float64)
    last = max(shown)[1] * unit or (times[-1] / (len(times) - 1) if len(times) > 1 else 1 / rate)
    return times, labels, float(last)


def _counted(rows: list[_Row], unit: float, rate: float) -> tuple[NDArray[np.float64], float]:
    """(times, seconds of a frame) of packets that don't (AVI, raw streams): by decoding times if any, else durations.

    One frame is shown per packet, so that times of presentation are times of decoding, in another order.
    """
    step = float(np.median([row[3] for row in rows])) * unit or 1 / rate
    stamps = np.unique(np.array([row[1] for row in rows if row[1] is not None], np.int64))
    if len(stamps) < len(rows):
        return np.asarray(np.arange(len(rows)) * step, np.float64), step
    return np.asarray((stamps - stamps[0]) * unit, np.float64), step


# ---- its frames ------------------------------------------------------------------------------------------------------


def decode(reel: Reel, times: Sequence[float], *, size: tuple[int, int] | None = None, threads: int = 1) -> list[Frame]:
    """The frames that are shown at `times` (seconds, any order), scaled to `size` (width, height; None: as shown).

    `threads` are used for large pictures only. Raises MediaError where a time lies beyond the end, where the file has
    changed since its survey, or where it is damaged so that the right frame can't be had.
    """
    path = reel.clip.path
    numbers = [reel.at(time) for time in times]
    if files.identity(path) != reel.identity:
        raise MediaError(f"{path} has changed while it was in use; leave it as it is, or start again")
    wanted = sorted(set(numbers))
    with boundary(MediaError, f"{path} can't be decoded; re-encode it"):
        found = dict(zip(wanted, _found(reel, wanted, size, threads), strict=True))
    return [found[number] for number in numbers]


def _found(reel: Reel, wanted: list[int], size: tuple[int, int] | None, threads: int) -> list[Frame]:
    """The wanted frames by the short cut, or else the long way."""
    try:
        return _take(reel, wanted, _seeking, size, threads)
    except (_Astray, _Damaged):
        pass
    try:
        return _take(reel, wanted, _playing, size, threads)
    except _Damaged as error:
        what = f"{reel.clip.path} is damaged: {error}"
        raise MediaError(f"{what}; re-encode it, or ask for times before that") from error


_Walk: TypeAlias = Callable[["_Tape", list[int]], Iterator[tuple[float, VideoFrame]]]


def _take(reel: Reel, wanted: list[int], walk: _Walk, size: tuple[int, int] | None, threads: int) -> list[Frame]:
    """The wanted frames (numbers, sorted) as pixels, found by `walk`; each is scaled before the next is decoded."""
    scaler = VideoReformatter()
    shape = reel.clip.width, reel.clip.height
    with _opened(reel.clip.path, threads if shape[0] * shape[1] >= LARGE else 1) as (container, stream):
        tape = _Tape(reel, container, stream)
        return [Frame(time, _upright(frame, size or shape, scaler)) for time, frame in walk(tape, wanted)]


@dataclass(slots=True)
class _Tape:
    """A video that is being decoded."""

    reel: Reel
    container: InputContainer
    stream: VideoStream

    def packets(self) -> Iterator[_Packet]:
        """The packets from here on, the first being a keyframe's."""
        return _from_keyframe(_packets(self.container, self.stream))

    def seek(self, key: tuple[int, int]) -> Iterator[_Packet]:
        """The packets from a keyframe (pts, dts) on, or from an earlier one. Raises _Astray where that fails."""
        for target in key:  # containers disagree on which of the two a seek means
            try:
                self.container.seek(target, stream=self.stream)
            except av.error.FFmpegError as error:
                raise _Astray from error
            packets = self.packets()
            first = next(packets, None)
            if first is not None and first.pts is not None and first.pts <= key[0]:
                return chain([first], packets)
        raise _Astray

    def play(self, packets: Iterable[_Packet], wanted: frozenset[int]) -> Iterator[VideoFrame]:
        """The frames of `packets`; where labels are `wanted`, H.264 frames that nothing depends on are left out."""
        context = self.stream.codec_context
        thrifty = bool(wanted) and context.name == "h264"
        for packet in packets:
            if thrifty:
                # a non-reference frame that is not wanted can be left undecoded without changing any other
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            yield from _decoded(packet, strict=True)


def _seeking(tape: _Tape, wanted: list[int]) -> Iterator[tuple[float, VideoFrame]]:
    """(time, frame) of each wanted number, by seeking to the keyframe before it where that saves decoding."""
    if tape.reel.counted:
        raise _Astray
    # `place` is the label reached so far; `sound`: nothing since the last keyframe was damaged
    keys = [pts for pts, _ in tape.reel.keys]
    labels = tape.reel.labels[wanted].tolist()
    needed = frozenset(labels)
    place, sound, frames = keys[0], True, tape.play(tape.packets(), needed)
    for number, label in zip(wanted, labels, strict=True):
        key = bisect_right(keys, label) - 1
        if key >= 0 and keys[key] > place:
            sound, frames = True, tape.play(tape.seek(tape.reel.keys[key]), needed)
        place = label
        for frame in frames:
            sound = not frame.is_corrupt and (sound or frame.key_frame)
            if frame.pts is None or frame.pts >= label:
                break
        else:
            raise _Astray
        if frame.pts != label or not sound:
            raise _Astray
        yield float(tape.reel.times[number]), frame


def _playing(tape: _Tape, wanted: list[int]) -> Iterator[tuple[float, VideoFrame]]:
    """(time, frame) of each wanted number, by decoding from the start: the last frame whose label isn't after its."""
    reel, left = tape.reel, tape.reel.labels[wanted].tolist()[::-1]
    held: tuple[float, VideoFrame] | None = None
    sound = True
    for count, frame in enumerate(tape.play(tape.packets(), frozenset())):
        label = count if reel.counted else frame.pts
        if label is None:
            continue
        while left and held and left[-1] < label:
            yield _checked(held, sound)
            left.pop()
        sound = not frame.is_corrupt and (sound or frame.key_frame)
        held = reel.time_of(label), frame
        if left and left[-1] == label:
            yield _checked(held, sound)
            left.pop()
        if not left:
            return
    for _ in left:
        if held is None:
            raise _Damaged("nothing in it can be decoded")
        yield _checked(held, sound)


def _checked(found: tuple[float, VideoFrame], sound: bool) -> tuple[float, VideoFrame]:
    if not sound:
        raise _Damaged(f"the frame at {found[0]:.1f} s can't be decoded right")
    return found


# ---- PyAV ------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str, threads: int = 1) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its first moving picture; nothing but the file itself may be opened on its behalf."""
    what = f"{path} can't be read as a video (check that it is complete, or re-encode it)"
    with boundary(MediaError, what):
        try:
            container = av.open(f"file:{path}", options={"protocol_whitelist": "file"})
        except av.error.FFmpegError as error:  # without its number and the protocol
            raise MediaError(f"{what}: {(error.strerror or str(error)).lower()}") from error
    with container:
        with boundary(MediaError, what):
            stream = _moving(container, path)
            stream.codec_context.thread_count = threads
            stream.codec_context.thread_type = "AUTO" if threads > 1 else "NONE"
        yield container, stream


def _moving(container: InputContainer, path: str) -> VideoStream:
    kind = container.format.name
    if kind.endswith("_pipe") or kind in ("image2", "tty"):
        raise MediaError(f"{path} is not a video; give a still picture as an image")
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise MediaError(f"{path} has no video stream (sound only?); give a file with moving pictures")


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[_Packet]:
    """The stream's packets, up to where the file can no longer be read."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except (StopIteration, av.error.FFmpegError):
            return
        yield packet


def _from_keyframe(packets: Iterable[_Packet]) -> Iterator[_Packet]:
    return dropwhile(lambda packet: not packet.is_keyframe, packets)


def _decoded(packet: _Packet, *, strict: bool = False) -> Iterator[VideoFrame]:
    """The frames that come out when `packet` goes in. Strict: after a fault what was whole comes out, then _Damaged."""
    context = packet.stream.codec_context
    try:
        yield from packet.decode()
    except av.error.EOFError:
        return
    except av.error.FFmpegError as error:
        if not strict:
            return
        # frames that were whole may still wait for their turn in the decoder
        with suppress(av.error.FFmpegError):
            yield from context.decode(None)
        raise _Damaged((error.strerror or str(error)).lower()) from error


def _turn(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """How a decoded frame becomes upright: swap the axes?, then mirror left-right?, then mirror top-bottom?

    The display matrix holds (a, b, _, c, d, ...) with x' = a x + c y and y' = b x + d y.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(matrix, SideData):
        return False, False, False
    a, b, _, c, d = np.frombuffer(bytes(matrix), "<i4")[:5].tolist()
    if abs(b) > abs(a):
        return True, c < 0, b < 0
    return False, a < 0, d < 0


def _shown_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    aspect = float(stream.sample_aspect_ratio or 1) or 1.0
    width, height = max(1, round(frame.width * aspect)), frame.height
    return (height, width) if _turn(frame)[0] else (width, height)


def _upright(frame: VideoFrame, size: tuple[int, int], scaler: VideoReformatter) -> NDArray[np.uint8]:
    swap, across, down = _turn(frame)
    width, height = size[::-1] if swap else size
    scaled = scaler.reformat(frame, width, height, "rgb24", interpolation="BICUBIC")
    pixels = scaled.to_ndarray()
    pixels = pixels.transpose(1, 0, 2) if swap else pixels
    pixels = pixels[:, ::-1] if across else pixels
    return np.ascontiguousarray(pixels[::-1] if down else pixels)
