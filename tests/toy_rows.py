"""Synthetic rows in the format of each dataset, as many as a complete copy has, and the files they belong in."""

import json
from itertools import count

LETTERS = "ABCDEFGH"
OPTIONS = ("a red ball", "a blue box", "a green hat", "a dog")


def spread(counts):
    """Each name as often as it is counted."""
    return [name for name, times in counts.items() for _ in range(times)]


def videomme():
    for at, duration in enumerate(spread({"short": 900, "medium": 900, "long": 900})):
        video = at // 3 + 1
        yield {
            **{"video_id": f"{video:03}", "duration": duration, "domain": "Knowledge", "sub_category": "Law"},
            **{"url": "", "videoID": f"v{video}", "question_id": f"{video:03}-{at % 3 + 1}", "task_type": "Counting"},
            "question": "What is shown?",
            "options": [f"{letter}. {text}" for letter, text in zip("ABCD", OPTIONS, strict=True)],
            "answer": "C",
        }


def longvideobench():
    groups = spread({15: 189, 60: 172, 600: 412, 3600: 564})
    levels = spread({"L1-Perception": 625, "L2-Relation": 712})
    for at, (group, level) in enumerate(zip(groups, levels, strict=True)):
        yield {
            **{
                "video_id": f"v{at // 2}",
                "question": "What is shown?",
                "candidates": list(OPTIONS),
                "correct_choice": 2,
            },
            **{"topic_category": "NP-News", "question_category": "TOS", "level": level, "id": f"v{at // 2}_{at % 2}"},
            **{"video_path": f"v{at // 2}.mp4", "subtitle_path": "s.json", "duration_group": group, "duration": 9.5},
            "starting_timestamp_for_subtitles": 0,
        }


def lvbench():
    """One line per video; counts of labels come out right by giving most questions one label and some of them more."""
    labels = spread(
        {
            **{"entity recognition": 677, "event understanding": 647, "key information retrieval": 291},
            **{"temporal grounding": 220, "reasoning": 201, "summarization": 58},
        }
    )
    kinds = [[label] for label in labels[:1549]]
    for kind, label in zip(kinds, labels[1549:], strict=False):
        kind.append(label)
    asked = "What is shown?\n" + "\n".join(f"({a}) {b}" for a, b in zip("ABCD", OPTIONS, strict=True))
    questions = [
        {"uid": str(at), "question": asked, "answer": "C", "question_type": kind, "time_reference": "00:15-00:19"}
        for at, kind in enumerate(kinds)
    ]
    for video in range(103):
        yield {"key": f"v{video}", "type": "sport", "qa": questions[video::103], "video_info": {"fps": 30}}


def mlvu():
    counts = {"plotQA": 539, "findNeedle": 355, "ego": 352, "count": 206, "order": 259, "anomaly_reco": 200}
    for at, kind in enumerate(spread({**counts, "topic_reasoning": 264})):
        yield {
            **{"video": f"v{at}.mp4", "duration": 240, "question": "What is shown?", "candidates": list(OPTIONS)},
            **{"answer": OPTIONS[2], "question_type": kind},
        }


def mmvu():
    subjects = {"Computer Science": 348, "Chemistry": 318, "Pharmacy": 193, "Art": 141}
    kinds = spread({"multiple-choice": 625, "open-ended": 375})
    for at, (subject, kind) in enumerate(zip(spread(subjects), kinds, strict=True)):
        closed = kind == "multiple-choice"
        options = (*OPTIONS, "a cat") if closed else ("",) * 5
        yield {
            "id": f"validation_{at}",
            "video": f"https://hub.example/datasets/x/resolve/main/videos/{subject.replace(' ', '_')}/{at}.mp4",
            **{"youtube_url": "", "question_type": kind, "metadata": {"subject": subject, "rationale": "..."}},
            **{"question": "What is it?", "choices": dict(zip("ABCDE", options, strict=True))},
            "answer": "C" if closed else "Dolly Zoom",
        }


def charades_sta():
    yield from ({"line": f"V{at:04} 24.3 30.4##a person turns a light on."} for at in range(3720))


def vsibench():
    numeric = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")
    levels = [f"object_rel_direction_{level}" for level in ("easy", "medium", "hard")]
    kinds = (*numeric, *levels, "object_rel_distance", "route_planning", "obj_appearance_order")
    for at in range(5130):
        kind = kinds[at % len(kinds)]
        options = [f"{letter}. {text}" for letter, text in zip("ABCD", OPTIONS, strict=True)]
        yield {
            **{"id": at, "dataset": "scannet", "scene_name": f"s{at % 288}", "question_type": kind, "question": "?"},
            **{"ground_truth": "4" if kind in numeric else "C", "options": None if kind in numeric else options},
        }


