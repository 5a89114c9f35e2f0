import itertools
import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade import stages
from saccade.chat.parse import parse
from saccade.config import World, load_recipe
from saccade.data.record import read_jsonl
from saccade.data.rows import read_demos, read_tasks, write_tasks
from saccade.data.world import check_world, make_world
from saccade.data.world.events import COLOURS, PALETTE, Event
from saccade.data.world.film import write_clip
from saccade.data.world.floors import blind_floor
from saccade.data.world.hay import PARTS, Source, Stretch, chosen, divided, frames_of, hay, overlaps, shown
from saccade.data.world.make import SPLITS, draw_world, read_labels, read_sources, tasks_of, traces_of
from saccade.data.world.oracle import drills, glances, practice, trace
from saccade.data.world.paint import background
from saccade.data.world.questions import KINDS, answer_of, events_of, visible
from saccade.data.world.sheet import contact_sheet
from saccade.errors import ConfigError, DataError
from saccade.media import video
from saccade.media.picks import uniform_times, window_times
from saccade.types import Kind, Task

SMALL = World(train=4, validation=2, test=2, distractors=1)


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "small"
    make_world(folder, SMALL, seed=5)
    return folder


@pytest.fixture(scope="module")
def default_tasks():
    world = World()
    drawn = draw_world(world, seed=0)
    return {split: tasks_of(world, drawn[split], seed=0, split=split) for split in SPLITS}


# ---- pixels --------------------------------------------------------------------------------------------------------


def colour_shown(pixels):
    """The colour that covers at least a tenth of a frame, by the pixels alone."""
    found = []
    for name, rgb in {**PALETTE, "white": (244, 244, 240)}.items():
        near = np.abs(pixels.astype(int) - rgb).max(axis=-1) < 40
        if near.mean() > 0.1:
            found.append(name)
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_frame_shows_what_its_labels_say(small, split):
    for name, (_, labels) in read_labels(small, split).items():
        path = str(small / split / "clips" / name)
        clip = video.probe(path)
        assert (clip.duration, clip.frames, clip.width, clip.height) == (64.0, 256, 64, 64)
        shown = (*labels.events, *labels.distractors)
        times = [i / 4 for i in range(256)]
        for time, frame in zip(times, video.decode(video.survey(path), times), strict=True):
            assert frame.time == time
            expected = next((event.colour for event in shown if event.start <= time < event.end), None)
            assert colour_shown(frame.pixels) == expected, (name, time)


def test_events_keep_their_distance_and_their_grid():
    world = World(train=200, validation=1, test=1, distractors=2, events=(1, 5))
    for labels in draw_world(world, seed=1)["train"]:
        events = sorted((*labels.events, *labels.distractors), key=lambda event: event.start)
        starts = [event.start for event in events]
        assert len(labels.distractors) == 2
        assert all(start % 2 == 0 and 0 <= start <= 62 for start in starts)
        assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(starts))


def test_backgrounds_differ_and_drift():
    clips = [background(32, 64, 4.0, seed).astype(int) for seed in range(4)]
    assert all(np.abs(one - other).mean() > 3 for i, one in enumerate(clips) for other in clips[:i])
    assert all(np.abs(clip[0] - clip[-1]).mean() > 0.3 for clip in clips)
    assert all(np.ptp(clip.mean(axis=(0, 1, 2))) < 40 for clip in clips)  # nearly grey: no colour of an event


def test_a_clip_is_the_size_and_rate_that_was_asked_for(tmp_path):
    world = World(train=1, validation=1, test=1, seconds=20, event_seconds=1, pixels=32, fps=8, events=(3, 3))
    make_world(tmp_path / "w", world, seed=0)
    clip = video.probe(str(tmp_path / "w/train/clips/00000.mp4"))
    assert (clip.duration, clip.frames, clip.width, clip.height) == (20.0, 160, 32, 32)


# ---- labels --------------------------------------------------------------------------------------------------------


