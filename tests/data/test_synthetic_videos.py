"""Synthetic videos match their labels, answers are right, splits don't leak, constant answers score low."""

import itertools
import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade.chat.parser import parse_reply
from saccade.config.load import load_recipe
from saccade.config.schema import SyntheticConfig
from saccade.data.constant_baseline import compute_constant_baselines
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.synthetic import generate_dataset, validate_dataset
from saccade.data.synthetic.background_clips import (
    SPLIT_RANGES,
    BackgroundSpan,
    BackgroundVideo,
    assign_to_splits,
    compute_span,
    decode_frames,
    find_overlaps,
    list_background_videos,
    select_background,
)
from saccade.data.synthetic.contact_sheet import draw_contact_sheet
from saccade.data.synthetic.dataset import SPLITS
from saccade.data.synthetic.demonstrations import (
    SubAgentCall,
    build_auxiliary_demonstration,
    build_demonstration,
    build_second_calls,
    build_window_calls,
)
from saccade.data.synthetic.events import COLORS, PALETTE, Event
from saccade.data.synthetic.generate import (
    VideoDataset,
    build_tool_call_demonstrations,
    read_background_spans,
)
from saccade.data.synthetic.questions import ANSWER_TYPES, compute_answer, parse_events
from saccade.data.synthetic.render import render_background
from saccade.data.synthetic.video_writer import write_video
from saccade.data.visibility import is_answerable
from saccade.errors import ConfigError, DataError
from saccade.media import video
from saccade.media.frame_sampling import sample_uniform_times, sample_window_times
from saccade.runs import pipeline
from saccade.types import AnswerType, Task

SMALL = SyntheticConfig(train=4, validation=2, test=2, distractors=1)


def read_files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos") / "small"
    generate_dataset(folder, SMALL, seed=5)
    return folder


@pytest.fixture(scope="module")
def default_tasks():
    return build_tasks_by_split(SyntheticConfig(), seed=0)


def build_tasks_by_split(config, seed):
    dataset = VideoDataset(config, seed=seed)
    contents = dataset.sample_contents()
    return {split: dataset.build_tasks(contents[split], split) for split in SPLITS}


def sample_contents(config, seed):
    return VideoDataset(config, seed=seed).sample_contents()


# ---- pixels --------------------------------------------------------------------------------------------------------


def find_color(pixels):
    """Return the color that covers at least a tenth of a frame, or None."""
    colors = []
    for name, rgb in {**PALETTE, "white": (244, 244, 240)}.items():
        is_near = np.abs(pixels.astype(int) - rgb).max(axis=-1) < 40
        if is_near.mean() > 0.1:
            colors.append(name)
    assert len(colors) <= 1
    return colors[0] if colors else None


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_frame_matches_its_labels(small, split):
    for name, (_, labels) in VideoDataset.read_labels(small, split).items():
        path = str(small / split / "clips" / name)
        clip = video.probe_video(path)
        assert (clip.duration, clip.num_frames, clip.width, clip.height) == (64.0, 256, 64, 64)
        all_events = (*labels.events, *labels.distractors)
        times = [i / 4 for i in range(256)]
        for time, frame in zip(times, video.decode_frames(video.index_video(path), times), strict=True):
            assert frame.time == time
            expected = next((event.color for event in all_events if event.start <= time < event.end), None)
            assert find_color(frame.pixels) == expected, (name, time)


def test_events_are_on_a_grid_and_keep_their_distance():
    config = SyntheticConfig(train=200, validation=1, test=1, distractors=2, events=(1, 5))
    for labels in sample_contents(config, seed=1)["train"]:
        events = sorted((*labels.events, *labels.distractors), key=lambda event: event.start)
        starts = [event.start for event in events]
        assert len(labels.distractors) == 2
        assert all(start % 2 == 0 and 0 <= start <= 62 for start in starts)
        assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(starts))


def test_backgrounds_differ_and_drift():
    clips = [next(render_background(32, 64, 4.0, seed)).astype(int) for seed in range(4)]
    assert all(np.abs(clip - other).mean() > 3 for i, clip in enumerate(clips) for other in clips[:i])
    assert all(np.abs(clip[0] - clip[-1]).mean() > 0.3 for clip in clips)
    assert all(np.ptp(clip.mean(axis=(0, 1, 2))) < 40 for clip in clips)  # nearly gray: no color of an event


