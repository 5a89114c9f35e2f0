"""Collecting a step's batch: frame budgets per epoch, sampling rounds, requeued prompts, slow groups, failures."""

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from error_cases import raises
from PIL import Image
from training_cases import RecordingEngine, Workspace, alternate, with_reward

from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.config.load import load_recipe
from saccade.config.schema import SelectionConfig
from saccade.data.dataset import load_tasks
from saccade.data.mixture import Mixture
from saccade.errors import ConfigError, DataError, EngineError, RunError
from saccade.metrics.episode_metrics import count_tokens
from saccade.rewards.compose import score_each
from saccade.rollouts.runner import run_episode
from saccade.training import checkpoint
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import CANCELLED_ERROR, collect_batch, collect_groups
from saccade.types import EpisodeStatus, Media, MediaKind, Ungraded
from saccade.utils.hashing import derive_seed

SHORT = ("rl.group_size=2", "sampling.max_tokens=2")
NUM_TASKS = 12
UNLIMITED = "rl.selection.max_sampling_rounds=null"


def load_components(workspace, *overrides, reward=alternate):
    return with_reward(workspace.load_components(*SHORT, *overrides), reward)


def collect(components, workspace, prompt_sampler=None, **settings):
    return asyncio.run(collect_batch(components, workspace.tasks, prompt_sampler or PromptSampler(), 0, **settings))


def get_positions(workspace, batch):
    """Return the prompt indices of a batch's prompts in the first epoch."""
    ids = [Mixture.from_tasks(workspace.tasks).get_task(5, prompt_index)[0].id for prompt_index in range(NUM_TASKS)]
    return [ids.index(group.task.id) for group in batch.groups]


def find_unique_prompt(workspace):
    """Return a prompt of the first epoch whose task's question no other task has."""
    questions = [
        Mixture.from_tasks(workspace.tasks).get_task(5, prompt_index)[0].question for prompt_index in range(NUM_TASKS)
    ]
    return next(prompt_index for prompt_index, question in enumerate(questions) if questions.count(question) == 1)


# ---- prompts and seeds -----------------------------------------------------------------------------------------------


def test_an_epoch_draws_each_task_once(workspace):
    """There are twelve tasks and two prompts per step."""
    components, prompt_sampler, drawn = load_components(workspace), PromptSampler(), []
    for step in range(6):
        _, prompt_sampler = asyncio.run(
            collect_batch(
                components,
                workspace.tasks,
                prompt_sampler,
                step,
                on_groups=lambda _, groups: drawn.extend(group.task.id for group in groups),
            )
        )
    assert sorted(drawn) == sorted(task.id for task in workspace.tasks)


@pytest.mark.parametrize(("limit", "peak"), [(0, 12), (2, 4)])
def test_groups_in_progress_are_bounded(workspace, limit, peak):
    components = load_components(workspace, f"rl.max_groups_in_progress={limit}")
    num_running, peaks = 0, [0]

    async def count(task, make_environment, ctx):
        nonlocal num_running
        num_running += 1
        peaks.append(num_running)
        await asyncio.sleep(0.001)
        num_running -= 1
        return await run_episode(task, make_environment, ctx)

    asyncio.run(collect_groups(components, workspace.tasks, range(6), 0, run_fn=count))
    assert max(peaks) == peak


