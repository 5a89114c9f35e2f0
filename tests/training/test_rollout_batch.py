"""Collecting a step's batch: frame budgets per epoch, sampling rounds, requeued prompts, slow groups, failures."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from error_cases import raises
from training_cases import RecordingEngine, alternate, with_reward

from saccade.algorithms.frame_budget import draw_frame_budget
from saccade.config.schema import SelectionConfig
from saccade.data.mixture import Mixture
from saccade.errors import EngineError, RunError
from saccade.rewards.compose import score_each
from saccade.training import checkpoint
from saccade.training.prompt_sampler import PromptSampler
from saccade.training.rollout_batch import collect_batch, collect_groups
from saccade.types import Ungraded
from saccade.utils.hashing import derive_seed

SHORT = ("rl.group_size=2", "sampling.max_tokens=2")
NUM_TASKS = 12


def load_components(workspace, *overrides, reward=alternate):
    return with_reward(workspace.load_components(*SHORT, *overrides), reward)


def collect(components, workspace, prompt_sampler=None, **settings):
    return asyncio.run(collect_batch(components, workspace.tasks, prompt_sampler or PromptSampler(), 0, **settings))


def get_positions(workspace, batch):
    """Return the positions of a batch's prompts in the first epoch."""
    ids = [Mixture.from_tasks(workspace.tasks).get_task(5, position)[0].id for position in range(NUM_TASKS)]
    return [ids.index(group.task.id) for group in batch.groups]


def find_unique_position(workspace):
    """Return a position of the first epoch whose task's question no other task has."""
    questions = [Mixture.from_tasks(workspace.tasks).get_task(5, position)[0].question for position in range(NUM_TASKS)]
    return next(position for position, question in enumerate(questions) if questions.count(question) == 1)


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