def test_clip_has_the_configured_size_and_rate(tmp_path):
    config = SyntheticConfig(
        train=1, validation=1, test=1, clip_seconds=20, event_seconds=1, frame_size=32, fps=8, events=(3, 3)
    )
    generate_dataset(tmp_path / "w", config, seed=0)
    clip = video.probe_video(str(tmp_path / "w/train/clips/00000.mp4"))
    assert (clip.duration, clip.num_frames, clip.width, clip.height) == (20.0, 160, 32, 32)


# ---- labels --------------------------------------------------------------------------------------------------------


def compute_answer_independently(task):
    """Compute the answer by stepping through the clip in quarter seconds, independently of the library."""
    extras = task.extras
    seen = []  # the color in each quarter second, or None
    for i in range(int(extras["seconds"] * 4)):
        colors = [name for start, end, name in extras["events"] if start <= i / 4 < end]
        seen.append(colors[0] if colors else None)
    changes = [c for previous, c in zip([None, *seen], seen, strict=False) if c is not None and c != previous]
    flashes = [c for previous, c in zip([None, *seen], seen, strict=False) if c is not None and previous is None]
    assert changes == flashes
    target = extras["target"]
    match extras["question"]:
        case "at":
            answer = seen[int(extras["second"] * 4)]
        case "after":
            assert flashes.count(target) == 1
            answer = flashes[flashes.index(target) + 1]
        case "before":
            assert flashes.count(target) == 1
            answer = flashes[flashes.index(target) - 1]
        case "count":
            return float(len(flashes) if target is None else flashes.count(target))
        case "order":
            answer = next(c for c in flashes if c in task.options)
        case "when":
            assert flashes.count(target) == 1
            times = [i / 4 for i, c in enumerate(seen) if c == target]
            return (times[0], times[-1] + 0.25)
    return "ABC"[task.options.index(answer)] if task.options else answer


def test_ground_truths_are_right(default_tasks):
    for tasks in default_tasks.values():
        for task in tasks:
            assert task.ground_truth == compute_answer_independently(task), task


@pytest.mark.slow
def test_multiple_choice_forms_have_the_right_letter(default_tasks):
    config = SyntheticConfig(questions=("at:choice", "after:choice", "before:choice"))
    for tasks in build_tasks_by_split(config, seed=3).values():
        assert all(task.answer_type == AnswerType.CHOICE and len(set(task.options)) == 3 for task in tasks)
        assert all(task.ground_truth == compute_answer_independently(task) for task in tasks)
        assert max(compute_constant_baselines(tasks).values()) <= 0.35


