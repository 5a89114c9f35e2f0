"""Plan RL on a cluster: steps per hour, the bottleneck and idle shares, by `simulation` and the memory of `estimates`.

    recipe ──> Workload ───────────────────────┐
    H100's data sheet, or a run ──> StageCosts ┼──> simulate ──> Table
    GPUs ──> memory: does it fit? ──> Cluster ─┘

The costs of an H100 are arithmetic, not measurements; `derive_h100_costs` has the source of each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from saccade import plugins
from saccade.checks.estimates import (
    DTYPE_BYTES,
    EpisodeSize,
    PlanAssumptions,
    TrainingCost,
    estimate_episode,
    estimate_memory,
    estimate_rl_training,
    list_micro_step_tokens,
    resolve_assumptions,
    resolve_model_sizes,
)
from saccade.checks.simulation import (
    Cluster,
    Conversation,
    LogNormal,
    SimulationResult,
    StageCosts,
    Workload,
    simulate,
)
from saccade.config.load import load_recipe
from saccade.config.schema import MAX_EPISODES_IN_PROGRESS, Recipe
from saccade.errors import ConfigError, DataError
from saccade.metrics.metric_log import read_metric_rows
from saccade.metrics.tables import Table
from saccade.models.model_sizes import ModelSizes
from saccade.rollouts.components import resolve_settings
from saccade.training.episode_log import list_recorded_steps, read_rollouts
from saccade.training.peak_flops import find_peak_flops
from saccade.types import Episode, ToolResult

GPUS_PER_NODE = 8  # of the clusters that are compared
MAX_GPUS = 1024
# NVIDIA's data sheet of the H100 SXM: memory, and its bandwidth per second.
MEMORY_BYTES, MEMORY_BANDWIDTH = 80 * 10**9, 3.35e12
NETWORK_BANDWIDTH = 50e9  # bytes per second: one 400 Gb/s port per GPU, as in NVIDIA's DGX H100
UTILIZATION = (
    0.4  # of peak FLOP/s: 38 to 43 % were published for H100s in bfloat16 (Llama 3, arXiv 2407.21783, table 4)
)
SERVER_MEMORY_SHARE = 0.9  # of a GPU, for weights and KV cache: vLLM's default gpu_memory_utilization
REPLY_SIGMA = 1.0  # an assumption: the long tail of benchmarks/streaming.py; a run's replies replace it
# Measured with benchmarks/media.py on one shared CPU core: 64 frames of a 5-minute 640x360 video in 2.21 s.
FRAME_SECONDS = 2.21 / 64
# Measured with benchmarks/sandbox.py on a shared CPU core: a call of `x = 1`. A call's own work comes on top.
CALL_SECONDS = 0.19e-3
PACKED_TOKEN_SECONDS = 3.4 / 417_000  # measured on one shared CPU core: 0.7 to 3.4 s for ParaVT's largest batch
_MIN_GAIN = 1.02  # of steps per hour, for which a table goes on to twice as many servers


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A simulated cluster; `servers` are GPUs beside the trainer's, 0 if the trainer samples itself."""

    trainer_gpus: int
    servers: int
    result: SimulationResult


