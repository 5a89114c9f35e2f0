"""Made-up rows in the published formats: one per importer, and rows of the published schemas in full."""

import json

WINDOW = {"name": "crop_video", "arguments": {"start_time": 1, "end_time": 3}}
CALL = f"<think>Look.</think>\n<tool_call>\n{json.dumps(WINDOW)}\n</tool_call>"

EXAMPLES = {
    "paravt_rl": {
        "prompt": [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": "<video>\nWhich colour is shown?\nA. red\nB. blue"},
        ],
        "videos": [{"video": "longvt_source/made/a.mp4"}],
        "extra_info": json.dumps({"answer": "B", "question_type": "mcq", "note": "x"}),
    },
    "paravt_sft": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Use the tool."}]},
            {
                "role": "user",
                "content": [
                    {"type": "video_url", "video_url": {"url": "file://selfqa/a.mp4"}},
                    {"type": "text", "text": "Which colour is shown?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": CALL}]},
            {"role": "tool", "content": [{"type": "text", "text": "<tool_response>blue at 2</tool_response>"}]},
            {"role": "assistant", "content": "<think>It is blue.</think><answer>blue</answer>"},
        ]
    },
    "pyvision_rl": {
        "prompt": [{"role": "user", "content": "<image>\nMany words.\n\nWhat is held?"}],
        "data_source": "deepeyes",
        "ability": "visual_search",
        "env_name": "pyvision_gym_w_image_hint",
        "reward_model": {"ground_truth": "a glove", "style": "model"},
        "extra_info": {"answer": "a glove", "index": 3, "question": "What is held?", "split": "train"},
        "mm_hint": {"hint_path": "images/a.png", "hint_type": "image"},
    },
    "pyvision_sft": {
        "messages": [
            {"role": "user", "content": "<image_clue_0><image></image_clue_0>\n\nMany words.\n\nHow many?"},
            {"role": "assistant", "content": "I count.\n<code>\n```python\nprint(3)\n```\n</code>"},
            {"role": "observation", "content": "<interpreter>\nText Result:\n3\n</interpreter>"},
            {"role": "assistant", "content": "<answer>\n\\boxed{3}\n</answer>"},
        ],
        "images": ["images/a.png"],
    },
    "pyvision_val": {
        "id": "12",
        "video_path": "videos/a.mp4",
        "question": "What is held?\n(A) a glove\n(B) a rope",
        "answer": "(A) a glove",
        "data_source": "vsi",
        "ability": "visual_search",
    },
    "llava": {
        "id": "x1",
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A dog."},
            {"from": "human", "value": "Which colour?"},
            {"from": "gpt", "value": "Brown."},
        ],
    },
    "tasks": {
        "id": "w-1",
        "question": "Which?",
        "media": [{"path": "a.mp4", "kind": "video"}],
        "answer_type": "choice",
        "ground_truth": "B",
        "options": ["red", "blue"],
        "extras": {"level": 3},
    },
    "plain": {"media": "a.mp4", "question": "Which?", "answer": "red", "options": "red|blue", "level": 3},
}


# ---- the published schemas in full ---------------------------------------------------------------------------------
# Media are video.mp4 (16 s), image.png and figure.png, in the folder of the rows.

CROP_SCHEMA = {
    "type": "function",
    "function": {
        "name": "crop_video",
        "description": "Look at a part of the video.",
        "parameters": {
            "type": "object",
            "properties": {
                "video_path": {"type": "string", "description": "Path of the video"},
                "start_time": {"type": "number", "description": "Start in seconds"},
                "end_time": {"type": "number", "description": "End in seconds"},
            },
            "required": ["video_path", "start_time", "end_time"],
        },
    },
}
PARAVT_SYSTEM = f"You look at videos.\n\n# Tools\n\n<tools>\n{json.dumps(CROP_SCHEMA)}\n</tools>"
PARAVT_PATH = "/mnt/cluster/clips/video.mp4"
PARAVT_QUESTION = f"Which colour is shown?\n(A) red\n(B) blue\nThe Video path for this video is: {PARAVT_PATH}"


