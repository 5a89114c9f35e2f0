"""Synthetic images match their labels, answers are right, splits don't leak, constant answers score low."""

import asyncio
import hashlib
import json
import random
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade.chat.parser import parse_reply
from saccade.config.load import load_recipe
from saccade.config.schema import SyntheticConfig, SyntheticImageConfig
from saccade.data.constant_baseline import compute_constant_baselines
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.synthetic import generate_dataset, validate_dataset
from saccade.data.synthetic.contact_sheet import draw_contact_sheet
from saccade.data.synthetic.dataset import SPLITS
from saccade.data.synthetic.events import COLORS, PALETTE
from saccade.data.synthetic.image.generate import MAX_CALLS_PER_TURN, ImageDataset, build_demonstration
from saccade.data.synthetic.image.objects import DIGIT, DOT, LETTER, SYMBOLS, ImageScene, SceneObject, sample_scene
from saccade.data.synthetic.image.questions import ANSWER_TYPES, parse_objects
from saccade.data.synthetic.image.render import LETTER_GLYPHS, render_image
from saccade.data.synthetic.render import DIGIT_GLYPHS, INK, WHITE
from saccade.engines.scripted import Scripted
from saccade.environments.tool_calling import ToolCalling
from saccade.errors import ConfigError, DataError
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.accuracy import Accuracy
from saccade.rollouts.runner import run_episode
from saccade.runs import pipeline
from saccade.types import AnswerType, EpisodeStatus, SamplingParams, Task

SMALL = SyntheticConfig(
    media="image",
    train=4,
    validation=2,
    test=2,
    image=SyntheticImageConfig(distractors=1, grid_images=0.5, grid_size=2),
)


def read_files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "small"
    generate_dataset(folder, SMALL, seed=5)
    return folder


def build_tasks_by_split(image_config=None, seed=0, sizes=(256, 48, 48)):
    config = SyntheticConfig(
        media="image", image=image_config or SyntheticImageConfig(), **dict(zip(SPLITS, sizes, strict=True))
    )
    dataset = ImageDataset(config, seed=seed)
    return {split: dataset.build_tasks(scenes, split) for split, scenes in dataset.sample_contents().items()}


@pytest.fixture(scope="module")
def default_tasks():
    return build_tasks_by_split()


# ---- reproducibility -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_video_dataset_are_pinned(tmp_path):
    """Rows and settings are compared byte for byte; the bytes of clips depend on the encoder's version."""
    generate_dataset(tmp_path / "w", SyntheticConfig(train=4, validation=2, test=2, distractors=1), seed=5)
    expected = {
        "train/tasks.jsonl": "29ef633b7467d8a9154407ca7b34fae1db2e4955cc7734ab3866b555b1f3821d",
        "train/demonstrations.jsonl": "e01c3a381133de8a170293034fdd55f157eafc4b84f94a1ac03190fa7c09d1fd",
        "validation/tasks.jsonl": "43193731154398bdb06974869ef6d80a6375525aff53f92dd94b51f364047896",
        "test/tasks.jsonl": "90dbadaf1babb55dfe2f08a84e55929f0c94ac931e1bcc94e2075c488a00693e",
    }
    for name, digest in expected.items():
        assert hashlib.sha256((tmp_path / "w" / name).read_bytes()).hexdigest() == digest, name
    settings = json.loads((tmp_path / "w" / "dataset.json").read_text())["settings"]
    names = (
        "train validation test clip_seconds event_seconds events distractors frame_size fps tasks_per_video questions"
    )
    assert list(settings) == [*names.split(), "demonstrations", "haystack"]


# ---- pixels --------------------------------------------------------------------------------------------------------


def is_near(pixels, rgb):
    return np.abs(pixels.astype(int) - rgb).max(axis=-1) < 3