def test_question_texts(default_tasks):
    by_kind = {task.extras["question"]: task for task in default_tasks["train"]}
    assert set(by_kind) == set(ANSWER_TYPES)
    assert by_kind["at"].question == f"What colour is shown at second {by_kind['at'].extras['second']:g}?"
    assert by_kind["after"].question == f"Which colour comes right after {by_kind['after'].extras['target']}?"
    assert by_kind["order"].question == "Which is shown first?"
    assert {task.question for task in default_tasks["train"] if task.extras["question"] == "count"} == {
        "How many flashes?",
        *(f"How many {color} flashes?" for color in COLORS),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_constant_answers_score_low(seed):
    for split, tasks in build_tasks_by_split(SyntheticConfig(), seed=seed).items():
        baselines = compute_constant_baselines(tasks)
        assert set(baselines) == set(ANSWER_TYPES)
        assert max(baselines.values()) <= 0.35, (split, baselines)
        assert baselines["count"] <= 0.30
        by_wording = defaultdict(Counter)  # nor an answer that depends on the wording alone
        for task in tasks:
            if task.extras["question"] == "count":
                by_wording[task.extras["target"] is None][task.ground_truth] += 1
        assert all(max(counts.values()) / counts.total() <= 0.40 for counts in by_wording.values())
        kinds = Counter(task.extras["question"] for task in tasks)
        assert min(kinds.values()) >= 0.1 * len(tasks)


def test_constant_baseline_of_spans_by_hand():
    def spans(*answers):
        extras = {"question": "when"}
        return [
            Task(
                id=str(span), question="", media=(), answer_type=AnswerType.GROUNDING, ground_truth=span, extras=extras
            )
            for span in answers
        ]

    assert compute_constant_baselines(spans((0.0, 2.0), (0.0, 2.0), (4.0, 6.0)))["when"] == pytest.approx(2 / 3)
    assert compute_constant_baselines(spans((0.0, 2.0), (2.0, 4.0)))["when"] == pytest.approx(0.5)
    assert compute_constant_baselines(spans((0.0, 2.0), (0.0, 4.0), (0.0, 4.0)))["when"] == pytest.approx(
        (0.5 + 1 + 1) / 3
    )


# ---- visibility in an overview -------------------------------------------------------------------------------------


def iterate_alternatives(task, times, rng, count):
    """Yield events that look the same at `times`: visible events stay, the others are sampled again."""
    visible = [event for event in parse_events(task) if any(event.is_visible_at(time) for time in times)]
    free = [2.0 * i for i in range(32) if not any(2 * i <= time < 2 * i + 2 for time in times)]
    for _ in range(count):
        events = list(visible)
        for start in rng.sample(free, min(len(free), rng.randint(0, 4))):
            if all(abs(start - event.start) >= 4 for event in events):
                events.append(Event(start=start, end=start + 2, color=rng.choice(COLORS)))
        yield sorted(events, key=lambda event: event.start)


@pytest.mark.parametrize("frames", [8, 16, 32])
def test_answerable_tasks_have_one_possible_answer(default_tasks, frames):
    rng, times = random.Random(0), sample_uniform_times(64, frames)
    num_answerable = 0
    for task in default_tasks["test"]:
        if not is_answerable(task, times):
            continue
        kind, target = task.extras["question"], task.extras["target"]
        num_answerable += 1
        for events in iterate_alternatives(task, times, rng, 20):
            colors = [event.color for event in events]
            if kind in ("after", "before", "when") and colors.count(target) != 1:
                continue  # the question implies exactly one
            candidates = [event for event in events if event.color in task.options] if kind == "order" else events
            answer = compute_answer(kind, candidates, target=target, second=task.extras["second"])
            answer = "ABC"[task.options.index(answer)] if task.options else answer
            assert answer == task.ground_truth, (task, events)
    assert num_answerable > 10


def test_share_of_answerable_tasks_per_frame_budget(default_tasks):
    tasks = default_tasks["train"]
    assert all(is_answerable(task, sample_uniform_times(64, 32)) for task in tasks)
    for frames, share in ((4, 1 / 8), (8, 1 / 4), (16, 1 / 2)):
        at_tasks = [
            is_answerable(task, sample_uniform_times(64, frames)) for task in tasks if task.extras["question"] == "at"
        ]
        assert abs(sum(at_tasks) / len(at_tasks) - share) < 0.08
        assert not any(
            is_answerable(task, sample_uniform_times(64, frames))
            for task in tasks
            if task.extras["question"] == "count"
        )


# ---- demonstrations ------------------------------------------------------------------------------------------------


def parse_answer_reply(demo):
    """Return the words that the last thought copies, and the answer."""
    reply = parse_reply(demo.replies[-1])
    return reply.blocks[0].body.removeprefix("\nI see: ").split(), reply.answer


def parse_calls(demo):
    """Return the calls of the first reply with the replies of the sub-agents."""
    arguments = [call.arguments for call in parse_reply(demo.replies[0]).calls]
    return [
        SubAgentCall(start=values["start_time"], end=values["end_time"], question=values["question"], reply=reply)
        for values, reply in zip(arguments, demo.children[0], strict=True)
    ]


def parse_reply_words(call):
    """Return the words of a sub-agent's reply that answer the call, without the scan of times."""
    return [word for word in call.reply.rpartition(" so ")[2].split() if word != "none"]


def test_direct_demonstrations_use_only_the_overview(default_tasks):
    rng, num_direct = random.Random(1), 0
    for task in default_tasks["validation"]:
        for frames in (4, 8, 16, 32):
            times = sample_uniform_times(64, frames)
            demo = build_demonstration(task, times, rng, direct_share=1.0)
            # a frame does not show when an event begins and ends
            assert (not demo.children) == (is_answerable(task, times) and task.extras["question"] != "when")
            if demo.children:
                continue
            num_direct += 1
            shown = [e for e in parse_events(task) if any(e.is_visible_at(time) for time in times)]
            words, _ = parse_answer_reply(demo)
            if words != ["none"]:
                remaining = iter(e.color for e in shown)
                assert all(word in remaining for word in words)  # a subsequence of what is seen
    assert num_direct > 250


def test_answers_copy_the_sub_agent_replies(default_tasks):
    rng = random.Random(2)
    for task in default_tasks["validation"]:
        demo = build_demonstration(task, sample_uniform_times(64, 4), rng, direct_share=0.0)
        kind, calls, (words, answer) = task.extras["question"], parse_calls(demo), parse_answer_reply(demo)
        assert demo.replies[0].startswith("<think>\nI look closer.</think>")
        assert len(calls) == (1 if kind == "at" else 4)
        reported = [word for call in calls for word in parse_reply_words(call)]
        assert words == (reported or ["none"])
        first = reported[0] if reported else ""
        expected = {"count": str(len(reported)), "when": first, "at": first}
        if kind == "order":
            assert answer == next(word for word in reported if word in task.options)
            assert answer == task.options["ABC".index(task.ground_truth)]
        elif kind in ("after", "before"):
            step = 1 if kind == "after" else -1
            assert answer == reported[reported.index(task.extras["target"]) + step]
        else:
            assert answer == expected[kind]


def test_sub_agents_reply_only_what_they_see(default_tasks):
    rng = random.Random(3)
    for task in default_tasks["validation"]:
        calls = [
            *build_window_calls(task, rng, 0.8),
            *build_second_calls(task, rng, 0.8),
            *parse_calls(build_demonstration(task, sample_uniform_times(64, 8), rng, direct_share=0.0)),
        ]
        for call in calls:
            assert 0 <= call.start < call.end <= 64
            times = sample_window_times(call.start, call.end)
            assert len(times) <= 16
            seen = [e for e in parse_events(task) if any(e.is_visible_at(time) for time in times)]
            target = call.question.removesuffix("?").split()[1]
            relevant = [e for e in seen if target in ("colours", e.color)]
            if call.question.startswith("When"):
                first = relevant[:1]
                assert parse_reply_words(call) == [f"{e.start:g}-{e.end:g}" for e in first]
                scanned = [float(word) for word in call.reply.partition(" so ")[0].split() if word != "none"]
                assert [any(e.is_visible_at(time) for e in first) for time in scanned] == [False] * (
                    len(scanned) - 1
                ) + [True] * len(first)
                assert all(call.start <= time < call.end for time in scanned)
            else:
                assert call.reply == (" ".join(e.color for e in relevant) or "none")
            if call.end - call.start > 1 and (call.question.startswith("When") or len(relevant) == len(seen)):
                inside = [e for e in seen if call.start <= e.start and e.end <= call.end]
                assert inside == seen  # no event is cut by a window's edge


def test_auxiliary_calls_mostly_show_events(default_tasks):
    rng = random.Random(4)
    chosen = default_tasks["train"][:400]
    for build_calls, minimum, maximum in ((build_window_calls, 0.2, 0.5), (build_second_calls, 0.1, 0.3)):
        replies = [call.reply for task in chosen for call in build_calls(task, rng, 0.8)]
        assert minimum < replies.count("none") / len(replies) < maximum


def test_auxiliary_calls_about_a_window_with_every_color():
    config = SyntheticConfig(train=20, validation=1, test=1, event_seconds=1, events=(24, 30))
    tasks = build_tasks_by_split(config, seed=0)["train"]
    num_questions = {
        len({call.question for call in build_window_calls(task, random.Random(seed), 1.0)})
        for seed, task in enumerate(tasks)
    }
    assert min(num_questions) >= 3


def test_demonstrations_are_well_formed(default_tasks):
    demos = build_tool_call_demonstrations(default_tasks["validation"][:40], seed=0)
    demos += [build_auxiliary_demonstration(task, random.Random(5)) for task in default_tasks["validation"][:5]]
    assert len(demos) == 40 * 4 * 2 + 5
    assert sum(demo.is_auxiliary for demo in demos) == 40 * 4 + 5
    for demo in demos:
        replies = [parse_reply(text) for text in demo.replies]
        assert all(block.is_closed for reply in replies for block in reply.blocks)
        assert all(call.ok and call.name == "crop_video" for reply in replies for call in reply.calls)
        assert [len(reply.calls) for reply in replies[:-1]] == [len(texts) for texts in demo.children]
        assert not replies[-1].calls
    assert {demo.frame_budget for demo in demos} == {1, 4, 8, 16, 32}


def test_demonstrations_follow_from_the_seed(default_tasks):
    tasks = default_tasks["test"][:30]
    assert (
        build_tool_call_demonstrations(tasks, seed=0)
        == build_tool_call_demonstrations(tasks, seed=0)
        != build_tool_call_demonstrations(tasks, seed=1)
    )
    visible = [task for task in tasks if task.extras["question"] != "when"]
    assert not any(
        not demo.is_auxiliary and demo.children
        for demo in build_tool_call_demonstrations(visible, seed=0, direct_share=1.0)
        if demo.frame_budget == 32
    )


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_same_seed_gives_the_same_files(small, tmp_path):
    generate_dataset(tmp_path / "again", SMALL, seed=5)
    assert read_files(tmp_path / "again") == read_files(small)
    generate_dataset(tmp_path / "other", SMALL, seed=6)
    changed = [name for name, data in read_files(tmp_path / "other").items() if read_files(small)[name] != data]
    assert len(changed) == len(read_files(small))


def test_test_split_does_not_depend_on_the_training_size():
    few, many = (
        sample_contents(SyntheticConfig(train=3), seed=0),
        sample_contents(SyntheticConfig(train=30), seed=0),
    )
    assert few["test"] == many["test"]
    assert few["validation"] == many["validation"]


def test_no_two_clips_show_the_same_events():
    config = SyntheticConfig(train=600, validation=100, test=100, clip_seconds=24, events=(2, 2))
    labels_by_split = sample_contents(config, seed=0)
    shown = [tuple((e.start, e.color) for e in labels.events) for split in SPLITS for labels in labels_by_split[split]]
    assert len(set(shown)) == len(shown)
    with raises(ConfigError, key="synthetic.events"):
        sample_contents(change_config(config, clip_seconds=6), seed=0)


def change_config(config, **changes):
    return SyntheticConfig(**{**config.model_dump(), **changes})


@pytest.mark.slow
def test_interrupted_generation_resumes(small, tmp_path):
    calls = []

    def interrupt(split, done, total):
        calls.append((split, done, total))
        if split == "validation":
            raise KeyboardInterrupt

    folder = tmp_path / "w"
    with pytest.raises(KeyboardInterrupt):
        generate_dataset(folder, SMALL, seed=5, progress=interrupt)
    assert calls[:2] == [("train", 1, 4), ("train", 2, 4)]
    assert not (folder / "validation" / "tasks.jsonl").exists()
    existing = folder / "train" / "clips" / "00001.mp4"
    before = existing.stat().st_mtime_ns
    (folder / "train" / "clips" / "00002.mp4").unlink()
    (folder / "train" / "clips" / "00003.mp4.part").write_bytes(b"half a clip")
    generate_dataset(folder, SMALL, seed=5)
    assert existing.stat().st_mtime_ns == before
    (folder / "train" / "clips" / "00003.mp4.part").unlink()
    assert read_files(folder) == read_files(small)


def test_folder_with_other_files_is_an_error(small, tmp_path):
    with raises(DataError, key=str(small), value=("seed",)):
        generate_dataset(small, SMALL, seed=6)
    with raises(DataError, key=str(small), value=("settings",)):
        generate_dataset(small, change_config(SMALL, frame_size=32), seed=5)
    (tmp_path / "letter.txt").write_text("mine")
    with raises(DataError, key=str(tmp_path)):
        generate_dataset(tmp_path, SMALL, seed=5)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"clip_seconds": 8, "events": (4, 4)}, "clip_seconds", 8),
        ({"event_seconds": 0.2}, "event_seconds", 0.2),
        ({"questions": ()}, "questions", ()),
        ({"questions": ("order",), "events": (1, 1)}, "questions", ("order",)),
    ],
)
def test_impossible_settings_are_errors(tmp_path, changes, key, value):
    with raises(ConfigError, key=f"synthetic.{key}", value=value):
        generate_dataset(tmp_path / "w", change_config(SMALL, **changes), seed=0)
    assert not (tmp_path / "w").exists()  # so that the same command works with other settings


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("frame_size=63", "frame_size", 63),
        ("frame_size=8", "frame_size", 8),
        ("events=[3,2]", "events", [3, 2]),
        ("events=[0,2]", "events.0", 0),
        ("questions=[at,why]", "questions.1", "why"),
        ("questions=['order:open']", "questions.0", "order:open"),
        ("image.objects=[3,2]", "image.objects", [3, 2]),
        ("image.objects=[0,2]", "image.objects.0", 0),
        ("image.questions=[digit,when]", "image.questions.1", "when"),
    ],
)
def test_invalid_settings_are_errors_of_the_recipe(override, key, value):
    with raises(ConfigError, key=f"synthetic.{key}", value=value):
        load_recipe("tiny/base", [f"synthetic.{override}"])


