"""Tool formats: calls of published systems become calls of Saccade's tools; parsing never raises."""

import json

import pytest
from error_cases import raises
from hypothesis import given
from hypothesis import strategies as st

from saccade import plugins
from saccade.chat.parser import parse_reply
from saccade.chat.tool_formats.base import parse_seconds
from saccade.chat.tool_formats.sage import sage
from saccade.chat.tool_formats.tool_call import tool_call
from saccade.chat.tool_formats.video_zoom import video_zoom
from saccade.types import BlockKind, CallFormat, Reply

NAMES = plugins.list_plugins("chat.tool_formats")


def make_window(start, end, **others):
    return {"start_time": float(start), "end_time": float(end), **others}


def get_calls(reply):
    return [(call.name, dict(call.arguments)) for call in reply.calls]


def get_errors(reply):
    return [call.error for call in reply.calls]


# ---- times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (3, 3.0),
        (-2.5, -2.5),
        ("12.5", 12.5),
        (" 12,5 ", 12.5),
        ("12s", 12.0),
        ("12 Seconds", 12.0),
        ("1:30", 90.0),
        ("01:30.5", 90.5),
        ("00:01:30", 90.0),
        ("1:00:00", 3600.0),
        ("90:00", 5400.0),
        ("00:00:05,250", 5.25),
    ],
)
def test_times_are_parsed(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    "text",
    [None, True, [], {}, "", "soon", "1:2:3:4", "-3", "1e3", "٣", float("nan"), float("inf"), 10**400, "9" * 5000],
)
def test_invalid_times_raise(text):
    with raises(ValueError, by=parse_seconds):
        parse_seconds(text)


# ---- <tool_call>, as ParaVT's evaluation and LongVT write it -------------------------------------------------------


def make_crop_call(**arguments):
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (make_crop_call(video_path="a.mp4", start_time=3, end_time=9.5), make_window(3, 9.5)),
        (make_crop_call(start_time="00:01:00", end_time="1:30"), make_window(60, 90)),
        (make_crop_call(start=3, end="9s"), make_window(3, 9)),
        (make_crop_call(start_time=3, end_time=9, reason="why"), make_window(3, 9)),
        ("<tool_code>crop_video(video_path='a.mp4', start_time=3, end_time=9)</tool_code>", make_window(3, 9)),
        ("<tool_code>print(crop_video('a.mp4', 3, 9))</tool_code>", make_window(3, 9)),
        ("<tool_code>crop_video(3, 9)</tool_code>", make_window(3, 9)),
    ],
)
def test_a_window_is_a_call_of_show_frames(text, expected):
    reply = tool_call(f"<think>Look.</think>{text}")
    assert get_calls(reply) == [("show_frames", expected)]
    assert reply.calls[0].call_format is CallFormat.THIRD_PARTY
    assert text in reply.text
    assert [block.kind for block in reply.blocks] == [BlockKind.THINK, BlockKind.CALL]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (make_crop_call(video_path="a.mp4"), "needs start_time and end_time"),
        (make_crop_call(start_time=3), "needs start_time and end_time"),
        (make_crop_call(start_time=3, end_time=None), "needs start_time and end_time"),
        (make_crop_call(start_time="soon", end_time=9), "a time must be"),
        (make_crop_call(start_time=[3], end_time=9), "a time must be"),
        (make_crop_call(start_time=True, end_time=9), "a time must be"),
        ("<tool_call>{oops</tool_call>", "can't be read"),
        ('<tool_call>{"name": "crop_video"', "not closed"),
        ("<tool_code>crop_video('a.mp4')</tool_code>", "needs start_time and end_time"),
    ],
)
def test_an_invalid_window_is_an_error_of_that_call_only(text, words):
    reply = tool_call(f"{make_crop_call(start_time=1, end_time=2)}{text}")
    assert get_errors(reply)[0] is None
    assert words in get_errors(reply)[1]
    assert not reply.calls[1].ok


