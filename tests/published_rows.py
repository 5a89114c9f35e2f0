"""Made-up rows in the published formats, one per importer."""

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