def test_rows_on_disk(small):
    tasks = load_tasks(small / "train" / "tasks.jsonl")
    demos = load_demonstrations(small / "train" / "demonstrations.jsonl")
    assert len(tasks) == 32
    assert len(demos) == 2 * 128
    assert {demo.task.digest for demo in demos} == {task.digest for task in tasks}
    assert not (small / "test" / "demonstrations.jsonl").exists()
    settings = json.loads((small / "dataset.json").read_text())
    assert settings["seed"] == 5
    assert SyntheticConfig(**settings["settings"]) == SMALL


# ---- contact sheet -------------------------------------------------------------------------------------------------


def test_contact_sheet_frames_the_events(small, tmp_path):
    draw_contact_sheet(small, tmp_path / "contact_sheet.png")
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
        assert sheet.width > 400
    for _, labels in list(VideoDataset.read_labels(small, "train").values())[:2]:
        assert all((pixels == PALETTE[event.color]).all(axis=1).any() for event in labels.events)


# ---- haystack ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("haystack")
    for index, (seconds, shape) in enumerate(((30, (48, 96)), (90, (96, 48)), (70, (64, 64)))):
        base = np.concatenate(list(render_background(seconds * 4, 96, 4.0, 100 + index)))[:, : shape[0], : shape[1]]
        write_video(folder / f"{index}.mp4", base, 4.0)
    (folder / "notes.txt").write_text("not a video")
    return folder