class ClusterPlanner:
    """Simulates one recipe on clusters of H100s, with derived costs or those of a run."""

    def __init__(
        self,
        recipe: Recipe,
        assumptions: PlanAssumptions,
        *,
        model_root: Path = Path(),
        measured: "MeasuredRun | None" = None,
        num_steps: int = 6,
    ) -> None:
        self._recipe, assumptions = resolve_assumptions(recipe, assumptions, model_root)
        self._sizes = resolve_model_sizes(self._recipe)
        episode = estimate_episode(self._recipe, self._sizes, assumptions)
        self._training = estimate_rl_training(self._recipe, episode)
        workload = build_workload(self._recipe, self._sizes, episode, self._training, assumptions)
        self._workload = measured.change_workload(workload) if measured else workload
        self._costs, self._episode = measured and measured.costs, episode
        self._num_steps = self._workload.max_staleness + 1 + num_steps
        self._saturated = dict[int, ClusterPlan]()  # by training GPUs: a plan with more servers than it uses
        # Whether sampling takes no time of the trainer's GPUs; those of rollouts.executor=processes sample there, too.
        self.has_servers = plugins.get_attribute("engines", self._recipe.engine.name, "has_separate_weights")

    def find_problem(self, trainer_gpus: int) -> str:
        """Return why the recipe doesn't run with so many training GPUs, or ""."""
        gpus, nodes = divide_nodes(trainer_gpus)
        memory = estimate_memory(
            self._recipe,
            self._sizes,
            self._recipe.rl.optim,
            self._training,
            gpus=gpus,
            nodes=nodes,
            kl=self._recipe.rl.kl,
        )
        if memory.peak > MEMORY_BYTES:
            return (
                f"training on {trainer_gpus} needs {memory.peak / 2**30:.0f} GiB of each, and an H100 has "
                f"{MEMORY_BYTES / 2**30:.0f} GiB"
            )
        return ""

    def simulate(self, trainer_gpus: int, servers: int) -> ClusterPlan:
        """Simulate a cluster that fits. Raises ConfigError if a server can't hold a conversation."""
        saturated = self._saturated.get(trainer_gpus)
        if saturated and servers >= saturated.result.used_servers:
            busy_servers = (1 - saturated.result.servers_idle) * saturated.servers
            result = replace(saturated.result, servers_idle=1 - busy_servers / servers)
            return ClusterPlan(trainer_gpus=trainer_gpus, servers=servers, result=result)
        micro_steps, num_tokens = list_micro_step_tokens(self._training, trainer_gpus)
        workers = self._recipe.rollouts.ray if self._recipe.rollouts.executor == "ray" else None
        # A run's rows are shorter than the longest ones of the plan.
        packed_share = self._workload.packed_tokens / self._training.packed_tokens
        cluster = Cluster(
            micro_step_tokens=round(sum(micro_steps) * packed_share),
            micro_step_idle=1 - num_tokens / (trainer_gpus * sum(micro_steps)),
            servers=max(servers, 1),
            workers=workers.workers if workers else 1,
            episodes_per_worker=workers.max_episodes if workers else MAX_EPISODES_IN_PROGRESS,
        )
        result = simulate(self._workload, self._get_costs(trainer_gpus), cluster, num_steps=self._num_steps)
        plan = ClusterPlan(trainer_gpus=trainer_gpus, servers=servers, result=result)
        if result.used_servers < servers:
            self._saturated[trainer_gpus] = plan
        return plan

    def compare_servers(self, trainer_gpus: int) -> Iterator[ClusterPlan]:
        """Double the servers as long as that gains something."""
        servers, best = 1, 0.0
        while servers <= MAX_GPUS:
            plan = self.simulate(trainer_gpus, servers)
            if plan.result.steps_per_hour < best * _MIN_GAIN:
                return
            yield plan
            best, servers = plan.result.steps_per_hour, servers * 2

    def find_best_split(self, num_gpus: int) -> ClusterPlan | str:
        """Return the split of a cluster with the most steps per hour, or why none fits.

        Training GPUs are all counts below a node, else powers of two; of equally fast splits that with fewer of them.
        """
        if not self.has_servers:
            return self.find_problem(num_gpus) or self.simulate(num_gpus, 0)
        problem, best = "", None
        for trainer_gpus in reversed(list_trainer_sizes(num_gpus - 1)):
            if found := self.find_problem(trainer_gpus):
                problem = problem or found
                continue
            num_tokens = sum(list_micro_step_tokens(self._training, trainer_gpus)[0])
            train_seconds = num_tokens * self._get_costs(trainer_gpus).trained_token
            # Fewer training GPUs than these can't be faster if training alone takes longer.
            if best and train_seconds > best.result.seconds_per_step:
                break
            plan = self.simulate(trainer_gpus, num_gpus - trainer_gpus)
            if best is None or plan.result.steps_per_hour >= best.result.steps_per_hour:
                best = plan
        return best or problem or "servers sample on GPUs beside the trainer's: at least 2 are needed"

    def _get_costs(self, trainer_gpus: int) -> StageCosts:
        return self._costs or derive_h100_costs(
            self._recipe, self._sizes, self._episode, self._workload, trainer_gpus=trainer_gpus
        )