def test_other_tools_and_answers_are_unchanged():
    text = '<tool_call>{"name": "zoom_image", "arguments": {"left": 1}}</tool_call><answer>B</answer>'
    assert tool_call(text) == parse_reply(text)
    assert tool_call("<think>so</think><answer>B</answer>").answer == "B"
    quoted = f"<think>I could write {make_crop_call(start_time=1, end_time=2)}</think><answer>B</answer>"
    assert tool_call(quoted).calls == ()


# ---- <video_zoom> --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"segment": [4.0, 6.0], "fps": 2}', make_window(4, 6, fps=2.0)),
        (' {"segment": [4, 6], "fps": 0.5} \n', make_window(4, 6, fps=0.5)),
        ('{"segment": ["00:04", "01:06"], "fps": "2"}', make_window(4, 66, fps=2.0)),
        ('{"segment": [4, 6]}', make_window(4, 6)),
        ('the part {"segment": [4, 6], "fps": 1}, please', make_window(4, 6, fps=1.0)),
        ('```json\n{"segment": [4, 6]}\n```', make_window(4, 6)),
        ('{"start_time": 4, "end_time": "6s"}', make_window(4, 6)),
        ('{"start": 4, "end": 6, "fps": 1}', make_window(4, 6, fps=1.0)),
        ("start=10.0 end=20.0", make_window(10, 20)),
        ("start_time = '1:10', end_time = '1:20', fps=2", make_window(70, 80, fps=2.0)),
    ],
)
def test_a_zoom_is_a_call_of_show_frames(body, expected):
    reply = video_zoom(f"<think>It moves.</think><video_zoom>{body}</video_zoom>")
    assert get_calls(reply) == [("show_frames", expected)]
    assert get_errors(reply) == [None]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "here",
        '{"segment": 4}',
        '{"segment": [4]}',
        '{"segment": [4, 6, 8]}',
        '{"segment": [null, 6]}',
        '{"segment": [[4], 6]}',
        '{"segment": ["soon", 6]}',
        '{"segment": [4, 6], "fps": [2]}',
        '{"segment": [4, 6], "fps": true}',
        '{"segment": [4, 6]} {"segment": [8, 9]}',
        '{"segment": [4, 6}',
        '{"segment": [NaN, 6]}',
        '{"segment": [1e999, 6]}',
        '{"segment": [4, 4], "segment": [5, 6]}',
        '{"segment": ' + "[" * 3000 + "}",
        "start=4",
    ],
)
def test_invalid_zooms_have_an_error(body):
    reply = video_zoom(f"<video_zoom>{body}</video_zoom>")
    assert [(block.is_closed, block.call.ok) for block in reply.blocks] == [(True, False)]


def test_zooms_among_other_tags():
    two = '<video_zoom>{"segment": [1, 2]}</video_zoom> and <video_zoom>{"segment": [3, 4]}</video_zoom>'
    assert [arguments["start_time"] for _, arguments in get_calls(video_zoom(two))] == [1.0, 3.0]
    nested = '<video_zoom><video_zoom>{"segment": [1, 2]}</video_zoom>'
    assert [call.ok for call in video_zoom(nested).calls] == [False, True]
    (unclosed,) = video_zoom('<video_zoom>{"segment": [1, 2]}').blocks
    assert (unclosed.is_closed, unclosed.call.ok) == (False, False)
    assert video_zoom("<think>or <video_zoom>{}</video_zoom>?</think><answer>B</answer>").calls == ()
    assert video_zoom("<answer>\\boxed{B}</answer>").answer == "\\boxed{B}"
    # Native calls are not part of this format.
    assert video_zoom(make_crop_call(start_time=1, end_time=2)).calls == ()


# ---- SAGE ----------------------------------------------------------------------------------------------------------


def make_action(*tools, answer=None, **others):
    called = {"needed": bool(tools), "tool_calls": list(tools)}
    return f"<json>{json.dumps({'final_answer': answer, 'recommended_tools': called, **others})}</json>"


