import contextlib
import random
import shutil
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from coded_clips import Pipe, copy_shifted, draw_number, make, read_number
from error_cases import raises

from saccade.errors import MediaError
from saccade.media import hashing, video
from saccade.media.video import decode_frames, index_video, probe_video

REAL = Path(__file__).parents[3] / "shared" / "media"
KINDS = {
    "plain.mp4": {"bf": 0, "g": 12},
    "b_frames.mp4": {"bf": 3, "g": 12},
    "one_key.mp4": {"bf": 2, "g": 250},
    "open_gop.mp4": {"bf": 3, "g": 12, "x264-params": "open-gop=1:b-pyramid=normal"},
    "refresh.mp4": {"g": 20, "x264-params": "intra-refresh=1"},
    "fragments.mp4": {"bf": 2, "g": 12, "mux_movflags": "frag_keyframe+empty_moov"},
    "b_frames.mkv": {"bf": 3, "g": 12},
    "b_frames.mov": {"bf": 3, "g": 12},
    "stream.ts": {"bf": 2, "g": 12},
    "open_gop.ts": {"bf": 3, "g": 12, "x264-params": "open-gop=1"},
    "hevc.mp4": {"codec": "libx265", "g": 12},
    "hevc.mkv": {"codec": "libx265", "g": 12},
    "av1.mp4": {"codec": "libsvtav1", "g": 12},
    "vp9.webm": {"codec": "libvpx-vp9", "g": 12},
    "mpeg4.mp4": {"codec": "mpeg4", "bf": 2, "g": 12},
    "mpeg2.ts": {"codec": "mpeg2video", "bf": 2, "g": 12},
    "mpeg4.avi": {"codec": "mpeg4", "bf": 2, "g": 12},
    "h264.avi": {"bf": 3, "g": 12},
    "motion.avi": {"codec": "mjpeg"},
    "raw.h264": {"bf": 2, "g": 12, "form": "h264"},
    "raw.m4v": {"codec": "mpeg4", "g": 12, "form": "m4v"},
    "anim.gif": {"codec": "gif"},
}
# H.264 with B-frames of all kinds of references, at several sizes and qualities.
EXACT_KINDS = {
    "pyramid.mp4": {"bf": 3, "g": 20, "x264-params": "b-pyramid=normal:ref=3:b-adapt=0"},
    "flat.mp4": {"bf": 3, "g": 20, "x264-params": "b-pyramid=none:b-adapt=0"},
    "many.mkv": {"bf": 8, "g": 60, "crf": 40, "x264-params": "b-pyramid=normal:ref=6:weightb=1"},
    "open.mp4": {"bf": 3, "g": 12, "x264-params": "open-gop=1:b-pyramid=strict"},
    "fields.ts": {"bf": 2, "g": 15, "x264-params": "interlaced=1"},
}
NUMBERED = {"mpeg4.avi", "h264.avi", "motion.avi", "raw.h264", "raw.m4v"}


def make_or_skip(path, **settings):
    codec = settings.get("codec", "libx264")
    try:
        av.codec.Codec(codec, "w")
    except av.error.FFmpegError:
        pytest.skip(f"this PyAV has no {codec} encoder")
    return make(str(path), **settings)


def decode_numbers(path, times, **settings):
    return [read_number(frame.pixels) for frame in decode_frames(index_video(path), times, **settings)]


def find_shown_frame(stamps, time):
    return max([index for index, stamp in enumerate(stamps) if stamp <= time], default=0)


