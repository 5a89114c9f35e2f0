"""Plan a recipe as tables: its settings, one step of each stage in each environment, and the memory of a GPU."""

from dataclasses import asdict
from pathlib import Path

from saccade.checks.estimates import (
    DTYPE_BYTES,
    EpisodeSize,
    MemoryEstimate,
    PlanAssumptions,
    TrainingCost,
    count_kv_cache_tokens,
    estimate_environment,
    estimate_memory,
    estimate_micro_steps,
    estimate_rl_training,
    estimate_rollouts,
    estimate_sft_training,
    resolve_assumptions,
    resolve_model_sizes,
)
from saccade.config.schema import Recipe
from saccade.metrics.tables import Table
from saccade.models.model_sizes import ModelSizes

NOTE = (
    "Counts are upper bounds: every reply and tool result has its maximum length; all frame budgets are equally "
    "frequent. --reply-tokens and --calls-per-turn plan a usual step instead. A video has the size shown and at least "
    "as many frames as the budget; a question has {question} tokens. Text is counted with the model's tokenizer if its "
    "folder exists, else as one token per word, digit and run of punctuation.\n"
    "Weights, gradients, optimizer state and copies are sharded evenly over the GPUs; gradients are float32 during a "
    "step. Activations are what autograd saves of one micro-batch with an attention that saves no scores; logits are "
    "five float32 copies of one chunk. Fragmentation and the libraries' own memory come on top."
)
TableRow = tuple[str, str, str]  # name, amount, composition


def build_plan(
    name: str,
    recipe: Recipe,
    assumptions: PlanAssumptions,
    *,
    gpus: int = 1,
    nodes: int = 1,
    model_root: Path = Path(),
) -> list[Table]:
    """Build the plan of a recipe: a summary, and one step of each stage that the recipe configures.

    The `gpus` of a node shard the weights, and each of the `nodes` has a copy.
    A step of a recipe with several environments is planned once for each, as if all tasks selected it; the memory is
    that of the largest. Raises SaccadeError for a recipe that can't be planned.
    """
    recipe, assumptions = resolve_assumptions(recipe, assumptions, model_root)
    sizes = resolve_model_sizes(recipe)
    environments = ("", *recipe.environments)  # "" is the default one
    episodes = {name: estimate_environment(recipe, sizes, assumptions, name) for name in environments}
    tables, estimates = [summarize_recipe(name, recipe, sizes, episodes, assumptions)], dict[str, MemoryEstimate]()
    for stage, optim in (("RL", recipe.rl.optim), ("SFT", recipe.sft.optim)):
        if stage.lower() not in recipe.model_fields_set:
            continue
        memory = []
        for environment, episode in episodes.items():
            suffix = f", environment {environment}" if environment else ""
            if stage == "RL":
                training = estimate_rl_training(recipe, episode)
                title, rows = f"One RL step, at most{suffix}", _build_rollout_rows(recipe, sizes, episode, training)
            else:
                training = estimate_sft_training(recipe, episode)
                title, rows = f"One SFT step{suffix}", _build_training_rows(training)
            rows += _build_micro_step_rows(training, gpus * nodes)
            tables.append(Table(title=title, header=("", "", ""), rows=tuple(rows)))
            kl = recipe.rl.kl if stage == "RL" else None
            memory.append(estimate_memory(recipe, sizes, optim, training, gpus=gpus, nodes=nodes, kl=kl))
        estimates[stage] = max(memory, key=lambda estimate: estimate.peak)
    return [*tables, _build_memory_table(recipe, estimates, gpus, nodes)] if estimates else tables


def summarize_recipe(
    name: str, recipe: Recipe, sizes: ModelSizes, episodes: dict[str, EpisodeSize], assumptions: PlanAssumptions
) -> Table:
    """Summarize a recipe's model, environments, prompts and training."""
    model, rl, sft = recipe.model, recipe.rl, recipe.sft
    trained = "all weights" if model.trained_weights == "all" else "the language model's weights"
    weights = f"adapters of rank {model.lora_rank}" if model.lora_rank else trained
    parameters = f"{sizes.num_parameters / 1e9:.3g} B parameters"
    lines = {"model": f"{sizes.name}: {parameters}, {weights}, {model.dtype}, {model.device}"}
    media, unit = ("image", "images") if recipe.synthetic.media == "image" else ("video", "frames")
    size = "{}x{}".format(*assumptions.video_size)
    for environment, episode in episodes.items():
        prefix, sub_agent = f"{environment}: " if environment else "", episode.sub_agent
        plugin = recipe.environments[environment] if environment else recipe.environment
        prompts = " ".join(
            f"{conversation.num_frames}: {conversation.prompt_tokens:,} ({conversation.visual_tokens:,})"
            for conversation in episode.conversations
        )
        turns = f"{episode.max_tool_turns} tool turns of {episode.calls_per_turn} calls"
        lines[f"{prefix}environment"] = f"{plugin.name}: {turns}"
        lines[f"{prefix}prompt"] = f"{unit}: tokens (visual): {prompts}; {media} {size}"
        if sub_agent:
            prompt = f"{sub_agent.prompt_tokens:,} ({sub_agent.visual_tokens:,})"
            lines[f"{prefix}sub-agent"] = f"{sub_agent.num_frames}: {prompt}"
    lines["replies"] = f"{recipe.sampling.max_tokens:,} tokens a turn, temperature {recipe.sampling.temperature:g}"
    if "rl" in recipe.model_fields_set:
        whiten = "" if rl.advantage.whiten == "none" else f", whitened over {rl.advantage.whiten}"
        loss_settings = "".join(f" {key}={value}" for key, value in rl.loss.settings.items())
        coefficients = {"loss": rl.kl.loss_coef, "advantage": rl.kl.advantage_coef}
        kl = "".join(f"; KL {value:g} in the {term}" for term, value in coefficients.items() if value)
        lines["rewards"] = ", ".join(f"{term.weight:g} × {reward}" for reward, term in recipe.rewards.items())
        lines["RL"] = (
            f"{rl.steps:,} steps, {rl.optim.name}, learning rate {rl.optim.lr:g} {rl.optim.schedule}; "
            f"{rl.advantage.estimator}{whiten}; loss {rl.loss.name}{loss_settings}; ranked by "
            f"{rl.selection.rank_by}{kl}"
        )
    if "sft" in recipe.model_fields_set:
        lines["SFT"] = f"{sft.steps:,} steps, {sft.optim.name}, learning rate {sft.optim.lr:g} {sft.optim.schedule}"
    return Table(title=name, header=("", ""), rows=tuple((key, value) for key, value in lines.items() if value))