def test_each_prompt_has_the_frame_budget_of_its_own_epoch(workspace):
    components, budgets, prompt_indices = load_components(workspace), (4, 8), range(9, 15)
    groups = asyncio.run(collect_groups(components, workspace.tasks, prompt_indices, 0))
    tasks = [Mixture.from_tasks(workspace.tasks).get_task(5, prompt_index)[0] for prompt_index in prompt_indices]
    expected = [
        draw_frame_budget(budgets, run_seed=5, epoch=prompt_index // NUM_TASKS, task=task)
        for prompt_index, task in zip(prompt_indices, tasks, strict=True)
    ]
    assert [group.scored_episodes[0].episode.frame_budget for group in groups] == expected
    budgets_of_first_epoch = [draw_frame_budget(budgets, run_seed=5, epoch=0, task=task) for task in tasks]
    assert expected != budgets_of_first_epoch


def test_a_task_drawn_again_in_a_step_gets_other_seeds(workspace):
    """One task is at three prompt indices, the third of which is collected in a later round."""
    components = load_components(workspace)
    components = replace(components, engine=RecordingEngine(components.engine))
    tasks = workspace.tasks[:1]
    asyncio.run(collect_groups(components, tasks, (0, 1), 0))
    asyncio.run(collect_groups(components, tasks, (2,), 0, earlier_indices=(0, 1)))
    seeds = [sampling.seed for sampling in components.engine.requests]
    assert len(set(seeds)) == 6  # three prompt indices, two episodes each
    assert seeds[0] == derive_seed(derive_seed(5, 0, tasks[0].digest, 0), 0)  # run, step, task, episode; turn
    asyncio.run(collect_groups(components, tasks, (1,), 0))
    assert components.engine.requests[-2].seed == seeds[0]  # the first draw has the same seeds at any prompt index


def test_duplicate_tasks_in_a_file_get_different_seeds(workspace):
    components = load_components(workspace)
    components = replace(components, engine=RecordingEngine(components.engine))
    asyncio.run(collect_groups(components, [workspace.tasks[0]] * 2, (0, 1), 0))
    first, _, second, _ = (sampling.seed for sampling in components.engine.requests)
    assert first != second


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_one_round_is_enough_if_every_group_passes(workspace):
    batch, prompt_sampler = collect(load_components(workspace, "rl.selection.max_sampling_rounds=3"), workspace)
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"], len(batch.groups)) == (1.0, 0, 2)
    assert prompt_sampler == PromptSampler(next_index=2)


def test_missing_groups_are_collected_in_another_round(workspace):
    """The rewards of the first round's four groups are equal; the second round is oversampled as well."""
    components = load_components(
        workspace,
        "rl.selection={max_sampling_rounds: 3, oversample: 2}",
        reward=lambda episode, count: count % 2 if count > 7 else 1,
    )
    received = []
    batch, prompt_sampler = collect(components, workspace, on_groups=lambda step, groups: received.append(groups))
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"]) == (2.0, 0)
    assert get_positions(workspace, batch) == [4, 5]
    assert prompt_sampler == PromptSampler(next_index=8)
    assert [len(groups) for groups in received] == [8]
    assert batch.metrics["groups/dropped/reward_std"] == 4.0
    episodes = [scored.episode for group in received[0] for scored in group.scored_episodes]
    assert batch.num_sampled_tokens == sum(episode.usage.sampled_tokens for episode in episodes)


def test_rounds_of_a_fixed_size_fill_the_step(workspace):
    """Three prompts per round, although two groups are missing; all of the first round are dropped."""
    components = load_components(
        workspace,
        "rl.selection={round_size: 3, max_sampling_rounds: null}",
        reward=lambda episode, count: count % 2 if count >= 6 else 1,
    )
    received = []
    batch, prompt_sampler = collect(components, workspace, on_groups=lambda step, groups: received.append(groups))
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"]) == (2.0, 0)
    assert [len(groups) for groups in received] == [6]
    assert get_positions(workspace, batch) == [3, 4]
    assert prompt_sampler == PromptSampler(next_index=6)


@pytest.mark.parametrize(
    "settings",
    [
        "{round_size: 3, max_sampling_rounds: null, oversample: 2}",
        "{round_size: 3, max_sampling_rounds: 2, oversample: 1}",
    ],
)
def test_rounds_that_contradict_other_settings_are_refused(settings):
    with raises(ConfigError, key="rl.selection.round_size", value=3):
        load_recipe("tiny/para_grpo", ["rl.prompts_per_step=8", f"rl.selection={settings}"])


def test_the_number_of_rounds_is_limited(workspace):
    components = load_components(workspace, "rl.selection.max_sampling_rounds=3", reward=lambda episode, count: 1.0)
    batch, prompt_sampler = collect(components, workspace)
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"], batch.groups) == (3.0, 2, ())
    assert prompt_sampler == PromptSampler(next_index=6)


def test_without_a_limit_rounds_go_on_for_one_pass_over_the_tasks(workspace):
    """Two prompts per round: twelve tasks are six rounds. A group that passes in between ends them."""
    batch, prompt_sampler = collect(load_components(workspace, UNLIMITED, reward=lambda episode, count: 1.0), workspace)
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"]) == (6.0, 2)
    assert prompt_sampler == PromptSampler(next_index=NUM_TASKS)
    late = load_components(workspace, UNLIMITED, reward=lambda episode, count: count % 2 if count > 11 else 1)
    batch, _ = collect(late, workspace)
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"]) == (4.0, 0)


def test_rounds_without_a_limit_report_missing_groups(workspace, caplog):
    components = load_components(workspace, UNLIMITED, reward=lambda episode, count: 1.0)
    collect(components, workspace)
    assert [record.args for record in caplog.records if record.name == "saccade"] == [(1, 0, 2, 4, NUM_TASKS)]


@pytest.mark.parametrize("num_usable", [0, 2])
def test_rounds_without_a_limit_end_if_every_episode_of_a_round_fails(workspace, num_usable):
    """The judge fails after `num_usable` groups of equal rewards; the step draws no further prompts."""
    components = load_components(workspace, UNLIMITED, reward=lambda episode, count: 1.0)
    graded, counter = components.score_fn, itertools.count()

    async def score(episodes):
        scores = await graded(episodes)
        return scores if next(counter) < num_usable else [Ungraded(reason="the judge is down")] * len(scores)

    components, num_collected = replace(components, score_fn=score), []
    rollouts = collect_batch(components, workspace.tasks, PromptSampler(), 0, on_rollouts=record_number(num_collected))
    if num_usable:
        batch, _ = asyncio.run(rollouts)
        assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"]) == (2.0, 2)
    else:
        with raises(EngineError, key="rewards", value="the judge is down"):
            asyncio.run(rollouts)
    assert num_collected == [2 * (2 + num_usable)]


def record_number(numbers):
    """Return an `on_rollouts` that appends the number of records."""

    async def on_rollouts(stage, step, records):
        numbers.append(len(records))

    return on_rollouts


@pytest.mark.slow
def test_a_run_that_stops_for_missing_groups_saves_its_finished_steps(workspace, tmp_path):
    """Step 1 has enough groups, step 2 doesn't, so step 1 is saved. A resumed run stops at the same step."""
    overrides = ("rl.selection={on_underfilled: stop, max_sampling_rounds: 2}",)

    def compute_reward(episode, count):
        return max(episode.ledger.versions()) or count % 2

    with raises(RunError, key="rl.selection.on_underfilled", value="stop"):
        workspace.run_rl(load_components(workspace, *overrides, reward=compute_reward), tmp_path)
    assert checkpoint.find_newest_checkpoint(tmp_path).step == 1
    resumed = workspace.load_components(*SHORT, *overrides, weights=tmp_path / "step-000001")
    with raises(RunError, key="rl.selection.on_underfilled"):
        workspace.run_rl(with_reward(resumed, compute_reward), tmp_path)


# ---- groups beyond the target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("surplus", ["discard", "requeue"])
def test_prompts_of_surplus_groups_are_discarded_or_requeued(workspace, surplus):
    components = load_components(workspace, f"rl.selection={{oversample: 2, surplus: {surplus}}}")
    batch, prompt_sampler = collect(components, workspace)
    assert get_positions(workspace, batch) == [0, 1]
    requeued = (2, 3) if surplus == "requeue" else ()
    assert prompt_sampler == PromptSampler(next_index=4, requeued_indices=requeued)
    next_batch, _ = asyncio.run(collect_batch(components, workspace.tasks, prompt_sampler, 1))
    assert get_positions(workspace, next_batch) == ([2, 3] if surplus == "requeue" else [4, 5])
    episodes = [scored.episode for group in next_batch.groups for scored in group.scored_episodes]
    versions = {version for episode in episodes for version in episode.ledger.versions()}
    assert versions == {-1, components.engine.version}  # no surplus episode is reused


# ---- images and videos -----------------------------------------------------------------------------------------------


def mix_kinds(workspace):
    """Return the tasks, the last three with an image in place of their video."""
    return MixedWorkspace(workspace.root, workspace.settings, workspace.demonstrations).tasks


@dataclass(frozen=True)
class MixedWorkspace(Workspace):
    """A workspace whose last three tasks hold an image."""

    @property
    def tasks(self):
        frame, tasks = self.root / "frame.png", load_tasks(self.root / "data/train/tasks.jsonl")
        Image.new("RGB", (32, 32), (200, 30, 30)).save(frame)
        image = (Media(path=str(frame), kind=MediaKind.IMAGE),)
        return [*tasks[:-3], *(replace(task, media=image) for task in tasks[-3:])]


def is_video_at(tasks, prompt_index):
    return Mixture.from_tasks(tasks).get_task(5, prompt_index)[0].media[0].kind is MediaKind.VIDEO


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.3, 0), (0.34, 1), (0.67, 2), (1.0, 3), (None, 3)])
@pytest.mark.parametrize("surplus", ["discard", "requeue"])
def test_other_prompts_replace_videos_above_their_share(workspace, share, most, surplus):
    """A batch of three holds the first videos up to the limit, and the next images, which may be far ahead."""
    tasks = mix_kinds(workspace)
    limit = "null" if share is None else share
    overrides = ("rl.prompts_per_step=3", f"rl.selection={{max_video_share: {limit}, surplus: {surplus}}}")
    components = load_components(workspace, *overrides)
    batch, sampler = asyncio.run(collect_batch(components, tasks, PromptSampler(), 0))
    expected, skipped, prompt_index = [], [], 0
    while len(expected) < 3:
        is_full = sum(is_video_at(tasks, index) for index in expected) == most
        (skipped if is_video_at(tasks, prompt_index) and is_full else expected).append(prompt_index)
        prompt_index += 1
    mixture = Mixture.from_tasks(tasks)
    assert [group.task.id for group in batch.groups] == [mixture.get_task(5, index)[0].id for index in expected]
    requeued = tuple(skipped) if surplus == "requeue" else ()
    assert sampler == PromptSampler(next_index=prompt_index, requeued_indices=requeued)
    assert batch.metrics["groups/kept"] == 3
    assert batch.metrics.get("prompts/surplus_videos") == (None if share is None else len(skipped))