def format_crops(*windows, **arguments):
    calls = [
        {"name": "crop_video", "arguments": {"video_path": PARAVT_PATH, **window, **arguments}} for window in windows
    ]
    return "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def build_paravt_sft_row(*turns, question=PARAVT_QUESTION, video="video.mp4"):
    """Return a row; a turn is a reply, or a reply and the texts of the tool responses after it."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": PARAVT_SYSTEM}]},
        {
            "role": "user",
            "content": [
                {"type": "video_url", "video_url": {"url": video}, "text": None},
                {"type": "text", "text": question, "video_url": None},
            ],
        },
    ]
    for turn in turns:
        reply, *responses = (turn,) if isinstance(turn, str) else turn
        messages.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
        text = "\n".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
        messages += [{"role": "user", "content": [{"type": "text", "text": text}]}] if responses else []
    return {"id": "selfqa_17", "data_source": "selfqa", "messages": json.dumps(messages)}


LOOK = "<think>\nI look at both halves.\n</think>"
ANSWER = "<think>\nIt is blue.\n</think>\n<answer>B</answer>"
FIRST, SECOND = {"start_time": 0.0, "end_time": 8.0}, {"start_time": 8, "end_time": 16}
# Each row with a part of the reason why it is refused; None for one that is learned.
PARAVT_SFT_ROWS = {
    "direct": (build_paravt_sft_row(ANSWER), None),
    "one call": (build_paravt_sft_row((LOOK + format_crops(FIRST), "It is blue."), ANSWER), None),
    "parallel calls": (build_paravt_sft_row((LOOK + format_crops(FIRST, SECOND), "Red.", "Blue."), ANSWER), None),
    "six parallel calls": (
        build_paravt_sft_row((LOOK + format_crops(*[FIRST] * 6), *["Nothing."] * 6), ANSWER),
        None,
    ),
    "five tool turns": (build_paravt_sft_row(*[(LOOK + format_crops(FIRST), "Nothing.")] * 5, ANSWER), None),
    "numbers as text": (
        build_paravt_sft_row((LOOK + format_crops({"start_time": "0.0", "end_time": "8"}), "Blue."), ANSWER),
        None,
    ),
    "other names": (
        build_paravt_sft_row((LOOK + format_crops({"start": 0.0, "end": 8.0}), "Blue."), ANSWER),
        None,
    ),
    "a further argument": (
        build_paravt_sft_row((LOOK + format_crops(FIRST, reason="the start"), "Blue."), ANSWER),
        None,
    ),
    "a long answer of a sub-agent": (
        build_paravt_sft_row((LOOK + format_crops(FIRST), "It shows a red disc. " * 300), ANSWER),
        None,
    ),
    "a video that only the question names": (
        build_paravt_sft_row(
            (LOOK + format_crops(FIRST, video_path="/raw/9.mp4"), "Blue."),
            ANSWER,
            question=PARAVT_QUESTION.replace(PARAVT_PATH, "/raw/9.mp4"),
        ),
        None,
    ),
    "another video": (
        build_paravt_sft_row((LOOK + format_crops(FIRST, video_path="other.mp4"), "Blue."), ANSWER),
        "video.mp4",
    ),
    "a window outside the video": (
        build_paravt_sft_row((LOOK + format_crops({"start_time": 90, "end_time": 99}), "Blue."), ANSWER),
        "outside the video",
    ),
    "a reversed window": (
        build_paravt_sft_row((LOOK + format_crops({"start_time": 9, "end_time": 3}), "Blue."), ANSWER),
        "end_time",
    ),
    "another tool": (
        build_paravt_sft_row((LOOK + format_crops(FIRST).replace("crop_video", "crop_audio"), "Blue."), ANSWER),
        "crop_audio",
    ),
    "an answer beside a call": (
        build_paravt_sft_row((LOOK + format_crops(FIRST) + "<answer>A</answer>", "Blue."), ANSWER),
        "not answered",
    ),
    "more tool turns than the recipe runs": (
        build_paravt_sft_row(*[(LOOK + format_crops(FIRST), "Nothing.")] * 31, ANSWER),
        "not answered",
    ),
}

PARAVT_RL_ROWS = {
    name: {
        "data_source": "longvideoreason",
        "prompt": [
            {"role": "system", "content": PARAVT_SYSTEM},
            {"role": "user", "content": f"<video>{PARAVT_QUESTION if kind == 'mcq' else 'When is it shown?'}"},
        ],
        "videos": [{"video": "video.mp4"}],
        "extra_info": json.dumps({"answer": answer, "question_type": kind, "index": 3, "split": "train"}),
    }
    for name, kind, answer in (("choice", "mcq", "B"), ("grounding", "tvg", "[3.5, 9.0]"), ("open", "oe", "in spring"))
}

PYVISION_PROMPT = (
    "You may run Python, in <code>\n```python\n...\n```\n</code>, on the image image_clue_0. "
    "Image Width: 40; Image Height: 20.\n\nHow many discs are there?"
)
SHOW = "I crop it.\n<code>\n```python\nplt.imshow(image_clue_0.crop((0, 0, 9, 9)))\nplt.show()\n```\n</code>"
PRINT = "I count.\n<code>\n```python\nprint(undefined_at_import_time)\n```\n</code>"
FIGURE = "<interpreter>Image Result:\n<image_clue_1><image></image_clue_1></interpreter>\n"
NUMBER = "<interpreter>Text Result:\n3</interpreter>\n"
FAILURE = "<interpreter>Execution error: name 'np' is not defined</interpreter>\n"
BOXED = "There are three.\n<answer>\n\\boxed{3}\n</answer>"


def build_pyvision_sft_row(*texts, images=("image.png",)):
    """Return a row of messages by turns of the assistant and the interpreter."""
    prompt = f"<image_clue_0><image></image_clue_0>\n\n{PYVISION_PROMPT}"
    roles = ["user", *["assistant", "observation"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, (prompt, *texts), strict=False)]
    return {"messages": messages, "images": [*images], "env_name": "pyvision_gym_w_image_hint"}


PYVISION_SFT_ROWS = {
    "direct": (build_pyvision_sft_row(BOXED), None),
    "text": (build_pyvision_sft_row(PRINT, NUMBER, BOXED), None),
    "a figure": (build_pyvision_sft_row(SHOW, FIGURE, BOXED, images=("image.png", "figure.png")), None),
    "a figure, then text": (
        build_pyvision_sft_row(SHOW, FIGURE, PRINT, NUMBER, BOXED, images=("image.png", "figure.png")),
        None,
    ),
    "46 messages": (
        build_pyvision_sft_row(*[SHOW, FIGURE] * 22, BOXED, images=("image.png", *["figure.png"] * 22)),
        None,
    ),
    "failed code that is corrected": (build_pyvision_sft_row(PRINT, FAILURE, PRINT, NUMBER, BOXED), None),
    "a reply without code": (build_pyvision_sft_row("I wonder.", NUMBER, BOXED), "1 results for 0 calls"),
    "two blocks of code and one output": (build_pyvision_sft_row(PRINT + PRINT, NUMBER, BOXED), "call 2 of turn 1"),
    "more turns than the recipe runs": (build_pyvision_sft_row(*[PRINT, NUMBER] * 31, BOXED), "not answered"),
}

PYVISION_RL_ROWS = {
    env_name: {
        "prompt": [{"role": "user", "content": PYVISION_PROMPT}],
        "data_source": "deepeyes" if kind == "image" else "vsi",
        "ability": "visual_search",
        "env_name": env_name,
        "reward_model": {"ground_truth": "3", "style": "model"},
        "extra_info": {"answer": "3", "index": 3, "question": "How many discs are there?", "split": "train"},
        "mm_hint": {"hint_path": path, "hint_type": kind},
    }
    for env_name, kind, path in (
        ("pyvision_gym_w_image_hint", "image", "image.png"),
        ("pyvision_gym_wo_image_hint", "image", "image.png"),
        ("pyvision_gym_wo_video_hint", "video", "video.mp4"),
    )
}