def test_each_prompt_has_the_frame_budget_of_its_own_epoch(workspace):
    components, budgets, positions = load_components(workspace), (4, 8), range(9, 15)
    groups = asyncio.run(collect_groups(components, workspace.tasks, positions, 0))
    tasks = [Mixture.from_tasks(workspace.tasks).get_task(5, position)[0] for position in positions]
    expected = [
        draw_frame_budget(budgets, run_seed=5, epoch=position // NUM_TASKS, task=task)
        for position, task in zip(positions, tasks, strict=True)
    ]
    assert [group.episodes[0].episode.frame_budget for group in groups] == expected
    budgets_of_first_epoch = [draw_frame_budget(budgets, run_seed=5, epoch=0, task=task) for task in tasks]
    assert expected != budgets_of_first_epoch


def test_a_task_drawn_again_in_a_step_gets_other_seeds(workspace):
    """One task is at three positions, the third of which is collected in a later round."""
    components = load_components(workspace)
    components = replace(components, engine=RecordingEngine(components.engine))
    tasks = workspace.tasks[:1]
    asyncio.run(collect_groups(components, tasks, (0, 1), 0))
    asyncio.run(collect_groups(components, tasks, (2,), 0, earlier_positions=(0, 1)))
    seeds = [sampling.seed for sampling in components.engine.requests]
    assert len(set(seeds)) == 6  # three positions, two episodes each
    assert seeds[0] == derive_seed(derive_seed(5, 0, tasks[0].digest, 0), 0)  # run, step, task, episode; turn
    asyncio.run(collect_groups(components, tasks, (1,), 0))
    assert components.engine.requests[-2].seed == seeds[0]  # the first draw has the same seeds at any position


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
    assert prompt_sampler == PromptSampler(next_position=2)


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
    assert prompt_sampler == PromptSampler(next_position=8)
    assert [len(groups) for groups in received] == [8]
    assert batch.metrics["groups/dropped/reward_std"] == 4.0
    episodes = [scored.episode for group in received[0] for scored in group.episodes]
    assert batch.num_sampled_tokens == sum(episode.usage.sampled_tokens for episode in episodes)


def test_the_number_of_rounds_is_limited(workspace):
    components = load_components(workspace, "rl.selection.max_sampling_rounds=3", reward=lambda episode, count: 1.0)
    batch, prompt_sampler = collect(components, workspace)
    assert (batch.metrics["sampling_rounds"], batch.metrics["groups/missing"], batch.groups) == (3.0, 2, ())
    assert prompt_sampler == PromptSampler(next_position=6)


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
    assert prompt_sampler == PromptSampler(next_position=4, requeued_positions=requeued)
    next_batch, _ = asyncio.run(collect_batch(components, workspace.tasks, prompt_sampler, 1))
    assert get_positions(workspace, next_batch) == ([2, 3] if surplus == "requeue" else [4, 5])
    episodes = [scored.episode for group in next_batch.groups for scored in group.episodes]
    versions = {version for episode in episodes for version in episode.ledger.versions()}
    assert versions == {-1, components.engine.version}  # no surplus episode is reused


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
    graded, counter = load_components(workspace, "rl.group_size=3"), itertools.count()

    async def score(episodes):
        scores = await graded.score_fn(episodes)
        return [Ungraded(reason="no answer") if next(counter) % 3 == 0 else score for score in scores]

    batch, _ = collect(replace(graded, score_fn=score), workspace)
    assert batch.metrics["ungraded"] == pytest.approx(1 / 3)
    assert all(len(group.episodes) == 2 for group in batch.groups)


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


def load_blocking(workspace, position, *overrides, num_allowed=0):
    """Load components whose engine doesn't answer the task at a position of the first epoch."""
    components = load_components(workspace, "rl.prompts_per_step=3", *overrides)
    engine = BlockingEngine(components.engine)
    engine.question = Mixture.from_tasks(workspace.tasks).get_task(5, position)[0].question
    engine.renderer, engine.num_allowed = components.backbone.renderer, num_allowed
    return replace(components, engine=engine)


def requeue_first(position):
    """Return a prompt sampler that takes this position and three others."""
    others = [other for other in range(NUM_TASKS) if other != position][:3]
    return PromptSampler(next_position=NUM_TASKS, requeued_positions=(position, *others))


@pytest.mark.parametrize("surplus", ["discard", "requeue"])
def test_a_step_does_not_wait_for_its_slowest_group(workspace, surplus):
    position = find_unique_position(workspace)
    filters = f"rl.selection={{over_provision: 1.3, surplus: {surplus}}}"
    components, prompt_sampler = load_blocking(workspace, position, filters), requeue_first(position)
    batch, rest = collect(components, workspace, prompt_sampler)
    assert sorted(get_positions(workspace, batch)) == sorted(prompt_sampler.requeued_positions[1:])
    assert components.engine.num_cancelled == 2
    assert (batch.metrics["groups/cancelled"], batch.metrics["episodes/cancelled"]) == (1.0, 2.0)
    assert batch.metrics["groups/missing"] == 0
    requeued = (position,) if surplus == "requeue" else ()
    assert rest == PromptSampler(next_position=NUM_TASKS, requeued_positions=requeued)


def test_finished_episodes_of_a_cancelled_group_are_discarded(workspace):
    """One of the slow group's two episodes finishes, the other never does."""
    position = find_unique_position(workspace)
    settings = ("rl.selection.over_provision=1.3", "environment.settings.max_turns=0")
    components = load_blocking(workspace, position, *settings, num_allowed=1)
    batch, _ = collect(components, workspace, requeue_first(position))
    assert (batch.metrics["groups/cancelled"], batch.metrics["episodes/cancelled"]) == (1.0, 1.0)
    assert batch.metrics["episodes/discarded"] == 1.0
    episodes = [scored.episode for group in batch.groups for scored in group.episodes]
    assert batch.num_sampled_tokens > sum(episode.usage.sampled_tokens for episode in episodes)


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
def test_over_provision_launches_more_groups_than_required(oversample, over_provision, num_missing, counts):
    settings = SelectionConfig(oversample=oversample, over_provision=over_provision)
    assert settings.compute_launch_counts(num_missing) == counts


def test_num_tokens_counts_all_conversations(workspace):
    batch, _ = collect(load_components(workspace), workspace)
    conversations = [
        conversation for group in batch.groups for scored in group.episodes for conversation in scored.episode.walk()
    ]
    assert batch.num_tokens == sum(len(conversation.ledger) for conversation in conversations) > 0


def test_without_over_provision_no_group_is_cancelled(workspace):
    batch, _ = collect(load_components(workspace, "rl.selection.oversample=2"), workspace)
    assert batch.metrics["groups/cancelled"] == 0.0
    assert batch.metrics["groups/kept"] + batch.metrics["groups/dropped/over_target"] == 4.0


def test_an_exception_is_raised_while_other_groups_are_running(workspace):
    components = load_blocking(workspace, find_unique_position(workspace), "rl.selection.over_provision=1.3")
    components = replace(components, score_fn=score_each(lambda episode: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        collect(components, workspace)
