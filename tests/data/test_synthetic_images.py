"""Worlds of pictures: what is painted is what is labelled, answers by another way, nothing leaks, no blind answer."""

import asyncio
import hashlib
import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from saccade import stages
from saccade.agents.parallel import parallel
from saccade.chat.parse import parse
from saccade.config import World, load_recipe
from saccade.data.record import read_jsonl
from saccade.data.rows import read_demos, read_tasks, write_tasks
from saccade.data.world import check_world, contact_sheet, make_world
from saccade.data.world.events import COLOURS, PALETTE
from saccade.data.world.floors import blind_floor
from saccade.data.world.folder import SPLITS
from saccade.data.world.paint import DIGITS, INK, WHITE
from saccade.data.world.still.cards import DIGIT, DOT, LETTER, SIGNS, Card, Scene, draw_scene
from saccade.data.world.still.make import draw_stills, read_scenes, tasks_of, traces_of
from saccade.data.world.still.oracle import AT_ONCE, demo
from saccade.data.world.still.paint import LETTERS, painted
from saccade.data.world.still.questions import KINDS, cards_of
from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, DataError
from saccade.media.cache import Library
from saccade.protocols import Context
from saccade.rewards.accuracy import accuracy
from saccade.rollouts.run import run_episode
from saccade.sections import Pictures
from saccade.types import End, Kind, Sampling, Task

SMALL = World(media="image", train=4, validation=2, test=2, image=Pictures(distractors=1, charts=0.5, chart_side=2))


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("still") / "small"
    make_world(folder, SMALL, seed=5)
    return folder


def everything(dials=None, seed=0, sizes=(256, 48, 48)):
    world = World(media="image", image=dials or Pictures(), **dict(zip(SPLITS, sizes, strict=True)))
    drawn = draw_stills(world, seed=seed)
    return {split: tasks_of(world.image, drawn[split], seed=seed, split=split) for split in SPLITS}


@pytest.fixture(scope="module")
def default_tasks():
    return everything()


# ---- the world of videos is as it was ------------------------------------------------------------------------------


def test_a_world_of_videos_is_what_it_was_before_there_were_pictures(tmp_path):
    """Rows and settings byte for byte; the bytes of clips depend on the encoder's version."""
    make_world(tmp_path / "w", World(train=4, validation=2, test=2, distractors=1), seed=5)
    known = {
        "train/tasks.jsonl": "28b927b9b933a8ebd40afd88fcf99e75981343c41d13dfdb633077066c63a5b7",
        "train/traces.jsonl": "a0505e93bd79d0923d9d8415e782fb22f3116dca8ef7dc8b17b8de6060a34f9b",
        "validation/tasks.jsonl": "c46cfe024e2843d67b1199ca2c6d9d13214492c8e4560cc8880b86e5d761ca66",
        "test/tasks.jsonl": "13f2c3e3b081ec4c583339ed30ed0310c0a999e5c87a7ca11ce7b9f23a3dd90d",
    }
    for name, digest in known.items():
        assert hashlib.sha256((tmp_path / "w" / name).read_bytes()).hexdigest() == digest, name
    settings = json.loads((tmp_path / "w" / "world.json").read_text())["settings"]
    known = "train validation test seconds event_seconds events distractors pixels fps tasks_per_video questions"
    assert list(settings) == [*known.split(), "traces", "haystack"]


# ---- pixels --------------------------------------------------------------------------------------------------------


def near(pixels, rgb):
    return np.abs(pixels.astype(int) - rgb).max(axis=-1) < 3


