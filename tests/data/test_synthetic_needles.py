"""Clips and maps that calls can't cover: exact labels, baseline policies, demonstrations."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from error_cases import raises

from saccade.config.load import load_recipe
from saccade.config.schema import NeedlesConfig, SyntheticConfig, SyntheticImageConfig
from saccade.data.dataset import load_demonstrations, load_tasks, write_items
from saccade.data.synthetic import generate_dataset, validate_dataset
from saccade.data.synthetic.contact_sheet import draw_contact_sheet
from saccade.data.synthetic.events import PALETTE
from saccade.data.synthetic.generate import read_background_spans
from saccade.data.synthetic.needles.generate import NeedleDataset
from saccade.data.synthetic.policy_baselines import NO_DECISION, compute_policy_baselines
from saccade.errors import ConfigError
from saccade.media import image, video
from saccade.media.frame_sampling import sample_uniform_times
from saccade.metrics import looking
from saccade.types import AnswerType, Task

SIZES = {"train": 12, "validation": 2, "test": 6}
CLIPS = {**SIZES, "clip_seconds": 240.0, "event_seconds": 8.0, "frame_size": 16, "fps": 0.5}
FEW = {"num_places": 6, "calls_per_turn": 2}
CONFIGS = {
    "opening": SyntheticConfig(tasks="cue", **CLIPS, needles=NeedlesConfig(**FEW)),
    "marker": SyntheticConfig(tasks="cue", **CLIPS, needles=NeedlesConfig(**FEW, cue="marker")),
    "counter": SyntheticConfig(tasks="cue", **CLIPS, needles=NeedlesConfig(**FEW, cue="counter")),
    "search": SyntheticConfig(tasks="search", **CLIPS, needles=NeedlesConfig(**FEW, tool_turns=2)),
    "cost": SyntheticConfig(tasks="cost", **CLIPS, needles=NeedlesConfig(num_places=6, calls_per_turn=1)),
    "map": SyntheticConfig(
        tasks="map",
        media="image",
        **SIZES,
        needles=NeedlesConfig(**FEW),
        image=SyntheticImageConfig(grid_images=0.5, grid_size=3),
    ),
    "small label": SyntheticConfig(
        tasks="map",
        media="image",
        demonstrations="python",
        **SIZES,
        needles=NeedlesConfig(**FEW, tool_turns=2, label="small"),
    ),
}
MIDDLES = sample_uniform_times(240.0, 6)


@pytest.fixture(scope="module", params=CONFIGS)
def dataset(request, tmp_path_factory):
    """A configuration and the folder of its dataset."""
    folder = tmp_path_factory.mktemp("needles") / "data"
    generate_dataset(folder, CONFIGS[request.param], seed=3)
    return CONFIGS[request.param], folder


def find_colors(pixels):
    """Return the palette's colors in the middle of a frame."""
    middle = pixels[pixels.shape[0] // 2, pixels.shape[1] // 2].astype(int)
    return {name for name, color in PALETTE.items() if np.abs(middle - color).max() < 60}


def test_labels_are_exact(dataset):
    config, folder = dataset
    report = validate_dataset(folder)
    assert report.problems == ()
    assert report.num_tasks == SIZES
    tasks = load_tasks(folder / "test" / "tasks.jsonl")
    assert max(Counter(task.extras["place"] for task in tasks).values()) <= 2 or config.tasks == "cost"
    for task in tasks:
        (*_, need) = task.extras["evidence"]
        if config.media == "image":
            crop = image.read_image(task.media[0].path).crop(tuple(map(int, need)))
            assert np.asarray(crop.convert("L")).min() < 60 < 200 < np.asarray(crop.convert("L")).max()
            continue
        place_seconds = 240 / config.needles.num_places
        window = (task.extras["place"] * place_seconds, task.extras["place"] * place_seconds + 16)
        assert task.extras["is_shown"] or (window[0] <= need[0] and need[1] <= window[1])
        frames = video.decode_frames(video.index_video(task.media[0].path), [sum(need) / 2, *MIDDLES])
        color = task.ground_truth.split()[0]
        assert find_colors(frames[0].pixels) == {color}
        shown = set.union(*(find_colors(frame.pixels) for frame in frames[1:]))
        if config.tasks == "cost":
            assert (color in shown) is task.extras["is_shown"]
        elif config.tasks == "search":
            assert shown == set()


def test_policies_are_those_of_the_tasks(dataset):
    _, folder = dataset
    path = folder / "validation" / "tasks.jsonl"
    original, tasks = path.read_bytes(), load_tasks(path)
    policies = looking.parse_policies(tasks[0])
    assert set(policies) == set(looking.POLICY_LABELS)
    assert policies["oracle"].accuracy == 1.0
    net = {
        name: policy.accuracy - looking.get_tool_call_penalty(tasks[0]) * policy.calls
        for name, policy in policies.items()
    }
    assert max(net, key=net.get) == "oracle"
    assert net[looking.NO_DECISION] == max(net[name] for name in ("exhaustive", "uniform", "fixed", "constant"))
    wrong = {**tasks[0].extras["policies"], "oracle": [0.5, 1.0]}
    write_items(path, [replace(tasks[0], extras={**tasks[0].extras, "policies": wrong}), *tasks[1:]])
    try:
        (problem,) = validate_dataset(folder).problems
    finally:
        path.write_bytes(original)
    assert problem.startswith("validation: ")


def test_demonstrations_look_everywhere_alike(dataset):
    """Calls of demonstrations are independent of where the needle is, or go where the question says."""
    config, folder = dataset
    demonstrations = load_demonstrations(folder / "train" / "demonstrations.jsonl")
    kinds = Counter(
        "auxiliary" if item.is_auxiliary else (item.task.id.rpartition("-")[0].count("named") and "named") or "task"
        for item in demonstrations
    )
    assert kinds["named"] == 2 * kinds["task"] or config.tasks == "map"
    for item in demonstrations:
        assert item.replies[-1].endswith("</answer>")
        if "named" in item.task.id:
            assert item.replies[-1].endswith(f"<answer>{item.task.ground_truth}</answer>")
            assert len(item.replies) == 2


@pytest.mark.slow
@pytest.mark.parametrize("white_share", [0.0, 0.5, 1.0])
def test_grids_of_maps_are_read_completely(tmp_path, white_share):
    config = CONFIGS["map"]
    settings = config.image.model_copy(update={"white_grid_entries": white_share})
    generate_dataset(tmp_path / "data", config.model_copy(update={"image": settings}), seed=4)
    demonstrations = load_demonstrations(tmp_path / "data" / "train" / "demonstrations.jsonl")
    grids = [item for item in demonstrations if item.is_auxiliary]
    assert len(grids) == 6
    num_white = 0
    for item in grids:
        picture = image.read_image(item.task.media[0].path)
        assert picture.size == (3 * 32, 3 * 32)
        symbols = item.replies[0].partition("I see: ")[2].partition("<")[0].split(", ")
        assert len(symbols) == 9
        assert item.task.ground_truth == symbols[-1]
        centers = np.asarray(picture)[3::32, 16::32].reshape(9, 3)  # above the symbol
        for symbol, pixel in zip(symbols, centers.tolist(), strict=True):
            assert (min(pixel) > 230) == (" " not in symbol)
        num_white += sum(" " not in symbol for symbol in symbols)
    assert num_white / (6 * 9) == pytest.approx(white_share, abs=0.3 * (0 < white_share < 1))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files(tmp_path):
    # The encoder's bytes for smaller frames may differ, rarely, although the frames are equal.
    config = CONFIGS["opening"].model_copy(update={"frame_size": 64})
    for name in ("a", "b"):
        generate_dataset(tmp_path / name, config, seed=1)
    files = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    assert [
        str(name) for name in files if (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()
    ] == []
    generate_dataset(tmp_path / "c", config, seed=2)
    assert (tmp_path / "a/test/clips/00000.mp4").read_bytes() != (tmp_path / "c/test/clips/00000.mp4").read_bytes()


@pytest.mark.slow
def test_contact_sheets(dataset, tmp_path):
    draw_contact_sheet(dataset[1], tmp_path / "contact_sheet.png")
    assert image.read_image(str(tmp_path / "contact_sheet.png")).height > 400


def test_a_gauge_rises_and_is_half_full_at_the_needle():
    contents = NeedleDataset(CONFIGS["search"], seed=0).sample_contents()["train"]
    for clip in contents:
        assert clip.levels[clip.place] == 0.5
        assert all(low <= high for low, high in pairwise(clip.levels))
        assert [level < 0.5 for level in clip.levels] == [place < clip.place for place in range(6)]


def test_a_counter_jumps_before_the_needle():
    for clip in NeedleDataset(CONFIGS["counter"], seed=0).sample_contents()["train"]:
        digits = [int(mark.shape) for mark in clip.marks]
        steps = [(after - before) % 10 for before, after in pairwise(digits)]
        assert [place + 1 for place, step in enumerate(steps) if step == 2] == [clip.place]
        assert set(steps) == {1, 2}


REAL = Path(__file__).parents[3] / "shared" / "media"


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real videos are not on this machine")
def test_real_clips_as_backgrounds(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").symlink_to(REAL / "nasa_13013.mp4")
    config = CONFIGS["opening"].model_copy(update={"haystack": str(tmp_path / "clips"), "train": 2, "test": 2})
    generate_dataset(tmp_path / "data", config, seed=0)
    assert validate_dataset(tmp_path / "data").problems == ()
    spans = [read_background_spans(tmp_path / "data", split)["00000.mp4"] for split in ("train", "test")]
    assert spans[0].end < spans[1].start  # no frame is in two splits


def make_tasks(places, answers, **extras):
    return [
        Task(
            id=str(number),
            question="?",
            media=(),
            answer_type=AnswerType.OPEN,
            ground_truth=answer,
            extras={"question": "opening", "place": place, **extras},
        )
        for number, (place, answer) in enumerate(zip(places, answers, strict=True))
    ]


def test_policies_by_hand():
    # Four places, two calls, answers a, a, b, c: a constant answer is right in half of the tasks.
    tasks = make_tasks([0, 3, 3, 2], ["a", "a", "b", "c"])
    policies = compute_policy_baselines(tasks, NeedlesConfig(num_places=4, calls_per_turn=2))
    assert policies["constant"] == [0.5, 0.0]
    assert policies["exhaustive"] == [pytest.approx((1 + 3 * 0.5) / 4), 2]  # places 0 and 1
    assert policies["uniform"] == [pytest.approx(0.5 + 0.5 * 0.5), 2]
    assert policies["fixed"] == [pytest.approx((3 + 0.5) / 4), 2]  # places 3 and 0
    assert policies[NO_DECISION] == policies["fixed"]
    assert policies["oracle"] == [1.0, 1.0]


def test_the_best_search_divides_each_range():
    # Two turns of one call find the middle of three places in one, the others in two calls.
    tasks = make_tasks([0, 1, 2], ["a", "b", "c"])
    tasks = [replace(task, extras={**task.extras, "question": "search"}) for task in tasks]
    settings = NeedlesConfig(num_places=3, calls_per_turn=1, tool_turns=2)
    assert compute_policy_baselines(tasks, settings)["oracle"] == [1.0, pytest.approx((1 + 2 + 2) / 3)]
    # Of five places, two remain: their answers are random.
    tasks = [
        replace(task, extras={**task.extras, "place": place}) for task, place in zip(tasks, (0, 2, 4), strict=True)
    ]
    accuracy, _ = compute_policy_baselines(tasks, replace_places(settings, 5))["oracle"]
    assert accuracy == pytest.approx(3 / 5 + 2 / 5 / 3)


def replace_places(settings, num_places):
    return settings.model_copy(update={"num_places": num_places})


def test_calls_that_cost_are_subtracted():
    tasks = make_tasks([0, 0], ["a", "b"], is_shown=False)
    tasks = [
        replace(task, extras={**task.extras, "question": "cost", "is_shown": i == 0}) for i, task in enumerate(tasks)
    ]
    policies = compute_policy_baselines(tasks, NeedlesConfig(num_places=4, calls_per_turn=1, tool_call_penalty=0.3))
    assert policies["oracle"] == [1.0, 0.5]
    # Never looking is right where the overview shows the answer, and in half of the others: 0.75 against 1 - 0.3.
    assert policies["fixed"] == [0.75, 0]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tasks": "cue", "needles": {"num_places": 3}}, "synthetic.needles.num_places"),
        ({"tasks": "cue", "clip_seconds": 60.0}, "synthetic.needles.window_seconds"),
        ({"tasks": "cue", "event_seconds": 20.0}, "synthetic.event_seconds"),
        ({"tasks": "cue", "needles": {"num_places": 13}}, "synthetic.needles.num_places"),
        ({"tasks": "map", "media": "image", "needles": {"num_places": 13}}, "synthetic.needles.num_places"),
        ({"tasks": "map", "media": "image", "demonstrations": "direct"}, "synthetic.demonstrations"),
    ],
)
def test_impossible_settings_are_refused_before_a_file_is_written(tmp_path, settings, key):
    config = SyntheticConfig(**{**SIZES, "clip_seconds": 600.0, "event_seconds": 8.0, **settings})
    with raises(ConfigError, key=key):
        generate_dataset(tmp_path / "data", config, seed=0)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tasks": "map"}, "synthetic.tasks"),
        ({"tasks": "cue", "media": "image"}, "synthetic.tasks"),
        ({"needles": {"tool_turns": 2}}, "synthetic.tasks"),
        ({"tasks": "cue", "demonstrations": "direct"}, "synthetic.demonstrations"),
    ],
)
def test_contradicting_settings_are_refused(settings, key):
    with raises(ConfigError, key=key):
        SyntheticConfig(**settings)


@pytest.mark.parametrize("name", ["cue", "search", "cost", "map", "map_python"])
def test_recipes_have_the_limits_of_their_baselines(name):
    recipe = load_recipe(f"tiny/{name}")
    needles, environment = recipe.synthetic.needles, recipe.environment.settings
    assert environment["max_tool_turns"] == needles.tool_turns
    calls = (
        1 if recipe.environment.name == "python" else environment["max_calls_per_turn"]
    )  # code may show several crops
    assert calls == needles.calls_per_turn or recipe.environment.name == "python"
    if recipe.synthetic.tasks == "cost":
        assert recipe.rewards["tool_call_penalty"].settings["penalty"] == needles.tool_call_penalty


def test_manifests_of_tiling_are_unchanged(tmp_path):
    generate_dataset(tmp_path / "data", SyntheticConfig(train=1, validation=1, test=1, tasks_per_video=1), seed=0)
    settings = json.loads((tmp_path / "data" / "dataset.json").read_text())["settings"]
    assert {"tasks", "needles"}.isdisjoint(settings)