@pytest.mark.slow
def test_events_are_drawn_on_haystack_videos(haystack, tmp_path):
    config = SyntheticConfig(train=3, validation=1, test=1, haystack=str(haystack))
    generate_dataset(tmp_path / "w", config, seed=2)
    assert validate_dataset(tmp_path / "w").problems == ()
    for name, (_, labels) in VideoDataset.read_labels(tmp_path / "w", "train").items():
        path = str(tmp_path / "w/train/clips" / name)
        assert video.probe_video(path).duration == 64.0
        times = [i + 0.5 for i in range(64)]
        for time, frame in zip(times, video.decode_frames(video.index_video(path), times), strict=True):
            expected = next((event.color for event in labels.events if event.is_visible_at(time)), None)
            assert find_color(frame.pixels) == expected


def whole(path):
    return BackgroundVideo(path=Path(path), digest="d")


def test_background_frames_are_those_of_the_video(haystack):
    source, times = select_background([whole(haystack / "2.mp4")], 7, count=40, fps=4.0)
    assert 0 <= times[0] <= 60
    assert times == pytest.approx([times[0] + i / 4 for i in range(40)])
    originals = video.decode_frames(video.index_video(str(haystack / "2.mp4")), times)
    assert np.array_equal(decode_frames(source, times, 64), np.stack([frame.pixels for frame in originals]))


