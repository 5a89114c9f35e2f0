"""Subtitles: every shape of file, which lines are shown, and where they stand."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import MediaError
from saccade.ledger import Picture
from saccade.media.subtitles import LEAD, Cue, during, read_cues, seen, thinned, woven

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


def cue(start, end, text="said"):
    return Cue(start=start, end=end, text=text)


def frame(time):
    return Picture(path="a.mp4", digest="d", time=time, width=32, height=32)


def read(tmp_path, text, name="a.srt", offset=0.0):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(one.start, one.end, one.text) for one in read_cues(str(path), offset)]


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
def test_subrip_in_its_spellings(tmp_path, text):
    assert read(tmp_path, text) == HELLO


def test_both_shapes_of_json(tmp_path):
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


def test_an_offset_is_taken_off_and_what_was_said_before_is_left_out(tmp_path):
    assert read(tmp_path, SRT, offset=3.0) == [(1.0, 3.0, "two lines and three")]
    assert read(tmp_path, SRT, "b.srt", offset=2.0)[0] == (-1.0, 0.5, "Hello, you")
    assert read(tmp_path, "", "c.srt") == []


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("hello", "a.srt", "holds no subtitles: no line of it has times"),
        ("hello", "a.json", "holds no subtitles: it must be a list"),
        ('"hi"', "b.json", "it must be a list"),
        ('{"a": 1}', "c.json", "it must be a list"),
        ('[{"text": "hi"}]', "d.json", "it must be a list"),
        ('[{"timestamp": [1], "text": "hi"}]', "e.json", "it must be a list"),
        ('[{"start": "soon", "end": "late", "line": "hi"}]', "f.json", "it must be a list"),
        ("[" * 5000, "g.json", "it must be a list"),
        (b"\xff\xfe\x00", "b.srt", "holds no subtitles"),
    ],
)
def test_a_file_that_holds_none_is_named(tmp_path, text, name, words):
    with pytest.raises(MediaError, match=words) as caught:
        read(tmp_path, text, name)
    assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MediaError, match=r"the subtitles .*nowhere.srt' can't be read: No such file"):
        read_cues(str(tmp_path / "nowhere.srt"))
    for path in (str(tmp_path), "a\0.srt", "a long line that is no name " * 99):
        with pytest.raises(MediaError, match="can't be read"):
            read_cues(path)


@pytest.mark.slow
@given(st.text(max_size=200) | st.lists(st.sampled_from([*"0123456789:,.-> \n", " --> ", "00:01,5"])).map("".join))
def test_any_text_is_read_or_named(text):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.srt", "a.json"):
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8", errors="replace")
            try:
                cues = read_cues(str(path))
            except MediaError:
                continue
            assert list(cues) == sorted(cues, key=lambda one: (one.start, one.end))


# ---- what is shown -------------------------------------------------------------------------------------------------


def test_a_line_is_seen_where_a_frame_falls_into_it():
    cues = [cue(0, 4), cue(5, 6), cue(7.4, 7.6), cue(9, 9.8), cue(12, math.inf)]
    assert seen(cues, [2, 5, 7.9, 10]) == [cues[0], cues[2]]
    assert seen(cues, [4.0, 6.0]) == []  # strictly inside
    assert seen(cues, [8.91, 9.89]) == [cues[3]]  # widened to a second around 9.4
    assert seen(cues, [11, 99]) == [cues[4]]
    assert seen(cues, []) == cues


def test_a_window_has_the_lines_of_which_something_is_said_in_it():
    cues = [cue(0, 4), cue(4, 8), cue(8, 12), cue(11, math.inf)]
    assert during(cues, 4, 8) == [cues[1]]
    assert during(cues, 3.9, 8.1) == cues[:3]
    assert during(cues, 50, 60) == [cues[3]]


def test_too_many_lines_are_thinned_evenly():
    cues = [cue(at, at + 1, "x") for at in range(10)]
    assert thinned(cues, 100, lambda line: 10) == cues
    assert thinned(cues, 99, lambda line: 10) == cues[::2]
    assert thinned(cues, 39, lambda line: 10) == cues[::4]
    assert thinned(cues, 10, lambda line: 10) == cues[:1]
    assert thinned(cues, 9, lambda line: 10) == []
    assert thinned(cues, 0, lambda line: 10) == thinned([], 100, lambda line: 10) == []


def test_lines_stand_after_all_frames_up_to_their_middle():
    frames = [frame(2.0), frame(6.0), frame(10.0)]
    cues = [cue(9, 11.5, "last"), cue(0, 3, "first"), cue(5, 7, "at six"), cue(3, 4, "between")]
    assert woven(frames, cues) == [
        *(LEAD, "<0.0-3.0 seconds> first\n", "<2.0 seconds>", frames[0], "<3.0-4.0 seconds> between\n"),
        *("<6.0 seconds>", frames[1], "<5.0-7.0 seconds> at six\n", "<10.0 seconds>", frames[2]),
        "<9.0-11.5 seconds> last\n",
    ]
    assert woven(frames, []) == ["<2.0 seconds>", frames[0], "<6.0 seconds>", frames[1], "<10.0 seconds>", frames[2]]
    assert woven([], [cue(3, math.inf, "on")]) == [LEAD, "<3.0- seconds> on\n"]
    assert woven(frames[:1], [], "") == [frames[0]]
