"""Tasks that name their environment: selection, settings, rewards, files, and training two environments in one run."""

import asyncio
from dataclasses import replace

import pytest
from error_cases import raises

from saccade import sandbox
from saccade.checks.run_checks import find_isolations
from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations, load_tasks
from saccade.data.synthetic import build_tokenizer_pieces, generate_dataset
from saccade.engines.scripted import Scripted
from saccade.environments.task_environments import TaskEnvironments
from saccade.errors import ConfigError, DataError
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Context
from saccade.rollouts.collect import collect
from saccade.rollouts.components import compose_task_rewards, require_trainable
from saccade.runs import pipeline
from saccade.runs.run_folder import Run
from saccade.testing import FakeMediaLoader
from saccade.training import rl
from saccade.training.demonstrations import replay_demonstration
from saccade.types import AnswerType, Media, MediaKind, SamplingParams, Task
from saccade.utils.jsonl import read_jsonl, to_jsonable, write_jsonl

TASK = Task(id="t", question="?", media=(Media(path="a.mp4"),), answer_type=AnswerType.OPEN, ground_truth="red")
IMAGE = replace(TASK, id="i", media=(Media(path="a.png", kind=MediaKind.IMAGE),), environment="image")
IMAGES = "environments={image: {name: single_turn, settings: {max_context_tokens: 3000, system_prompt: Look.}}}"


def test_a_task_selects_its_environment():
    environments = TaskEnvironments.from_recipe(load_recipe("tiny/base", [IMAGES]))
    assert environments(TASK)().name == "tool_calling"
    assert environments(IMAGE)().name == "single_turn"
    assert environments(IMAGE)().max_context_tokens == environments.max_context_tokens == 3000


def test_an_environment_that_is_not_configured_is_named_with_the_known_ones():
    environments = TaskEnvironments.from_recipe(load_recipe("tiny/base", [IMAGES]))
    with raises(DataError, key="environment", value="images") as caught:
        environments(replace(IMAGE, environment="images"))
    assert "task i " in str(caught.value)
    assert "'image'" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("environments.image.settings.num_frame=4", "environments.image.settings.num_frame", 4),
        ("environments.image.settings.num_frames=0", "environments.image.settings.num_frames", 0),
        ("environments.image.name=singleturn", "environments.image.name", "singleturn"),
    ],
)
def test_settings_are_checked_under_their_own_key(override, key, value):
    with raises(ConfigError, key=key, value=value):
        TaskEnvironments.from_recipe(load_recipe("tiny/base", [IMAGES, override]))


def test_every_environment_must_be_trainable():
    with raises(ConfigError, key="environments.image.name", value="third_party_format"):
        require_trainable(load_recipe("tiny/base", ["environments={image: {name: third_party_format}}"]))


def test_the_tools_of_every_environment_are_isolated():
    recipe = load_recipe("tiny/base", ["environments={image: {name: python}}"])
    assert find_isolations(recipe) == [("python", "best_effort")]


def test_the_environment_enters_files_and_the_digest_only_if_it_is_set(tmp_path):
    assert "environment" not in to_jsonable(TASK)
    assert replace(TASK, environment="image").digest != TASK.digest
    write_jsonl(tmp_path / "tasks.jsonl", [TASK, IMAGE])
    assert read_jsonl(tmp_path / "tasks.jsonl", Task) == [TASK, IMAGE]


def test_groups_of_two_environments_have_their_own_rewards(renderer):
    rewards = "environments.image.rewards={format_compliance: {weight: 2}}"
    recipe = load_recipe("tiny/base", [IMAGES, rewards])
    engine = Scripted(renderer, replies=lambda ledger: "I know.</think><answer>red</answer>")
    ctx = Context(
        engine=engine, renderer=renderer, media=FakeMediaLoader(), sampling=SamplingParams(), seed=3, frame_budget=4
    )
    environments, score_fn = TaskEnvironments.from_recipe(recipe), compose_task_rewards(recipe)
    video, image = asyncio.run(collect([TASK, IMAGE], environments, ctx, group_size=2, score_fn=score_fn))
    assert [scored.episode.environment for group in (video, image) for scored in group.scored_episodes] == [
        *["tool_calling"] * 2,
        *["single_turn"] * 2,
    ]
    assert video.scored_episodes[0].score.parts.keys() == {"accuracy", "format_compliance"}
    assert image.scored_episodes[0].score.parts.keys() == {"format_compliance"}