def read_card(pixels):
    """Return color, symbol class and symbol of a card from its pixels, sampling a glyph at the center of its bits."""
    side = len(pixels)
    names = {**PALETTE, "white": WHITE}
    shares = {name: is_near(pixels, rgb).mean() for name, rgb in names.items()}
    color = max(shares, key=shares.get)
    ink = is_near(pixels, INK)
    if not ink.any():
        others = {name: share for name, share in shares.items() if share > 0.02 and name != color}
        return color, DOT, max(others, key=others.get)
    rows, columns = np.nonzero(ink.any(axis=1))[0], np.nonzero(ink.any(axis=0))[0]
    height = rows[-1] - rows[0] + 1
    center = side / 2
    width = 0.7 * 0.4 * side
    bits = []
    for row in range(5):
        y = int(rows[0] + (row + 0.5) * height / 5)
        values = [ink[y, int(center + (i - 1) * width / 3)] for i in range(3)]
        bits.append(sum(int(value) << (2 - i) for i, value in enumerate(values)))
    assert columns[0] >= center - width / 2 - 1
    matches = [(DIGIT, name) for name, glyph in DIGIT_GLYPHS.items() if glyph == tuple(bits)]
    matches += [(LETTER, name) for name, glyph in LETTER_GLYPHS.items() if glyph == tuple(bits)]
    ((symbol_class, symbol),) = matches
    return color, symbol_class, symbol


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_image_matches_its_labels(small, split):
    for name, (_, scene) in ImageDataset.read_labels(small, split).items():
        with Image.open(small / split / "pictures" / name) as image:
            pixels = np.asarray(image)
        assert pixels.shape == (scene.pixels, scene.pixels, 3)
        covered = np.zeros(pixels.shape[:2], bool)
        assert len(scene.distractors) == (scene.pixels == 320)  # a grid image has none
        for card in (*scene.objects, *scene.distractors):
            left, top, right, bottom = card.box
            assert read_card(pixels[top:bottom, left:right]) == (card.color, card.symbol_class, card.symbol)
            covered[top:bottom, left:right] = True
        # the background has none of these colors
        for rgb in (*PALETTE.values(), WHITE, INK):
            assert not is_near(pixels, rgb)[~covered].any()


def test_all_glyphs_differ():
    glyphs = [*DIGIT_GLYPHS.values(), *LETTER_GLYPHS.values()]
    assert len(set(glyphs)) == len(glyphs)
    assert (set(DIGIT_GLYPHS), set(LETTER_GLYPHS)) == (set(SYMBOLS[DIGIT]), set(SYMBOLS[LETTER]))
    assert "A" not in LETTER_GLYPHS  # an article, which answer normalization removes


@pytest.mark.parametrize(
    "config",
    [
        SyntheticImageConfig(),
        SyntheticImageConfig(image_size=640, object_scale=0.05, objects=(3, 6), distractors=4),
        SyntheticImageConfig(image_size=90, object_scale=0.2),
    ],
)
def test_cards_are_on_a_lattice_and_keep_their_distance(config):
    config = config.model_copy(update={"objects": (2, 2)}) if config.image_size == 90 else config
    side = round(config.image_size * config.object_scale)
    for seed in range(50):
        scene = sample_scene(config, random.Random(seed))
        cards = [*scene.objects, *scene.distractors]
        assert config.objects[0] <= len(scene.objects) <= config.objects[1]
        assert len(scene.distractors) == config.distractors
        assert all(card.side == side and card.left % side == card.top % side == 0 for card in cards)
        assert all(side <= edge <= config.image_size - side for card in cards for edge in card.box)
        for i, card in enumerate(cards):
            for other in cards[:i]:
                assert max(abs(card.left - other.left), abs(card.top - other.top)) >= 2 * side
        assert list(scene.objects) == sorted(scene.objects, key=lambda card: (card.top, card.left))
        assert all(card.symbol in SYMBOLS[card.symbol_class] and card.symbol != card.color for card in cards)
        assert {card.color for card in scene.distractors} <= {"white"}


def test_overview_shows_cards_but_no_symbols():
    """At the size of the recipe's overview, images that differ only in a symbol are nearly the same."""
    card = SceneObject(left=96, top=160, side=32, color="red", symbol_class=DIGIT, symbol="3")
    others = [replace(card, symbol="8"), replace(card, color="green"), replace(card, left=128)]
    scenes = [ImageScene(pixels=320, objects=(variant,)) for variant in (card, *others)]
    small = [
        np.asarray(Image.fromarray(render_image(scene, 1)).resize((64, 64), Image.Resampling.BICUBIC)).astype(int)
        for scene in scenes
    ]
    symbol, color, position = (np.abs(image - small[0]).max() for image in small[1:])
    assert symbol < 60 < 120 < min(color, position)


