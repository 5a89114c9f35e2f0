"""Index videos and decode their frames at given times. The only module that uses PyAV.

    file ──index_video──> VideoIndex: the timeline, from one pass over the packets; only the first frame is decoded
    VideoIndex + times ──decode_frames──> frames: seek to keyframes, decode up to each frame, check its id
                                          └─ if the file contradicts the index: decode from the start instead

The frame at time t is the last one whose presentation time is <= t, as a player shows it. Times are seconds since the
first displayable frame, never frame numbers. The result of a seek is always verified: it is used only if the decoder
returns an undamaged frame with exactly the expected id.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import NamedTuple, TypeAlias

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.sidedata.sidedata import SideData
from av.stream import Disposition
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from saccade.errors import MediaError, convert_errors
from saccade.media import hashing
from saccade.protocols import VideoInfo
from saccade.utils.files import require_regular

END_TOLERANCE = 0.5  # seconds after the end at which the last frame is still shown
LIBRARY_VERSIONS = tuple(f"{name} {version}" for name, version in sorted(av.library_versions.items()))
MULTITHREADED_MIN_PIXELS = 640 * 360  # pixels per frame above which several threads are faster

_Packet: TypeAlias = "Packet[VideoStream]"


class _PacketInfo(NamedTuple):
    pts: int | None
    dts: int | None
    is_keyframe: bool
    duration: int
    is_shown: bool


class _SeekFailed(Exception):
    """Seeking did not give the frame that the index predicts."""


class _CorruptVideo(Exception):
    """The decoder found data that it can't decode."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame: its presentation time (seconds since the first frame) and pixels, uint8 RGB [height, width, 3]."""

    time: float
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class VideoIndex:
    """The timeline of a video.

    `times` are the frames' presentation times in seconds (float64 [frames]). `frame_ids` are the decoder's timestamps
    in order of presentation, in units of `time_base` seconds (int64 [frames]); without usable timestamps they are
    numbers 0, 1, 2, ... `keyframes` are the (pts, dts), in order, at which decoding can start. `identity` detects
    whether the file has changed since it was indexed.
    """

    info: VideoInfo
    identity: tuple[str, int, int]
    times: NDArray[np.float64]
    frame_ids: NDArray[np.int64]
    time_base: float
    keyframes: tuple[tuple[int, int], ...]

    def to_bytes(self) -> bytes:
        """Return the timeline without the file's path and identity, for `from_bytes`."""
        buffer = io.BytesIO()
        info, keyframes = self.info, np.array(self.keyframes, np.int64).reshape(-1, 2)
        header = np.array([info.duration, self.time_base, info.width, info.height], np.float64)
        np.savez(buffer, header=header, times=self.times, frame_ids=self.frame_ids, keyframes=keyframes)
        return buffer.getvalue()

    @staticmethod
    def from_bytes(path: str, content: bytes) -> "VideoIndex":
        """Return the timeline of the file at `path`, whose digest must be that of the indexed one."""
        arrays = np.load(io.BytesIO(content), allow_pickle=False)
        duration, time_base, width, height = arrays["header"].tolist()
        times, digest = arrays["times"], hashing.compute_file_digest(path)
        keyframes = tuple((pts, dts) for pts, dts in arrays["keyframes"].tolist())
        info = VideoInfo(
            path=path, digest=digest, duration=duration, num_frames=len(times), width=int(width), height=int(height)
        )
        return VideoIndex(info, hashing.get_file_identity(path), times, arrays["frame_ids"], time_base, keyframes)

    @property
    def uses_frame_numbers(self) -> bool:
        """Return whether frames are identified by counting from the start."""
        return not self.keyframes

    def find_frame_number(self, time: float) -> int:
        """Return the number of the frame shown at `time`: the first one before the start, the last one after the end.

        A frame's time rounded to milliseconds finds the same frame. Raises MediaError for a time more than half a
        second after the end, and for NaN.
        """
        if not time <= self.info.duration + END_TOLERANCE:
            end = f"{self.info.path} ends at {self.info.duration:.1f} s"
            message = f"{end}: it has no frame at {time:.1f} s; ask for an earlier time"
            raise MediaError(message, key=self.info.path, value=time)
        # A time rounded down to the millisecond precedes its frame, by half a millisecond at most.
        number = int(self.times.searchsorted(time + 0.0005 + 1e-6, side="right")) - 1
        while number > 0 and min(self.times[number], round_to_milliseconds(self.times[number])) > time + 1e-6:
            number -= 1
        return max(0, number)

    def compute_frame_time(self, frame_id: int) -> float:
        """Return the time in seconds of the frame with this id."""
        if self.uses_frame_numbers:
            return float(self.times[min(frame_id, len(self.times) - 1)])
        return float((frame_id - self.frame_ids[0]) * self.time_base)

    def snap_to_frame_time(self, time: float) -> float:
        """Return the presentation time of the frame shown at `time`, in seconds."""
        return float(self.times[self.find_frame_number(time)])