def test_the_video_limit_holds_for_every_round(workspace):
    """All groups of the first round are dropped; the second one takes two prompts again, at most one with a video."""
    tasks = mix_kinds(workspace)
    overrides = ("rl.selection={max_video_share: 0.5, max_sampling_rounds: 2}",)
    components = load_components(workspace, *overrides, reward=lambda episode, count: count % 2 if count >= 4 else 1)
    received = []
    batch, _ = asyncio.run(
        collect_batch(components, tasks, PromptSampler(), 0, on_groups=lambda _, groups: received.extend(groups))
    )
    kinds = [group.task.media[0].kind for group in received]
    assert len(kinds) == 4
    assert all(part.count(MediaKind.VIDEO) <= 1 for part in (kinds[:2], kinds[2:]))
    assert batch.metrics["sampling_rounds"] == 2.0


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_images_and_videos(workspace, tmp_path):
    mixed, drawn = MixedWorkspace(workspace.root, workspace.settings, workspace.demonstrations), []
    overrides = (*SHORT, "rl.selection={max_video_share: 0.5, surplus: requeue, oversample: 2}")

    def train(folder, weights=None, **options):
        def record(step, groups):
            drawn.append((folder.name, step, [(group.task.id, group.task.media[0].kind) for group in groups]))

        components = with_reward(mixed.load_components(*overrides, weights=weights), alternate)
        return mixed.run_rl(components, folder, on_groups=record, **options)

    rows = train(tmp_path / "whole")
    train(tmp_path / "killed", kill_at=3)
    del drawn[4:]
    assert train(tmp_path / "killed", weights=tmp_path / "killed/step-000002") == rows[2:]
    assert [groups for _, _, groups in drawn[4:]] == [groups for _, _, groups in drawn[2:4]]
    assert all(sum(kind is MediaKind.VIDEO for _, kind in groups) <= 2 for _, _, groups in drawn)


