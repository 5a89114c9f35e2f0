"""Subtitles: file formats, selection of lines, and their order among frames."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from error_cases import raises
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.media.subtitles import (
    SUBTITLES_INTRO,
    Cue,
    interleave_cues,
    read_cues,
    select_cues_at,
    select_cues_between,
    subsample_cues,
)

SRT = """1
00:00:01,000 --> 00:00:02,500
Hello, <i>you</i>

2
00:00:04,000 --> 00:00:06,000
{\\an8}two\\Nlines
and three

3
01:00:00,000 --> 01:00:01,000

"""


def cue(start, end, text="spoken"):
    return Cue(start=start, end=end, text=text)


def frame(time):
    return ImageRef(path="a.mp4", digest="d", time=time, width=32, height=32)


def read(tmp_path, text, name="a.srt", offset=0.0):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(cue.start, cue.end, cue.text) for cue in read_cues(str(path), offset)]


HELLO = [(1.0, 2.5, "Hello, you"), (4.0, 6.0, "two lines and three")]


@pytest.mark.parametrize(
    "text",
    [
        SRT,
        SRT.replace("\n", "\r\n"),
        "\ufeff" + SRT,
        SRT.replace("\n\n2\n", "\n2\n"),
        SRT.replace(",", ".").replace("Hello.", "Hello,"),
        "WEBVTT\n\n" + SRT.replace("00:00:01,000 --> 00:00:02,500", "00:01.000 --> 00:02.500 align:start"),
        SRT.replace("1\n00:00:01", "one\n\n00:00:01"),
        SRT.rstrip("\n"),
    ],
)
def test_variants_of_subrip_and_webvtt(tmp_path, text):
    assert read(tmp_path, text) == HELLO


def test_both_json_formats(tmp_path):
    rows = [{"timestamp": [4, 6], "text": "two lines\nand three"}, {"timestamp": [1.0, 2.5], "text": "Hello, you"}]
    assert read(tmp_path, json.dumps(rows), "a.json") == HELLO
    rows = [
        {"start": "00:00:01.000", "end": "00:00:02.500", "line": "Hello, you"},
        {"start": "00:04.0", "end": "6", "line": "two lines and three"},
    ]
    assert read(tmp_path, json.dumps(rows), "b.json") == HELLO
    ((start, end, _),) = read(tmp_path, json.dumps([{"timestamp": [4, "NaN"], "text": "to the end"}]), "c.json")
    assert (start, end) == (4.0, math.inf)
    assert read(tmp_path, "[]", "d.json") == []


def test_an_offset_shifts_lines_and_drops_earlier_ones(tmp_path):
    assert read(tmp_path, SRT, offset=3.0) == [(1.0, 3.0, "two lines and three")]
    assert read(tmp_path, SRT, "b.srt", offset=2.0)[0] == (-1.0, 0.5, "Hello, you")
    assert read(tmp_path, "", "c.srt") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hello", "a.srt"),
        ("hello", "a.json"),
        ('"hi"', "b.json"),
        ('{"a": 1}', "c.json"),
        ('[{"text": "hi"}]', "d.json"),
        ('[{"timestamp": [1], "text": "hi"}]', "e.json"),
        ('[{"start": "soon", "end": "late", "line": "hi"}]', "f.json"),
        ("[" * 5000, "g.json"),
        (b"\xff\xfe\x00", "b.srt"),
    ],
)
def test_a_file_without_subtitles_raises(tmp_path, text, name):
    with raises(MediaError, key=str(tmp_path / name)):
        read(tmp_path, text, name)


def test_an_unreadable_file_raises(tmp_path):
    for path in (str(tmp_path / "nowhere.srt"), str(tmp_path), "a\0.srt", "a long line that is no name " * 99):
        with raises(MediaError, key=path):
            read_cues(path)


@pytest.mark.slow
@given(st.text(max_size=200) | st.lists(st.sampled_from([*"0123456789:,.-> \n", " --> ", "00:01,5"])).map("".join))
def test_any_text_is_parsed_or_raises_media_error(text):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.srt", "a.json"):
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8", errors="replace")
            try:
                cues = read_cues(str(path))
            except MediaError:
                continue
            assert list(cues) == sorted(cues, key=lambda cue: (cue.start, cue.end))


# ---- selection -----------------------------------------------------------------------------------------------------


def test_a_line_is_selected_by_a_frame_inside_it():
    cues = [cue(0, 4), cue(5, 6), cue(7.4, 7.6), cue(9, 9.8), cue(12, math.inf)]
    assert select_cues_at(cues, [2, 5, 7.9, 10]) == [cues[0], cues[2]]
    assert select_cues_at(cues, [4.0, 6.0]) == []  # strictly inside
    assert select_cues_at(cues, [8.91, 9.89]) == [cues[3]]  # widened to a second around 9.4
    assert select_cues_at(cues, [11, 99]) == [cues[4]]
    assert select_cues_at(cues, []) == cues


def test_a_window_selects_the_lines_that_overlap_it():
    cues = [cue(0, 4), cue(4, 8), cue(8, 12), cue(11, math.inf)]
    assert select_cues_between(cues, 4, 8) == [cues[1]]
    assert select_cues_between(cues, 3.9, 8.1) == cues[:3]
    assert select_cues_between(cues, 50, 60) == [cues[3]]


def test_too_many_lines_are_subsampled_evenly():
    cues = [cue(at, at + 1, "x") for at in range(10)]
    assert subsample_cues(cues, 100, lambda line: 10) == cues
    assert subsample_cues(cues, 99, lambda line: 10) == cues[::2]
    assert subsample_cues(cues, 39, lambda line: 10) == cues[::4]
    assert subsample_cues(cues, 10, lambda line: 10) == cues[:1]
    assert subsample_cues(cues, 9, lambda line: 10) == []
    assert subsample_cues(cues, 0, lambda line: 10) == subsample_cues([], 100, lambda line: 10) == []


def test_lines_follow_the_frames_up_to_their_middle():
    frames = [frame(2.0), frame(6.0), frame(10.0)]
    cues = [cue(9, 11.5, "last"), cue(0, 3, "first"), cue(5, 7, "at six"), cue(3, 4, "between")]
    assert interleave_cues(frames, cues) == [
        *(SUBTITLES_INTRO, "<0.0-3.0 seconds> first\n", "<2.0 seconds>", frames[0], "<3.0-4.0 seconds> between\n"),
        *("<6.0 seconds>", frames[1], "<5.0-7.0 seconds> at six\n", "<10.0 seconds>", frames[2]),
        "<9.0-11.5 seconds> last\n",
    ]
    assert interleave_cues(frames, []) == [
        "<2.0 seconds>",
        frames[0],
        "<6.0 seconds>",
        frames[1],
        "<10.0 seconds>",
        frames[2],
    ]
    assert interleave_cues([], [cue(3, math.inf, "on")]) == [SUBTITLES_INTRO, "<3.0- seconds> on\n"]
    assert interleave_cues(frames[:1], [], "") == [frames[0]]