def slow_answer(task):
    """The answer by walking through the clip quarter second by quarter second; written apart from the code."""
    extras = task.extras
    seen = []  # (time, colour), one entry per quarter second
    for i in range(int(extras["seconds"] * 4)):
        colour = [name for start, end, name in extras["events"] if start <= i / 4 < end]
        seen.append(colour[0] if colour else None)
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
            answer = next(c for c in flashes if c in task.choices)
        case "when":
            assert flashes.count(target) == 1
            times = [i / 4 for i, c in enumerate(seen) if c == target]
            return (times[0], times[-1] + 0.25)
    return "ABC"[task.choices.index(answer)] if task.choices else answer


def test_golds_are_right_by_another_way(default_tasks):
    for tasks in default_tasks.values():
        for task in tasks:
            assert task.gold == slow_answer(task), task


@pytest.mark.slow
def test_choice_forms_have_the_right_letter(default_tasks):
    world = World(questions=("at:choice", "after:choice", "before:choice"))
    drawn = draw_world(world, seed=3)
    for split in SPLITS:
        tasks = tasks_of(world, drawn[split], seed=3, split=split)
        assert all(task.kind is Kind.CHOICE and len(set(task.choices)) == 3 for task in tasks)
        assert all(task.gold == slow_answer(task) for task in tasks)
        assert max(blind_floor(tasks).values()) <= 0.35