def read_card(pixels):
    """Colour, class and sign of a card by its pixels alone, each row of a glyph looked up in the middle of its bits."""
    side = len(pixels)
    names = {**PALETTE, "white": WHITE}
    shares = {name: near(pixels, rgb).mean() for name, rgb in names.items()}
    colour = max(shares, key=shares.get)
    ink = near(pixels, INK)
    if not ink.any():
        others = {name: share for name, share in shares.items() if share > 0.02 and name != colour}
        return colour, DOT, max(others, key=others.get)
    rows, columns = np.nonzero(ink.any(axis=1))[0], np.nonzero(ink.any(axis=0))[0]
    high = rows[-1] - rows[0] + 1
    centre = side / 2
    width = 0.7 * 0.4 * side
    bits = []
    for row in range(5):
        y = int(rows[0] + (row + 0.5) * high / 5)
        values = [ink[y, int(centre + (i - 1) * width / 3)] for i in range(3)]
        bits.append(sum(int(value) << (2 - i) for i, value in enumerate(values)))
    assert columns[0] >= centre - width / 2 - 1
    found = [(DIGIT, name) for name, glyph in DIGITS.items() if glyph == tuple(bits)]
    found += [(LETTER, name) for name, glyph in LETTERS.items() if glyph == tuple(bits)]
    ((mark, sign),) = found
    return colour, mark, sign


@pytest.mark.parametrize("split", SPLITS)
def test_every_picture_shows_what_its_labels_say(small, split):
    for name, (_, scene) in read_scenes(small, split).items():
        with Image.open(small / split / "pictures" / name) as picture:
            pixels = np.asarray(picture)
        assert pixels.shape == (scene.pixels, scene.pixels, 3)
        covered = np.zeros(pixels.shape[:2], bool)
        assert len(scene.distractors) == (scene.pixels == 320)  # a chart has none
        for card in (*scene.cards, *scene.distractors):
            left, top, right, bottom = card.box
            assert read_card(pixels[top:bottom, left:right]) == (card.colour, card.mark, card.sign)
            covered[top:bottom, left:right] = True
        # nowhere else is there a colour
        for rgb in (*PALETTE.values(), WHITE, INK):
            assert not near(pixels, rgb)[~covered].any()


def test_no_two_signs_look_the_same():
    glyphs = [*DIGITS.values(), *LETTERS.values()]
    assert len(set(glyphs)) == len(glyphs)
    assert (set(DIGITS), set(LETTERS)) == (set(SIGNS[DIGIT]), set(SIGNS[LETTER]))
    assert "A" not in LETTERS  # an article, which answers are freed of


@pytest.mark.parametrize(
    "dials",
    [Pictures(), Pictures(pixels=640, target=0.05, cards=(3, 6), distractors=4), Pictures(pixels=90, target=0.2)],
)
def test_cards_keep_their_distance_and_their_lattice(dials):
    dials = dials.model_copy(update={"cards": (2, 2)}) if dials.pixels == 90 else dials
    side = round(dials.pixels * dials.target)
    for seed in range(50):
        scene = draw_scene(dials, random.Random(seed))
        cards = [*scene.cards, *scene.distractors]
        assert dials.cards[0] <= len(scene.cards) <= dials.cards[1]
        assert len(scene.distractors) == dials.distractors
        assert all(card.side == side and card.left % side == card.top % side == 0 for card in cards)
        assert all(side <= edge <= dials.pixels - side for card in cards for edge in card.box)
        for i, one in enumerate(cards):
            for other in cards[:i]:
                assert max(abs(one.left - other.left), abs(one.top - other.top)) >= 2 * side
        assert list(scene.cards) == sorted(scene.cards, key=lambda card: (card.top, card.left))
        assert all(card.sign in SIGNS[card.mark] and card.sign != card.colour for card in cards)
        assert {card.colour for card in scene.distractors} <= {"white"}


def test_an_overview_hides_marks_and_shows_cards():
    """Two pictures that differ in their marks alone: as the recipe shows them first they can hardly be told apart."""
    card = Card(left=96, top=160, side=32, colour="red", mark=DIGIT, sign="3")
    others = [replace(card, sign="8"), replace(card, colour="green"), replace(card, left=128)]
    scenes = [Scene(pixels=320, cards=(each,)) for each in (card, *others)]
    small = [
        np.asarray(Image.fromarray(painted(scene, 1)).resize((64, 64), Image.Resampling.BICUBIC)).astype(int)
        for scene in scenes
    ]
    mark, colour, place = (np.abs(each - small[0]).max() for each in small[1:])
    assert mark < 60 < 120 < min(colour, place)


# ---- labels --------------------------------------------------------------------------------------------------------