def make_tool_use(tool, **arguments):
    return {"rationale": "to see", "name": tool, "arguments": arguments}


SPAN = {"timestamp_start": "00:01:00", "timestamp_end": "00:02:30"}


@pytest.mark.parametrize(
    ("tool", "name", "arguments"),
    [
        (
            make_tool_use("extract_parts_from_timestamp", video_path="a.mp4", **SPAN),
            "show_frames",
            make_window(60, 150),
        ),
        (
            make_tool_use("extract-video-parts", path="a.mp4", type="frames", start="60", end=150),
            "show_frames",
            make_window(60, 150),
        ),
        (
            make_tool_use("perform_reasoning", query="Who?", media_paths=["frame_12.50.png", "x/frame_14.00.png"]),
            "crop_video",
            make_window(12, 14.5, question="Who?"),
        ),
        (
            make_tool_use("analyze", query="Who?", **{"media-paths": ["frame_0.25.png"]}),
            "crop_video",
            make_window(0, 0.75, question="Who?"),
        ),
        (
            make_tool_use("perform_reasoning", query=" Who? ", media_paths=["video.mp4"]),
            "crop_video",
            make_window(0, 1e6, question="Who?"),
        ),
    ],
)
def test_visual_tools_become_calls_of_saccades_tools(tool, name, arguments):
    reply = sage(make_action(tool))
    assert get_calls(reply) == [(name, arguments)]
    assert get_errors(reply) == [None]


@pytest.mark.parametrize("name", ["identify_timestamps_visually", "ground-event"])
def test_locating_an_event_becomes_a_crop_with_a_question(name):
    ((tool, arguments),) = get_calls(sage(make_action(make_tool_use(name, event="the goal", **SPAN))))
    assert (tool, arguments["start_time"], arguments["end_time"]) == ("crop_video", 60.0, 150.0)
    assert "the goal" in arguments["question"]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (make_tool_use("verbal_transcript", **SPAN), "verbal_transcript can't be used here; there is identify"),
        (make_tool_use("unified_web_search", query="who"), "can't be used here"),
        (make_tool_use("parse-website"), "can't be used here"),
        (make_tool_use("extract_parts_from_timestamp"), "give timestamp_start and timestamp_end"),
        (
            make_tool_use("extract_parts_from_timestamp", timestamp_start="late", timestamp_end="00:02:00"),
            "a time must be",
        ),
        (make_tool_use("identify_timestamps_visually", **SPAN), "give event as text"),
        (make_tool_use("identify_timestamps_visually", event=" ", **SPAN), "give event as text"),
        (make_tool_use("perform_reasoning", query="Who?"), "give media_paths"),
        (make_tool_use("perform_reasoning", query="Who?", media_paths="a.mp4"), "give media_paths"),
        (make_tool_use("perform_reasoning", query=3, media_paths=["a.mp4"]), "give query as text"),
        ({"name": "perform_reasoning", "arguments": ["Who?"]}, "must be an object"),
        ({"name": 3}, "a tool call must be"),
        ("perform_reasoning", "a tool call must be"),
        ({}, "a tool call must be"),
    ],
)
def test_unsupported_or_invalid_tool_calls_have_an_error(tool, words):
    reply = sage(make_action(tool, make_tool_use("extract_parts_from_timestamp", **SPAN)))
    assert words in get_errors(reply)[0]
    assert get_errors(reply)[1] is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (make_action(answer="B"), "B"),
        (make_action(answer="B", answerable={"verdict": True, "reasoning": "it is shown"}), "B"),
        (make_action(answer=42), "42"),
        (make_action(make_tool_use("extract_parts_from_timestamp", **SPAN), answer="B"), "B"),
        ('```json\n{"final-answer": "B"}\n```', "B"),
        ('{"final_answer": "B"}', "B"),
        ('<think>Hm.</think>\n{"final_answer": "B"}', "B"),
        ('<json>{"final_answer": "two\nlines"}</json>', "two\nlines"),
        ('<json>{"final_answer": "B"}', "B"),
    ],
)
def test_final_answers(text, answer):
    reply = sage(text)
    assert (reply.answer, reply.calls) == (answer, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "<json></json>",
        "<json>{</json>",
        "<json>[1, 2]</json>",
        "<json>null</json>",
        '<json>{"final_answer": null}</json>',
        '<json>{"final_answer": "null"}</json>',
        '<json>{"final_answer": null, "recommended_tools": {"needed": false, "tool_calls": []}}</json>',
        '<json>{"final_answer": null, "recommended_tools": {"tool_calls": "perform_reasoning"}}</json>',
        '<json>{"final_answer": null, "recommended_tools": 3}</json>',
        '<json>{"final_answer": NaN}</json>',
        '<json>{"a": 1, "a": 2}</json>',
        "<json>" + "[" * 5000 + "</json>",
        '<json>{"a": ' * 3,
        "<answer>B</answer>",
    ],
)
def test_an_invalid_action_is_one_call_with_an_error(text):
    reply = sage(text)
    assert reply.answer is None
    assert len(reply.calls) == 1
    assert "<json>" in reply.calls[0].error