def vstar():
    for at, kind in enumerate(spread({"direct_attributes": 115, "relative_position": 76})):
        letters = "ABCD" if kind == "direct_attributes" else "AB"
        listed = [f"({letter}) {text}" for letter, text in zip(letters, OPTIONS, strict=False)]
        asked = "\n".join(("What is it?", *listed, "Answer with the option's letter from the given choices directly."))
        yield {
            **{"image": f"{kind}/sa_{at}.jpg", "category": kind, "label": letters[-2], "question_id": str(at)},
            "text": asked,
        }


def hrbench():
    for at in range(800):
        question, turn = divmod(at, 4)
        options = OPTIONS[turn:] + OPTIONS[:turn]
        yield {
            **{"index": str(at), "question": f"What is in picture {question}?", "answer": "ABCD"[(2 - turn) % 4]},
            **{"category": "single" if question < 100 else "cross", **dict(zip("ABCD", options, strict=True))},
            **{"cycle_category": str(turn), "image": f"images/{question}.jpg"},
        }


def mathverse():
    versions = ("Text Dominant", "Text Lite", "Vision Intensive", "Vision Dominant", "Vision Only")
    number = count(1)
    for problem in range(788):
        closed = problem < 436
        for version in versions:
            yield {
                **{"sample_index": str(next(number)), "problem_index": str(problem), "problem_version": version},
                **{"question": "" if version == "Vision Only" else "Find L.", "image": f"images/{problem}.png"},
                **{"answer": "C" if closed else "14", "question_type": "multi-choice" if closed else "free-form"},
                **{
                    "metadata": {"subject": "Plane Geometry", "subfield": "Length"},
                    "query_wo": "Find L.",
                    "query_cot": "",
                },
            }


def mathvision():
    for at in range(3040):
        options = [*OPTIONS, "a cat"] if at < 1532 else []
        yield {
            **{"id": str(at), "question": "Which?\n<image1>", "options": options, "image": f"images/{at}.jpg"},
            **{"answer": "C" if options else "27", "solution": None, "level": at % 5 + 1, "subject": "counting"},
        }


def wemath():
    for steps, problems in ((2, 360), (3, 165)):
        for part in [*range(1, steps + 1), "multi"]:
            for problem in range(1, problems + 1):
                yield {
                    **{"ID": f"{steps}steps_{problem}", "split": "testmini", "knowledge concept": "Cones"},
                    **{"question": "Which?", "option": "A. a red ball;B. a blue box; C. a green hat; D. a dog"},
                    **{"answer": "C", "image_path": f"{steps}steps/image/{problem}-{part}.png"},
                    **{"key": f"{steps}steps_{part}", "question number": 1},
                }


def dynamath():
    for variant in range(1, 11):
        for seed in range(1, 502):
            kind = "float" if seed <= 296 else "multiple choice" if seed <= 470 else "text"
            answer = {"float": "3.8971", "multiple choice": "C", "text": "23:38"}[kind]
            row = {"question": "Find it.", "answer": answer, "image": f"image/image{seed}.png", "answer_type": kind}
            yield {"trial": variant, "key": str(seed), "row": {**row, "subject": "algebra", "level": "high school"}}


def tirbench():
    ground_truths = {"jigsaw": [4, 3, 2, 1], "spot_difference": [1, 2, 3], "word_search": "[3, 4]", "ocr": "mobile"}
    ground_truths |= {"maze": "C", "refcoco": "AC", "instrument": 72, "math": "2.5"}
    counts = {
        **{"color": 100, "contrast": 50, "instrument": 80, "jigsaw": 120, "math": 120, "maze": 120, "ocr": 60},
        **{"refcoco": 120, "rotation_game": 75, "spot_difference": 100, "symbolic": 50, "visual_search": 120},
        "word_search": 100,
    }
    for at, task in enumerate(spread(counts)):
        yield {
            **{
                "id": at,
                "task": task,
                "image_1": f"data/{at + 1000}.jpg",
                "image_2": "",
                "prompt": "Which? A. red B. blue",
            },
            **{"answer": ground_truths.get(task, "B"), "meta_data": {"difficulty": 2} if task == "jigsaw" else {}},
        }


MAKERS = {
    maker.__name__: maker
    for maker in (
        *(videomme, longvideobench, lvbench, mlvu, mmvu, charades_sta, vsibench, vstar, hrbench, mathverse),
        *(mathvision, wemath, dynamath, tirbench),
    )
}


def write_copy(name, folder, rows=None):
    """A copy of a benchmark, as far as rows go, as lines of JSON in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = list(MAKERS[name]()) if rows is None else rows
    # one file whatever the benchmark: `rows.jsonl` fits the last pattern of each, with the size in HR-Bench's name
    file = folder / ("rows_4k.jsonl" if name == "hrbench" else "rows.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in listed))
    return folder