def test_a_video_limit_needs_tasks_without_a_video(workspace):
    with raises(DataError, key="rl.selection.max_video_share", value=0.5):
        collect(load_components(workspace, "rl.selection.max_video_share=0.5"), workspace)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_step_without_a_graded_episode_raises(workspace):
    components = replace(
        load_components(workspace), score_fn=score_each(lambda episode: Ungraded(reason="the judge is down"))
    )
    with raises(EngineError, key="rewards", value="the judge is down"):
        collect(components, workspace)


def test_a_step_whose_prompts_exceed_the_context_raises(workspace):
    with raises(EngineError, key="episodes"):
        collect(load_components(workspace, "environment.settings.max_context_tokens=20"), workspace)


def test_ungraded_episodes_are_counted_and_not_trained(workspace):
    graded, counter, ended = load_components(workspace, "rl.group_size=3"), itertools.count(), []

    async def score(episodes):
        ended.extend(episodes)
        scores = await graded.score_fn(episodes)
        return [Ungraded(reason="no answer") if next(counter) % 3 == 0 else score for score in scores]

    batch, _ = collect(replace(graded, score_fn=score), workspace)
    assert batch.metrics["frac_ungraded"] == pytest.approx(1 / 3)
    assert all(len(group.scored_episodes) == 2 for group in batch.groups)
    assert batch.num_sampled_tokens == sum(episode.usage.sampled_tokens for episode in ended)