def test_the_first_object_is_used():
    assert sage(f"{make_action(answer='A')} {make_action(answer='B')}").answer == "A"


# ---- all formats ----------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *("<json>", "</json>", "```json", "```", "<video_zoom>", "</video_zoom>", "<tool_call>", "</tool_call>"),
        *("<tool_code>", "</tool_code>", "<think>", "</think>", "<answer>", "</answer>", "{", "}", "[", "]", ":", ","),
        *('"segment"', '"fps"', '"final_answer"', '"recommended_tools"', '"tool_calls"', '"name"', '"arguments"'),
        *('"extract_parts_from_timestamp"', '"crop_video"', "crop_video(", ")", "start=", "end=", "null", "1:2", "4"),
        *("\n", "\\", '"', "'", "\ud800", "\x00", "é", "NaN", "1e999", "-"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def check_reply(reply, text, prefill_length):
    assert isinstance(reply, Reply)
    assert (reply.text, reply.prefill) == (text, text[:prefill_length])
    for call in reply.calls:
        assert call.error is None or call.error
        json.dumps(dict(call.arguments), allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(text=st.lists(PIECES | st.text(max_size=4), max_size=24).map("".join), prefill_length=st.integers(0, 9))
def test_any_text_parses(name, text, prefill_length):
    check_reply(plugins.load("chat.tool_formats", name)(text, prefill_length), text, prefill_length)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(value=VALUES, key=st.sampled_from(["segment", "fps", "start", "final_answer", "recommended_tools", "arguments"]))
def test_any_json_parses(name, value, key):
    body = json.dumps({"name": "crop_video", key: value})
    for text in (f"<json>{body}</json>", f"<video_zoom>{body}</video_zoom>", f"<tool_call>{body}</tool_call>", body):
        check_reply(plugins.load("chat.tool_formats", name)(text, 0), text, 0)


@pytest.mark.slow
@given(value=VALUES, name=st.sampled_from(["extract_parts_from_timestamp", "perform_reasoning", "ground_event"]))
def test_any_arguments_of_sages_tools_parse(value, name):
    filled = dict.fromkeys(("timestamp_start", "timestamp_end", "event", "query", "media_paths"), value)
    for arguments in (value, filled):
        text = make_action({"name": name, "arguments": arguments})
        check_reply(sage(text), text, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_long_replies_are_parsed_quickly(name):
    parse = plugins.load("chat.tool_formats", name)
    for piece in ("<video_zoom>", "<json>", "{", "a=1 ", "<tool_call>{}</tool_call>", "1:", "frame_1"):
        parse(piece * 20000)