def slow_answer(task):
    """The answer from the rows of the task and the words of its question; written apart from the code."""
    cards = [dict(zip(("left", "top", "side", "colour", "mark", "sign"), c, strict=True)) for c in task.extras["cards"]]
    words = task.question.removesuffix("?").split()
    match task.extras["question"]:
        case "colour" | "digit" | "letter":
            (card,) = [card for card in cards if card["colour"] == words[-2]]
            assert card["mark"] == {"colour": "dot"}.get(words[1], words[1])
            return card["sign"]
        case "count":
            return float(sum(words == ["How", "many", "cards"] or card["mark"] == words[-1] for card in cards))
        case "where" if words[-1] == "card":
            (card,) = [card for card in cards if card["colour"] == words[-2]]
        case _:
            sign, mark = (words[-2], ["dot"]) if words[-1] == "dot" else (words[-1], ["digit", "letter"])
            (card,) = [card for card in cards if card["sign"] == sign and card["mark"] in mark]
    if task.kind is Kind.CHOICE:
        assert len(set(task.choices)) == 3
        return "ABC"[task.choices.index(card["colour"])]
    left, top, side = float(card["left"]), float(card["top"]), float(card["side"])
    return (left, top, left + side, top + side)


@pytest.mark.parametrize("dials", [Pictures(), Pictures(cards=(3, 8), distractors=2, target=0.05)])
def test_golds_are_right_by_another_way(dials):
    for tasks in everything(dials, sizes=(64, 16, 16)).values():
        for task in tasks:
            assert task.gold == slow_answer(task), task
            assert task.kind is KINDS[task.extras["question"]]
            assert (task.extras["width"], task.extras["height"]) == (320, 320)