@pytest.fixture
def seeking_only(monkeypatch):
    monkeypatch.setattr(video, "_decode_from_start", lambda *_: pytest.fail("the file was decoded from the start"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_format_gives_the_frame_shown_at_a_time(name, tmp_path, monkeypatch):
    path = make_or_skip(tmp_path / name, **KINDS[name])
    video_index = index_video(path)
    rate = 25.0
    assert (video_index.info.num_frames, video_index.info.width, video_index.info.height) == (60, 96, 64)
    assert video_index.info.duration == pytest.approx(60 / rate, abs=0.002)
    if name not in NUMBERED | {"refresh.mp4"}:  # its keyframes are incomplete
        monkeypatch.setattr(video, "_decode_from_start", lambda *_: pytest.fail("the file was decoded from the start"))
    rng = random.Random(name)
    for count in (1, 2, 5, 60):
        times = [rng.uniform(0, 60 / rate) for _ in range(count)]
        frames = decode_frames(video_index, times)
        for time, frame in zip(times, frames, strict=True):
            number = read_number(frame.pixels)
            assert frame.time == pytest.approx(number / rate, abs=0.0006)  # some containers count in milliseconds
            assert number == find_shown_frame(video_index.times, time), f"{time} s of {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b_frames.mp4", "stream.ts", "hevc.mkv", "mpeg4.avi"])
def test_a_frame_is_found_by_its_time_and_its_rounded_time(name, tmp_path):
    path = make_or_skip(tmp_path / name, **{**KINDS[name], "rate": 30})
    video_index = index_video(path)
    frame_times = [frame.time for frame in decode_frames(video_index, video_index.times.tolist())]
    assert frame_times == video_index.times.tolist()
    assert decode_numbers(path, frame_times) == list(range(60))
    assert decode_numbers(path, [video.round_to_milliseconds(time) for time in frame_times]) == list(range(60))
    assert decode_numbers(path, [index / 30 for index in range(60)]) == list(range(60)) or name == "hevc.mkv"
    assert decode_numbers(path, [time - 0.002 for time in frame_times]) == [0, *range(59)]


def test_variable_frame_rate(tmp_path, seeking_only):
    stamps = [0, 40, 60, 500, 1700, 1710, 1720, 5000, 5001, 5900]
    for name in ("vfr.mp4", "vfr.mkv"):
        path = make_or_skip(tmp_path / name, stamps=stamps, count=10, bf=2, g=4)
        assert probe_video(path).num_frames == 10
        times = [0.039, 0.04, 0.3, 0.499, 0.5, 1.699, 1.7, 1.715, 4.9, 5.0005, 5.8, 5.9]
        assert decode_numbers(path, times) == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]


def test_times_are_relative_to_the_first_frame(tmp_path, seeking_only):
    source = make_or_skip(tmp_path / "from_zero.mp4", bf=2, g=12)
    for name in ("late.ts", "late.mkv", "late.mp4"):
        path = copy_shifted(source, tmp_path / name, 7.0)
        assert probe_video(path).duration == pytest.approx(2.4, abs=0.002)
        assert decode_numbers(path, [0.0, 0.41, 2.39]) == [0, 10, 59]


def test_an_edit_list_hides_frames(tmp_path, seeking_only):
    path = copy_shifted(make_or_skip(tmp_path / "whole.mp4", bf=2, g=12), tmp_path / "cut.mp4", -1.0)
    with av.open(path) as container:
        assert any(packet.is_discard for packet in container.demux(video=0))
    info = probe_video(path)
    assert (info.num_frames, info.duration) == (35, pytest.approx(1.4, abs=0.05))
    assert decode_numbers(path, [0.0, 0.041, 1.0, 1.39]) == [25, 26, 50, 59]


def test_headers_without_metadata(tmp_path, seeking_only):
    for name, form in (("live.mkv", "matroska"), ("live.ts", "mpegts")):
        with Pipe(tmp_path / name) as pipe:
            make(pipe, form=form, bf=2, g=12)
        path = str(tmp_path / name)
        with av.open(path) as container:
            assert container.streams.video[0].frames == 0
        info = probe_video(path)
        assert (info.num_frames, info.duration) == (60, pytest.approx(2.4, abs=0.002))
        assert decode_numbers(path, [0.0, 1.21, 2.39]) == [0, 30, 59]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("down", [False, True])