def test_questions_read_as_expected(default_tasks):
    by_kind = {task.extras["question"]: task for task in default_tasks["train"]}
    assert set(by_kind) == set(KINDS)
    assert by_kind["at"].question == f"What colour is shown at second {by_kind['at'].extras['second']:g}?"
    assert by_kind["after"].question == f"Which colour comes right after {by_kind['after'].extras['target']}?"
    assert by_kind["order"].question == "Which is shown first?"
    assert {task.question for task in default_tasks["train"] if task.extras["question"] == "count"} == {
        "How many flashes?",
        *(f"How many {colour} flashes?" for colour in COLOURS),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_constant_answer_does_well(seed):
    world = World()
    drawn = draw_world(world, seed=seed)
    for split in SPLITS:
        tasks = tasks_of(world, drawn[split], seed=seed, split=split)
        floors = blind_floor(tasks)
        assert set(floors) == set(KINDS)
        assert max(floors.values()) <= 0.35, (split, floors)
        assert floors["count"] <= 0.30
        by_words = defaultdict(Counter)  # nor does one that knows the wording, but not the video
        for task in tasks:
            if task.extras["question"] == "count":
                by_words[task.extras["target"] is None][task.gold] += 1
        assert all(max(golds.values()) / golds.total() <= 0.40 for golds in by_words.values())
        kinds = Counter(task.extras["question"] for task in tasks)
        assert min(kinds.values()) >= 0.1 * len(tasks)


def test_blind_floor_by_hand():
    def spans(*golds):
        extras = {"question": "when"}
        return [Task(id=str(g), question="", media=(), kind=Kind.GROUNDING, gold=g, extras=extras) for g in golds]

    assert blind_floor(spans((0.0, 2.0), (0.0, 2.0), (4.0, 6.0)))["when"] == pytest.approx(2 / 3)
    assert blind_floor(spans((0.0, 2.0), (2.0, 4.0)))["when"] == pytest.approx(0.5)
    assert blind_floor(spans((0.0, 2.0), (0.0, 4.0), (0.0, 4.0)))["when"] == pytest.approx((0.5 + 1 + 1) / 3)


# ---- what an overview can show -------------------------------------------------------------------------------------


def other_worlds(task, times, rng, count):
    """Events that look the same at `times`: those seen there stay, the unseen ones are drawn anew."""
    kept = [event for event in events_of(task) if any(event.holds(time) for time in times)]
    free = [2.0 * i for i in range(32) if not any(2 * i <= time < 2 * i + 2 for time in times)]
    for _ in range(count):
        events = list(kept)
        for start in rng.sample(free, min(len(free), rng.randint(0, 4))):
            if all(abs(start - event.start) >= 4 for event in events):
                events.append(Event(start=start, end=start + 2, colour=rng.choice(COLOURS)))
        yield sorted(events, key=lambda event: event.start)


@pytest.mark.parametrize("frames", [8, 16, 32])
def test_a_visible_answer_is_certain(default_tasks, frames):
    rng, times = random.Random(0), uniform_times(64, frames)
    found = 0
    for task in default_tasks["test"]:
        if not visible(task, times):
            continue
        kind, target = task.extras["question"], task.extras["target"]
        found += 1
        for events in other_worlds(task, times, rng, 20):
            colours = [event.colour for event in events]
            if kind in ("after", "before", "when") and colours.count(target) != 1:
                continue  # the question says that there is one
            among = [event for event in events if event.colour in task.choices] if kind == "order" else events
            answer = answer_of(kind, among, target=target, second=task.extras["second"])
            answer = "ABC"[task.choices.index(answer)] if task.choices else answer
            assert answer == task.gold, (task, events)
    assert found > 10


def test_visibility_at_the_published_budgets(default_tasks):
    tasks = default_tasks["train"]
    assert all(visible(task, uniform_times(64, 32)) for task in tasks)
    for frames, share in ((4, 1 / 8), (8, 1 / 4), (16, 1 / 2)):
        at = [visible(task, uniform_times(64, frames)) for task in tasks if task.extras["question"] == "at"]
        assert abs(sum(at) / len(at) - share) < 0.08
        assert not any(visible(task, uniform_times(64, frames)) for task in tasks if task.extras["question"] == "count")


# ---- the oracle ----------------------------------------------------------------------------------------------------


def copied(found):
    """The words that a last thought copies."""
    return found.think.removeprefix("I see: ").split()


def told_by(ask):
    """The words of a sub-agent's reply that answer it: after a scan of times, the time that was found."""
    return [word for word in ask.reply.rpartition(" so ")[2].split() if word != "none"]


def test_direct_traces_use_only_what_the_overview_shows(default_tasks):
    rng, direct = random.Random(1), 0
    for task in default_tasks["validation"]:
        for frames in (4, 8, 16, 32):
            times = uniform_times(64, frames)
            found = trace(task, times, rng, direct=1.0)
            # a frame does not show when an event begins and ends
            assert found.direct == (visible(task, times) and task.extras["question"] != "when")
            if not found.direct:
                continue
            direct += 1
            shown = [e for e in events_of(task) if any(e.holds(time) for time in times)]
            words = copied(found)
            if words != ["none"]:
                remaining = iter(e.colour for e in shown)
                assert all(word in remaining for word in words)  # a subsequence of what is seen
    assert direct > 250


def test_traces_with_tools_copy_what_the_sub_agents_say(default_tasks):
    rng = random.Random(2)
    for task in default_tasks["validation"]:
        found = trace(task, uniform_times(64, 4), rng, direct=0.0)
        kind = task.extras["question"]
        assert found.plan
        assert len(found.asks) == (1 if kind == "at" else 4)
        told = [word for ask in found.asks for word in told_by(ask)]
        assert copied(found) == (told or ["none"])
        gold = {"count": str(len(told)), "when": told[0] if told else "", "at": told[0] if told else ""}
        if kind == "order":
            assert found.answer == next(word for word in told if word in task.choices)
            assert found.answer == task.choices["ABC".index(task.gold)]
        elif kind in ("after", "before"):
            step = 1 if kind == "after" else -1
            assert found.answer == told[told.index(task.extras["target"]) + step]
        else:
            assert found.answer == gold[kind]


def test_sub_agents_can_see_what_they_say(default_tasks):
    rng = random.Random(3)
    for task in default_tasks["validation"]:
        asks = [
            *drills(task, rng, 0.8),
            *glances(task, rng, 0.8),
            *trace(task, uniform_times(64, 8), rng, direct=0.0).asks,
        ]
        for ask in asks:
            assert 0 <= ask.start < ask.end <= 64
            times = window_times(ask.start, ask.end)
            assert len(times) <= 16
            seen = [e for e in events_of(task) if any(e.holds(time) for time in times)]
            asked = ask.question.removesuffix("?").split()[1]
            wanted = [e for e in seen if asked in ("colours", e.colour)]
            if ask.question.startswith("When"):
                first = wanted[:1]
                assert told_by(ask) == [f"{e.start:g}-{e.end:g}" for e in first]
                scanned = [float(word) for word in ask.reply.partition(" so ")[0].split() if word != "none"]
                assert [any(e.holds(time) for e in first) for time in scanned] == [False] * (len(scanned) - 1) + [
                    True
                ] * len(first)
                assert all(ask.start <= time < ask.end for time in scanned)
            else:
                assert ask.reply == (" ".join(e.colour for e in wanted) or "none")
            if ask.end - ask.start > 1 and (ask.question.startswith("When") or len(wanted) == len(seen)):
                inside = [e for e in seen if ask.start <= e.start and e.end <= ask.end]
                assert inside == seen  # no event is cut by a window's edge


def test_drills_are_mostly_about_something(default_tasks):
    rng = random.Random(4)
    chosen = default_tasks["train"][:400]
    for drill, least, most in ((drills, 0.2, 0.5), (glances, 0.1, 0.3)):
        replies = [ask.reply for task in chosen for ask in drill(task, rng, 0.8)]
        assert least < replies.count("none") / len(replies) < most


def test_a_window_that_shows_every_colour_is_drilled_too():
    world = World(train=20, validation=1, test=1, event_seconds=1, events=(24, 30))
    tasks = tasks_of(world, draw_world(world, seed=0)["train"], seed=0, split="train")
    shown = {len({ask.question for ask in drills(task, random.Random(seed), 1.0)}) for seed, task in enumerate(tasks)}
    assert min(shown) >= 3


def test_demonstrations_are_well_formed(default_tasks):
    demos = traces_of(default_tasks["validation"][:40], seed=0)
    demos += [practice(task, random.Random(5)) for task in default_tasks["validation"][:5]]
    assert len(demos) == 40 * 4 * 2 + 5
    assert sum(not demo.main for demo in demos) == 40 * 4 + 5
    for demo in demos:
        replies = [parse(text) for text in demo.replies]
        assert all(block.closed for reply in replies for block in reply.blocks)
        assert all(call.ok and call.name == "crop_video" for reply in replies for call in reply.calls)
        assert [len(reply.calls) for reply in replies[:-1]] == [len(texts) for texts in demo.children]
        assert not replies[-1].calls
    assert {demo.frames for demo in demos} == {1, 4, 8, 16, 32}


def test_traces_are_drawn_by_seed(default_tasks):
    tasks = default_tasks["test"][:30]
    assert traces_of(tasks, seed=0) == traces_of(tasks, seed=0) != traces_of(tasks, seed=1)
    whole = [task for task in tasks if task.extras["question"] != "when"]
    assert not any(demo.main and demo.children for demo in traces_of(whole, seed=0, direct=1.0) if demo.frames == 32)


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_makes_the_same_files(small, tmp_path):
    make_world(tmp_path / "again", SMALL, seed=5)
    assert files_of(tmp_path / "again") == files_of(small)
    make_world(tmp_path / "other", SMALL, seed=6)
    changed = [name for name, data in files_of(tmp_path / "other").items() if files_of(small)[name] != data]
    assert len(changed) == len(files_of(small))


def test_more_training_clips_leave_the_test_as_it_is():
    few, many = draw_world(World(train=3), seed=0), draw_world(World(train=30), seed=0)
    assert few["test"] == many["test"]
    assert few["validation"] == many["validation"]


def test_no_clip_shows_what_another_shows():
    world = World(train=600, validation=100, test=100, seconds=24, events=(2, 2))
    drawn = draw_world(world, seed=0)
    shown = [tuple((e.start, e.colour) for e in labels.events) for split in SPLITS for labels in drawn[split]]
    assert len(set(shown)) == len(shown)
    with pytest.raises(ConfigError, match="repeat"):
        draw_world(replace_world(world, seconds=6), seed=0)


def replace_world(world, **changes):
    return World(**{**world.model_dump(), **changes})


@pytest.mark.slow
def test_an_interrupted_world_is_finished(small, tmp_path):
    calls = []

    def stop(split, done, total):
        calls.append((split, done, total))
        if split == "validation":
            raise KeyboardInterrupt

    folder = tmp_path / "w"
    with pytest.raises(KeyboardInterrupt):
        make_world(folder, SMALL, seed=5, progress=stop)
    assert calls[:2] == [("train", 1, 4), ("train", 2, 4)]
    assert not (folder / "validation" / "tasks.jsonl").exists()
    kept = folder / "train" / "clips" / "00001.mp4"
    before = kept.stat().st_mtime_ns
    (folder / "train" / "clips" / "00002.mp4").unlink()
    (folder / "train" / "clips" / "00003.mp4.part").write_bytes(b"half a clip")
    make_world(folder, SMALL, seed=5)
    assert kept.stat().st_mtime_ns == before
    (folder / "train" / "clips" / "00003.mp4.part").unlink()
    assert files_of(folder) == files_of(small)


def test_another_world_is_never_mixed_in(small, tmp_path):
    with pytest.raises(DataError, match="another world"):
        make_world(small, SMALL, seed=6)
    with pytest.raises(DataError, match="another world"):
        make_world(small, replace_world(SMALL, pixels=32), seed=5)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        make_world(tmp_path, SMALL, seed=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixels": 63}, "even number"),
        ({"pixels": 8}, "at least 16"),
        ({"events": (3, 2)}, "least and most"),
        ({"events": (0, 2)}, "least and most"),
        ({"seconds": 8, "events": (4, 4)}, "5 events of 2 s don't fit 8 s"),
        ({"event_seconds": 0.2}, "events of 0.2 s can fall between frames at 4 fps"),
        ({"questions": ("at", "why")}, "no question 'why'"),
        ({"questions": ("order:open",)}, "no question 'order:open'"),
        ({"questions": ()}, "can't be asked of any clip of the split train"),
        ({"questions": ("order",), "events": (1, 1)}, "can't be asked of any clip of the split train"),
    ],
)
def test_settings_that_cant_be_met(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_world(tmp_path / "w", replace_world(SMALL, **changes), seed=0)
    assert not (tmp_path / "w").exists()  # so that the same command works once the settings are right


def test_rows_on_disk(small):
    tasks = read_tasks(small / "train" / "tasks.jsonl")
    demos = read_demos(small / "train" / "traces.jsonl")
    assert len(tasks) == 32
    assert len(demos) == 2 * 128
    assert {demo.task.digest for demo in demos} == {task.digest for task in tasks}
    assert not (small / "test" / "traces.jsonl").exists()
    settings = json.loads((small / "world.json").read_text())
    assert settings["seed"] == 5
    assert World(**settings["settings"]) == SMALL


# ---- the check and the sheet ---------------------------------------------------------------------------------------


@pytest.fixture
def copy(small, tmp_path):
    for name, data in files_of(small).items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "copy"


def test_a_sound_world_has_no_problems(small):
    report = check_world(small)
    assert report.problems == ()
    assert report.clips == {"train": 4, "validation": 2, "test": 2}
    assert report.tasks == {"train": 32, "validation": 16, "test": 16}
    assert set(report.floors["train"]) <= set(KINDS)


def test_a_wrong_answer_is_found(copy):
    path = copy / "test" / "tasks.jsonl"
    tasks = read_jsonl(path, Task)
    count = next(i for i, task in enumerate(tasks) if task.kind is Kind.NUMBER)
    tasks[count] = replace(tasks[count], gold=9.0)
    write_tasks(path, tasks)
    (problem,) = check_world(copy).problems
    assert "gold 9.0, but the labels say" in problem


def test_a_changed_clip_is_found(copy):
    (copy / "train/clips/00000.mp4").write_bytes((copy / "train/clips/00001.mp4").read_bytes())
    (problem,) = check_world(copy).problems
    assert problem.startswith("train/clips/00000.mp4")


def test_a_leak_is_found(copy):
    shown = json.loads((copy / "train/events.json").read_text())["00000.mp4"]
    labels = json.loads((copy / "test/events.json").read_text())
    (copy / "test/clips/00007.mp4").write_bytes((copy / "train/clips/00000.mp4").read_bytes())
    (copy / "test/events.json").write_text(json.dumps({**labels, "00007.mp4": shown}))
    problems = check_world(copy).problems
    assert len(problems) == 2
    assert all("train/clips/00000.mp4, test/clips/00007.mp4" in problem for problem in problems)


def test_an_unfinished_world_is_named(copy):
    (copy / "test/events.json").unlink()
    with pytest.raises(DataError, match=r"test/events\.json can't be read"):
        check_world(copy)


def test_the_sheet_is_a_picture_with_the_events_marked(small, tmp_path):
    contact_sheet(small, tmp_path / "sheet.png", clips=2, columns=6)
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
        assert sheet.width > 400
    for _, labels in list(read_labels(small, "train").values())[:2]:
        assert all((pixels == PALETTE[event.colour]).all(axis=1).any() for event in labels.events)


# ---- haystacks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hay")
    for index, (seconds, shape) in enumerate(((30, (48, 96)), (90, (96, 48)), (70, (64, 64)))):
        base = background(seconds * 4, 96, 4.0, 100 + index)[:, : shape[0], : shape[1]]
        write_clip(folder / f"{index}.mp4", base, 4.0)
    (folder / "notes.txt").write_text("not a clip")
    return folder


@pytest.mark.slow
def test_needles_lie_in_ones_own_clips(stack, tmp_path):
    world = World(train=3, validation=1, test=1, haystack=str(stack))
    make_world(tmp_path / "w", world, seed=2)
    assert check_world(tmp_path / "w").problems == ()
    for name, (_, labels) in read_labels(tmp_path / "w", "train").items():
        path = str(tmp_path / "w/train/clips" / name)
        assert video.probe(path).duration == 64.0
        times = [i + 0.5 for i in range(64)]
        for time, frame in zip(times, video.decode(video.survey(path), times), strict=True):
            expected = next((event.colour for event in labels.events if event.holds(time)), None)
            assert colour_shown(frame.pixels) == expected


def whole(path):
    return Source(path=Path(path), digest="d")


def test_a_stretch_is_the_clips_own_frames(stack):
    source, times = chosen([whole(stack / "2.mp4")], 7, count=40, fps=4.0)
    assert 0 <= times[0] <= 60
    assert times == pytest.approx([times[0] + i / 4 for i in range(40)])
    originals = video.decode(video.survey(str(stack / "2.mp4")), times)
    assert np.array_equal(frames_of(source, times, 64), np.stack([frame.pixels for frame in originals]))


def test_a_short_clip_is_played_back_and_forth(stack):
    source, times = chosen([whole(stack / "0.mp4")], 1, count=256, fps=4.0)
    frames = frames_of(source, times, 32)
    assert frames.shape == (256, 32, 32, 3)
    assert np.array_equal(frames[110], frames[130])  # 27.5 s and 32.5 s of a clip of 30 s
    assert (shown(source, times).start, shown(source, times).end) == (0.0, 29.75)


def test_three_files_are_given_to_the_splits_whole_and_copies_count_once(stack, tmp_path):
    found = divided(hay(str(stack)))
    names = {split: [source.path.name for source in sources] for split, sources in found.items()}
    assert names == {"train": ["2.mp4"], "validation": ["1.mp4"], "test": ["0.mp4"]}
    assert all(source.part == (0.0, 1.0) for sources in found.values() for source in sources)
    for name in ("a", "b", "c"):  # one video, three times
        (tmp_path / f"{name}.mp4").write_bytes((stack / "0.mp4").read_bytes())
    copies = divided(hay(str(tmp_path)))
    assert [[source.path.name for source in copies[split]] for split in SPLITS] == [["a.mp4"]] * 3
    assert [copies[split][0].part for split in SPLITS] == [PARTS[split] for split in SPLITS]


@pytest.mark.parametrize("fps", [4.0, 7.3, 24.0])
def test_the_parts_of_a_file_share_no_frame(stack, fps):
    """Whatever is drawn, and at whatever rate: the frames themselves are looked up, not their times."""
    path = stack / "1.mp4"
    reel, numbers = video.survey(str(path)), {}
    for split, sources in divided([path]).items():
        drawn = [chosen(sources, seed, count=64 * 4, fps=fps)[1] for seed in range(40)]
        numbers[split] = {reel.at(time) for times in drawn for time in times}
    for split, (first, last) in {"train": (0, 215), "validation": (216, 287), "test": (288, 359)}.items():
        assert first <= min(numbers[split]) < first + 20
        assert last - 20 < max(numbers[split]) <= last


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_haystack_of_one_or_two_files_leaks_nothing(stack, tmp_path, count):
    few, folder = tmp_path / "hay", tmp_path / "w"
    few.mkdir()
    for index in range(count):
        (few / f"{index}.mp4").write_bytes((stack / f"{index + 1}.mp4").read_bytes())
    make_world(folder, World(train=4, validation=2, test=2, seconds=20, haystack=str(few)), seed=2)
    assert check_world(folder).problems == ()
    sources = {split: read_sources(folder, split) for split in SPLITS}
    assert [len(sources[split]) for split in SPLITS] == [4, 2, 2]
    length = {"0.mp4": 90, "1.mp4": 70}
    for split, (first, last) in PARTS.items():
        for each in sources[split].values():
            assert first * length[each.file] - 1e-6 <= each.start < each.end <= last * length[each.file]
    for name, each in sources["test"].items():  # what is written is what stands there: colours apart
        clip = video.decode(video.survey(str(folder / "test/clips" / name)), [0.5])[0].pixels.astype(int)
        behind = video.decode(video.survey(str(few / each.file)), [each.start], size=(clip.shape[1],) * 2)
        assert clip.shape == behind[0].pixels.shape


def test_a_file_too_short_for_three_splits_is_refused(tmp_path):
    (tmp_path / "hay").mkdir()
    write_clip(tmp_path / "hay" / "short.mp4", background(12, 64, 4.0, 1), 4.0)
    with pytest.raises(DataError, match=r"short\.mp4 lasts 3\.0 s, too little for three splits; give longer clips"):
        make_world(tmp_path / "w", replace_world(SMALL, haystack=str(tmp_path / "hay")), seed=0)
    assert not (tmp_path / "w").exists()


def test_the_same_background_in_two_splits_is_a_leak(stack, tmp_path):
    folder = tmp_path / "w"
    world = World(train=2, validation=1, test=1, seconds=20, haystack=str(stack))
    make_world(folder, world, seed=2)
    path = folder / "test" / "events.json"
    entries, there = json.loads(path.read_text()), read_sources(folder, "train")["00001.mp4"]
    for start, end, leaks in ((there.end, there.end + 5, 1), (there.end + 0.25, there.end + 5, 0)):
        entries["00000.mp4"]["source"] = {"file": "x.mp4", "digest": there.digest, "start": start, "end": end}
        path.write_text(json.dumps(entries))
        problems = check_world(folder).problems
        assert len(problems) == leaks
        assert all("behind clips of more than one split" in problem for problem in problems)


def test_overlaps_by_hand():
    def at(start, end, digest="d"):
        return Stretch(file="a.mp4", digest=digest, start=start, end=end)

    train = {"0": at(0, 10), "1": at(2, 3), "2": at(20, 30), "3": at(5, 6, "other")}
    assert overlaps({"train": train, "test": {"0": at(11, 19), "1": at(0, 99, "third")}}) == []
    (line,) = overlaps({"train": train, "test": {"0": at(9, 12), "1": at(9, 25)}})  # a long one before a short one
    assert line.startswith("train/clips/0, test/clips/0: the same frames of a.mp4")
    assert (
        len(overlaps({"train": train, "validation": {"0": at(30, 31)}, "test": {"0": at(4, 5), "1": at(30, 40)}})) == 3
    )


def test_a_haystack_that_changed_is_another_world(stack, tmp_path):
    few = tmp_path / "hay"
    few.mkdir()
    for index in range(3):
        (few / f"{index}.mp4").write_bytes((stack / f"{index}.mp4").read_bytes())
    world = World(train=1, validation=1, test=1, seconds=20, haystack=str(few))
    make_world(tmp_path / "w", world, seed=2)
    make_world(tmp_path / "w", world, seed=2)
    (few / "1.mp4").unlink()
    with pytest.raises(DataError, match="another world \\(its sources differ\\)"):
        make_world(tmp_path / "w", world, seed=2)


# ---- frame budgets of the traces -----------------------------------------------------------------------------------


def test_traces_are_for_the_budgets_that_are_asked_for(tmp_path):
    world = World(train=2, validation=1, test=1, seconds=20, tasks_per_video=2)
    make_world(tmp_path / "w", world, seed=0, budgets=(4, 64, 4))
    demos = read_demos(tmp_path / "w/train/traces.jsonl")
    assert {demo.frames for demo in demos if demo.main} == {4, 64}
    assert len(demos) == 2 * 2 * 4
    assert json.loads((tmp_path / "w/world.json").read_text())["budgets"] == [4, 64]
    with pytest.raises(DataError, match="another world \\(its budgets differ\\)"):
        make_world(tmp_path / "w", world, seed=0)


@pytest.mark.parametrize(("gating", "budgets"), [((8, 64), {8, 64}), ((), {4, 8, 16, 32})])
def test_a_recipes_world_has_traces_for_the_budgets_it_trains_with(tmp_path, gating, budgets):
    settings = [f"gating.frames={list(gating)}", "world.train=1", "world.validation=1", "world.test=1"]
    recipe = load_recipe("tiny/base", [*settings, "world.seconds=20", "world.tasks_per_video=2"])
    stages.world(tmp_path / "w", recipe, told=lambda *_: None)
    assert {demo.frames for demo in read_demos(tmp_path / "w/train/traces.jsonl") if demo.main} == budgets


def test_a_haystack_without_clips_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        make_world(tmp_path / "w", replace_world(SMALL, haystack=str(tmp_path / "hay")), seed=0)
    (tmp_path / "hay").mkdir()
    with pytest.raises(DataError, match="holds no clip"):
        make_world(tmp_path / "w", replace_world(SMALL, haystack=str(tmp_path / "hay")), seed=0)


REAL = Path(__file__).parents[3] / "shared" / "media"


@pytest.mark.skipif(not REAL.is_dir(), reason="the real clips are not on this machine")
@pytest.mark.parametrize("name", ["video_90.mov", "av1_video.mkv", "nasa_13013.mp4"])
def test_real_clips_serve_as_haystack(name):
    source, times = chosen([whole(REAL / name)], 0, count=16, fps=2.0)
    frames = frames_of(source, times, 32)
    assert frames.shape == (16, 32, 32, 3)
    assert frames.std() > 1