def _build_rollout_rows(
    recipe: Recipe, sizes: ModelSizes, episode: EpisodeSize, training: TrainingCost
) -> list[TableRow]:
    cost, group, sub_agent = estimate_rollouts(recipe, episode), recipe.rl.group_size, episode.sub_agent
    rounds = recipe.rl.selection.max_sampling_rounds
    again = "" if rounds == 1 else f", in up to {rounds} rounds" if rounds else ", in rounds until none is missing"
    prompts = f"{recipe.rl.prompts_per_step} of {cost.num_groups} prompts are trained, {group} episodes each{again}"
    rows = [
        ("episodes", f"{cost.num_episodes:,}", prompts),
        ("images", f"{cost.num_images:,}", "overviews once per prompt, windows once per sub-agent"),
        ("sampled tokens", f"{cost.sampled_tokens:,}", f"{episode.max_tool_turns + 1} replies per episode"),
    ]
    if sub_agent:
        sub_agents = f"{cost.num_episodes * episode.num_sub_agents:,} sub-agents with {sub_agent.sampled_tokens:,} each"
        rows.append(("sampled by sub-agents", f"{cost.sub_agent_sampled_tokens:,}", sub_agents))
    rows += _build_training_rows(training)
    token_bytes = sizes.compute_kv_bytes(DTYPE_BYTES[recipe.model.dtype])
    longest = f"the longest conversation: {format_bytes(token_bytes * cost.max_conversation_tokens)}"
    total = f"{cost.total_tokens:,} tokens, no shared prefixes"
    rows.append(("KV cache", f"{format_bytes(token_bytes)} per token", longest))
    rows.append(("KV cache, all episodes", format_bytes(token_bytes * cost.total_tokens), total))
    if limit := count_kv_cache_tokens(recipe):
        rows.append(("KV cache, engine's limit", format_bytes(token_bytes * limit), f"{limit:,} tokens"))
    return rows


def _build_training_rows(cost: TrainingCost) -> list[TableRow]:
    batches = (
        f"micro-batches: {cost.num_micro_batches:,}, of {cost.micro_batch_size} of {cost.num_rows:,} rows; "
        f"{cost.max_row_tokens:,} tokens each"
    )
    rows = [("trained tokens, packed", f"{cost.packed_tokens:,}", batches)]
    if cost.unpacked_tokens > cost.packed_tokens:
        ratio = f"without shared prefixes: {cost.unpacked_tokens / cost.packed_tokens:.2f} times as many"
        rows.append(("trained tokens, unpacked", f"{cost.unpacked_tokens:,}", ratio))
    return rows


def _build_micro_step_rows(cost: TrainingCost, num_ranks: int) -> list[TableRow]:
    if num_ranks == 1:
        return []
    num_micro_steps, idle_share = estimate_micro_steps(cost, num_ranks)
    idle = f"one micro-batch for each of {num_ranks:,} GPUs; they wait {idle_share:.0%} of the time for each other's"
    return [("micro-steps", f"{num_micro_steps:,}", idle)]


def _build_memory_table(recipe: Recipe, estimates: dict[str, MemoryEstimate], gpus: int, nodes: int) -> Table:
    amounts = [asdict(estimate) for estimate in estimates.values()]
    labels = {name: name.replace("_", " ") for name in amounts[0]} | {
        "activations": "activations, all saved",
        "master_weights": "float32 master weights",
        "reference_weights": "reference weights (KL)",
    }
    unused = "activations" if recipe.model.activation_checkpointing else "checkpointed_activations"
    labels[unused] = f"({labels[unused]})"  # not part of the peak
    num_processes = recipe.rollouts.num_processes if recipe.rollouts.executor == "processes" else 0
    labels["rollout_processes"] = f"{num_processes} rollout processes"
    if not num_processes:
        del labels["rollout_processes"]
    rows = tuple((label, *(format_bytes(by_name[name]) for by_name in amounts)) for name, label in labels.items())
    device = (
        f"each of {gpus} GPUs" if gpus * nodes > 1 else f"one {'process' if recipe.model.device == 'cpu' else 'GPU'}"
    )
    device += f" of each of {nodes} nodes" if nodes > 1 else ""
    if num_processes:
        device += ", the first with the rollout processes" if gpus * nodes > 1 else " with the rollout processes"
    return Table(title=f"Estimated training memory of {device}", header=("", *estimates), rows=rows)


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(147456), format_bytes(17 * 2**30)
    ('144 KiB', '17.0 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.0f} {unit}" if num_bytes >= 100 * size else f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