def test_every_display_matrix_is_applied(swap, across, down, tmp_path):
    def draw_stored(number):
        upright = draw_number(number)
        upright = upright[:, ::-1] if across else upright
        upright = upright[::-1] if down else upright
        return np.ascontiguousarray(upright.transpose(1, 0, 2) if swap else upright)

    x, y = (-1 if across else 1) * 65536, (-1 if down else 1) * 65536
    matrix = [0, y, 0, x, 0, 0, 0, 0, 2**30] if swap else [x, 0, 0, 0, y, 0, 0, 0, 2**30]
    path = make_or_skip(tmp_path / "turned.mp4", draw=draw_stored, matrix=matrix, count=20)
    assert (probe_video(path).width, probe_video(path).height) == (96, 64)
    assert decode_numbers(path, [0.2]) == [5]
    assert decode_numbers(path, [0.2], size=(60, 48)) == [5]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_rotation_agrees_with_pyav(degrees, tmp_path):
    turn = round(np.cos(np.radians(degrees))), round(np.sin(np.radians(degrees)))
    matrix = [turn[0] * 65536, -turn[1] * 65536, 0, turn[1] * 65536, turn[0] * 65536, 0, 0, 0, 2**30]
    path = make_or_skip(tmp_path / "rotated.mp4", matrix=matrix, count=3)
    with av.open(path) as container:
        frame = next(container.decode(video=0))
        assert abs(frame.rotation) == abs(degrees)
        expected = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
    assert np.abs(decode_frames(index_video(path), [0.0])[0].pixels.astype(int) - expected).mean() < 3


def test_non_square_pixels_are_scaled_to_square(tmp_path):
    path = make_or_skip(tmp_path / "wide.mp4", count=3, **{"x264-params": "sar=2/1"})
    assert (probe_video(path).width, probe_video(path).height) == (192, 64)
    assert decode_numbers(path, [0.04]) == [1]


def test_times_before_the_start_and_beyond_the_end(tmp_path):
    path = make_or_skip(tmp_path / "clip.mp4", bf=2)
    assert decode_numbers(path, [-3.0, 2.4, 2.8]) == [0, 59, 59]
    for time in (3.0, 1e9, float("inf"), float("nan")):
        with raises(MediaError, key=path) as caught:
            decode_frames(index_video(path), [time])
        assert caught.value.value == pytest.approx(time, nan_ok=True)


def test_frames_have_the_requested_order_and_size(tmp_path):
    path = make_or_skip(tmp_path / "clip.mkv", bf=2, g=12)
    frames = decode_frames(index_video(path), [2.0, 0.1, 2.0, 1.0, 0.11], size=(48, 32))
    assert [read_number(frame.pixels) for frame in frames] == [50, 2, 50, 25, 2]
    assert {(frame.pixels.shape, frame.pixels.dtype.name) for frame in frames} == {((32, 48, 3), "uint8")}
    assert decode_frames(index_video(path), []) == []


def test_colors_and_threads(tmp_path):
    def draw(number):
        return np.broadcast_to(np.array([[200, 30, number * 4]], np.uint8), (368, 640, 3)).copy()

    path = make_or_skip(tmp_path / "large.mp4", draw=draw, count=40, bf=2, g=10)
    times = [0.1, 0.5, 0.9, 1.5]
    single, multiple = (decode_frames(index_video(path), times, threads=threads) for threads in (1, 4))
    for frame, other in zip(single, multiple, strict=True):
        assert (frame.pixels == other.pixels).all()
        assert np.abs(frame.pixels.mean(axis=(0, 1)) - (200, 30, round(frame.time * 25) * 4)).max() < 5


