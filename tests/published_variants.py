"""Variants of the published rows, made by rules: each with how it is learned, or the reason why it is refused.

A variant's outcome is LEARNED, a `RejectionReason` of the replay, or the key of the importer's DataError. Media are
video.mp4 (16 s), image.png and figure.png, in the folder of the rows.
"""

import itertools
import json
import random

from published_rows import PARAVT_PATH, PARAVT_QUESTION, PARAVT_SYSTEM, PYVISION_PROMPT

from saccade.training.demonstrations import RejectionReason

LEARNED = "learned"
LOOK = "<think>\nI look closer.\n</think>\n"
ANSWER = "<think>\nIt is blue.\n</think>\n<answer>B</answer>"
UNICODE = (
    "Ein Kreis – „blau“ 🙂",
    "一个蓝色的圆",
    "دائرة زرقاء",
    "e\u0301 and é",
    "a\u200bb\u00a0c",
    "\\frac{1}{2} & <b>",
)


# ---- ParaVT, SFT ---------------------------------------------------------------------------------------------------


def format_call(name="crop_video", *, path=PARAVT_PATH, **arguments):
    arguments = {"video_path": path, **arguments} if path else arguments
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CROP = format_call(start_time=2.0, end_time=9.5)


def text_part(text):
    return {"type": "text", "text": text}


def respond(*texts):
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


def build_paravt(*turns, system=PARAVT_SYSTEM, user=None, tool_role="user", as_json=True, as_parts=True):
    """Return a row of messages; the turns alternate between the assistant and the tools."""

    def build(role, text):
        return {"role": role, "content": [text_part(text)] if as_parts else text}

    first = [] if system is None else [build("system", system)]
    user = user or [{"type": "video_url", "video_url": {"url": "video.mp4"}}, text_part(PARAVT_QUESTION)]
    roles = itertools.cycle(("assistant", tool_role))
    messages = [*first, {"role": "user", "content": user}, *(build(next(roles), text) for text in turns)]
    return {"id": "selfqa_3", "data_source": "selfqa", "messages": json.dumps(messages) if as_json else messages}


def iterate_paravt_grid():
    """Yield rows of one to five tool turns with one to six parallel calls each, with windows and texts at random."""
    rng = random.Random(5)
    for num_turns, num_calls in itertools.product((1, 2, 3, 5), (1, 2, 4, 6)):
        turns = []
        for _ in range(num_turns):
            windows = [sorted(rng.sample(range(16), 2)) for _ in range(num_calls)]
            calls = "".join(format_call(start_time=start, end_time=end) for start, end in windows)
            turns += [LOOK + calls, respond(*(rng.choice((*UNICODE, "Nothing.")) for _ in windows))]
        yield f"{num_turns} turns of {num_calls} calls", build_paravt(*turns, ANSWER), LEARNED