# ---- labels --------------------------------------------------------------------------------------------------------


def compute_answer_independently(task):
    """Compute the answer from the extras and the words of the question, independently of the library."""
    cards = [
        dict(zip(("left", "top", "side", "color", "symbol_class", "symbol"), card, strict=True))
        for card in task.extras["cards"]
    ]
    words = task.question.removesuffix("?").split()
    match task.extras["question"]:
        case "colour" | "digit" | "letter":
            (card,) = [card for card in cards if card["color"] == words[-2]]
            assert card["symbol_class"] == {"colour": "dot"}.get(words[1], words[1])
            return card["symbol"]
        case "count":
            return float(sum(words == ["How", "many", "cards"] or card["symbol_class"] == words[-1] for card in cards))
        case "where" if words[-1] == "card":
            (card,) = [card for card in cards if card["color"] == words[-2]]
        case _:
            symbol, classes = (words[-2], ["dot"]) if words[-1] == "dot" else (words[-1], ["digit", "letter"])
            (card,) = [card for card in cards if card["symbol"] == symbol and card["symbol_class"] in classes]
    if task.answer_type == AnswerType.CHOICE:
        assert len(set(task.options)) == 3
        return "ABC"[task.options.index(card["color"])]
    left, top, side = float(card["left"]), float(card["top"]), float(card["side"])
    return (left, top, left + side, top + side)


@pytest.mark.parametrize(
    "config", [SyntheticImageConfig(), SyntheticImageConfig(objects=(3, 8), distractors=2, object_scale=0.05)]
)
def test_ground_truths_are_right(config):
    for tasks in build_tasks_by_split(config, sizes=(64, 16, 16)).values():
        for task in tasks:
            assert task.ground_truth == compute_answer_independently(task), task
            assert task.answer_type == ANSWER_TYPES[task.extras["question"]]
            assert (task.extras["width"], task.extras["height"]) == (320, 320)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SyntheticImageConfig(),
        SyntheticImageConfig(distractors=3),
        SyntheticImageConfig(image_size=640, object_scale=0.05),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_constant_answers_score_low(config, seed):
    for split, tasks in build_tasks_by_split(config, seed=seed).items():
        baselines = compute_constant_baselines(tasks)
        assert set(baselines) == set(ANSWER_TYPES)
        assert max(baselines.values()) <= 0.35, (split, baselines)
        assert baselines["where"] <= 0.06
        by_wording = defaultdict(Counter)  # nor an answer that depends on the wording alone
        for task in tasks:
            if task.extras["question"] == "count":
                by_wording[task.extras["target"] is None][task.ground_truth] += 1
        assert all(max(counts.values()) / counts.total() <= 0.45 for counts in by_wording.values())
        kinds = Counter(task.extras["question"] for task in tasks)
        assert min(kinds.values()) >= 0.08 * len(tasks)


def test_constant_baseline_of_boxes_by_hand():
    def boxes(*answers, **extras):
        extras = {"question": "where", **extras}
        return [
            Task(id=str(i), question="", media=(), answer_type=AnswerType.BOX, ground_truth=box, extras=extras)
            for i, box in enumerate(answers)
        ]

    first, second = (0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0)
    assert compute_constant_baselines(boxes(first, first, second))["where"] == pytest.approx(2 / 3)
    # the whole image overlaps with each quarter by 1/4, which is less than one exact match in two
    assert compute_constant_baselines(boxes(first, second))["where"] == pytest.approx(1 / 2)
    # two halves that share a quarter of the image: IoU 1 and 1/3 for either half, 1/2 each for the shared quarter
    assert compute_constant_baselines(boxes((0.0, 0.0, 0.5, 1.0), (0.0, 0.0, 1.0, 0.5)))["where"] == pytest.approx(
        (1 + 1 / 3) / 2
    )
    pixels = boxes((0, 0, 100, 50), width=200, height=100) + boxes((0, 0, 50, 50), width=100, height=100)
    assert compute_constant_baselines(pixels)["where"] == pytest.approx(1.0)