# ---- slow groups -----------------------------------------------------------------------------------------------------


class BlockingEngine(RecordingEngine):
    """An engine that answers only `num_allowed` requests of one task, whose question is `question`."""

    question, renderer, num_allowed, num_cancelled = "", None, 0, 0

    async def generate(self, request):
        if self.question not in self.renderer.decode(request.ledger.input_ids()):
            return await super().generate(request)
        if self.num_allowed:
            self.num_allowed -= 1
            return await super().generate(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def load_blocking(workspace, prompt_index, *overrides, num_allowed=0):
    """Load components whose engine doesn't answer the task at a prompt of the first epoch."""
    components = load_components(workspace, "rl.prompts_per_step=3", *overrides)
    engine = BlockingEngine(components.engine)
    engine.question = Mixture.from_tasks(workspace.tasks).get_task(5, prompt_index)[0].question
    engine.renderer, engine.num_allowed = components.vlm.renderer, num_allowed
    return replace(components, engine=engine)


def requeue_first(prompt_index):
    """Return a prompt sampler that takes this prompt index and three others."""
    others = [other for other in range(NUM_TASKS) if other != prompt_index][:3]
    return PromptSampler(next_index=NUM_TASKS, requeued_indices=(prompt_index, *others))


@pytest.mark.parametrize("surplus", ["discard", "requeue"])
def test_a_step_does_not_wait_for_its_slowest_group(workspace, surplus):
    prompt_index = find_unique_prompt(workspace)
    filters = f"rl.selection={{over_provision: 1.3, surplus: {surplus}}}"
    components, prompt_sampler = load_blocking(workspace, prompt_index, filters), requeue_first(prompt_index)
    batch, rest = collect(components, workspace, prompt_sampler)
    assert sorted(get_positions(workspace, batch)) == sorted(prompt_sampler.requeued_indices[1:])
    assert components.engine.num_cancelled == 2
    assert (batch.metrics["groups/cancelled"], batch.metrics["episodes/cancelled"]) == (1.0, 2.0)
    assert batch.metrics["groups/missing"] == 0
    requeued = (prompt_index,) if surplus == "requeue" else ()
    assert rest == PromptSampler(next_index=NUM_TASKS, requeued_indices=requeued)


def test_finished_episodes_of_a_cancelled_group_are_discarded(workspace):
    """One of the slow group's two episodes finishes, the other never does."""
    prompt_index = find_unique_prompt(workspace)
    settings = ("rl.selection.over_provision=1.3", "environment.settings.max_tool_turns=0")
    components, records = load_blocking(workspace, prompt_index, *settings, num_allowed=1), []

    async def record_rollouts(stage, step, new_records):
        records.extend(new_records)

    batch, _ = collect(components, workspace, requeue_first(prompt_index), on_rollouts=record_rollouts)
    assert (batch.metrics["groups/cancelled"], batch.metrics["episodes/cancelled"]) == (1.0, 1.0)
    assert batch.metrics["episodes/discarded"] == 1.0
    episodes = [scored.episode for group in batch.groups for scored in group.scored_episodes]
    assert batch.num_sampled_tokens > sum(episode.usage.sampled_tokens for episode in episodes)
    *others, discarded, cancelled = records
    assert {record.outcome for record in others} <= {"kept", "dropped"}
    assert [(record.outcome, record.index) for record in (discarded, cancelled)] == [("discarded", 0), ("cancelled", 1)]
    assert discarded.group == cancelled.group == max(record.group for record in others) + 1
    assert discarded.episode.task == cancelled.episode.task
    assert len(discarded.episode.turns) == 1
    assert (cancelled.episode.turns, cancelled.episode.status) == ((), EpisodeStatus.ABORTED)
    assert discarded.reason == cancelled.reason == CANCELLED_ERROR


def test_records_name_what_became_of_an_episode(workspace):
    """A filter drops one of four groups, and another exceeds the target."""

    def grade(episode, count):
        return count % 2 if count < 6 else 1.0  # the last group's rewards are equal

    components = load_components(workspace, "rl={group_size: 2, selection: {oversample: 2}}", reward=grade)
    records = []

    async def record_rollouts(stage, step, new_records):
        records.extend(new_records)

    batch, _ = collect(components, workspace, on_rollouts=record_rollouts)
    reasons = defaultdict(set)
    for record in records:
        reasons[record.group].add((record.outcome, record.reason))
    assert len(records) == 8
    assert list(reasons.values()).count({("dropped", "reward_std")}) == 1
    assert list(reasons.values()).count({("dropped", "surplus")}) == 1
    assert list(reasons.values()).count({("kept", "")}) == len(batch.groups) == 2
    assert all(record.step == 1 and record.score is not None for record in records)


@pytest.mark.parametrize(
    ("oversample", "over_provision", "num_missing", "counts"),
    [
        (1.0, 1.0, 8, (8, 8)),
        (1.5, 1.0, 8, (12, 12)),
        (1.0, 1.25, 8, (8, 10)),
        (1.0, 1.25, 2, (2, 3)),  # rounded up, so that few groups are over-provisioned too
        (1.0, 1.25, 1, (1, 2)),
        (1.0, 1.1, 10, (10, 11)),  # 11.000000000000002 in floating point
        (1.5, 1.25, 8, (12, 15)),
    ],
)
def test_over_provision_starts_more_groups_than_required(oversample, over_provision, num_missing, counts):
    settings = SelectionConfig(oversample=oversample, over_provision=over_provision)
    assert settings.compute_start_counts(num_missing) == counts


def test_num_tokens_counts_all_conversations(workspace):
    batch, _ = collect(load_components(workspace), workspace)
    conversations = [
        conversation
        for group in batch.groups
        for scored in group.scored_episodes
        for conversation in scored.episode.walk()
    ]
    assert count_tokens(batch.groups) == sum(len(conversation.ledger) for conversation in conversations) > 0


def test_without_over_provision_no_group_is_cancelled(workspace):
    batch, _ = collect(load_components(workspace, "rl.selection.oversample=2"), workspace)
    assert batch.metrics["groups/cancelled"] == 0.0
    assert batch.metrics["groups/kept"] + batch.metrics["groups/dropped/surplus"] == 4.0


def test_an_exception_is_raised_while_other_groups_are_running(workspace):
    components = load_blocking(workspace, find_unique_prompt(workspace), "rl.selection.over_provision=1.3")
    components = replace(components, score_fn=score_each(lambda episode: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        collect(components, workspace)
