import contextlib
import random
import shutil
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from coded_clips import Pipe, drawn, make, moved, number_of

from saccade.errors import MediaError
from saccade.media import files, video
from saccade.media.video import decode, probe, survey

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
COUNTED = {"mpeg4.avi", "h264.avi", "motion.avi", "raw.h264", "raw.m4v"}


def made(path, **settings):
    codec = settings.get("codec", "libx264")
    try:
        av.codec.Codec(codec, "w")
    except av.error.FFmpegError:
        pytest.skip(f"this PyAV has no {codec} encoder")
    return make(str(path), **settings)


def numbers(path, times, **settings):
    return [number_of(frame.pixels) for frame in decode(survey(path), times, **settings)]


def shown_at(stamps, time):
    return max([index for index, stamp in enumerate(stamps) if stamp <= time], default=0)


@pytest.fixture
def no_long_way(monkeypatch):
    monkeypatch.setattr(video, "_playing", lambda *_: pytest.fail("the file was decoded from the start"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_frame_that_is_shown(name, tmp_path, monkeypatch):
    path = made(tmp_path / name, **KINDS[name])
    reel = survey(path)
    rate = 25.0
    assert (reel.clip.frames, reel.clip.width, reel.clip.height) == (60, 96, 64)
    assert reel.clip.duration == pytest.approx(60 / rate, abs=0.002)
    if name not in COUNTED | {"refresh.mp4"}:  # its keyframes are not whole pictures
        monkeypatch.setattr(video, "_playing", lambda *_: pytest.fail("the file was decoded from the start"))
    rng = random.Random(name)
    for count in (1, 2, 5, 60):
        times = [rng.uniform(0, 60 / rate) for _ in range(count)]
        found = decode(reel, times)
        for time, frame in zip(times, found, strict=True):
            number = number_of(frame.pixels)
            assert frame.time == pytest.approx(number / rate, abs=0.0006)  # some containers count in milliseconds
            assert number == shown_at(reel.times, time), f"{time} s of {name}"


@pytest.mark.parametrize("name", ["b_frames.mp4", "stream.ts", "hevc.mkv", "mpeg4.avi"])
def test_each_frame_is_found_by_its_own_time_and_by_that_time_rounded(name, tmp_path):
    path = made(tmp_path / name, **{**KINDS[name], "rate": 30})
    reel = survey(path)
    own = [frame.time for frame in decode(reel, reel.times.tolist())]
    assert own == reel.times.tolist()
    assert numbers(path, own) == numbers(path, [video.rounded(time) for time in own]) == list(range(60))
    assert numbers(path, [index / 30 for index in range(60)]) == list(range(60)) or name == "hevc.mkv"
    assert numbers(path, [time - 0.002 for time in own]) == [0, *range(59)]


def test_frames_of_varying_length(tmp_path, no_long_way):
    stamps = [0, 40, 60, 500, 1700, 1710, 1720, 5000, 5001, 5900]
    for name in ("vfr.mp4", "vfr.mkv"):
        path = made(tmp_path / name, stamps=stamps, count=10, bf=2, g=4)
        assert probe(path).frames == 10
        times = [0.039, 0.04, 0.3, 0.499, 0.5, 1.699, 1.7, 1.715, 4.9, 5.0005, 5.8, 5.9]
        assert numbers(path, times) == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]


def test_time_counts_from_the_first_frame_wherever_the_file_starts(tmp_path, no_long_way):
    source = made(tmp_path / "from_zero.mp4", bf=2, g=12)
    for name in ("late.ts", "late.mkv", "late.mp4"):
        path = moved(source, tmp_path / name, 7.0)
        assert probe(path).duration == pytest.approx(2.4, abs=0.002)
        assert numbers(path, [0.0, 0.41, 2.39]) == [0, 10, 59]


def test_an_edit_list_cuts_what_players_do_not_show(tmp_path, no_long_way):
    path = moved(made(tmp_path / "whole.mp4", bf=2, g=12), tmp_path / "cut.mp4", -1.0)
    with av.open(path) as container:
        assert any(packet.is_discard for packet in container.demux(video=0))
    clip = probe(path)
    assert (clip.frames, clip.duration) == (35, pytest.approx(1.4, abs=0.05))
    assert numbers(path, [0.0, 0.041, 1.0, 1.39]) == [25, 26, 50, 59]


def test_headers_that_promise_nothing(tmp_path, no_long_way):
    for name, form in (("live.mkv", "matroska"), ("live.ts", "mpegts")):
        with Pipe(tmp_path / name) as pipe:
            made_path = tmp_path / name
            write_piped(pipe, form)
        with av.open(str(made_path)) as container:
            assert container.streams.video[0].frames == 0
        clip = probe(str(made_path))
        assert (clip.frames, clip.duration) == (60, pytest.approx(2.4, abs=0.002))
        assert numbers(str(made_path), [0.0, 1.21, 2.39]) == [0, 30, 59]


def write_piped(pipe, form):
    make(pipe, form=form, bf=2, g=12)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("down", [False, True])
def test_every_display_matrix_is_undone(swap, across, down, tmp_path):
    def stored(number):
        upright = drawn(number)
        upright = upright[:, ::-1] if across else upright
        upright = upright[::-1] if down else upright
        return np.ascontiguousarray(upright.transpose(1, 0, 2) if swap else upright)

    x, y = (-1 if across else 1) * 65536, (-1 if down else 1) * 65536
    matrix = [0, y, 0, x, 0, 0, 0, 0, 2**30] if swap else [x, 0, 0, 0, y, 0, 0, 0, 2**30]
    path = made(tmp_path / "turned.mp4", draw=stored, matrix=matrix, count=20)
    assert (probe(path).width, probe(path).height) == (96, 64)
    assert numbers(path, [0.2]) == [5]
    assert numbers(path, [0.2], size=(60, 48)) == [5]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_rotation_agrees_with_what_pyav_calls_it(degrees, tmp_path):
    turn = round(np.cos(np.radians(degrees))), round(np.sin(np.radians(degrees)))
    matrix = [turn[0] * 65536, -turn[1] * 65536, 0, turn[1] * 65536, turn[0] * 65536, 0, 0, 0, 2**30]
    path = made(tmp_path / "rotated.mp4", matrix=matrix, count=3)
    with av.open(path) as container:
        frame = next(container.decode(video=0))
        assert abs(frame.rotation) == abs(degrees)
        expected = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
    assert np.abs(decode(survey(path), [0.0])[0].pixels.astype(int) - expected).mean() < 3


def test_pixels_that_are_not_square_are_shown_square(tmp_path):
    path = made(tmp_path / "wide.mp4", count=3, **{"x264-params": "sar=2/1"})
    assert (probe(path).width, probe(path).height) == (192, 64)
    assert numbers(path, [0.04]) == [1]


def test_times_before_the_start_and_beyond_the_end(tmp_path):
    path = made(tmp_path / "clip.mp4", bf=2)
    assert numbers(path, [-3.0, 2.4, 2.8]) == [0, 59, 59]
    for time in (3.0, 1e9, float("inf"), float("nan")):
        with pytest.raises(MediaError, match=r"clip\.mp4 ends at 2\.4 s"):
            decode(survey(path), [time])


def test_frames_come_in_the_order_asked_and_in_the_size_asked(tmp_path):
    path = made(tmp_path / "clip.mkv", bf=2, g=12)
    found = decode(survey(path), [2.0, 0.1, 2.0, 1.0, 0.11], size=(48, 32))
    assert [number_of(frame.pixels) for frame in found] == [50, 2, 50, 25, 2]
    assert {(frame.pixels.shape, frame.pixels.dtype.name) for frame in found} == {((32, 48, 3), "uint8")}
    assert decode(survey(path), []) == []


def test_colours_and_threads(tmp_path):
    def draw(number):
        return np.broadcast_to(np.array([[200, 30, number * 4]], np.uint8), (368, 640, 3)).copy()

    path = made(tmp_path / "large.mp4", draw=draw, count=40, bf=2, g=10)
    times = [0.1, 0.5, 0.9, 1.5]
    alone, together = (decode(survey(path), times, threads=threads) for threads in (1, 4))
    for one, many in zip(alone, together, strict=True):
        assert (one.pixels == many.pixels).all()
        assert np.abs(one.pixels.mean(axis=(0, 1)) - (200, 30, round(one.time * 25) * 4)).max() < 5


def noisy(number):
    noise = np.random.default_rng(number).integers(-30, 30, drawn(number).shape[:2])
    return (drawn(number) + noise[:, :, None]).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut.mp4", "cut.mkv", "cut.ts", "cut.webm", "cut.avi", "cut.h264"])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_of_a_cut_off_file_right_frames_or_a_clear_error(name, share, tmp_path):
    settings = {"mux_movflags": "faststart"} if name == "cut.mp4" else {}
    codec = "libvpx-vp9" if name == "cut.webm" else "libx264"
    path = made(tmp_path / name, codec=codec, g=12, draw=noisy, **settings)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: int(len(content) * share)])
    reel = survey(path)
    assert 0.2 < reel.clip.duration < 2.4
    found = [frame_or_none(path, reel.clip.duration * part / 20) for part in range(20)]
    assert found.count(None) <= 2  # the last frame may be there in part
    for frame in filter(None, found):
        assert number_of(frame.pixels) == round(frame.time * 25)
    with pytest.raises(MediaError, match="ends at"):
        decode(reel, [reel.clip.duration + 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hurt.mp4", "hurt.mkv", "hurt.ts"])
def test_of_a_damaged_file_what_players_show_or_a_clear_error(name, tmp_path):
    path = made(tmp_path / name, bf=2, g=12, draw=noisy)
    content = Path(path).read_bytes()
    rng = random.Random(name)
    right = 0
    for _ in range(8):
        start = rng.randrange(len(content) // 4, len(content) * 3 // 4)
        Path(path).write_bytes(content[:start] + rng.randbytes(60) + content[start + 60 :])
        shown = played(path)
        for time in (0.2, 0.9, 1.3, 2.3):
            frame = frame_or_none(path, time)
            if frame is not None:
                assert (frame.pixels == shown[round(frame.time * 25)]).all()
                right += 1
    assert right >= 16


def played(path):
    frames = {}
    with av.open(path) as container:
        start = None
        for packet in container.demux(video=0):
            with contextlib.suppress(av.error.FFmpegError):
                for frame in packet.decode():
                    start = frame.time if start is None else start
                    frames[round((frame.time - start) * 25)] = frame.to_ndarray(format="rgb24")
    return frames


def frame_or_none(path, time):
    with contextlib.suppress(MediaError):
        return decode(survey(path), [time])[0]


def test_files_that_are_no_videos(tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("This is a letter, not a video.\n" * 50)
    (tmp_path / "noise.mp4").write_bytes(random.Random(0).randbytes(5000))
    shutil.copy(made(tmp_path / "whole.mp4"), tmp_path / "headless.mp4")
    (tmp_path / "headless.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:1500])
    with wave.open(str(tmp_path / "sound.mp4"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\nwhole.mp4\n")
    reasons = {
        "missing.mp4": "check the path",
        ".": "not a file",
        "empty.mp4": "is empty",
        "text.mp4": "can't be read as a video",
        "noise.mp4": "can't be read as a video",
        "headless.mp4": "check that it is complete",
        "sound.mp4": "no video stream",
        "list.mp4": "can't be read as a video",
        "nul\0.mp4": "check the path",
    }
    for name, reason in reasons.items():
        with pytest.raises(MediaError, match=reason) as caught:
            survey(f"{tmp_path}/{name}")
        assert name in str(caught.value)


def test_a_still_picture_is_no_video(tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "still.png")
    with pytest.raises(MediaError, match="as an image"):
        survey(str(tmp_path / "still.png"))


def test_paths_with_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = made("plain.mp4")
    for name in ("a:b.mp4", "http:c.mp4", "50% off #1.mp4", "-x.mp4", "frame%03d.mp4", "ärgerlich 見.mp4"):
        shutil.copy(source, name)
        assert numbers(name, [1.0]) == [25]


def test_the_digest_tells_contents_apart(tmp_path):
    one, two, three = (tmp_path / name for name in "123")
    one.write_bytes(b"a" * 100)
    two.write_bytes(b"a" * 100)
    assert files.digest(str(one)) == files.digest(str(two))
    two.write_bytes(b"a" * 99 + b"b")
    assert files.digest(str(one)) != files.digest(str(two))
    large = bytearray(files.WHOLE + 1)
    three.write_bytes(large)
    before = files.digest(str(three))
    large[len(large) // 2] = 1
    three.write_bytes(large)
    assert files.digest(str(three)) != before


def test_a_file_that_changes_while_in_use_is_an_error(tmp_path):
    path = made(tmp_path / "clip.mp4")
    reel = survey(path)
    made(tmp_path / "clip.mp4", count=50)
    with pytest.raises(MediaError, match="has changed while it was in use"):
        decode(reel, [0.0])


# ---- clips of other people ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["av1_video.mkv", "flipping_a_pancake.mkv", "h265_video.mp4", "nasa_13013.mp4", "unordered.mov", "video_90.mov"],
)
def test_real_clips_show_what_plain_decoding_shows(name):
    path = REAL / name
    if not path.exists():
        pytest.skip("the real clips are not here")
    reel = survey(str(path))
    with av.open(str(path)) as container:
        plain = [(frame.time, frame.to_ndarray(format="rgb24"), frame.rotation) for frame in container.decode(video=0)]
    assert len(plain) == reel.clip.frames
    stamps = [time - plain[0][0] for time, _, _ in plain]
    times = [random.Random(name).uniform(0, reel.clip.duration) for _ in range(6)]
    for time, frame in zip(times, decode(reel, times), strict=True):
        number = shown_at(stamps, time)
        assert frame.time == pytest.approx(stamps[number])
        expected = np.rot90(plain[number][1], plain[number][2] // 90)
        assert frame.pixels.shape == expected.shape
        assert np.abs(frame.pixels.astype(int) - expected).mean() < 3


def test_a_real_corrupted_clip_is_right_up_to_the_damage():
    path = REAL / "corrupted.mp4"
    if not path.exists():
        pytest.skip("the real clips are not here")
    reel = survey(str(path))
    assert [frame.time for frame in decode(reel, [0.0, 1.05, 2.0])] == pytest.approx([0.0, 1.0, 2.0])
    with pytest.raises(MediaError, match=r"corrupted\.mp4 is damaged"):
        decode(reel, [0.0, 4.5])