def test_short_background_plays_forward_and_backward(haystack):
    source, times = select_background([whole(haystack / "0.mp4")], 1, count=256, fps=4.0)
    frames = decode_frames(source, times, 32)
    assert frames.shape == (256, 32, 32, 3)
    assert np.array_equal(frames[110], frames[130])  # 27.5 s and 32.5 s of a clip of 30 s
    assert (compute_span(source, times).start, compute_span(source, times).end) == (0.0, 29.75)


def test_three_files_are_assigned_whole_and_copies_count_once(haystack, tmp_path):
    assigned = assign_to_splits(list_background_videos(str(haystack)))
    names = {split: [source.path.name for source in sources] for split, sources in assigned.items()}
    assert names == {"train": ["2.mp4"], "validation": ["1.mp4"], "test": ["0.mp4"]}
    assert all(source.share_range == (0.0, 1.0) for sources in assigned.values() for source in sources)
    for name in ("a", "b", "c"):  # three copies of one video
        (tmp_path / f"{name}.mp4").write_bytes((haystack / "0.mp4").read_bytes())
    copies = assign_to_splits(list_background_videos(str(tmp_path)))
    assert [[source.path.name for source in copies[split]] for split in SPLITS] == [["a.mp4"]] * 3
    assert [copies[split][0].share_range for split in SPLITS] == [SPLIT_RANGES[split] for split in SPLITS]