def divide_nodes(num_gpus: int) -> tuple[int, int]:
    """Return the GPUs of a node and the nodes.

    >>> divide_nodes(6), divide_nodes(32)
    ((6, 1), (8, 4))
    """
    return (num_gpus, 1) if num_gpus <= GPUS_PER_NODE else (GPUS_PER_NODE, num_gpus // GPUS_PER_NODE)


def list_trainer_sizes(max_gpus: int) -> list[int]:
    """Return the numbers of training GPUs to compare.

    >>> list_trainer_sizes(40)
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    """
    sizes = [*range(1, GPUS_PER_NODE + 1), *(GPUS_PER_NODE * 2**power for power in range(1, 8))]
    return [size for size in sizes if size <= max_gpus]


def build_workload(
    recipe: Recipe, sizes: ModelSizes, episode: EpisodeSize, training: TrainingCost, assumptions: PlanAssumptions
) -> Workload:
    """Describe a step of the recipe; a usual reply (`--reply-tokens`) has a long tail, the longest reply has none."""
    rl, longest = recipe.rl, episode.longest
    num_collected, num_started = rl.selection.compute_start_counts(rl.prompts_per_step)
    num_calls = episode.max_tool_turns * episode.calls_per_turn
    max_tokens = recipe.sampling.max_tokens
    reply = LogNormal(mean=longest.sampled_tokens / (episode.max_tool_turns + 1))
    if assumptions.reply_tokens is not None and assumptions.reply_tokens < max_tokens:
        reply = LogNormal(mean=assumptions.reply_tokens, sigma=REPLY_SIGMA, maximum=max_tokens)
    sub_agent = None
    if episode.sub_agent is not None:
        prompt_tokens, num_frames = episode.sub_agent.prompt_tokens, episode.sub_agent.num_frames
        sub_agent = Conversation(prompt_tokens=prompt_tokens, num_frames=num_frames)
    return Workload(
        groups_per_round=num_collected,
        started_per_round=num_started,
        rounds_per_step=math.ceil(rl.prompts_per_step / num_collected),
        group_size=rl.group_size,
        prompts=[
            Conversation(prompt_tokens=prompt.prompt_tokens, num_frames=prompt.num_frames)
            for prompt in episode.assign_frame_budgets(len(episode.conversations))
        ],
        reply_tokens=reply,
        tool_turns=episode.max_tool_turns,
        calls_per_turn=episode.calls_per_turn,
        tokens_per_result=(longest.completion_tokens - longest.sampled_tokens) // num_calls if num_calls else 0,
        sub_agent=sub_agent,
        max_staleness=rl.max_staleness,
        is_streaming=rl.streaming,
        waits_for_stale=rl.on_stale_group == "wait",
        max_running_groups=rl.max_running_groups,
        packed_tokens=training.packed_tokens,
        num_updates=rl.epochs_per_batch * training.num_mini_batches,
        weight_bytes=sizes.num_parameters * DTYPE_BYTES[recipe.model.dtype],
    )


def derive_h100_costs(
    recipe: Recipe, sizes: ModelSizes, episode: EpisodeSize, workload: Workload, *, trainer_gpus: int
) -> StageCosts:
    """Derive the costs of H100s by arithmetic; each is a lower bound unless its comment names a measurement.

    Left out: the vision tower, attention scores, what FSDP gathers within a node (it overlaps with computing), and the
    start of a request. Raises ConfigError if a server can't hold the longest conversation.
    """
    size, rl, model = DTYPE_BYTES[recipe.model.dtype], recipe.rl, recipe.model
    num_text = sizes.num_parameters - sizes.count_vision_parameters()
    num_trained, _ = sizes.count_trained_parameters(model)
    weight_bytes, kv_bytes = sizes.num_parameters * size, sizes.compute_kv_bytes(size)
    longest = episode.longest
    max_replies = int((SERVER_MEMORY_SHARE * MEMORY_BYTES - weight_bytes) / (kv_bytes * longest.total_tokens))
    if max_replies < 1:
        raise ConfigError(
            f"a server on one H100 can't hold {sizes.name} ({weight_bytes / 2**30:.0f} GiB) and the KV cache of a "
            f"conversation of {longest.total_tokens:,} tokens "
            f"({kv_bytes * longest.total_tokens / 2**30:.0f} GiB): lower environment.settings.max_context_tokens",
            key="environment.settings.max_context_tokens",
            value=longest.total_tokens,
        )
    # Halfway through its sampling, a conversation has this many tokens in the KV cache.
    context = (longest.prompt_tokens + longest.total_tokens) / 2
    flops = UTILIZATION * (find_peak_flops("H100") or math.nan)
    # Kaplan et al. 2020 (arXiv 2001.08361, table 1): 2 FLOP per weight and token forward, 2 for the gradient of the
    # activations, 2 for that of each trained weight; a checkpointed layer runs forward twice.
    is_adapter = bool(model.lora_rank)
    passes = 4 + (2 if model.activation_checkpointing else 0) + (0 if is_adapter else 2)
    num_scored = int(bool(rl.kl.loss_coef or rl.kl.advantage_coef))  # by the reference
    num_scored += workload.num_updates > 1 and rl.loss.old_logprobs == "trainer"
    gpus, nodes = divide_nodes(trainer_gpus)
    trained_bytes = 4 * num_trained / gpus  # float32, of a GPU
    # A ring all-reduce between nodes sends 2 (M - 1) / M of the gradients; AdamW reads weights, gradients and two
    # moments and writes all but the gradients.
    optimizer_step = 2 * (nodes - 1) / nodes * trained_bytes / NETWORK_BANDWIDTH + 7 * trained_bytes / MEMORY_BANDWIDTH
    return StageCosts(
        decode_step=num_text * size / MEMORY_BANDWIDTH,  # reads all weights once
        decode_step_per_reply=kv_bytes * context / MEMORY_BANDWIDTH,  # reads the KV cache of each reply
        prefill_token=2 * num_text / flops,
        max_replies=max_replies,
        tool_call=LogNormal(mean=CALL_SECONDS),
        frame=FRAME_SECONDS,
        score=LogNormal(mean=0.0),
        packed_token=PACKED_TOKEN_SECONDS,
        trained_token=(passes * rl.epochs_per_batch + 2 * num_scored) * num_text / flops,
        optimizer_step=optimizer_step,
        sync_byte=1 / NETWORK_BANDWIDTH,
        sync=0.0,
    )


# ---- costs of a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Costs and amounts of a run's RL steps, on average; calls include their frames, replies their prefill.

    A server decodes at the pace that it had in the run, and holds at most its share of a step's episodes.
    """

    costs: StageCosts
    reply_tokens: LogNormal
    tool_turns: float  # of an episode
    calls_per_turn: float
    packed_tokens: int  # of a step

    def change_workload(self, workload: Workload) -> Workload:
        """Return the workload with what the run measured."""
        return replace(
            workload,
            reply_tokens=self.reply_tokens,
            tool_turns=self.tool_turns,
            calls_per_turn=self.calls_per_turn,
            packed_tokens=self.packed_tokens,
        )


def measure_run(folder: Path, trainer_gpus: int) -> MeasuredRun:
    """Read the costs of a run on `trainer_gpus` training GPUs, from its log and its stored episodes.

    The first step, which warms up, is left out. Raises DataError for a run without two RL steps that trained, or
    without their episodes.
    """
    steps = {row["step"]: row for row in read_metric_rows(folder / "metrics.jsonl") if row["stage"] == "rl"}
    rows = [steps[step] for step in sorted(steps)[1:] if steps[step].get("packed_tokens")]
    recorded = {*list_recorded_steps(folder, "rl")}
    records = [
        record
        for row in rows
        if row["step"] in recorded
        for record in read_rollouts(folder, "rl", row["step"])
        if record.episode.turns and record.episode.usage.sampled_tokens
    ]
    if not records:
        raise DataError(
            f"{folder} has no costs to measure: at least two RL steps that trained are needed, with their episodes "
            "(episodes.max_gib above 0)",
            key=str(folder),
        )
    recipe = load_recipe(str(folder / "recipe.yaml"))
    servers = len(resolve_settings("engines", recipe.engine).get("servers", ("",)))
    episodes = [record.episode for record in records]
    turns = [turn for episode in episodes for turn in episode.turns if turn.results]
    calls = [
        max(result.seconds - _get_child_seconds(episode, result), 0.0)
        for episode in episodes
        for turn in episode.turns
        for result in turn.results
    ]
    replies = [segment.num_tokens for episode in episodes for segment in episode.ledger.segments if segment.is_sampled]
    sampling = sum(episode.usage.seconds for episode in episodes) - sum(
        max(result.seconds for result in turn.results) for turn in turns
    )
    num_recorded = len({record.step for record in records})
    packed_tokens = fmean(row["packed_tokens"] for row in rows)
    costs = StageCosts(
        decode_step=max(sampling, 0.0) / sum(replies),
        decode_step_per_reply=0.0,
        prefill_token=0.0,
        max_replies=math.ceil(len(episodes) / (num_recorded * servers)),
        tool_call=fit_log_normal(calls),
        frame=0.0,
        score=LogNormal(mean=0.0),
        packed_token=0.0,  # a part of seconds/train
        trained_token=fmean(row["seconds/train"] for row in rows) * trainer_gpus / packed_tokens,
        optimizer_step=0.0,  # likewise
        sync_byte=0.0,
        sync=fmean(row["seconds/weight_sync"] for row in rows),
    )
    return MeasuredRun(
        costs=costs,
        reply_tokens=fit_log_normal(replies, maximum=recipe.sampling.max_tokens),
        tool_turns=len(turns) / len(episodes),
        calls_per_turn=len(calls) / len(turns) if turns else 0.0,
        packed_tokens=round(packed_tokens),
    )


def _get_child_seconds(episode: Episode, result: ToolResult) -> float:
    return 0.0 if result.child_index is None else episode.children[result.child_index].usage.seconds


def fit_log_normal(amounts: Sequence[float], *, maximum: float = math.inf) -> LogNormal:
    """Return the log-normal amount with the mean of `amounts` and, if there are two above 0, the sigma of those.

    >>> fit_log_normal([2.0, 2.0, 2.0])
    LogNormal(mean=2.0, sigma=0.0, maximum=inf)
    """
    logarithms = [math.log(amount) for amount in amounts if amount > 0]
    sigma = pstdev(logarithms) if len(logarithms) > 1 else 0.0
    return LogNormal(mean=fmean(amounts) if amounts else 0.0, sigma=sigma, maximum=maximum)


# ---- tables --------------------------------------------------------------------------------------------------------


def simulate_recipe(
    recipe: Recipe,
    assumptions: PlanAssumptions,
    trainer_gpus: int,
    servers: int | None,
    max_gpus: int,
    *,
    model_root: Path = Path(),
    measured: MeasuredRun | None = None,
) -> list[Table]:
    """Return the tables of a recipe with RL on GPUs, none for others; costs are those of H100s unless measured.

    One has the steps with so many training GPUs and servers, the other those of clusters of up to `max_gpus`.
    """
    if explain_missing_simulation(recipe, has_costs=measured is not None):
        return []
    planner = ClusterPlanner(recipe, assumptions, model_root=model_root, measured=measured)
    tables = [build_server_table(planner, trainer_gpus, servers)]
    return [*tables, *build_cluster_tables(planner, max_gpus)] if max_gpus else tables


def explain_missing_simulation(recipe: Recipe, *, has_costs: bool) -> str:
    """Return why no steps of a recipe are simulated, or nothing."""
    if "rl" not in recipe.model_fields_set:
        return "the recipe has no RL"
    if recipe.model.device == "cpu" and not has_costs:
        return "the recipe trains on a CPU (model.device=cpu), whose costs need --costs RUN"
    return ""


_HEADER = ("steps/h", "s a step", "waits", "trains", "syncs")
_IDLE_HEADER = ("trainer idle", "servers idle", "workers idle", "limited by")


def build_server_table(planner: ClusterPlanner, gpus: int, servers: int | None) -> Table:
    """Simulate a trainer on `gpus` GPUs with `servers` servers, or with 1, 2, 4, … as long as more gain something.

    Raises ConfigError for servers of an engine that samples in the trainer.
    """
    title = f"Simulated RL steps, {gpus:,} GPUs for training"
    if servers and not planner.has_servers:
        raise ConfigError(
            f"the engine samples on the trainer's GPUs, so --servers={servers} has no effect: set engine.name=vllm, or "
            "remove --servers",
            key="--servers",
            value=servers,
        )
    if problem := planner.find_problem(gpus):
        return Table(title=title, header=("", ""), rows=(("not possible", problem),))
    if not planner.has_servers:
        plans = [planner.simulate(gpus, 0)]
    else:
        plans = [planner.simulate(gpus, servers)] if servers else list(planner.compare_servers(gpus))
    rows = tuple((f"{plan.servers:,}", *_format_result(plan.result)) for plan in plans)
    return Table(title=title, header=("servers", *_HEADER, *_IDLE_HEADER), rows=rows)


def build_cluster_tables(planner: ClusterPlanner, max_gpus: int) -> list[Table]:
    """Simulate the best split of clusters of 1, 2, 4, … GPUs; a second table has those on which nothing fits."""
    rows, problems = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for power in range(max_gpus.bit_length()):
        num_gpus = 2**power
        best = planner.find_best_split(num_gpus)
        if isinstance(best, str):
            problems.append((f"{num_gpus:,}", best))
        else:
            rows.append((f"{num_gpus:,}", f"{best.trainer_gpus:,}", f"{best.servers:,}", *_format_result(best.result)))
    header = ("GPUs", "trainer", "servers", *_HEADER, *_IDLE_HEADER)
    tables = [
        Table(title="Simulated RL steps, best split of GPUs", header=header, rows=tuple(rows)),
        Table(title="Clusters that are too small", header=("GPUs", ""), rows=tuple(problems)),
    ]
    return [table for table in tables if table.rows]


def _format_result(result: SimulationResult) -> tuple[str, ...]:
    seconds = (result.seconds_per_step, result.wait_seconds, result.train_seconds, result.sync_seconds)
    idle = (result.trainer_idle, result.servers_idle, result.workers_idle)
    return (
        f"{result.steps_per_hour:,.0f}",
        *(f"{value:,.1f}" for value in seconds),
        *(f"{share:.0%}" for share in idle),
        result.bottleneck,
    )