def round_to_milliseconds(time: float) -> float:
    """Round a time in seconds to the millisecond, as in `ImageRef.time`."""
    return round(float(time) * 1000) / 1000


# ---- indexing -------------------------------------------------------------------------------------------------------


def probe_video(path: str) -> VideoInfo:
    """Return the metadata of the video at `path`; the size is upright, with square pixels. Raises MediaError."""
    return index_video(path).info


def index_video(path: str) -> VideoIndex:
    """Build the timeline of the video at `path`; reads the whole file once. Raises MediaError."""
    identity = hashing.get_file_identity(path)
    first: VideoFrame | None = None
    rows: list[_PacketInfo] = []
    with (
        convert_errors(MediaError, f"{path} can't be read as a video; re-encode it", key=path),
        _open_video(path) as (container, stream),
    ):
        for packet in _read_packets(container, stream):
            if first is None:
                first = next(_decode_packet(packet), None)
            if packet.size and not packet.is_corrupt:
                num_ticks, is_shown = packet.duration or 0, not packet.is_discard
                rows.append(_PacketInfo(packet.pts, packet.dts, packet.is_keyframe, num_ticks, is_shown))
        if first is None or not any(row.is_shown for row in rows):
            message = f"{path} holds no frame that can be decoded; download it again or re-encode it"
            raise MediaError(message, key=path)
        width, height = _compute_display_size(first, stream)
        rate = float(stream.guessed_rate or stream.average_rate or 25)
        # AVI stores decoding times only; the demuxer's presentation times are wrong for B-frames.
        uses_frame_numbers = container.format.name == "avi" or first.pts is None or None in {row.pts for row in rows}
        time_base = float(stream.time_base or 0)
    keyframes: tuple[tuple[int, int], ...] = ()
    if uses_frame_numbers:
        times, last_duration = _build_numbered_timeline(rows, time_base, rate)
        frame_ids = np.arange(len(times))
    else:
        times, frame_ids, last_duration = _build_pts_timeline(rows, time_base, int(first.pts or 0), rate)
        packets = [(row.pts or 0, row.dts) for row in rows if row.is_keyframe]
        keyframes = tuple(sorted((pts, pts if dts is None else dts) for pts, dts in packets))
    digest = hashing.compute_file_digest(path)
    duration = float(times[-1]) + last_duration
    info = VideoInfo(path=path, digest=digest, duration=duration, num_frames=len(times), width=width, height=height)
    return VideoIndex(info, identity, times, frame_ids, time_base, keyframes)