@pytest.mark.slow
@pytest.mark.parametrize("dials", [Pictures(), Pictures(distractors=3), Pictures(pixels=640, target=0.05)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_constant_answer_does_well(dials, seed):
    for split, tasks in everything(dials, seed=seed).items():
        floors = blind_floor(tasks)
        assert set(floors) == set(KINDS)
        assert max(floors.values()) <= 0.35, (split, floors)
        assert floors["where"] <= 0.06
        by_words = defaultdict(Counter)  # nor does one that knows the wording, but not the picture
        for task in tasks:
            if task.extras["question"] == "count":
                by_words[task.extras["target"] is None][task.gold] += 1
        assert all(max(golds.values()) / golds.total() <= 0.45 for golds in by_words.values())
        kinds = Counter(task.extras["question"] for task in tasks)
        assert min(kinds.values()) >= 0.08 * len(tasks)


def test_the_blind_floor_of_boxes_by_hand():
    def boxes(*golds, **extras):
        extras = {"question": "where", **extras}
        return [
            Task(id=str(i), question="", media=(), kind=Kind.BOX, gold=g, extras=extras) for i, g in enumerate(golds)
        ]

    one, two = (0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)
    assert blind_floor(boxes(one, one, two))["where"] == pytest.approx(2 / 3)
    # both quarters have a quarter of the whole picture, which is less than all of one of them
    assert blind_floor(boxes(one, two))["where"] == pytest.approx(1 / 2)
    # two halves that share a quarter of the picture: one of them 1 and 1/3, the quarter they share 1/2 each
    assert blind_floor(boxes((0.0, 0.0, 0.5, 1.0), (0.0, 0.0, 1.0, 0.5)))["where"] == pytest.approx((1 + 1 / 3) / 2)
    pixels = boxes((0, 0, 100, 50), width=200, height=100) + boxes((0, 0, 50, 50), width=100, height=100)
    assert blind_floor(pixels)["where"] == pytest.approx(1.0)


def test_the_blind_floor_of_many_boxes_is_found_in_reasonable_time():
    rng = random.Random(0)
    golds = [(x := rng.random() / 2, y := rng.random() / 2, x + 0.3, y + 0.3) for _ in range(1000)]
    extras = {"question": "where"}
    tasks = [Task(id=str(i), question="", media=(), kind=Kind.BOX, gold=g, extras=extras) for i, g in enumerate(golds)]
    assert 0.25 < blind_floor(tasks)["where"] < 0.5


# ---- the oracle ----------------------------------------------------------------------------------------------------


def replay(task, found, renderer, **settings):
    """The demonstration, said by a scripted model through the real agent and tool."""
    engine = scripted(renderer, replies=[text.removeprefix("<think>\n") for text in found.replies])
    ctx = Context(engine=engine, renderer=renderer, media=Library(), sampling=Sampling(max_tokens=900), seed=1)
    agent = partial(parallel, tools={"zoom_image": {"pixels": (1024, 1024)}}, image_pixels=(4096, 4096), **settings)
    return asyncio.run(run_episode(task, agent, ctx))


def test_demonstrations_are_right_through_the_real_tool(small, renderer):
    """Each call shows just the card that the next thought names, and the answer is worth everything."""
    judge = accuracy(open="exact", number="exact")
    tasks = read_tasks(small / "train" / "tasks.jsonl")
    assert {task.extras["question"] for task in tasks} == set(KINDS)
    library = Library()
    for task in tasks:
        found = demo(task)
        episode = replay(task, found, renderer)
        assert (episode.end, judge(episode, task)) == (End.ANSWERED, 1.0)
        assert all(result.ok for result in episode.results)
        cards, thought = cards_of(task), parse(found.replies[-1]).blocks[0].body
        shown = [picture for result in episode.results for picture in result.pictures]
        assert [picture.box for picture in shown] == [cards[place].box for place in task.extras["looks"]]
        said = thought.removeprefix("\nI see: ").split(", ")
        for picture, words in zip(shown, said if shown else [], strict=True):
            colour, _, sign = read_card(library.pixels(picture))
            assert words.split()[:2] == [colour, sign]
        if not shown:  # an overview is enough to count
            assert task.question == "How many cards?"
            side = task.extras["width"]
            spots = {(card.colour, f"{card.left / side:g}", f"{card.top / side:g}") for card in cards}
            told = [tuple(words.split()) for words in thought.removeprefix("\nCards: ").split(", ")]
            assert (set(told), len(told)) == (spots, len(cards))
        # a box is the answer of a box, and stands in the result that showed it
        if task.kind is Kind.BOX:
            assert episode.answer in [result.text for result in episode.results]


def test_many_cards_are_looked_at_in_turns():
    dials = Pictures(cards=(8, 8), target=0.05)
    task = next(task for task in everything(dials, sizes=(8, 1, 1))["train"] if len(task.extras["looks"]) == 8)
    calls = [len(parse(reply).calls) for reply in demo(task).replies]
    assert calls == [AT_ONCE, 8 - AT_ONCE, 0]


def test_demonstrations_are_well_formed(default_tasks):
    for task in default_tasks["validation"]:
        found = demo(task)
        replies = [parse(text) for text in found.replies]
        assert all(block.closed for reply in replies for block in reply.blocks)
        assert all(call.ok and call.name == "zoom_image" for reply in replies for call in reply.calls)
        assert (found.frames, found.children, found.main) == (None, (), True)
        assert all(0 < side < 1 for reply in replies for call in reply.calls for side in call.arguments.values())


@pytest.mark.slow
def test_charts_are_read_whole(tmp_path):
    """They are of training alone, each card as large as it is in a picture."""
    world = World(
        media="image", train=3, validation=1, test=1, image=Pictures(charts=1.4, chart_side=3, tasks_per_picture=2)
    )
    make_world(tmp_path / "w", world, seed=5)
    assert check_world(tmp_path / "w").problems == ()
    scenes = {name: scene for name, (_, scene) in read_scenes(tmp_path / "w", "train").items()}
    assert [len(read_scenes(tmp_path / "w", split)) for split in SPLITS] == [7, 1, 1]
    demos = read_demos(tmp_path / "w/train/traces.jsonl")
    charts = [each for each in demos if not each.main]
    assert (len(charts), len(demos)) == (4, 3 * 2 + 4)
    for chart in charts:
        path = chart.task.media[0].path
        cards = scenes[path.rpartition("/")[2]].cards
        assert [card.box for card in cards] == [(x, y, x + 32, y + 32) for y in (0, 32, 64) for x in (0, 32, 64)]
        with Image.open(path) as picture:
            assert picture.size == (96, 96)
            assert [picture.getpixel((card.left, card.top)) for card in cards] == [PALETTE[c.colour] for c in cards]
        (reply,) = chart.replies
        listed = [f"{card.colour} {card.sign}{' dot' if card.mark == DOT else ''}" for card in cards]
        assert f"I see: {', '.join(listed)}</think>" in reply
        assert parse(reply).answer == chart.task.gold == listed[-1]


def test_another_language_of_tools_can_be_demonstrated(default_tasks):
    """What looks is a setting: an agent that writes code needs another text, and nothing else."""
    task = next(task for task in default_tasks["test"] if len(task.extras["looks"]) == 1)
    found = demo(task, look=lambda think, boxes, pixels: f"{think} {boxes} of {pixels}")
    (box,) = [cards_of(task)[place].box for place in task.extras["looks"]]
    assert found.replies[0].endswith(f" {[box]} of 320")
    assert found.replies[0].startswith("Cards: ")
    assert found.replies[1:] == demo(task).replies[1:]


def test_traces_may_be_answers_alone(default_tasks):
    """The measure for looking closer: a sharp overview that is read at once."""
    for task in default_tasks["test"]:
        (reply,) = demo(task, look=None).replies
        found = parse(reply)
        assert (found.calls, found.answer) == ((), parse(demo(task).replies[-1]).answer)
        cards = [cards_of(task)[place] for place in task.extras["looks"]]
        assert reply.count(f"{cards[0].colour} {cards[0].sign}" if cards else "Cards: ") == 1
    world = World(media="image", traces="answers")
    assert traces_of(default_tasks["test"], world) == [demo(task, look=None) for task in default_tasks["test"]]


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_makes_the_same_files(small, tmp_path):
    make_world(tmp_path / "again", SMALL, seed=5)
    assert files_of(tmp_path / "again") == files_of(small)
    make_world(tmp_path / "other", SMALL, seed=6)
    changed = [name for name, data in files_of(tmp_path / "other").items() if files_of(small)[name] != data]
    assert len(changed) == len(files_of(small))


def test_more_training_pictures_leave_the_test_as_it_is():
    few, many = (draw_stills(World(media="image", train=count), seed=0) for count in (3, 30))
    assert few["test"] == many["test"]
    assert few["validation"] == many["validation"]


def test_no_picture_shows_what_another_shows():
    dials = Pictures(cards=(1, 1), pixels=100, target=0.2)
    drawn = draw_stills(World(media="image", train=300, validation=50, test=50, image=dials), seed=0)
    shown = [tuple(scene.cards) for split in SPLITS for scene in drawn[split]]
    assert len(set(shown)) == len(shown) == 400
    # nine places, six colours, 25 signs that differ from them: no more than that can be told apart
    with pytest.raises(ConfigError, match="repeat"):
        draw_stills(World(media="image", train=2000, image=dials), seed=0)


def test_an_interrupted_world_is_finished(small, tmp_path):
    def stop(split, done, total):
        if split == "validation":
            raise KeyboardInterrupt

    folder = tmp_path / "w"
    with pytest.raises(KeyboardInterrupt):
        make_world(folder, SMALL, seed=5, progress=stop)
    assert not (folder / "validation" / "tasks.jsonl").exists()
    kept = folder / "train" / "pictures" / "00001.png"
    before = kept.stat().st_mtime_ns
    (folder / "train" / "pictures" / "00002.png").unlink()
    make_world(folder, SMALL, seed=5)
    assert kept.stat().st_mtime_ns == before
    assert files_of(folder) == files_of(small)


def test_another_world_is_never_mixed_in(small, tmp_path):
    with pytest.raises(DataError, match="another world"):
        make_world(small, SMALL, seed=6)
    with pytest.raises(DataError, match="another world"):
        make_world(small, World(train=4, validation=2, test=2), seed=5)
    with pytest.raises(DataError, match="another world"):
        make_world(small, SMALL.model_copy(update={"image": Pictures()}), seed=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.03}, "cards of 0.03 of 320 pixels need a whole number of them"),
        ({"mark": 0.1}, "a mark of 3.2 pixels can't be read; it needs 5 at least"),
        ({"cards": (3, 2)}, "least and most"),
        ({"cards": (0, 2)}, "at least one"),
        ({"cards": (20, 20)}, "20 cards of 32 pixels don't fit a picture of 320"),
        ({"target": 0.5}, "cards of 160 pixels don't fit a picture of 320"),
        ({"questions": ("digit", "when")}, "there is no question 'when'; there are colour, digit"),
    ],
)
def test_settings_that_cant_be_met(tmp_path, changes, message):
    dials = Pictures(**{**Pictures().model_dump(), **changes})
    with pytest.raises(ConfigError, match=message):
        make_world(tmp_path / "w", SMALL.model_copy(update={"image": dials}), seed=0)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["world.image.pixels=640"], "world.image has settings, but the world is of videos: set world.media=image too"),
        (["world.media=image", "world.haystack=clips"], "world.haystack hides needles in clips"),
        (["world.media=picture"], "world.media can't be 'picture': it should be 'video' or 'image'"),
        (["world.media=image", "world.image.pixel=64"], "did you mean world.image.pixels"),
    ],
)
def test_dials_of_the_other_medium_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe("tiny/base", overrides)