@pytest.mark.slow
def test_constant_baseline_of_many_boxes_is_fast():
    rng = random.Random(0)
    boxes = [(x := rng.random() / 2, y := rng.random() / 2, x + 0.3, y + 0.3) for _ in range(1000)]
    extras = {"question": "where"}
    tasks = [
        Task(id=str(i), question="", media=(), answer_type=AnswerType.BOX, ground_truth=box, extras=extras)
        for i, box in enumerate(boxes)
    ]
    assert 0.25 < compute_constant_baselines(tasks)["where"] < 0.5


# ---- demonstrations ------------------------------------------------------------------------------------------------


def replay(task, demo, renderer, **settings):
    """Replay a demonstration with a scripted engine in the real environment with its real tool."""
    engine = Scripted(renderer, replies=[text.removeprefix("<think>\n") for text in demo.replies])
    ctx = Context(
        engine=engine, renderer=renderer, media=CachingMediaLoader(), sampling=SamplingParams(max_tokens=900), seed=1
    )
    environment = partial(
        ToolCalling, tools={"zoom_image": {"image_pixels": (1024, 1024)}}, image_pixels=(4096, 4096), **settings
    )
    return asyncio.run(run_episode(task, environment, ctx))


@pytest.mark.slow
def test_demonstrations_earn_full_reward_with_the_real_tool(small, renderer):
    """Each call shows exactly the card that the next thought names, and the answer is right."""
    score = Accuracy(answer_types={"open": {"mode": "exact"}, "number": {"mode": "exact"}})
    tasks = load_tasks(small / "train" / "tasks.jsonl")
    assert {task.extras["question"] for task in tasks} == set(ANSWER_TYPES)
    loader = CachingMediaLoader()
    for task in tasks:
        demo = build_demonstration(task)
        episode = replay(task, demo, renderer)
        assert (episode.status, score(episode).value) == (EpisodeStatus.ANSWERED, 1.0)
        assert all(result.ok for result in episode.results)
        cards, thought = parse_objects(task), parse_reply(demo.replies[-1]).blocks[0].body
        shown = [image for result in episode.results for image in result.images]
        assert [image.box for image in shown] == [cards[index].box for index in task.extras["looks"]]
        observations = thought.removeprefix("\nI see: ").split(", ")
        for image, words in zip(shown, observations if shown else [], strict=True):
            color, _, symbol = read_card(loader.load_pixels(image))
            assert words.split()[:2] == [color, symbol]
        if not shown:  # the overview is sufficient for counting
            assert task.question == "How many cards?"
            side = task.extras["width"]
            expected = {(card.color, f"{card.left / side:g}", f"{card.top / side:g}") for card in cards}
            named = [tuple(words.split()) for words in thought.removeprefix("\nCards: ").split(", ")]
            assert (set(named), len(named)) == (expected, len(cards))
        # a box in the answer is copied from the tool result that showed it
        if task.answer_type == AnswerType.BOX:
            assert episode.answer in [result.text for result in episode.results]


def test_many_cards_are_inspected_in_several_turns():
    config = SyntheticImageConfig(objects=(8, 8), object_scale=0.05)
    task = next(
        task for task in build_tasks_by_split(config, sizes=(8, 1, 1))["train"] if len(task.extras["looks"]) == 8
    )
    calls = [len(parse_reply(reply).calls) for reply in build_demonstration(task).replies]
    assert calls == [MAX_CALLS_PER_TURN, 8 - MAX_CALLS_PER_TURN, 0]


def test_demonstrations_are_well_formed(default_tasks):
    for task in default_tasks["validation"]:
        demo = build_demonstration(task)
        replies = [parse_reply(text) for text in demo.replies]
        assert all(block.is_closed for reply in replies for block in reply.blocks)
        assert all(call.ok and call.name == "zoom_image" for reply in replies for call in reply.calls)
        assert (demo.frame_budget, demo.children, not demo.is_auxiliary) == (None, (), True)
        assert all(0 < side < 1 for reply in replies for call in reply.calls for side in call.arguments.values())