def iterate_paravt_forms():
    """Yield rows whose messages, media, roles and calls are written in other forms."""
    one_look = (LOOK + CROP, respond("Blue."), ANSWER)
    for as_json, as_parts in itertools.product((False, True), repeat=2):
        yield f"json {as_json}, parts {as_parts}", build_paravt(*one_look, as_json=as_json, as_parts=as_parts), LEARNED
    for role in ("user", "tool", "observation", "function", "ipython", "tool_response"):
        yield f"responses of the role {role}", build_paravt(*one_look, tool_role=role), LEARNED
    question = text_part(PARAVT_QUESTION)
    for name, part in {
        "a file address": {"type": "video_url", "video_url": {"url": "file://video.mp4"}},
        "a plain address": {"type": "video_url", "video_url": "video.mp4"},
        "the key video": {"type": "video", "video": "video.mp4", "text": None},
        "a file address under video": {"type": "video", "video": "file://video.mp4"},
    }.items():
        yield f"a video by {name}", build_paravt(*one_look, user=[part, question]), LEARNED
        yield f"a video by {name} after the text", build_paravt(*one_look, user=[question, part]), LEARNED
    placeholder = [{"type": "video", "video": "video.mp4"}, text_part(f"<video>\n{PARAVT_QUESTION}")]
    yield "a placeholder beside its video", build_paravt(*one_look, user=placeholder), LEARNED
    yield "no system turn", build_paravt(*one_look, system=None), LEARNED
    texts = ("2", "9.5"), ("2.0", 9), ("2s", "9 s"), ("00:02", "00:09"), ("0:00:02", "0:00:09.5")
    for start, end in (*texts, (-3, 9), (2, 99), (2, 2.01)):
        call = format_call(start_time=start, end_time=end)
        yield f"times {start!r} and {end!r}", build_paravt(LOOK + call, respond("Blue."), ANSWER), LEARNED
    for name, call in {
        "start and end": format_call(start=2, end=9),
        "another name of the video": format_call(path="", video=PARAVT_PATH, start_time=2, end_time=9),
        "no video": format_call(path="", start_time=2, end_time=9),
        "the file's name": format_call(path="video.mp4", start_time=2, end_time=9),
        "a further argument": format_call(start_time=2, end_time=9, reason="the start", level=[1, {"a": None}]),
        "a null argument": format_call(start_time=2, end_time=9, question=None),
        "a question": format_call(start_time=2, end_time=9, question=UNICODE[0]),
        "python style": f"\n<tool_code>print(crop_video({PARAVT_PATH!r}, 2, end_time=9))</tool_code>",
        "python style by position": "\n<tool_code>crop_video(2, 9.5)</tool_code>",
    }.items():
        outcome = RejectionReason.ERROR_RESULT if name == "a null argument" else LEARNED
        yield f"a call with {name}", build_paravt(LOOK + call, respond("Blue."), ANSWER), outcome
    row = build_paravt(*one_look, as_json=False)
    call = {"type": "function", "function": {"name": "crop_video", "arguments": '{"start_time": 2, "end_time": 9}'}}
    row["messages"][2] = {"role": "assistant", "content": LOOK, "tool_calls": [call, call]}
    row["messages"][3:4] = [{"role": "tool", "content": text} for text in ("Red.", "Blue.")]
    yield "calls in a field of their own", row, LEARNED
    row = build_paravt(*one_look, as_json=False)
    row["messages"][2:3] = [{"role": "assistant", "content": text} for text in (LOOK, CROP)]
    yield "a thought and its call in two messages", row, LEARNED
    row = build_paravt(ANSWER, as_json=False)
    row["messages"] += [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": ANSWER}]
    yield "two questions", row, LEARNED


def iterate_paravt_texts():
    """Yield rows with texts that look like something else: quoted tags, special tokens, other scripts, long answers."""
    for number, text in enumerate(UNICODE):
        thought = f"<think>\n{text}\n</think>\n"
        row = build_paravt(thought + CROP, respond(text), f"{thought}<answer>{text}</answer>")
        yield f"texts of other scripts {number}", row, LEARNED
    for tag in (
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        "<code>",
        "<code>1</code>",
        "<answer>A</answer>",
        "</answer>",
    ):
        thought = f"<think>\nI could write {tag} here.\n</think>\n"
        yield f"{tag} in a thought", build_paravt(thought + CROP, respond("Blue."), thought + ANSWER[26:]), LEARNED
    for start in ("<think>", "<think> ", "\n<think>\n\n", ""):  # some chat templates begin the thought
        thought = f"{start}I look.</think>\n"
        row = build_paravt(thought + CROP, respond("Blue."), f"{thought}<answer>B</answer>")
        yield f"a thought that begins with {start!r}", row, LEARNED
    for answer in ("B", "(B)", "B. blue", "blue", "\\boxed{B}", "3.5 to 9", "a\nb", "<answer>", "🙂"):
        outcome = "messages" if answer == "<answer>" else LEARNED
        yield f"the answer {answer!r}", build_paravt(f"{LOOK}<answer>{answer}</answer>"), outcome
    yield "an answer without tags", build_paravt(f"{LOOK}It is blue."), LEARNED
    yield "two answers in one reply", build_paravt(f"{ANSWER} No: <answer>A</answer>"), LEARNED
    yield "special tokens", build_paravt(f"{LOOK}<|im_end|><|video_pad|><answer>B</answer>"), LEARNED
    shown = [text_part("A jet."), {"type": "image_url", "image_url": {"url": "figure.png"}}]
    for name, content in {"a frame and a text": shown, "a frame alone": shown[1:]}.items():
        row = build_paravt(LOOK + CROP, "", ANSWER, as_json=False, tool_role="tool")
        row["messages"][3]["content"] = content
        yield f"a response with {name}", row, LEARNED
    for text in ("Error: nothing is shown.", "Word. " * 900, "a\n\nb", "{}", "</think>", "[cut]"):
        yield f"a sub-agent's {text[:12]!r}", build_paravt(LOOK + CROP, respond(text), ANSWER), LEARNED


def iterate_paravt_bad():
    """Yield rows that can't be learned as they are written."""
    for name, call in {
        "a time that is not a number": '{"video_path": "video.mp4", "start_time": NaN, "end_time": 9}',
        "an infinite time": '{"start_time": 2, "end_time": Infinity}',
        "a huge time": '{"start_time": 2, "end_time": 1e999}',
        "a list of times": '{"start_time": [2], "end_time": [9]}',
        "a truth value as a time": '{"start_time": false, "end_time": 9}',
        "no end": '{"start_time": 2}',
        "no arguments": "{}",
        "a word as a time": '{"start_time": "soon", "end_time": 9}',
        "a blank time": '{"start_time": "", "end_time": 9}',
        "equal times": '{"start_time": 9, "end_time": 9}',
        "reversed times": '{"start_time": 9, "end_time": 2}',
        "a window after the end": '{"start_time": 16.5, "end_time": 20}',
        "a window before the start": '{"start_time": -9, "end_time": -2}',
        "another video": '{"video_path": "other.mp4", "start_time": 2, "end_time": 9}',
        "a key twice": '{"start_time": 2, "start_time": 3, "end_time": 9}',
        "the same argument twice": '{"start_time": 2, "start": 3, "end_time": 9}',
        "invalid unicode": '{"start_time": 2, "end_time": 9, "question": "\\ud800"}',
        "arguments that are no mapping": "[2, 9]",
    }.items():
        body = f'{{"name": "crop_video", "arguments": {call}}}'
        row = build_paravt(f"{LOOK}<tool_call>{body}</tool_call>", respond("Blue."), ANSWER)
        yield f"a call with {name}", row, RejectionReason.ERROR_RESULT
        mixed = build_paravt(f"{LOOK}{CROP}<tool_call>{body}</tool_call>", respond("Red.", "Blue."), ANSWER)
        yield f"a good call beside one with {name}", mixed, RejectionReason.ERROR_RESULT
    for error in ("[Error: crop_video failed: no frame]", "[Error cropping 2.0s-9.5s]", "[Error]"):
        yield f"the response {error}", build_paravt(LOOK + CROP, respond(error), ANSWER), RejectionReason.ERROR_RESULT
        row = build_paravt(LOOK + CROP * 2, respond("Red.", error), ANSWER)
        yield f"a text beside the response {error}", row, RejectionReason.ERROR_RESULT
    for name, call in {
        "another tool": format_call("crop_audio", start_time=2, end_time=9),
        "no JSON": "<tool_call>crop the video</tool_call>",
        "cut JSON": '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2',
        "no closing tag": '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 9}}',
        "code": "<code>\n```python\nprint(1)\n```\n</code>",
    }.items():
        yield f"a call of {name}", build_paravt(LOOK + call, respond("Blue."), ANSWER), RejectionReason.ERROR_RESULT
    yield (
        "31 calls in one turn",
        build_paravt(LOOK + CROP * 31, respond(*["Red."] * 31), ANSWER),
        RejectionReason.ERROR_RESULT,
    )
    turns = [LOOK + CROP, respond("Red.")]
    yield "31 tool turns", build_paravt(*turns * 31, ANSWER), RejectionReason.UNANSWERED_CALLS
    yield (
        "a call in a thought",
        build_paravt(f"<think>{CROP}</think>", *turns[1:], ANSWER),
        RejectionReason.SURPLUS_RESULTS,
    )
    yield "a response without a call", build_paravt(LOOK, respond("Red."), ANSWER), RejectionReason.SURPLUS_RESULTS
    answered = build_paravt(f"{ANSWER}{CROP}", respond("Red."), ANSWER)
    yield "a call after the answer", answered, RejectionReason.UNANSWERED_CALLS
    answered = build_paravt(f"{LOOK}{CROP}<answer>A</answer>", respond("Red."), ANSWER)
    yield "a call before the answer", answered, RejectionReason.UNANSWERED_CALLS
    yield "a call after the last answer", build_paravt(*turns, ANSWER + CROP), RejectionReason.UNANSWERED_CALLS
    yield "no thought", build_paravt("It is blue. <answer>B</answer>"), RejectionReason.NO_THOUGHT
    yield "no thought at a call", build_paravt(CROP, respond("Red."), ANSWER), RejectionReason.NO_THOUGHT
    yield "no thought at the end", build_paravt(*turns, "<answer>B</answer>"), RejectionReason.NO_THOUGHT
    yield "an answer that opens again", build_paravt(f"{ANSWER}<answer>A"), RejectionReason.UNCLOSED_ANSWER
    image = [{"type": "image", "image": "image.png"}, text_part(PARAVT_QUESTION)]
    yield "a crop of an image", build_paravt(*turns, ANSWER, user=image), RejectionReason.ERROR_RESULT
    yield "a crop of nothing", build_paravt(*turns, ANSWER, user=[text_part("Who?")]), RejectionReason.ERROR_RESULT
    missing = [{"type": "video", "video": "missing.mp4"}, text_part("Who?")]
    yield "a missing video", build_paravt(ANSWER, user=missing), RejectionReason.FAILED
    untyped = build_paravt(ANSWER, user=[{"video": "missing.mp4"}, text_part("Who?")])
    yield "a missing video without a type", untyped, RejectionReason.FAILED
    broken = [{"type": "video", "video": "broken.mp4"}, text_part("Who?")]
    yield "a broken video", build_paravt(ANSWER, user=broken), RejectionReason.FAILED


def iterate_paravt_unreadable():
    """Yield rows that the importer refuses, with the key of its error."""
    for name, turns in {
        "no reply": (),
        "a call at the end": (LOOK + CROP,),
        "a response at the end": (LOOK + CROP, respond("Red.")),
        "fewer responses than calls": (LOOK + CROP * 2, respond("Red."), ANSWER),
        "more responses than calls": (LOOK + CROP, respond("Red.", "Blue."), ANSWER),
        "an empty response": (LOOK + CROP, respond(""), ANSWER),
        "a blank reply": (" \n",),
        "a blank answer": (f"{LOOK}<answer> </answer>",),
        "an answer without its end": (f"{LOOK}<answer>B",),
        "an answer in a thought alone": ("<think>Is it <answer>B</answer>?</think>",),
        "a thought without its end": ("<think>It is blue.",),
        "a quoted answer beside a call": (f"<think>As <answer>B</answer>.</think>{CROP}",),
    }.items():
        yield name, build_paravt(*turns), "messages"
    both = [text_part(respond("Red.", "Blue.")), {"type": "image_url", "image_url": {"url": "figure.png"}}]
    for name, calls, content in (
        ("an image for either of two calls", CROP * 2, both),
        ("a video in a response", CROP, [text_part("Red."), {"type": "video_url", "video_url": {"url": "video.mp4"}}]),
    ):
        row = build_paravt(LOOK + calls, "", ANSWER, as_json=False)
        row["messages"][3] = {"role": "tool", "content": content}
        yield name, row, "messages"
    question = text_part("Who?")
    yield "a placeholder without its video", build_paravt(ANSWER, user=[{"type": "video"}, question]), "messages"
    yield "an image's placeholder in the text", build_paravt(ANSWER, user=[text_part("<image> Who?")]), "messages"
    yield "no text", build_paravt(ANSWER, user=[{"type": "video", "video": "video.mp4"}]), "messages"
    yield "sound", build_paravt(ANSWER, user=[{"type": "audio", "audio": "a.wav"}, question]), "messages.1.content.0"
    yield "a number as content", build_paravt(ANSWER, user=[3, question]), "messages.1.content.0"
    for name, messages, key in (
        ("no messages", [], "messages"),
        ("no question", [{"role": "assistant", "content": ANSWER}], "messages"),
        ("cut JSON", '[{"role": "user"', "messages.0"),
        (
            "an unknown role",
            [{"role": "user", "content": "Who?"}, {"role": "narrator", "content": "x"}],
            "messages.1.role",
        ),
        ("no role", [{"content": "Who?"}], "messages.0.role"),
        (
            "an answer before the question",
            [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Who?"}],
            "messages",
        ),
        (
            "a system turn in the middle",
            [
                {"role": "user", "content": "Who?"},
                {"role": "system", "content": "Be brief."},
                {"role": "assistant", "content": ANSWER},
            ],
            "messages",
        ),
        (
            "a response before any call",
            [
                {"role": "user", "content": "Who?"},
                {"role": "tool", "content": "Red."},
                {"role": "assistant", "content": ANSWER},
            ],
            "messages",
        ),
    ):
        yield name, {"messages": messages}, key


# ---- RL: a row's outcome is the task's answer type and ground truth, or the key of the importer's DataError ----------


def build_paravt_rl(question=PARAVT_QUESTION, *, system=PARAVT_SYSTEM, videos=({"video": "video.mp4"},), **info):
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": f"<video>{question}"}]
    return {"data_source": "museg", "prompt": prompt, "videos": [*videos], "extra_info": json.dumps(info)}


def iterate_paravt_rl():
    """Yield RL rows of every type of question, with answers and media in many forms."""
    for number, answer in enumerate(("B", "(B)", "b", "B. blue", "blue", "\\boxed{B}", "Answer: B")):
        yield f"a choice {number}", build_paravt_rl(answer=answer, question_type="mcq"), ("choice", "B")
    for number, answer in enumerate(("C", "A or B", "green", 3, [])):
        key = "extra_info.answer"
        yield f"no choice {number}", build_paravt_rl(answer=answer, question_type="mcq"), key
    spans = (
        [2, 9.5],
        ["2", "9.5"],
        "[2.0, 9.5]",
        "2 - 9.5",
        "00:02 to 00:09.5",
        {"start": 2, "end": "9.5"},
        [[2, 9.5]],
    )
    for number, answer in enumerate(spans):
        row = build_paravt_rl("When is it blue?", answer=answer, question_type="tvg")
        yield f"a span {number}", row, ("grounding", (2.0, 9.5))
    nan, infinity = float("nan"), float("inf")
    for number, answer in enumerate(
        (
            [9, 2],
            [2, 2],
            [2],
            [2, nan],
            [nan, 9],
            [2, infinity],
            [2, nan, 9],
            [True, 9],
            "soon",
            None,
            {"start": 2},
            [2, 3, 4],
        )
    ):
        row = build_paravt_rl("When is it blue?", answer=answer, question_type="tvg")
        yield f"no span {number}", row, "extra_info.answer"
    for text in UNICODE:
        row = build_paravt_rl("What is it?", answer=text, question_type="oe")
        yield f"the text {text}", row, ("open", text)
    yield "a number as a text", build_paravt_rl("How many?", answer=3, question_type="oe"), ("open", "3")
    yield "no type", build_paravt_rl("What is it?", answer="red"), ("open", "red")
    yield "a blank answer", build_paravt_rl("What is it?", answer=" ", question_type="oe"), "extra_info.answer"
    yield "no answer", build_paravt_rl("What is it?", question_type="oe"), "extra_info.answer"
    info = {"answer": "B", "question_type": "mcq"}
    yield "options of their own", build_paravt_rl("Which?", options=["red", "blue"], **info), ("choice", "B")
    yield "no options", build_paravt_rl("Which?", **info), "extra_info.answer"
    for number, videos in enumerate((["video.mp4"], [{"video": "file://video.mp4"}], [{"path": "video.mp4"}])):
        yield f"a video in the form {number}", build_paravt_rl(videos=videos, **info), ("choice", "B")
    yield "no video", build_paravt_rl(videos=[], **info), "videos"
    yield "two videos for a placeholder", build_paravt_rl(videos=["video.mp4"] * 2, **info), "videos"
    yield "a number as a video", build_paravt_rl(videos=[3.5, None], **info), "videos.1"
    yield "no question", build_paravt_rl(" ", **info), "prompt"
    row = build_paravt_rl(**info)
    yield "a mapping of further facts", {**row, "extra_info": json.loads(row["extra_info"])}, ("choice", "B")
    yield "cut JSON", {**row, "extra_info": row["extra_info"][:9]}, "extra_info"
    yield "the prompt as JSON", {**row, "prompt": json.dumps(row["prompt"])}, ("choice", "B")
    yield "no user", {**row, "prompt": row["prompt"][:1]}, "prompt"


def build_pyvision_rl(**fields):
    fact = {"answer": "3", "index": 3, "question": "How many discs are there?", "split": "train"}
    return {
        "prompt": [{"role": "user", "content": f"<image>\n{PYVISION_PROMPT}"}],
        "data_source": "deepeyes",
        "ability": "visual_search",
        "env_name": "pyvision_gym_w_image_hint",
        "reward_model": {"ground_truth": "3", "style": "model"},
        "extra_info": fact,
        "mm_hint": {"hint_path": "image.png", "hint_type": "image"},
    } | fields


def iterate_pyvision_rl():
    """Yield RL rows of every environment, origin and form of media."""
    video = {"hint_path": "video.mp4", "hint_type": "video"}
    for env_name, hint in (
        ("pyvision_gym_w_image_hint", {"hint_path": "image.png", "hint_type": "image"}),
        ("pyvision_gym_wo_image_hint", {"hint_path": ["image.png"], "hint_type": "image"}),
        ("pyvision_gym_w_image_hint", {"hint_path": ["image.png", "figure.png"], "hint_type": "image"}),
        ("pyvision_gym_wo_video_hint", video),
        ("pyvision_gym_wo_video_hint", {"hint_path": ["video.mp4", "video.mp4"], "hint_type": "video"}),
    ):
        count = len(hint["hint_path"]) if isinstance(hint["hint_path"], list) else 1
        yield f"{env_name} of {count} files", build_pyvision_rl(env_name=env_name, mm_hint=hint), ("open", "3")
    for truth, outcome in (
        ("3.5", 3.5),
        (4, 4.0),
        ("1,200", 1200.0),
        ("-2", -2.0),
        ("nan", None),
        ("many", None),
        ("", None),
    ):
        row = build_pyvision_rl(data_source="vsi_numerical", reward_model={"ground_truth": truth}, mm_hint=video)
        yield f"the number {truth!r}", row, "reward_model.ground_truth" if outcome is None else ("number", outcome)
    for truth in ("\\frac{1}{2}", "x^2", "3"):
        row = build_pyvision_rl(ability="math", reward_model={"ground_truth": truth})
        yield f"the formula {truth}", row, ("math", truth)
    for text in UNICODE:
        yield f"the text {text}", build_pyvision_rl(reward_model={"ground_truth": text}), ("open", text)
    for field in ("prompt", "reward_model", "mm_hint"):
        row = build_pyvision_rl()
        del row[field]
        yield f"no {field}", row, field
    yield "no facts", build_pyvision_rl(extra_info=None), ("open", "3")
    yield "no environment", build_pyvision_rl(env_name=None), ("open", "3")
    for hint, key in (
        ({"hint_path": "a.wav", "hint_type": "audio"}, "mm_hint.hint_type"),
        ({"hint_type": "image"}, "mm_hint.hint_path"),
    ):
        yield f"the hint {hint}", build_pyvision_rl(mm_hint=hint), key


RL_VARIANTS = {"paravt_rl": [*iterate_paravt_rl()], "pyvision_rl": [*iterate_pyvision_rl()]}


# ---- PyVision, SFT -------------------------------------------------------------------------------------------------

BOXED = "There are three.\n<answer>\n\\boxed{3}\n</answer>"
IMAGE_PROMPT = f"<image_clue_0><image></image_clue_0>\n\n{PYVISION_PROMPT}"


def write_code(source):
    return f"I count.\n<code>\n```python\n{source}\n```\n</code>"


def write_result(text="", figures=(), *, error=""):
    """Return the interpreter's message: printed text, figures by number, or an error."""
    shown = "".join(f"<image_clue_{number}><image></image_clue_{number}>" for number in figures)
    body = "\n".join(
        filter(None, (f"Text Result:\n{text}" if text else "", f"Image Result:\n{shown}" if figures else "", error))
    )
    return f"<interpreter>{body}</interpreter>\n"


def build_pyvision(*turns, prompt=IMAGE_PROMPT, images=("image.png",), tool_role="observation", **fields):
    roles = ["user", *["assistant", tool_role] * len(turns)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, (prompt, *turns), strict=False)]
    return {"messages": messages, "images": [*images], "env_name": "pyvision_gym_w_image_hint", **fields}


def iterate_pyvision_grid():
    """Yield rows of up to 46 messages, whose turns print, show figures, do both, or fail, at random."""
    rng = random.Random(7)
    for num_turns in (0, 1, 1, 2, 2, 3, 4, 5, 8, 13, 21, 22):
        turns, images, has_error = [], ["image.png"], False
        for _ in range(num_turns):
            figures = range(len(images), len(images) + rng.choice((0, 0, 1, 1, 3)))
            fails = rng.random() < 0.3
            error = rng.choice(("Execution error: name 'np' is not defined", "ValueError: bad")) if fails else ""
            text = rng.choice((*UNICODE, "3", "1\n2\n\n3", "" if figures else "0"))
            turns += [write_code(f"print({rng.random()})"), write_result(text, figures, error=error)]
            images += ["figure.png"] * len(figures)
            has_error = has_error or fails
        name = f"{num_turns} turns with {len(images)} images and {'an' if has_error else 'no'} error"
        yield name, build_pyvision(*turns, BOXED, images=images), RejectionReason.ERROR_RESULT if has_error else LEARNED


def iterate_pyvision_errors():
    """Yield rows with a failed call that a later reply corrects; they are learned where the recipe accepts them."""
    traceback = 'Traceback (most recent call last):\n  File "<string>", line 1\nZeroDivisionError: division by zero'
    for error in (
        "Execution error: name 'np' is not defined",
        "Tool error: timeout",
        "Error: no such image",
        traceback,
        "NameError: name 'np' is not defined",
        '  File "<string>", line 1\n    x =\nSyntaxError: invalid syntax',
        "PIL.UnidentifiedImageError: cannot identify image file",
        "KeyError",
    ):
        for printed in ("", "3 discs"):
            if printed and error.startswith("Error:"):
                continue  # below other output it may be printed on purpose
            body = f"{printed}\n{error}" if printed else error
            row = build_pyvision(write_code("1/0"), write_result(body), write_code("3"), write_result("3"), BOXED)
            yield f"{error.splitlines()[-1]!r} after {printed!r}", row, RejectionReason.ERROR_RESULT
    for text in (
        "Mean Error: 0.3",
        "MeanSquaredError: 0.2",
        "the error is small",
        "3 Errors",
        "ValueError: x\nfixed: 3",
    ):
        row = build_pyvision(write_code("3"), write_result(text), BOXED)
        yield f"{text!r}, which is no failure", row, LEARNED


def iterate_pyvision_forms():
    """Yield rows whose messages, images, code and prompts are written in other forms."""
    looks = (write_code("print(3)"), write_result("3"), BOXED)
    for role in ("observation", "user", "tool", "ipython"):
        yield f"results of the role {role}", build_pyvision(*looks, tool_role=role), LEARNED
    for number, image in enumerate(({"path": "image.png"}, {"bytes": None, "path": "image.png"}, "file://image.png")):
        yield f"an image in the form {number}", build_pyvision(*looks, images=[image]), LEARNED
    yield (
        "messages as JSON",
        {**build_pyvision(*looks), "messages": json.dumps(build_pyvision(*looks)["messages"])},
        LEARNED,
    )
    parts = [{"type": "image"}, text_part(PYVISION_PROMPT)]
    yield "a placeholder as a part", build_pyvision(*looks, prompt=parts), LEARNED
    parts = [{"type": "image", "image": "image.png"}, text_part(PYVISION_PROMPT)]
    yield "an image as a part", build_pyvision(*looks, prompt=parts, images=()), LEARNED
    yield "an image for the interpreter alone", build_pyvision(*looks, prompt=PYVISION_PROMPT), LEARNED
    yield "no image", build_pyvision(*looks, prompt="What is 1 + 2?", images=()), LEARNED
    two = "<image_clue_0><image></image_clue_0>\n<image_clue_1><image></image_clue_1>\nWhich is red?"
    yield "two images", build_pyvision(*looks, prompt=two, images=["image.png", "figure.png"]), LEARNED
    video = {"videos": ["video.mp4"], "env_name": "pyvision_gym_wo_video_hint"}
    yield "a video", build_pyvision(*looks, prompt="<video>\nHow many?", images=(), **video), LEARNED
    yield "a video for the interpreter alone", build_pyvision(*looks, prompt="How many?", images=(), **video), LEARNED
    figure = (write_code("plt.show()"), write_result("", [0]), BOXED)
    row = build_pyvision(*figure, prompt="How many?", images=["figure.png"], **video)
    yield "a figure of a video", row, LEARNED
    for name, code in {
        "no fence": "<code>\nprint(3)\n</code>",
        "a plain fence": "<code>\n```\nprint(3)\n```\n</code>",
        "two fences": "<code>\n```python\nx = 3\n```\nand\n```python\nprint(x)\n```\n</code>",
        "tags in texts": write_code("print('<answer>4</answer>', '<image>', '<think>')"),
        "a thought that quotes it": f"<think>\nI write <code>.\n</think>\n{write_code('print(3)')}",
        "other scripts": write_code(f"print({UNICODE[1]!r})"),
        "a long source": write_code("x = 1\n" * 2000),
    }.items():
        yield f"code with {name}", build_pyvision(code, write_result("3"), BOXED), LEARNED
    yield "a long output", build_pyvision(looks[0], write_result("3 " * 9000), BOXED), LEARNED
    yield "an output without a header", build_pyvision(looks[0], "<interpreter>3</interpreter>", BOXED), LEARNED
    yield "an output without its end", build_pyvision(looks[0], "<interpreter>\nText Result:\n3", BOXED), LEARNED
    yield "an empty output", build_pyvision(looks[0], "<interpreter></interpreter>", BOXED), LEARNED
    yield "an answer without tags", build_pyvision("There are three."), LEARNED


def iterate_pyvision_bad():
    """Yield rows that can't be learned as they are written."""
    code, result = write_code("print(3)"), write_result("3")
    shows = (write_code("plt.show()"), write_result("", [1]), BOXED)
    for count in (0, 1, 3):
        row = build_pyvision(*shows, images=["image.png", "figure.png", "figure.png"][:count])
        yield f"{count} images for 2 placeholders", row, "messages"
    unnamed = "<interpreter>Image Result:\n</interpreter>"
    for count in (1, 2):
        images = ["image.png", "figure.png"][:count]
        yield (
            f"a figure without its placeholder, {count}",
            build_pyvision(shows[0], unnamed, BOXED, images=images),
            "messages",
        )
    yield (
        "an image without its placeholder",
        build_pyvision(*shows, prompt="Who?", images=["image.png", "figure.png"]),
        "messages",
    )
    yield (
        "a figure in the assistant's text",
        build_pyvision(f"<image>{BOXED}", images=["image.png", "figure.png"]),
        "messages",
    )
    yield "a missing figure", build_pyvision(*shows, images=["image.png", "missing.png"]), RejectionReason.FAILED
    yield "a broken figure", build_pyvision(*shows, images=["image.png", "broken.mp4"]), RejectionReason.FAILED
    yield "an output without code", build_pyvision("I wonder.", result, BOXED), RejectionReason.SURPLUS_RESULTS
    yield "code in a thought", build_pyvision(f"<think>{code}</think>", result, BOXED), RejectionReason.SURPLUS_RESULTS
    yield "two blocks and one output", build_pyvision(code + code, result, BOXED), RejectionReason.ERROR_RESULT
    yield "code without its end", build_pyvision(code[:-7], result, BOXED), RejectionReason.ERROR_RESULT
    yield "code that is blank", build_pyvision("<code>\n</code>", result, BOXED), RejectionReason.ERROR_RESULT
    yield (
        "an opening tag in the text",
        build_pyvision(f"In <code>: {code}", result, BOXED),
        RejectionReason.ERROR_RESULT,
    )
    yield "a call of another tool", build_pyvision(CROP, result, BOXED), RejectionReason.ERROR_RESULT
    yield "code after the answer", build_pyvision(BOXED + code, result, BOXED), RejectionReason.UNANSWERED_CALLS
    yield "code after the last answer", build_pyvision(BOXED + code), RejectionReason.UNANSWERED_CALLS
    yield "31 turns", build_pyvision(*[code, result] * 31, BOXED), RejectionReason.UNANSWERED_CALLS
    yield "code at the end", build_pyvision(code), "messages"
    yield "an output at the end", build_pyvision(code, result), "messages"
    yield "an answer without its end", build_pyvision("<answer>\n\\boxed{3}"), "messages"
    yield "a list as an image", build_pyvision(BOXED, images=[["image.png"]]), "images.0"
    row = build_pyvision(code, result, BOXED)
    row["messages"][3:3] = [{"role": "observation", "content": result}]
    yield "two outputs of one block", row, RejectionReason.SURPLUS_RESULTS


PARAVT_VARIANTS = [
    *iterate_paravt_grid(),
    *iterate_paravt_forms(),
    *iterate_paravt_texts(),
    *iterate_paravt_bad(),
    *iterate_paravt_unreadable(),
]
PYVISION_FAILURES = [*iterate_pyvision_grid(), *iterate_pyvision_errors()]  # all learned where errors are accepted
PYVISION_VARIANTS = [*PYVISION_FAILURES, *iterate_pyvision_forms(), *iterate_pyvision_bad()]