@pytest.mark.slow
@pytest.mark.parametrize("fps", [4.0, 7.3, 24.0])
def test_parts_of_a_file_share_no_frame(haystack, fps):
    """Frame numbers are compared, for any seed and frame rate."""
    path = haystack / "1.mp4"
    index, numbers = video.index_video(str(path)), {}
    for split, sources in assign_to_splits([path]).items():
        drawn = [select_background(sources, seed, count=64 * 4, fps=fps)[1] for seed in range(40)]
        numbers[split] = {index.find_frame_number(time) for times in drawn for time in times}
    for split, (first, last) in {"train": (0, 215), "validation": (216, 287), "test": (288, 359)}.items():
        assert first <= min(numbers[split]) < first + 20
        assert last - 20 < max(numbers[split]) <= last


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_haystack_of_one_or_two_files_does_not_leak(haystack, tmp_path, count):
    few, folder = tmp_path / "few", tmp_path / "w"
    few.mkdir()
    for index in range(count):
        (few / f"{index}.mp4").write_bytes((haystack / f"{index + 1}.mp4").read_bytes())
    generate_dataset(folder, SyntheticConfig(train=4, validation=2, test=2, clip_seconds=20, haystack=str(few)), seed=2)
    assert validate_dataset(folder).problems == ()
    sources = {split: read_background_spans(folder, split) for split in SPLITS}
    assert [len(sources[split]) for split in SPLITS] == [4, 2, 2]
    length = {"0.mp4": 90, "1.mp4": 70}
    for split, (first, last) in SPLIT_RANGES.items():
        for span in sources[split].values():
            assert first * length[span.file] - 1e-6 <= span.start < span.end <= last * length[span.file]
    for name, span in sources["test"].items():
        clip = video.decode_frames(video.index_video(str(folder / "test/clips" / name)), [0.5])[0].pixels.astype(int)
        background = video.decode_frames(
            video.index_video(str(few / span.file)), [span.start], size=(clip.shape[1],) * 2
        )
        assert clip.shape == background[0].pixels.shape


def test_file_too_short_for_three_splits_is_an_error(tmp_path):
    folder = tmp_path / "haystack"
    folder.mkdir()
    write_video(folder / "short.mp4", next(render_background(12, 64, 4.0, 1)), 4.0)
    with raises(DataError, key="synthetic.haystack", value=str(folder / "short.mp4")):
        generate_dataset(tmp_path / "w", change_config(SMALL, haystack=str(folder)), seed=0)
    assert not (tmp_path / "w").exists()


def test_same_background_in_two_splits_is_a_leak(haystack, tmp_path):
    folder = tmp_path / "w"
    config = SyntheticConfig(train=2, validation=1, test=1, clip_seconds=20, haystack=str(haystack))
    generate_dataset(folder, config, seed=2)
    path = folder / "test" / "events.json"
    entries, span = json.loads(path.read_text()), read_background_spans(folder, "train")["00001.mp4"]
    for start, end, leaks in ((span.end, span.end + 5, 1), (span.end + 0.25, span.end + 5, 0)):
        entries["00000.mp4"]["source"] = {"file": "x.mp4", "digest": span.digest, "start": start, "end": end}
        path.write_text(json.dumps(entries))
        problems = validate_dataset(folder).problems
        assert len(problems) == leaks


def test_find_overlaps_by_hand():
    def span(start, end, digest="d"):
        return BackgroundSpan(file="a.mp4", digest=digest, start=start, end=end)

    train = {"0": span(0, 10), "1": span(2, 3), "2": span(20, 30), "3": span(5, 6, "other")}
    assert find_overlaps({"train": train, "test": {"0": span(11, 19), "1": span(0, 99, "third")}}) == []
    (line,) = find_overlaps(
        {"train": train, "test": {"0": span(9, 12), "1": span(9, 25)}}
    )  # a long one before a short one
    assert line.startswith("train/clips/0, test/clips/0: the same frames of a.mp4")
    assert (
        len(
            find_overlaps(
                {"train": train, "validation": {"0": span(30, 31)}, "test": {"0": span(4, 5), "1": span(30, 40)}}
            )
        )
        == 3
    )