@pytest.mark.slow
def test_grid_images_are_read_completely(tmp_path):
    """Only the training split has them; their cards are as large as in other images."""
    config = SyntheticConfig(
        media="image",
        train=3,
        validation=1,
        test=1,
        image=SyntheticImageConfig(grid_images=1.4, grid_size=3, tasks_per_image=2),
    )
    generate_dataset(tmp_path / "w", config, seed=5)
    assert validate_dataset(tmp_path / "w").problems == ()
    scenes = {name: scene for name, (_, scene) in ImageDataset.read_labels(tmp_path / "w", "train").items()}
    assert [len(ImageDataset.read_labels(tmp_path / "w", split)) for split in SPLITS] == [7, 1, 1]
    demos = load_demonstrations(tmp_path / "w/train/demonstrations.jsonl")
    grid_demos = [demo for demo in demos if demo.is_auxiliary]
    assert (len(grid_demos), len(demos)) == (4, 3 * 2 + 4)
    for demo in grid_demos:
        path = demo.task.media[0].path
        cards = scenes[path.rpartition("/")[2]].objects
        assert [card.box for card in cards] == [(x, y, x + 32, y + 32) for y in (0, 32, 64) for x in (0, 32, 64)]
        with Image.open(path) as image:
            assert image.size == (96, 96)
            assert [image.getpixel((card.left, card.top)) for card in cards] == [PALETTE[c.color] for c in cards]
        (reply,) = demo.replies
        observed = [f"{card.color} {card.symbol}{' dot' if card.symbol_class == DOT else ''}" for card in cards]
        assert f"I see: {', '.join(observed)}</think>" in reply
        assert parse_reply(reply).answer == demo.task.ground_truth == observed[-1]


def test_calls_can_be_formatted_for_other_tools(default_tasks):
    task = next(task for task in default_tasks["test"] if len(task.extras["looks"]) == 1)
    demo = build_demonstration(task, format_look=lambda thought, boxes, side: f"{thought} {boxes} of {side}")
    (box,) = [parse_objects(task)[index].box for index in task.extras["looks"]]
    assert demo.replies[0].endswith(f" {[box]} of 320")
    assert demo.replies[0].startswith("Cards: ")
    assert demo.replies[1:] == build_demonstration(task).replies[1:]


def test_direct_demonstrations_only_answer(default_tasks):
    for task in default_tasks["test"]:
        (reply,) = build_demonstration(task, format_look=None).replies
        parsed = parse_reply(reply)
        assert (parsed.calls, parsed.answer) == ((), parse_reply(build_demonstration(task).replies[-1]).answer)
        cards = [parse_objects(task)[index] for index in task.extras["looks"]]
        assert reply.count(f"{cards[0].color} {cards[0].symbol}" if cards else "Cards: ") == 1
    config = SyntheticConfig(media="image", demonstrations="direct")
    assert ImageDataset(config, seed=0).build_demonstrations(default_tasks["test"], []) == [
        build_demonstration(task, format_look=None) for task in default_tasks["test"]
    ]


# ---- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_same_seed_gives_the_same_files(small, tmp_path):
    generate_dataset(tmp_path / "again", SMALL, seed=5)
    assert read_files(tmp_path / "again") == read_files(small)
    generate_dataset(tmp_path / "other", SMALL, seed=6)
    changed = [name for name, data in read_files(tmp_path / "other").items() if read_files(small)[name] != data]
    assert len(changed) == len(read_files(small))


def test_test_split_does_not_depend_on_the_training_size():
    configs = (SyntheticConfig(media="image", train=count) for count in (3, 30))
    few, many = (ImageDataset(config, seed=0).sample_contents() for config in configs)
    assert few["test"] == many["test"]
    assert few["validation"] == many["validation"]


def test_no_two_images_have_the_same_cards():
    config = SyntheticImageConfig(objects=(1, 1), image_size=100, object_scale=0.2)
    sizes = {"train": 300, "validation": 50, "test": 50}
    scenes = ImageDataset(SyntheticConfig(media="image", image=config, **sizes), seed=0).sample_contents()
    shown = [tuple(scene.objects) for split in SPLITS for scene in scenes[split]]
    assert len(set(shown)) == len(shown) == 400
    # nine positions, six colors, 25 symbols of another color: there are fewer distinct images than this
    with raises(ConfigError, key="synthetic.image.objects"):
        ImageDataset(SyntheticConfig(media="image", train=2000, image=config), seed=0).sample_contents()