def test_a_recipe_makes_a_world_of_pictures(tmp_path):
    sizes = ["world.media=image", "world.train=3", "world.validation=1", "world.test=1"]
    told = []
    report = stages.world(tmp_path / "w", load_recipe("tiny/base", sizes), told=lambda *row: told.append(row))
    assert report.problems == ()
    assert told[-1] == (5, "checking", 5)
    assert (tmp_path / "w" / "sheet.png").is_file()
    assert len(read_demos(tmp_path / "w" / "train" / "traces.jsonl")) == 3 * 8
    assert not (tmp_path / "w" / "test" / "traces.jsonl").exists()


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
    assert report.clips == {"train": 4 + 2, "validation": 2, "test": 2}  # two charts
    assert report.tasks == {"train": 32, "validation": 16, "test": 16}
    assert set(report.floors["train"]) <= set(KINDS)


def test_a_wrong_answer_is_found(copy):
    path = copy / "test" / "tasks.jsonl"
    tasks = read_jsonl(path, Task)
    place = next(i for i, task in enumerate(tasks) if task.kind is Kind.BOX)
    tasks[place] = replace(tasks[place], gold=(0.0, 0.0, 32.0, 32.0))
    write_tasks(path, tasks)
    (problem,) = check_world(copy).problems
    assert "gold (0.0, 0.0, 32.0, 32.0), but the labels say" in problem