@pytest.mark.slow
def test_changed_haystack_is_another_dataset(haystack, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for index in range(3):
        (few / f"{index}.mp4").write_bytes((haystack / f"{index}.mp4").read_bytes())
    config = SyntheticConfig(train=1, validation=1, test=1, clip_seconds=20, haystack=str(few))
    generate_dataset(tmp_path / "w", config, seed=2)
    generate_dataset(tmp_path / "w", config, seed=2)
    (few / "1.mp4").unlink()
    with raises(DataError, key=str(tmp_path / "w"), value=("sources",)):
        generate_dataset(tmp_path / "w", config, seed=2)


# ---- frame budgets -------------------------------------------------------------------------------------------------


def test_demonstrations_have_the_given_frame_budgets(tmp_path):
    config = SyntheticConfig(train=2, validation=1, test=1, clip_seconds=20, tasks_per_video=2)
    generate_dataset(tmp_path / "w", config, seed=0, frame_budgets=(4, 64, 4))
    demos = load_demonstrations(tmp_path / "w/train/demonstrations.jsonl")
    assert {demo.frame_budget for demo in demos if not demo.is_auxiliary} == {4, 64}
    assert len(demos) == 2 * 2 * 4
    assert json.loads((tmp_path / "w/dataset.json").read_text())["frame_budgets"] == [4, 64]
    with raises(DataError, key=str(tmp_path / "w"), value=("frame_budgets",)):
        generate_dataset(tmp_path / "w", config, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("frame_budgets", "expected"), [((8, 64), {8, 64}), ((), {4, 8, 16, 32})])
def test_recipe_generates_demonstrations_for_its_frame_budgets(tmp_path, frame_budgets, expected):
    settings = [
        f"frame_budgets={list(frame_budgets)}",
        "synthetic.train=1",
        "synthetic.validation=1",
        "synthetic.test=1",
    ]
    recipe = load_recipe("tiny/base", [*settings, "synthetic.clip_seconds=20", "synthetic.tasks_per_video=2"])
    pipeline.generate_data(tmp_path / "w", recipe, on_progress=lambda *_: None)
    assert {
        demo.frame_budget
        for demo in load_demonstrations(tmp_path / "w/train/demonstrations.jsonl")
        if not demo.is_auxiliary
    } == expected


def test_haystack_without_videos_is_an_error(tmp_path):
    folder = tmp_path / "haystack"
    for _ in range(2):  # a missing folder, then an empty one
        with raises(DataError, key="synthetic.haystack", value=str(folder)):
            generate_dataset(tmp_path / "w", change_config(SMALL, haystack=str(folder)), seed=0)
        folder.mkdir(exist_ok=True)


REAL = Path(__file__).parents[3] / "shared" / "media"


@pytest.mark.skipif(not REAL.is_dir(), reason="the real videos are not on this machine")
@pytest.mark.parametrize("name", ["video_90.mov", "av1_video.mkv", "nasa_13013.mp4"])
def test_real_videos_as_haystack(name):
    source, times = select_background([whole(REAL / name)], 0, count=16, fps=2.0)
    frames = decode_frames(source, times, 32)
    assert frames.shape == (16, 32, 32, 3)
    assert frames.std() > 1


@pytest.mark.slow
def test_small_frames_give_the_same_bytes(tmp_path):
    rng = np.random.default_rng(0)
    frames = [np.repeat(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)[None], 10, axis=0) for _ in range(30)]
    frames = [frame // 4 + rng.integers(0, 8, frame.shape).astype(np.uint8) for group in frames for frame in group]
    contents = set()
    for _ in range(60):
        heap = [np.full(int(size), 255, np.uint8) for size in rng.integers(1000, 400_000, 6)]
        del heap  # other memory for the encoder
        write_video(tmp_path / "clip.mp4", frames, fps=0.5)
        contents.add((tmp_path / "clip.mp4").read_bytes())
    assert len(contents) == 1