def draw_noisy(number):
    noise = np.random.default_rng(number).integers(-30, 30, draw_number(number).shape[:2])
    return (draw_number(number) + noise[:, :, None]).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut.mp4", "cut.mkv", "cut.ts", "cut.webm", "cut.avi", "cut.h264"])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_a_truncated_file_gives_correct_frames_or_an_error(name, share, tmp_path):
    settings = {"mux_movflags": "faststart"} if name == "cut.mp4" else {}
    codec = "libvpx-vp9" if name == "cut.webm" else "libx264"
    path = make_or_skip(tmp_path / name, codec=codec, g=12, draw=draw_noisy, **settings)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: int(len(content) * share)])
    video_index = index_video(path)
    assert 0.2 < video_index.info.duration < 2.4
    frames = [decode_or_none(path, video_index.info.duration * part / 20) for part in range(20)]
    assert frames.count(None) <= 4  # the last frame may be incomplete, and the two B-frames before it depend on it
    for frame in filter(None, frames):
        assert read_number(frame.pixels) == round(frame.time * 25)
    with raises(MediaError, key=path, value=video_index.info.duration + 1):
        decode_frames(video_index, [video_index.info.duration + 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hurt.mp4", "hurt.mkv", "hurt.ts"])
def test_a_damaged_file_gives_what_players_show_or_an_error(name, tmp_path):
    path = make_or_skip(tmp_path / name, bf=2, g=12, draw=draw_noisy)
    content = Path(path).read_bytes()
    rng = random.Random(name)
    num_correct = 0
    for _ in range(8):
        start = rng.randrange(len(content) // 4, len(content) * 3 // 4)
        Path(path).write_bytes(content[:start] + rng.randbytes(60) + content[start + 60 :])
        shown = play(path)
        for time in (0.2, 0.9, 1.3, 2.3):
            frame = decode_or_none(path, time)
            if frame is not None:
                assert (frame.pixels == shown[round(frame.time * 25)]).all()
                num_correct += 1
    assert num_correct >= 16


def test_a_b_frame_whose_later_reference_is_damaged_is_an_error(tmp_path):
    path = make_or_skip(tmp_path / "hurt.mp4", bf=2, g=12, draw=draw_noisy)
    content = Path(path).read_bytes()
    with av.open(path) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    unit = min(packet.duration for packet in packets)
    start = min(packet.pts for packet in packets)
    (anchor,) = [packet for packet in packets if packet.pts == start + 23 * unit]
    middle = anchor.pos + anchor.size // 2
    Path(path).write_bytes(content[:middle] + random.Random(0).randbytes(60) + content[middle + 60 :])
    for number in (20, 24):
        assert decode_or_none(path, number / 25) is not None
    for number in (21, 22, 23):
        assert decode_or_none(path, number / 25) is None
        with raises(MediaError, key=path):
            decode_frames(index_video(path), [20 / 25, number / 25, 24 / 25])


def play(path):
    frames = {}
    with av.open(path) as container:
        start = None
        for packet in container.demux(video=0):
            with contextlib.suppress(av.error.FFmpegError):
                for frame in packet.decode():
                    start = frame.time if start is None else start
                    frames[round((frame.time - start) * 25)] = frame.to_ndarray(format="rgb24")
    return frames


def decode_or_none(path, time):
    with contextlib.suppress(MediaError):
        return decode_frames(index_video(path), [time])[0]


def test_files_that_are_not_videos_raise(tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("This is a letter, not a video.\n" * 50)
    (tmp_path / "noise.mp4").write_bytes(random.Random(0).randbytes(5000))
    shutil.copy(make_or_skip(tmp_path / "whole.mp4"), tmp_path / "headless.mp4")
    (tmp_path / "headless.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:1500])
    with wave.open(str(tmp_path / "sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\nwhole.mp4\n")
    names = ["missing", "empty", "text", "noise", "headless", "sound", "list", "nul\0"]
    for path in [f"{tmp_path}/.", *(f"{tmp_path}/{name}.mp4" for name in names)]:
        with raises(MediaError, key=path):
            index_video(path)


def test_a_still_image_is_not_a_video(tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "still.png")
    with raises(MediaError, key=str(tmp_path / "still.png")):
        index_video(str(tmp_path / "still.png"))


def test_paths_with_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = make_or_skip("plain.mp4")
    for name in ("a:b.mp4", "http:c.mp4", "50% off #1.mp4", "-x.mp4", "frame%03d.mp4", "ärgerlich 見.mp4"):
        shutil.copy(source, name)
        assert decode_numbers(name, [1.0]) == [25]


def test_the_digest_depends_on_the_content(tmp_path):
    first, second, large_file = (tmp_path / name for name in "123")
    first.write_bytes(b"a" * 100)
    second.write_bytes(b"a" * 100)
    assert hashing.compute_file_digest(str(first)) == hashing.compute_file_digest(str(second))
    second.write_bytes(b"a" * 99 + b"b")
    assert hashing.compute_file_digest(str(first)) != hashing.compute_file_digest(str(second))
    large = bytearray(hashing.FULL_DIGEST_MAX_BYTES + 1)
    large_file.write_bytes(large)
    digest = hashing.compute_file_digest(str(large_file))
    large[len(large) // 2] = 1
    large_file.write_bytes(large)
    assert hashing.compute_file_digest(str(large_file)) != digest


def test_a_file_that_changes_after_indexing_raises(tmp_path):
    path = make_or_skip(tmp_path / "clip.mp4")
    video_index = index_video(path)
    make_or_skip(tmp_path / "clip.mp4", count=50)
    with raises(MediaError, key=path):
        decode_frames(video_index, [0.0])


# ---- real clips -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["av1_video.mkv", "flipping_a_pancake.mkv", "h265_video.mp4", "nasa_13013.mp4", "unordered.mov", "video_90.mov"],
)
def test_real_clips_equal_sequential_decoding(name):
    path = REAL / name
    if not path.exists():
        pytest.skip("the real clips are missing")
    video_index = index_video(str(path))
    with av.open(str(path)) as container:
        plain = [(frame.time, frame.to_ndarray(format="rgb24"), frame.rotation) for frame in container.decode(video=0)]
    assert len(plain) == video_index.info.num_frames
    stamps = [time - plain[0][0] for time, _, _ in plain]
    times = [random.Random(name).uniform(0, video_index.info.duration) for _ in range(6)]
    for time, frame in zip(times, decode_frames(video_index, times), strict=True):
        number = find_shown_frame(stamps, time)
        assert frame.time == pytest.approx(stamps[number])
        expected = np.rot90(plain[number][1], plain[number][2] // 90)
        assert frame.pixels.shape == expected.shape
        assert np.abs(frame.pixels.astype(int) - expected).mean() < 3


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "name", ["flipping_a_pancake.mkv", "h265_video.mp4", "nasa_13013.mp4", "video_90.mov", *EXACT_KINDS]
)
def test_skipped_frames_change_no_other_frame(name, threads, tmp_path, monkeypatch):
    """Seeks, segments in threads, skipped non-reference frames and early ends give the bytes of full decoding."""
    path = str(REAL / name) if name not in EXACT_KINDS else make_or_skip(tmp_path / name, **EXACT_KINDS[name])
    if not Path(path).exists():
        pytest.skip("the real clips are missing")
    monkeypatch.setattr(video, "MULTITHREADED_MIN_PIXELS", 0)
    video_index, rng = index_video(path), random.Random(name)
    numbers = [
        sorted(rng.sample(range(len(video_index.times)), min(count, len(video_index.times)))) for count in (3, 9)
    ]
    numbers.append(list(range(len(video_index.times))))
    picks = [video_index.times[part].tolist() for part in numbers]
    picked = [decode_frames(video_index, times, threads=threads) for times in picks]

    def decode_whole_file(*_):
        raise video._SeekFailed

    monkeypatch.setattr(video, "_decode_by_seeking", decode_whole_file)
    whole = decode_frames(video_index, video_index.times.tolist())
    for part, frames in zip(numbers, picked, strict=True):
        for number, frame in zip(part, frames, strict=True):
            assert frame.time == whole[number].time
            assert np.array_equal(frame.pixels, whole[number].pixels), f"frame {number} of {name}"


def test_a_corrupted_clip_is_decoded_up_to_the_damage():
    path = REAL / "corrupted.mp4"
    if not path.exists():
        pytest.skip("the real clips are missing")
    video_index = index_video(str(path))
    assert [frame.time for frame in decode_frames(video_index, [0.0, 1.05, 2.0])] == pytest.approx([0.0, 1.0, 2.0])
    with raises(MediaError, key=str(path)):
        decode_frames(video_index, [0.0, 4.5])