def _build_pts_timeline(
    packets: list[_PacketInfo], time_base: float, start_pts: int, rate: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
    """Return (times, frame ids, seconds of the last frame) of packets with presentation times, from the first frame."""
    shown = [(row.pts or 0, row.duration) for row in packets if row.is_shown and (row.pts or 0) >= start_pts]
    shown = shown or [(start_pts, 0)]
    frame_ids = np.unique(np.array([start_pts, *(pts for pts, _ in shown)], np.int64))
    times = np.asarray((frame_ids - start_pts) * time_base, np.float64)
    last_duration = max(shown)[1] * time_base or (times[-1] / (len(times) - 1) if len(times) > 1 else 1 / rate)
    return times, frame_ids, float(last_duration)


def _build_numbered_timeline(
    packets: list[_PacketInfo], time_base: float, rate: float
) -> tuple[NDArray[np.float64], float]:
    """Return (times, seconds per frame) of packets without presentation times (AVI, raw streams).

    Decoding times are used if all packets have them, else durations. Each packet has one frame, so the presentation
    times are the decoding times in another order.
    """
    step = float(np.median([row.duration for row in packets])) * time_base or 1 / rate
    timestamps = np.unique(np.array([row.dts for row in packets if row.dts is not None], np.int64))
    if len(timestamps) < len(packets):
        return np.asarray(np.arange(len(packets)) * step, np.float64), step
    return np.asarray((timestamps - timestamps[0]) * time_base, np.float64), step


# ---- decoding --------------------------------------------------------------------------------------------------------


class _Segment(NamedTuple):
    """Frames that one seek reaches: decoding begins at the keyframe, or at the file's start (None)."""

    keyframe: tuple[int, int] | None  # its (pts, dts)
    numbers: list[int]  # frame numbers, sorted
    cost: int  # frames from the keyframe to the last of the numbers


Size: TypeAlias = tuple[int, int]  # width, height
_Strategy: TypeAlias = Callable[["_VideoDecoder", list[_Segment]], Iterator[tuple[int, float, VideoFrame]]]


def decode_frames(
    video_index: VideoIndex,
    times: Sequence[float],
    *,
    size: Size | None = None,
    sizes: Sequence[Size] | None = None,
    threads: int = 1,
    is_cancelled: Callable[[], bool] = bool,
) -> list[Frame]:
    """Decode the frames shown at `times` (seconds, any order) in one pass over the file.

    They are scaled to `size` (width, height), or to `sizes`, one for each time; None is the display size. `threads` are
    used for large frames only: each decodes other segments of the file, or all share the only one. Raises MediaError if
    a time is after the end, if the file has changed since it was indexed, if damage makes a frame undecodable, or once
    `is_cancelled()` is true.
    """
    path, info = video_index.info.path, video_index.info
    numbers = [video_index.find_frame_number(time) for time in times]
    sizes = sizes or [size or (info.width, info.height)] * len(numbers)
    sizes_by_number: dict[int, set[Size]] = {}
    for number, frame_size in zip(numbers, sizes, strict=True):
        sizes_by_number.setdefault(number, set()).add(frame_size)
    if hashing.get_file_identity(path) != video_index.identity:
        message = f"{path} has changed while it was in use; leave it as it is, or start again"
        raise MediaError(message, key=path)
    segments = _split_into_segments(video_index, sorted(sizes_by_number))
    threads = threads if info.width * info.height >= MULTITHREADED_MIN_PIXELS else 1

    def decode(strategy: _Strategy, segments: list[_Segment], threads: int) -> dict[tuple[int, Size], Frame]:
        scaler = VideoReformatter()
        with _open_video(path, threads) as (container, stream):
            # Each frame is scaled before the next is decoded.
            return {
                (number, frame_size): Frame(time, _scale_upright(frame, frame_size, scaler))
                for number, time, frame in strategy(
                    _VideoDecoder(video_index, container, stream, is_cancelled), segments
                )
                for frame_size in sizes_by_number[number]
            }

    with convert_errors(MediaError, f"{path} can't be decoded; re-encode it", key=path):
        try:
            shares = _share_segments(segments, threads)
            if len(shares) == 1:
                frames = decode(_decode_by_seeking, segments, threads)
            else:
                with ThreadPoolExecutor(len(shares), thread_name_prefix="saccade-segments") as pool:
                    decoded = pool.map(lambda share: decode(_decode_by_seeking, share, 1), shares)
                    frames = {key: frame for part in decoded for key, frame in part.items()}
        except (_SeekFailed, _CorruptVideo):
            try:
                frames = decode(_decode_from_start, segments, threads)
            except _CorruptVideo as error:
                message = f"{path} is damaged: {error}; re-encode it, or ask for times before that"
                raise MediaError(message, key=path) from error
    return [frames[number, frame_size] for number, frame_size in zip(numbers, sizes, strict=True)]


def _split_into_segments(video_index: VideoIndex, numbers: list[int]) -> list[_Segment]:
    """Split sorted frame numbers where a seek to the keyframe before a frame saves decoding."""
    if video_index.uses_frame_numbers:
        return [_Segment(None, numbers, max(numbers, default=0))]
    keyframe_ids = [pts for pts, _ in video_index.keyframes]
    segments: list[_Segment] = []
    reached = keyframe_ids[0]  # the id of the last frame of the segments
    for number, frame_id in zip(numbers, video_index.frame_ids[numbers].tolist(), strict=True):
        key = bisect_right(keyframe_ids, frame_id) - 1
        if not segments or (key >= 0 and keyframe_ids[key] > reached):
            is_first = key < 0 or keyframe_ids[key] <= keyframe_ids[0]
            segments.append(_Segment(None if is_first else video_index.keyframes[key], [], 0))
        reached, segment = frame_id, segments[-1]
        start = 0 if segment.keyframe is None else int(np.searchsorted(video_index.frame_ids, segment.keyframe[0]))
        segments[-1] = segment._replace(numbers=[*segment.numbers, number], cost=number - start + 1)
    return segments


def _share_segments(segments: list[_Segment], threads: int) -> list[list[_Segment]]:
    """Share segments, in order, among at most `threads` threads; the shares cost about the same."""
    shares: list[list[_Segment]] = []
    total, spent, share = sum(segment.cost for segment in segments), 0, -1
    for segment in segments:
        # A segment belongs to the share in which its middle falls.
        index = min(threads - 1, (2 * spent + segment.cost) * threads // (2 * max(1, total)))
        if index != share:
            shares.append([])
            share = index
        shares[-1].append(segment)
        spent += segment.cost
    return shares or [[]]


@dataclass(slots=True)
class _VideoDecoder:
    video_index: VideoIndex
    container: InputContainer
    stream: VideoStream
    is_cancelled: Callable[[], bool]

    def seek(self, keyframe: tuple[int, int]) -> Iterator[_Packet]:
        """Return the packets from a keyframe (pts, dts), or an earlier one, on. Raises _SeekFailed."""
        for target in keyframe:  # containers differ in which of the two a seek refers to
            try:
                self.container.seek(target, stream=self.stream)
            except av.error.FFmpegError as error:
                raise _SeekFailed from error
            packets = _read_packets(self.container, self.stream)
            first = next(packets, None)
            if first is not None and first.pts is not None and first.pts <= keyframe[0]:
                return chain([first], packets)
        raise _SeekFailed

    def decode_packets(self, packets: Iterable[_Packet], needed_ids: Iterable[int] = ()) -> Iterator[VideoFrame]:
        """Yield the frames of `packets`.

        Given `needed_ids`, skip H.264 non-reference frames that aren't needed, and end after the needed ones.
        """
        context = self.stream.codec_context
        missing_ids = set(needed_ids)
        can_skip = bool(missing_ids) and context.name == "h264"
        for packet in packets:
            if self.is_cancelled():
                raise MediaError("decoding was cancelled", key=self.video_index.info.path)
            is_needed = packet.pts in missing_ids
            if can_skip:
                # Skipping a non-reference frame changes no other frame.
                context.skip_frame = "DEFAULT" if is_needed else "NONREF"
            yield from _decode_packet(packet, strict=True)
            if is_needed:
                missing_ids.discard(packet.pts or 0)
                if not missing_ids:  # the decoder holds frames back, to bring later ones into order
                    yield from context.decode(None)
                    return


def _decode_by_seeking(decoder: _VideoDecoder, segments: list[_Segment]) -> Iterator[tuple[int, float, VideoFrame]]:
    """Yield (number, time, frame) of each number, seeking to each segment's keyframe."""
    video_index = decoder.video_index
    if video_index.uses_frame_numbers:
        raise _SeekFailed
    for segment in segments:
        if segment.keyframe is None:
            packets = _read_packets(decoder.container, decoder.stream)
        else:
            packets = decoder.seek(segment.keyframe)
        frame_ids = video_index.frame_ids[segment.numbers].tolist()
        frames = _track_damage(decoder.decode_packets(packets, frame_ids))
        for number, frame_id in zip(segment.numbers, frame_ids, strict=True):
            target = next((pair for pair in frames if pair[0].pts is None or pair[0].pts >= frame_id), None)
            if target is None:
                raise _SeekFailed
            frame, is_intact = target
            if frame.pts != frame_id or not is_intact:
                raise _SeekFailed
            yield number, float(video_index.times[number]), frame


def _decode_from_start(decoder: _VideoDecoder, segments: list[_Segment]) -> Iterator[tuple[int, float, VideoFrame]]:
    """Yield (number, time, frame) of each, decoding from the start: the last frame whose id isn't greater."""
    video_index = decoder.video_index
    numbers = [number for segment in segments for number in segment.numbers]
    remaining = list(zip(video_index.frame_ids[numbers].tolist(), numbers, strict=True))[::-1]
    latest: tuple[float, VideoFrame] | None = None
    is_latest_intact = True
    packets = _read_packets(decoder.container, decoder.stream)
    frames = _track_damage(decoder.decode_packets(packets))
    for count, (frame, is_intact) in enumerate(frames):
        frame_id = count if video_index.uses_frame_numbers else frame.pts
        if frame_id is None:
            continue
        while remaining and latest and remaining[-1][0] < frame_id:
            yield remaining.pop()[1], *_require_intact(latest, is_latest_intact)
        latest, is_latest_intact = (video_index.compute_frame_time(frame_id), frame), is_intact
        if remaining and remaining[-1][0] == frame_id:
            yield remaining.pop()[1], *_require_intact(latest, is_latest_intact)
        if not remaining:
            return
    for _, number in reversed(remaining):
        if latest is None:
            raise _CorruptVideo("nothing in it can be decoded")
        yield number, *_require_intact(latest, is_latest_intact)


def _track_damage(frames: Iterable[VideoFrame]) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield each frame and whether it is intact: no frame since the last keyframe, nor any it depends on, is damaged.

    A B-frame may depend on frames that are shown after it, up to the next frame of another type: it waits for that one.
    """
    is_intact = True
    waiting: list[VideoFrame] = []
    for frame in frames:
        waiting.append(frame)
        if frame.pict_type != PictureType.B:
            is_next_intact = not any(candidate.is_corrupt for candidate in waiting)
            for b_frame in waiting[:-1]:
                yield b_frame, is_intact and is_next_intact
            is_intact = is_next_intact and (is_intact or frame.key_frame)
            yield frame, is_intact
            waiting.clear()
    for frame in waiting:
        is_intact = is_intact and not frame.is_corrupt
        yield frame, is_intact


def _require_intact(timed_frame: tuple[float, VideoFrame], is_intact: bool) -> tuple[float, VideoFrame]:
    if not is_intact:
        raise _CorruptVideo(f"the frame at {timed_frame[0]:.1f} s can't be decoded right")
    return timed_frame


# ---- PyAV ------------------------------------------------------------------------------------------------------------


@contextmanager
def _open_video(path: str, threads: int = 1) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its first video stream; a playlist in it can't open other files or URLs."""
    message = f"{path} can't be read as a video (check that it is complete, or re-encode it)"
    with convert_errors(MediaError, message, key=path):
        require_regular(path)
        try:
            container = av.open(f"file:{path}", options={"protocol_whitelist": "file"})
        except av.error.FFmpegError as error:  # FFmpeg's text has an error number and the protocol
            raise MediaError(f"{message}: {(error.strerror or str(error)).lower()}", key=path) from error
    with container:
        with convert_errors(MediaError, message, key=path):
            stream = _find_video_stream(container, path)
            stream.codec_context.thread_count = threads
            stream.codec_context.thread_type = "AUTO" if threads > 1 else "NONE"
        yield container, stream


def _find_video_stream(container: InputContainer, path: str) -> VideoStream:
    container_format = container.format.name
    if container_format.endswith("_pipe") or container_format in ("image2", "tty"):
        raise MediaError(f"{path} is not a video; give a still image as an image", key=path)
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise MediaError(f"{path} has no video stream (sound only?); give a file with moving pictures", key=path)


def _read_packets(container: InputContainer, stream: VideoStream) -> Iterator[_Packet]:
    """Yield the stream's packets from the next keyframe on, up to the first read error."""
    packets = dropwhile(lambda packet: not packet.is_keyframe, container.demux(stream))
    while True:
        try:
            packet = next(packets)
        except (StopIteration, av.error.FFmpegError):
            return
        yield packet


def _decode_packet(packet: _Packet, *, strict: bool = False) -> Iterator[VideoFrame]:
    """Yield the frames of a packet. Strict: at an error flush the intact frames, then raise _CorruptVideo."""
    context = packet.stream.codec_context
    try:
        yield from packet.decode()
    except av.error.EOFError:
        return
    except av.error.FFmpegError as error:
        if not strict:
            return
        # The decoder may still buffer intact frames.
        with suppress(av.error.FFmpegError):
            yield from context.decode(None)
        raise _CorruptVideo((error.strerror or str(error)).lower()) from error


def _read_orientation(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """Return how to make a frame upright: whether to swap axes, then mirror left-right, then mirror top-bottom.

    The display matrix is (a, b, _, c, d, ...) with x' = a x + c y and y' = b x + d y.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if not isinstance(matrix, SideData):
        return False, False, False
    a, b, _, c, d = np.frombuffer(bytes(matrix), "<i4")[:5].tolist()
    if abs(b) > abs(a):
        return True, c < 0, b < 0
    return False, a < 0, d < 0


def _compute_display_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    aspect = float(stream.sample_aspect_ratio or 1) or 1.0
    width, height = max(1, round(frame.width * aspect)), frame.height
    return (height, width) if _read_orientation(frame)[0] else (width, height)


def _scale_upright(frame: VideoFrame, size: tuple[int, int], scaler: VideoReformatter) -> NDArray[np.uint8]:
    swap_axes, mirror_x, mirror_y = _read_orientation(frame)
    width, height = size[::-1] if swap_axes else size
    scaled = scaler.reformat(frame, width, height, "rgb24", interpolation="BICUBIC", threads=1)
    pixels = scaled.to_ndarray()
    pixels = pixels.transpose(1, 0, 2) if swap_axes else pixels
    pixels = pixels[:, ::-1] if mirror_x else pixels
    return np.ascontiguousarray(pixels[::-1] if mirror_y else pixels)