def test_a_wrong_card_is_found(copy):
    path = copy / "train" / "cards.json"
    entries = json.loads(path.read_text())
    entries["00000.png"]["cards"][0]["side"] += 1
    path.write_text(json.dumps(entries))
    problems = check_world(copy).problems
    assert any("its cards are not those of its picture" in problem for problem in problems)


def test_a_changed_picture_is_found(copy):
    (copy / "train/pictures/00000.png").write_bytes((copy / "train/pictures/00001.png").read_bytes())
    (problem,) = check_world(copy).problems
    assert problem.startswith("train/pictures/00000.png")


def test_a_leak_is_found(copy):
    shown = json.loads((copy / "train/cards.json").read_text())["00000.png"]
    labels = json.loads((copy / "test/cards.json").read_text())
    (copy / "test/pictures/00007.png").write_bytes((copy / "train/pictures/00000.png").read_bytes())
    (copy / "test/cards.json").write_text(json.dumps({**labels, "00007.png": shown}))
    problems = check_world(copy).problems
    assert len(problems) == 2
    assert all("train/pictures/00000.png, test/pictures/00007.png" in problem for problem in problems)


def test_an_unfinished_world_is_named(copy):
    (copy / "test/cards.json").unlink()
    with pytest.raises(DataError, match=r"test/cards\.json can't be read"):
        check_world(copy)


def test_the_sheet_shows_pictures_and_cards(small, tmp_path):
    contact_sheet(small, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    for _, scene in read_scenes(small, "train").values():
        assert all((pixels == PALETTE[card.colour]).all(axis=1).any() for card in scene.cards)
    assert set(COLOURS) == set(PALETTE)