@pytest.mark.slow
def test_interrupted_generation_resumes(small, tmp_path):
    def interrupt(split, done, total):
        if split == "validation":
            raise KeyboardInterrupt

    folder = tmp_path / "w"
    with pytest.raises(KeyboardInterrupt):
        generate_dataset(folder, SMALL, seed=5, progress=interrupt)
    assert not (folder / "validation" / "tasks.jsonl").exists()
    existing = folder / "train" / "pictures" / "00001.png"
    before = existing.stat().st_mtime_ns
    (folder / "train" / "pictures" / "00002.png").unlink()
    generate_dataset(folder, SMALL, seed=5)
    assert existing.stat().st_mtime_ns == before
    assert read_files(folder) == read_files(small)


def test_folder_with_another_dataset_is_an_error(small, tmp_path):
    with raises(DataError, key=str(small), value=("seed",)):
        generate_dataset(small, SMALL, seed=6)
    with raises(DataError, key=str(small)):
        generate_dataset(small, SyntheticConfig(train=4, validation=2, test=2), seed=5)
    with raises(DataError, key=str(small), value=("settings",)):
        generate_dataset(small, SMALL.model_copy(update={"image": SyntheticImageConfig()}), seed=5)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"object_scale": 0.03}, "object_scale", 0.03),
        ({"symbol_scale": 0.1}, "symbol_scale", 0.1),
        ({"objects": (20, 20)}, "objects", (20, 20)),
        ({"object_scale": 0.5}, "objects", (2, 4)),
    ],
)
def test_impossible_settings_are_errors(tmp_path, changes, key, value):
    config = SyntheticImageConfig(**{**SyntheticImageConfig().model_dump(), **changes})
    with raises(ConfigError, key=f"synthetic.image.{key}", value=value):
        generate_dataset(tmp_path / "w", SMALL.model_copy(update={"image": config}), seed=0)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["synthetic.image.image_size=640"], "synthetic.media", "video"),
        (["synthetic.media=image", "synthetic.haystack=/clips"], "synthetic.haystack", "/clips"),
        (["synthetic.media=picture"], "synthetic.media", "picture"),
        (["synthetic.media=image", "synthetic.image.pixel=64"], "synthetic.image.pixel", 64),
    ],
)
def test_settings_of_the_other_media_kind_are_errors(overrides, key, value):
    with raises(ConfigError, key=key, value=value):
        load_recipe("tiny/base", overrides)


@pytest.mark.slow
def test_recipe_generates_an_image_dataset(tmp_path):
    sizes = ["synthetic.media=image", "synthetic.train=3", "synthetic.validation=1", "synthetic.test=1"]
    progress = []
    report = pipeline.generate_data(
        tmp_path / "w", load_recipe("tiny/base", sizes), on_progress=lambda *row: progress.append(row)
    )
    assert report.problems == ()
    assert progress[-1][::2] == (5, 5)
    assert (tmp_path / "w" / "contact_sheet.png").is_file()
    assert len(load_demonstrations(tmp_path / "w" / "train" / "demonstrations.jsonl")) == 3 * 8
    assert not (tmp_path / "w" / "test" / "demonstrations.jsonl").exists()


# ---- validation and contact sheet ----------------------------------------------------------------------------------


def test_wrong_card_is_found(small, tmp_path):
    copy = shutil.copytree(small, tmp_path / "copy")
    path = copy / "train" / "objects.json"
    entries = json.loads(path.read_text())
    entries["00000.png"]["objects"][0]["side"] += 1
    path.write_text(json.dumps(entries))
    problems = validate_dataset(copy).problems
    assert any("cards" in problem for problem in problems)


@pytest.mark.slow
def test_contact_sheet_shows_images_and_cards(small, tmp_path):
    draw_contact_sheet(small, tmp_path / "contact_sheet.png")
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    for _, scene in ImageDataset.read_labels(small, "train").values():
        assert all((pixels == PALETTE[card.color]).all(axis=1).any() for card in scene.objects)
    assert set(COLORS) == set(PALETTE)
