"""A run whose videos are shown in pairs of frames, from SFT to reports; and what refuses pairs."""

import asyncio
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from commands import RL, SFT, count_visual_tokens, fail, good
from error_cases import raises
from PIL import Image

from saccade.chat.renderer import ChatRenderer
from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.environments.python import Python
from saccade.errors import ConfigError, RunError
from saccade.evaluation.compare import read_evaluations
from saccade.media.cache import CachingMediaLoader
from saccade.metrics.episode_metrics import get_overview_times
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Context
from saccade.reporting.episode_view import list_prompt_images
from saccade.reporting.viewer.episodes import list_images
from saccade.reporting.viewer.library import Library
from saccade.rollouts.components import RolloutComponents, TrainingComponents
from saccade.rollouts.runner import run_episode
from saccade.runs.run_folder import Run
from saccade.training.demonstrations import HeaderLoader, replay_demonstration
from saccade.training.episode_log import list_recorded_steps, read_rollouts
from saccade.types import AnswerType, Media, MediaKind, SamplingParams, Task

PAIRS = "media.frame_pairs=true"
SETTINGS = [
    PAIRS,
    *SFT,
    *RL,
    "sampling.max_tokens=24",
    "frame_budgets=[5]",
    "evaluation={num_tasks: 4, frame_budgets: [5]}",
]
SETTINGS += ["rl.filters={reward_std: null, statuses: null}", "rl.steps=2", "sft.tokens_per_step=300"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tiny_folder, dataset_folder):
    """The folder of a run of SFT, RL and an evaluation."""
    folder = tmp_path_factory.mktemp("paired") / "run"
    start = ["tiny/para_grpo", *SETTINGS, "--model", tiny_folder, "--data", dataset_folder, "--out", folder]
    good("sft", *start)
    good("rl", *start, "--resume")
    good("eval", folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    frames = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    write_video(folder / "clip.mp4", frames, 4.0)
    Image.fromarray(frames[0]).save(folder / "still.png")
    return folder


def load(*settings):
    return TrainingComponents.from_recipe(load_recipe("tiny/para_grpo", ["model.num_threads=1", *settings]))


@pytest.mark.slow
def test_episodes_show_pairs(run_folder):
    rollouts = [
        record for step in list_recorded_steps(run_folder, "rl") for record in read_rollouts(run_folder, "rl", step)
    ]
    assert len(rollouts) >= 2 * 2 * 2
    (evaluation,) = read_evaluations(run_folder).values()
    for episode in [*(record.episode for record in rollouts), *(scored.episode for scored in evaluation.scored)]:
        slots = episode.ledger.segments[0].slots
        times = get_overview_times(episode)
        assert [slot.image.is_pair for slot in slots] == [True] * 3
        assert slots[2].image.time == slots[2].image.second_time  # the last of an odd number
        assert len(times) == 5
        assert times == tuple(sorted(times))
        assert episode.frame_budget == 5
        assert [image.time for image in list_prompt_images(episode)] == list(times)
    metrics = Run.open(run_folder).read_metrics("rl")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert math.isfinite(row["loss"])
        assert row["engine_trainer_logprob_diff_max"] < 1e-4


@pytest.mark.slow
def test_reports_show_both_frames(run_folder, tmp_path):
    good("report", run_folder)
    good("view", run_folder, "--export", tmp_path / "page.html")
    library = Library([run_folder])
    library.scan()
    library.refresh()
    record = read_rollouts(run_folder, "rl", 1)[0]
    shown = list_images(record.episode)
    assert not any(image.is_pair for image in shown)
    assert [image.time for image in shown[:5]] == list(get_overview_times(record.episode))
    html = (run_folder / "report.html").read_text()
    assert html.count("data:image/jpeg") >= 5


@pytest.mark.slow
def test_a_question_shows_half_the_visual_tokens(run_folder, files, tmp_path):
    question = ["ask", "Which?", "--model", run_folder, "--video", files / "clip.mp4", "--image", files / "still.png"]
    question += ["--page", tmp_path / "page.html", "environment.settings.num_frames=8"]
    pairs, single = (count_visual_tokens(good(*question, *more)) for more in ([], ["media.frame_pairs=false"]))
    num_still = 4  # 32 x 32 pixels
    assert (pairs - num_still, single - num_still) == (4, 8)


@pytest.mark.slow
def test_a_run_keeps_its_input(run_folder, tiny_folder, dataset_folder):
    start = ["tiny/para_grpo", *SETTINGS, "--model", tiny_folder, "--data", dataset_folder, "--out", run_folder]
    fail(RunError, "rl", *start, "--resume", "media.frame_pairs=false", key="media.frame_pairs")
    results = run_folder / "evaluations" / "test.jsonl"
    fail(RunError, "eval", run_folder, "media.frame_pairs=false", key=results, value=("frame_pairs",))


@pytest.mark.slow
def test_demonstrations_train_on_pairs(dataset_folder, tiny_folder):
    """Replies are trained as without pairs; the check that reads headers counts the tokens of the real replay."""

    async def replay(demonstration, components, media):
        context = replace(components.build_context(seed=0), media=media)
        samples = await replay_demonstration(demonstration, components.environments(demonstration.task), context)
        return [sample.ledger for sample in samples]

    demonstrations = load_demonstrations(dataset_folder / "train" / "demonstrations.jsonl")
    demonstration = next(item for item in demonstrations if item.children and not item.is_auxiliary)
    settings = [f"model.path={tiny_folder}"]
    single, pairs = load(*settings), load(*settings, PAIRS)
    plain = asyncio.run(replay(demonstration, single, single.media))
    paired = asyncio.run(replay(demonstration, pairs, pairs.media))
    checked = asyncio.run(replay(demonstration, pairs, HeaderLoader(pairs.media)))
    assert [ledger.sampled_tokens() for ledger in paired] == [ledger.sampled_tokens() for ledger in plain]
    counts = [
        [sum(len(image.frames) for image in ledger.images()) for ledger in ledgers] for ledgers in (paired, plain)
    ]
    assert counts[0] == counts[1]
    for one, two, three in zip(plain, paired, checked, strict=True):
        assert len(two.images()) == len(three.images()) == math.ceil(len(one.images()) / 2)
        assert all(image.is_pair for image in (*two.images(), *three.images()))
        assert len(two) == len(three)


def look(stage, *media, frames=5):
    task = Task(id="t", question="Which?", media=media, answer_type=AnswerType.OPEN, ground_truth="")
    context = stage.build_context(seed=0, frame_budget=frames, temperature=0.0)
    return asyncio.run(run_episode(task, stage.environments(task), context))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_stills_stay_images(tmp_path, files, family):
    make_tiny_model(tmp_path / "model", family=family)
    stage = load(PAIRS, f"model.path={tmp_path / 'model'}", "sampling.max_tokens=4")
    still, clip = Media(path=str(files / "still.png"), kind=MediaKind.IMAGE), Media(path=str(files / "clip.mp4"))
    episode = look(stage, still, clip)
    assert [image.is_pair for image in episode.ledger.images()] == [False, True, True, True]
    image, *pairs = [slot.index for slot in episode.ledger.segments[0].slots]
    tokens = episode.ledger.segments[0].tokens
    assert (tokens[image], {tokens[index] for index in pairs}) == (
        stage.renderer.visual_ids[0],
        {stage.renderer.visual_ids[1]},
    )
    assert episode.frame_budget == 5


@pytest.mark.slow
def test_code_sees_the_first_frame_of_a_pair(renderer, files):
    """As `image_clue_0`, in an environment that shows the video to the model and to its code."""
    environment = partial(Python, video_in_prompt=True, num_frames=4, frame_pixels=(256, 256))
    code = "<code>print(image_clue_0.getpixel((3, 5)), image_clue_1.getpixel((3, 5)))</code>"
    media = CachingMediaLoader(pairs_frames=True)
    context = Context(
        engine=Scripted(renderer, replies=(code, "<answer>\\boxed{red}</answer>")),
        renderer=renderer,
        media=media,
        sampling=SamplingParams(),
        seed=0,
    )
    clip = Media(path=str(files / "clip.mp4"))
    task = Task(id="t", question="Which?", media=(clip,), answer_type=AnswerType.OPEN, ground_truth="")
    episode = asyncio.run(run_episode(task, environment, context))
    pairs = episode.ledger.images()
    assert [pair.is_pair for pair in pairs] == [True, True]
    (result,) = episode.turns[0].results
    pixels = [media.load_pixels(pair)[:, 5, 3].tolist() for pair in pairs]
    assert all(first != second for first, second in pixels)
    assert (result.error, result.text) == (None, " ".join(str(tuple(first)) for first, _ in pixels))


# ---- what refuses pairs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang", "chat_completions"])
def test_servers_refuse_pairs(engine):
    settings = "{url: 'http://127.0.0.1:1'}" if engine == "chat_completions" else "{}"
    recipe = load_recipe("tiny/para_grpo", [PAIRS, f"engine={{name: {engine}, settings: {settings}}}"])
    with raises(ConfigError, key="media.frame_pairs", value=engine):
        check_recipe(recipe, ["eval"])
    with raises(ConfigError, key="media.frame_pairs", value=engine):
        RolloutComponents.from_recipe(recipe)
    check_recipe(recipe.with_values({"media.frame_pairs": False}), ["eval"])


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_training_with_servers_refuses_pairs_before_the_run_exists(command, tmp_path, tiny_folder, dataset_folder):
    start = [command, "tiny/para_grpo", PAIRS, "engine={name: vllm, settings: {}}", "--model", tiny_folder]
    start += ["--data", dataset_folder, "--out", tmp_path / "run"]
    fail(ConfigError, *start, key="media.frame_pairs", value="vllm")
    assert not (tmp_path / "run").exists()


def test_a_family_without_videos_is_refused(tiny_folder, monkeypatch):
    monkeypatch.setattr(ChatRenderer, "supports_frame_pairs", False)
    with raises(ConfigError, key="media.frame_pairs", value=True):
        load(PAIRS, f"model.path={tiny_folder}")
    load(f"model.path={tiny_folder}")