@pytest.mark.slow
def test_images_with_python_and_videos_with_crops_train_in_one_run(tmp_path):
    """SFT on both kinds of demonstrations, then two steps of RL on both kinds of tasks."""
    small = ["seed=5", "model.num_threads=1", "synthetic={train: 3, validation: 1, test: 1}", "sampling.max_tokens=96"]
    image_recipe = load_recipe("tiny/pyvision_image", [*small, "synthetic.image={tasks_per_image: 2, grid_images: 0}"])
    recipe = load_recipe(
        "tiny/para_grpo",
        [
            *small,
            "sft={steps: 60, tokens_per_step: 1500, save_every: 60, optim: {warmup_steps: 5}, auxiliary_fraction: 0}",
            "rl={steps: 2, prompts_per_step: 6, group_size: 2, filters: {reward_std: null}}",
            "frame_budgets=[8]",
        ],
    )
    named = {"image": {"name": "python", "settings": image_recipe.environment.settings}}
    recipe = type(recipe).model_validate({**recipe.model_dump(), "environments": named})
    tasks, demonstrations = [], []
    for kind, section in (("video", recipe.synthetic), ("image", image_recipe.synthetic)):
        generate_dataset(tmp_path / kind, section, seed=0)
        changes = {"environment": None if kind == "video" else kind}
        tasks += [
            replace(task, id=f"{kind} {task.id}", **changes)
            for task in load_tasks(tmp_path / kind / "train/tasks.jsonl")[:6]
        ]
        demonstrations += [
            replace(demo, task=replace(demo.task, id=f"{kind} {demo.task.id}", **changes))
            for demo in load_demonstrations(tmp_path / kind / "train/demonstrations.jsonl")
            if not demo.is_auxiliary
        ]
    for split in ("train", "validation", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "data" / split / "tasks.jsonl", tasks)
        write_jsonl(tmp_path / "data" / split / "demonstrations.jsonl", demonstrations)
    make_tiny_model(
        str(tmp_path / "model"),
        hidden_size=64,
        num_layers=2,
        vocabulary_text=sorted({text for demo in demonstrations for text in (demo.task.question, *demo.replies)}),
        phrases=[*build_tokenizer_pieces(recipe.synthetic), *build_tokenizer_pieces(image_recipe.synthetic)],
    )
    folder = tmp_path / "run"
    recipe = pipeline.with_paths(recipe, folder=folder, model=tmp_path / "model", data=tmp_path / "data")
    checkpoint = pipeline.run_sft(folder, recipe, on_step=lambda *_: None)
    losses = [row["loss"] for row in Run.open(folder).read_metrics("sft")]
    assert losses[-1] < 0.5 * losses[0]
    components = pipeline.load_training_components(recipe, checkpoint)
    rows, episodes, num_images = [], [], {}

    async def train():
        context = components.build_context(seed=0)
        try:
            for demo in demonstrations:
                samples = await replay_demonstration(demo, components.environments(demo.task), context)
                num_images.setdefault(demo.task.environment, []).append([len(s.ledger.images()) for s in samples])
            await rl.train(
                components,
                load_tasks(tmp_path / "data/train/tasks.jsonl"),
                folder=tmp_path / "rl",
                log_step=lambda row: rows.append(row),
                on_groups=lambda step, groups: episodes.extend(m.episode for g in groups for m in g.scored_episodes),
            )
        finally:
            await components.engine.close()

    try:
        asyncio.run(train())
    finally:
        sandbox.close_shared_servers()
    assert max(map(len, num_images[None])) > 1  # sub-agents' conversations
    assert max(num_images["image"]) > [1]  # images that code has shown
    assert [row["frac_errors"] for row in rows] == [0, 0]
    assert all(row["engine_trainer_logprob_diff_max"] < 1e-4 for row in rows)
    by_environment = {name: [e for e in episodes if e.environment == name] for name in ("tool_calling", "python")}
    assert {e.task.environment for e in by_environment["tool_calling"]} == {None}
    assert {e.task.environment for e in by_environment["python"]} == {"image"}
    assert all(e.ledger.images() and e.turns for e in episodes)
