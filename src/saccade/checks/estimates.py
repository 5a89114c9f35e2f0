"""Estimate conversations, RL and SFT steps, and a GPU's memory from a recipe alone.

    recipe ──> EpisodeSize ──> RolloutCost ──┐
    (each environment) └────> TrainingCost ──┴──> tables (plan.py), checks (run_checks.py)
    model sizes ─────────────────┴──> MemoryEstimate

A prompt is the family's template around placeholder images; no media is decoded and no weights are loaded.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from saccade import plugins
from saccade.algorithms.group_advantages import needs_greedy_baseline
from saccade.chat.families.base import ModelText, TemplateText
from saccade.chat.renderer import load_renderer
from saccade.config.schema import KlConfig, OptimizerConfig, Recipe, RlConfig, SftConfig, SyntheticModelConfig
from saccade.errors import ConfigError
from saccade.ledger import ImageRef, Ledger
from saccade.media.frame_sampling import interleave_timestamps, pair_frames
from saccade.media.image import fit_size
from saccade.models.model_sizes import ModelSizes, get_published_sizes, get_tiny_sizes
from saccade.models.pass_limits import MAX_LOGITS_PER_CHUNK, MAX_VISION_TOKENS
from saccade.protocols import PixelBudget
from saccade.rollouts.components import resolve_settings, resolve_tool_settings
from saccade.tools.base import load_tool
from saccade.training.packing import PrefixTree, bin_pack, split_rows
from saccade.types import Message

Medium = Literal["video", "image"]
# Counts the tokens of a prompt's messages and tool schemas.
TokenCounter = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], int]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_COUNT = 4_000_000  # of a planned step's conversations, rows and frames, and of a conversation's tokens
_FLOAT32_BYTES = 4
_MOMENT_BYTES_IN_8_BITS = 1 + 4 / 256  # a scale per 256 values; small and odd tensors, in float32, are not counted
_LOGITS_COPIES = 5  # of a chunk of logits, at the peak
_ENTROPY_COPIES = 1.25  # of it, which the gradient of the entropies adds
_MLP_COPIES = 3  # of a layer's widest activation, in its backward pass
_CUBLAS_BYTES = 2 * 2**25  # workspaces of the forward and the backward thread, as large as on Hopper
_TURN_MARKER_TOKENS = 8  # around a turn, or around a tool result
_PREFILL_TOKENS = 2  # of the prefilled think tag
_TOKEN_PATTERN = re.compile(r"<\|\w+\|>|\d| ?[^\W\d_]{1,8}|[^\w\s]+|\s+|_")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAssumptions:
    """What a recipe doesn't specify; the last two replace its limits, to estimate a usual step, not the largest."""

    video_size: tuple[int, int] = (1920, 1080)  # width and height of the video or image
    question_tokens: int = 64  # of a question with its options
    reply_tokens: int | None = None
    calls_per_turn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSize:
    """A conversation; a visual token of the prompt is one of its tokens."""

    num_frames: int  # of the prompt
    prompt_tokens: int
    visual_tokens: int  # of the prompt
    sampled_tokens: int
    total_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Tokens after the prompt."""
        return self.total_tokens - self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSize:
    """The conversations of an episode: its own, one per frame budget K, and a sub-agent's."""

    conversations: tuple[ConversationSize, ...]
    sub_agent: ConversationSize | None
    max_tool_turns: int  # with tools
    calls_per_turn: int

    @property
    def num_sub_agents(self) -> int:
        """The most sub-agents that an episode can have."""
        return self.max_tool_turns * self.calls_per_turn if self.sub_agent else 0

    @property
    def longest(self) -> ConversationSize:
        """The conversation with the most tokens."""
        return max(self.conversations, key=lambda conversation: conversation.total_tokens)

    def assign_frame_budgets(self, num_prompts: int) -> list[ConversationSize]:
        """Return the conversations of `num_prompts` prompts: budgets in rotation from the largest, equally often."""
        longest_first = sorted(self.conversations, key=lambda conversation: -conversation.total_tokens)
        return [longest_first[i % len(longest_first)] for i in range(num_prompts)]


def resolve_model_sizes(recipe: Recipe) -> ModelSizes:
    """Return the sizes of the recipe's model: its folder's, its planned model's, or a tiny model's."""
    if recipe.model.path:
        from saccade.models.config_sizes import read_sizes  # torch and transformers, which the others don't need

        return read_sizes(recipe.model.path)
    if recipe.model.memory_plan_model:
        return get_published_sizes(recipe.model.memory_plan_model)
    if recipe.synthetic.model != SyntheticModelConfig():
        from saccade.models.config_sizes import compute_tiny_sizes  # torch and transformers

        return compute_tiny_sizes(recipe.model.family, **recipe.synthetic.model.model_dump())
    return get_tiny_sizes(recipe.model.family)


def resolve_assumptions(
    recipe: Recipe, assumptions: PlanAssumptions, model_root: Path
) -> tuple[Recipe, PlanAssumptions]:
    """Return the recipe with its model's path resolved against `model_root` if it is there, and its videos' size."""
    if recipe.model.path and (model_root / recipe.model.path).exists():
        recipe = recipe.with_values({"model.path": str(model_root / recipe.model.path)})
    if not recipe.model.memory_plan_model:  # planned with the synthetic videos or images
        side = recipe.synthetic.image.image_size if recipe.synthetic.media == "image" else recipe.synthetic.frame_size
        assumptions = replace(assumptions, video_size=(side, side))
    return recipe, assumptions


def explain_replaced_assumptions(recipe: Recipe, assumptions: PlanAssumptions) -> list[str]:
    """Return a sentence for each assumption in place of which the plan uses the recipe's own limit or size."""
    sentences = []
    reply, calls, max_tokens = assumptions.reply_tokens, assumptions.calls_per_turn, recipe.sampling.max_tokens
    if reply is not None and reply > max_tokens:
        sentences.append(f"--reply-tokens={reply} is above sampling.max_tokens={max_tokens}, which the plan uses")
    named = (recipe.environment, *recipe.environments.values())
    environments = [resolve_settings("environments", plugin) for plugin in named]
    calls_limit = max(map(_get_max_calls, environments))
    if calls is not None and not any(map(resolve_tool_settings, environments)):
        sentences.append("--calls-per-turn has no effect: the recipe has no tools")
    elif calls is not None and calls > calls_limit:
        limit = "the calls of a turn that the recipe allows (max_calls_per_turn)"
        sentences.append(f"--calls-per-turn={calls} is above {calls_limit}, {limit}, which the plan uses")
    if assumptions.video_size != PlanAssumptions().video_size and not recipe.model.memory_plan_model:
        sentences.append("--video-size has no effect: the plan uses the recipe's synthetic videos or images")
    return sentences


# ---- an episode ----------------------------------------------------------------------------------------------------


def estimate_environment(
    recipe: Recipe, sizes: ModelSizes, assumptions: PlanAssumptions, environment: str
) -> EpisodeSize:
    """Estimate an episode of the environment that tasks select by this name, or of the default one ("").

    Tasks of either medium may select a named environment, so its prompts hold frames, or one image. Raises ConfigError
    if no prompt leaves room for a reply.
    """
    if not environment:
        return estimate_episode(recipe, sizes, assumptions)
    environment_recipe = recipe.with_values({"environment": recipe.environments[environment]})
    section, episodes, misfit = f"environments.{environment}", [], ConfigError()
    for medium in get_args(Medium):
        try:
            episodes.append(estimate_episode(environment_recipe, sizes, assumptions, medium=medium, section=section))
        except ConfigError as error:
            misfit = error
    if not episodes:
        raise misfit
    conversations = tuple(conversation for episode in episodes for conversation in episode.conversations)
    return replace(episodes[0], conversations=conversations)


def estimate_episode(
    recipe: Recipe,
    sizes: ModelSizes,
    assumptions: PlanAssumptions,
    *,
    medium: Medium | None = None,
    section: str = "environment",
) -> EpisodeSize:
    """Estimate the conversations of one episode in the recipe's default environment.

    The `medium` of the prompt is that of the synthetic data by default. Raises ConfigError, with a key in the recipe's
    `section`, if a prompt leaves no room for a reply.
    """
    settings, count_tokens = resolve_settings("environments", recipe.environment), build_token_counter(recipe, sizes)
    tools = resolve_tool_settings(settings)
    turns = settings.get("max_tool_turns", 0) if tools else 0
    calls = _get_max_calls(settings)
    calls = calls if assumptions.calls_per_turn is None else min(calls, assumptions.calls_per_turn)
    reply = min(recipe.sampling.max_tokens, assumptions.reply_tokens or recipe.sampling.max_tokens)
    prefill = _PREFILL_TOKENS if settings.get("force_think") else 0
    pairs = recipe.media.frame_pairs
    images = sum(count_tool_visual_tokens(tool, calls, turns, sizes.factor, pairs) for tool in tools.values())
    texts = calls * (min(settings.get("max_tool_result_tokens", 512), reply) + _TURN_MARKER_TOKENS)
    results = texts + images + _TURN_MARKER_TOKENS  # tokens of a turn's tool results
    context = settings.get("max_context_tokens", 32768)
    schemas = [plugins.load("tools", name).schema for name in tools] if settings.get("show_tool_schemas", True) else []
    system = [Message(role="system", parts=(settings["system_prompt"],))] if settings.get("system_prompt") else []
    is_image = (medium or recipe.synthetic.media) == "image"  # a prompt with one image, without timestamps

    def estimate_conversation(
        num_frames: int, pixels: tuple[int, int], num_replies: int, *, is_main_agent: bool
    ) -> ConversationSize:
        _require_countable({f"{section}.settings.num_frames": num_frames})
        budget = PixelBudget(min_pixels=pixels[0], max_pixels=pixels[1])
        width, height = fit_size(*assumptions.video_size, sizes.factor, budget)
        frames = [ImageRef(path="", digest="", time=100.0 + i, width=width, height=height) for i in range(num_frames)]
        images = pair_frames(frames) if recipe.media.frame_pairs and not is_image else frames
        user = Message(role="user", parts=tuple(images if is_image else interleave_timestamps(images)))
        prompt = count_tokens([*system, user], schemas) if is_main_agent else count_tokens([user], ())
        prompt += assumptions.question_tokens + (prefill if is_main_agent else 0)
        if prompt >= context:
            key = f"{section}.settings.max_context_tokens"
            raise ConfigError(
                f"a prompt of {num_frames} frames and a question of {assumptions.question_tokens} tokens takes "
                f"{prompt} tokens, and the context ends at {context}; show fewer or smaller frames, or raise {key}",
                key=key,
                value=context,
            )
        return ConversationSize(
            num_frames=num_frames,
            prompt_tokens=prompt,
            visual_tokens=len(images) * width * height // sizes.factor**2,
            sampled_tokens=min(num_replies * reply, context - prompt),
            total_tokens=min(context, prompt + num_replies * reply + (num_replies - 1) * (results + prefill)),
        )

    pixel_range = settings.get("image_pixels" if is_image else "frame_pixels", (784, 50176))
    budgets = recipe.frame_budgets or (settings.get("num_frames", 0),)
    if is_image:
        budgets = (1,)
    elif settings.get("video_in_prompt") is False:  # the video is only in the interpreter
        budgets = (0,)
    main = [estimate_conversation(frames, pixel_range, turns + 1, is_main_agent=True) for frames in budgets]
    sub_agents = [
        estimate_conversation(
            tool.get("frame_range", (0, 0))[1], tool.get("frame_pixels", pixel_range), 1, is_main_agent=False
        )
        for name, tool in tools.items()
        if turns and load_tool(name).may_run_sub_agent
    ]
    largest = max(sub_agents, key=lambda conversation: conversation.total_tokens, default=None)
    return EpisodeSize(conversations=tuple(main), sub_agent=largest, max_tool_turns=turns, calls_per_turn=calls)


def _get_max_calls(settings: Mapping[str, Any]) -> int:
    """Return the most calls of a turn, from an environment's settings."""
    return int(settings.get("max_calls_per_turn", 1)) if settings.get("parallel_tool_calls", True) else 1


def count_tool_visual_tokens(
    tool: Mapping[str, Any], calls: int, turns: int, factor: int, frame_pairs: bool = False
) -> int:
    """Return the most visual tokens that a tool's results add to a turn, from the tool's settings.

    A tool shows one image per call, `max_frames` per call (half as many pairs with `frame_pairs`), or the turn's share
    of `max_images`; one with a `frame_range` shows its frames to a sub-agent.
    """
    pixels = tool.get("frame_pixels", tool.get("image_pixels"))
    if pixels is None or "frame_range" in tool:
        return 0
    num_images = tool.get("max_frames", 1)
    if frame_pairs and "frame_pixels" in tool:
        num_images = math.ceil(num_images / 2)
    num_images *= calls
    if "max_images" in tool:
        num_images = -(-tool["max_images"] // max(turns, 1))
    return num_images * (int(pixels[1]) // factor**2)


def build_token_counter(recipe: Recipe, sizes: ModelSizes) -> TokenCounter:
    """Return a function that counts a prompt's tokens: by the model's tokenizer, or without it by `estimate_tokens`."""
    if recipe.model.path:
        renderer = load_renderer(recipe.model.path)
        return lambda messages, tools: len(Ledger(segments=(renderer.render(Ledger(), messages, tools=tools),)))
    family = plugins.load("chat.families", recipe.model.family)

    def count_tokens(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        return sum(
            piece.width * piece.height // sizes.factor**2
            if isinstance(piece, ImageRef)
            else estimate_tokens(piece.text if isinstance(piece, TemplateText | ModelText) else piece)
            for piece in (*family.render_start(messages, tools), family.generation_prompt)
        )

    return count_tokens


def estimate_tokens(text: str) -> int:
    """Estimate a text's tokens: one per word (of at most eight letters), digit, and run of punctuation.

    >>> estimate_tokens("<12.5 seconds>"), estimate_tokens("Which colour is shown?")
    (7, 5)
    """
    return len(_TOKEN_PATTERN.findall(text))


# ---- a step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCost:
    """The rollouts of an RL step; `total_tokens` are those of conversations at their longest, nothing shared."""

    num_groups: int
    num_episodes: int
    num_images: int
    sampled_tokens: int
    sub_agent_sampled_tokens: int
    total_tokens: int
    max_conversation_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """The training of a step: tokens with one row per conversation, and the rows packed with shared prefixes."""

    unpacked_tokens: int
    visual_tokens: int
    trained_tokens: int
    row_lengths: tuple[int, ...]  # the longest row first
    micro_batch_size: int
    num_mini_batches: int = 1  # optimizer steps of a pass
    # Of the row with the most: tokens of shared prefixes, once for each branch that attends to them.
    max_row_prefix_tokens_of_branches: int = 0

    @property
    def packed_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.row_lengths)

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return len(self.row_lengths)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one process."""
        return math.ceil(self.num_rows / self.micro_batch_size)

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.row_lengths[0]

    @property
    def max_row_visual_tokens(self) -> int:
        """Visual tokens of the longest row."""
        return math.ceil(self.max_row_tokens * self.visual_tokens / self.packed_tokens)

    @property
    def max_row_trained_tokens(self) -> int:
        """Trained tokens of the longest row."""
        return math.ceil(self.max_row_tokens * self.trained_tokens / self.packed_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each GPU: the persistent state, and what one micro-batch saves for its gradients.

    The rollout processes, and with them the peak, are those of the first GPU, or of a CPU's memory.
    """

    weights: int
    gradients: int
    optimizer_state: int
    master_weights: int
    reference_weights: int
    activations: int  # all that autograd saves
    checkpointed_activations: int  # what it saves with activation checkpointing
    logits: int
    rollout_processes: int  # models and full KV caches of all processes of rollouts.executor=processes
    # in a step's last backward pass, with the recipe's activation checkpointing, or in its update; not the sum of all
    peak: int


def _require_countable(counts: Mapping[str, int]) -> None:
    """Raise ConfigError for a step too large to plan; `counts` are its numbers by the keys that decide them."""
    for key, count in counts.items():
        if count > MAX_COUNT:
            message = f"{key} is too large to plan: a step would have {count:.3g} of its items, more than {MAX_COUNT:,}"
            raise ConfigError(message, key=key, value=count)


def _require_plannable(num_groups: int, group_size: int, episode: EpisodeSize) -> None:
    """Raise ConfigError for an RL step with too many conversations to plan."""
    _require_countable(
        {
            "rl.prompts_per_step": num_groups,
            "rl.group_size": num_groups * group_size,
            "environment.settings.max_tool_turns": num_groups * group_size * episode.num_sub_agents,
            "environment.settings.max_context_tokens": episode.longest.total_tokens,
        }
    )


def estimate_rollouts(recipe: Recipe, episode: EpisodeSize) -> RolloutCost:
    """Estimate the rollouts that an RL step starts: more than it trains, if it oversamples or over-provisions.

    These are the rounds that fill a step if every group passes the filters. A group's greedy episode, if the advantage
    estimator needs one, is one of its episodes.
    """
    group_size = recipe.rl.group_size + needs_greedy_baseline(recipe.rl.advantage)
    num_collected, num_started = recipe.rl.selection.compute_start_counts(recipe.rl.prompts_per_step)
    num_groups = num_started * math.ceil(recipe.rl.prompts_per_step / num_collected)
    _require_plannable(num_groups, group_size, episode)
    prompts = episode.assign_frame_budgets(num_groups)
    children = [episode.sub_agent] * (num_groups * group_size * episode.num_sub_agents) if episode.sub_agent else []
    return RolloutCost(
        num_groups=num_groups,
        num_episodes=num_groups * group_size,
        num_images=sum(conversation.num_frames for conversation in (*prompts, *children)),
        sampled_tokens=sum(prompt.sampled_tokens for prompt in prompts) * group_size,
        sub_agent_sampled_tokens=sum(child.sampled_tokens for child in children),
        total_tokens=sum(conversation.total_tokens for conversation in (*prompts * group_size, *children)),
        max_conversation_tokens=episode.longest.total_tokens,
    )


def estimate_rl_training(recipe: Recipe, episode: EpisodeSize) -> TrainingCost:
    """Estimate the training of an RL step: whole groups, and their sub-agents if those share the credit."""
    settings, group_size, sub_agent = recipe.rl, recipe.rl.group_size, episode.sub_agent
    _require_plannable(settings.prompts_per_step, group_size, episode)
    prompts = episode.assign_frame_budgets(settings.prompts_per_step)
    num_children = len(prompts) * group_size * episode.num_sub_agents
    children = [sub_agent] * num_children if sub_agent and settings.advantage.sub_agent_advantage != "none" else []
    trees = [(plan_tree(child, 1), child) for child in children]
    for prompt in prompts:
        trees += [(tree, prompt) for tree in plan_trees(prompt, group_size, settings.pack_length)]
    return _estimate_training(
        settings,
        unpacked_tokens=sum(conversation.total_tokens for conversation in (*prompts * group_size, *children)),
        trees=[tree for tree, _ in trees],
        visual_tokens=sum(conversation.visual_tokens for _, conversation in trees),
        trained_tokens=sum(conversation.sampled_tokens for conversation in (*prompts * group_size, *children)),
    )


def estimate_sft_training(recipe: Recipe, episode: EpisodeSize) -> TrainingCost:
    """Estimate the training of an SFT step: full rows with the largest prompt's share of visual tokens."""
    settings, longest = recipe.sft, episode.longest
    row = PrefixTree(prefix_length=0, sample_indices=(), num_tokens=settings.pack_length)
    _require_countable({"sft.tokens_per_step": settings.tokens_per_step // settings.pack_length})
    return _estimate_training(
        settings,
        unpacked_tokens=settings.tokens_per_step,
        trees=[row] * math.ceil(settings.tokens_per_step / settings.pack_length),
        visual_tokens=math.ceil(settings.tokens_per_step * longest.visual_tokens / longest.prompt_tokens),
        trained_tokens=math.ceil(settings.tokens_per_step * longest.sampled_tokens / longest.total_tokens),
    )


def _estimate_training(
    settings: RlConfig | SftConfig,
    *,
    unpacked_tokens: int,
    trees: Sequence[PrefixTree],
    visual_tokens: int,
    trained_tokens: int,
) -> TrainingCost:
    rows = bin_pack(trees, settings.pack_length)
    attended = [sum(tree.prefix_length * len(tree.sample_indices) for tree in row) for row in rows]
    return TrainingCost(
        unpacked_tokens=unpacked_tokens,
        visual_tokens=visual_tokens,
        trained_tokens=trained_tokens,
        row_lengths=tuple(sorted((sum(tree.num_tokens for tree in row) for row in rows), reverse=True)),
        micro_batch_size=min(len(rows), settings.micro_batch_size),
        num_mini_batches=min(len(rows), settings.num_mini_batches) if isinstance(settings, RlConfig) else 1,
        max_row_prefix_tokens_of_branches=max(attended),
    )


def estimate_micro_steps(training: TrainingCost, num_ranks: int) -> tuple[int, float]:
    """Return the micro-steps of a pass over a step's micro-batches, and the share of the ranks' time without one.

    What ranks do together, such as the optimizer's update, isn't counted.
    """
    micro_steps, num_tokens = list_micro_step_tokens(training, num_ranks)
    return len(micro_steps), 1 - num_tokens / (num_ranks * sum(micro_steps))


def list_micro_step_tokens(training: TrainingCost, num_ranks: int) -> tuple[list[int], int]:
    """Return the tokens of each micro-step's longest micro-batch, and those of all micro-batches; both with padding.

    The time of a micro-batch grows with its tokens; a micro-step takes as long as its longest micro-batch. Mini-batches
    have equal shares of the rows.
    """
    num_tokens, micro_steps = 0, list[int]()
    for first in range(training.num_mini_batches):
        row_lengths = training.row_lengths[first :: training.num_mini_batches]
        parts = split_rows(len(row_lengths), training.micro_batch_size, num_ranks)
        lengths = sorted((len(row_lengths[part]) * row_lengths[part.start] for part in parts), reverse=True)
        num_tokens += sum(lengths)
        micro_steps += lengths[::num_ranks]
    return micro_steps, num_tokens


def plan_trees(conversation: ConversationSize, num_episodes: int, pack_length: int) -> list[PrefixTree]:
    """Plan the prefix trees of a group; if the group exceeds a row, each tree repeats the prompt.

    >>> size = ConversationSize(num_frames=4, prompt_tokens=100, visual_tokens=4, sampled_tokens=50, total_tokens=150)
    >>> [tree.num_tokens for tree in plan_trees(size, 8, 300)]
    [300, 300]
    """
    most = max(1, (pack_length - conversation.prompt_tokens) // conversation.completion_tokens)
    return [plan_tree(conversation, min(most, num_episodes - start)) for start in range(0, num_episodes, most)]


def plan_tree(conversation: ConversationSize, num_branches: int) -> PrefixTree:
    """Plan the tree of a prompt and its branches; a single branch has no prefix of its own."""
    return PrefixTree(
        prefix_length=conversation.prompt_tokens if num_branches > 1 else 0,
        sample_indices=tuple(range(num_branches)),
        num_tokens=conversation.prompt_tokens + num_branches * conversation.completion_tokens,
    )


# ---- memory --------------------------------------------------------------------------------------------------------


def estimate_state(
    recipe: Recipe, sizes: ModelSizes, optim: OptimizerConfig, *, gpus: int = 1, nodes: int = 1
) -> dict[str, int]:
    """Estimate the bytes of the weights and of all that training stores per weight, on each of a node's `gpus` GPUs.

    Several GPUs shard the weights in float32, so there is no master copy; a frozen vision tower isn't sharded. What is
    gathered at a time counts as weights and gradients: the root unit (all but the language layers) and two layers, one
    of them prefetched. What `model.cpu_offload` moves to the CPU's memory counts only if that is the device.
    """
    is_offloaded = recipe.model.cpu_offload and recipe.model.device != "cpu"
    size = DTYPE_BYTES[recipe.model.dtype]
    trained, num_matrix = sizes.count_trained_parameters(recipe.model)
    # AdamW has two moments per parameter, Muon one.
    num_muon = num_matrix if optim.name == "muon" else 0
    moment_bytes = _MOMENT_BYTES_IN_8_BITS if optim.name == "adamw_8bit" else _FLOAT32_BYTES
    optimizer_state = int((2 * trained - num_muon) * moment_bytes)
    if gpus * nodes > 1:
        num_weights = _count_weights(recipe, sizes)
        num_vision, num_layers = sizes.count_vision_parameters(), sizes.count_layer_parameters()
        num_replicated = num_vision if recipe.model.lora_rank or recipe.model.trained_weights != "all" else 0
        num_root, num_layer = sizes.num_parameters - num_layers - num_replicated, num_layers // sizes.num_layers
        num_gathered = 0 if recipe.model.lora_rank else num_root + num_layer  # an adapter is far smaller than a layer
        part_bytes = 0 if is_offloaded else _FLOAT32_BYTES
        return {
            "weights": (num_weights - num_replicated) * part_bytes // gpus
            + (num_replicated + num_root + 2 * num_layer) * size,
            "gradients": trained * part_bytes // gpus + num_gathered * size,
            "optimizer_state": 0 if is_offloaded else optimizer_state // gpus,
            "master_weights": 0,
        }
    has_copies = size < _FLOAT32_BYTES or recipe.model.cpu_offload
    return {
        "weights": _count_weights(recipe, sizes) * size,
        "gradients": trained * (size if is_offloaded else _FLOAT32_BYTES),  # those of bfloat16 are converted to float32
        "optimizer_state": 0 if is_offloaded else optimizer_state,
        "master_weights": 0 if is_offloaded or not has_copies else trained * _FLOAT32_BYTES,
    }


def count_kv_cache_tokens(recipe: Recipe) -> int:
    """Return the tokens whose keys and values the recipe's engine stores at most, 0 if servers store them."""
    settings = resolve_settings("engines", recipe.engine)
    return int(settings.get("kv_cache_tokens", 0)) + int(settings.get("prefix_cache_tokens", 0))


def estimate_rollout_processes(recipe: Recipe, sizes: ModelSizes) -> int:
    """Estimate the bytes of all processes of rollouts.executor=processes: a model and a full KV cache for each.

    All of them are on `model.device`: with "cuda" on the first GPU, also beside several training processes.
    """
    if recipe.rollouts.executor != "processes":
        return 0
    size = DTYPE_BYTES[recipe.model.dtype]
    kv_cache = count_kv_cache_tokens(recipe) * sizes.compute_kv_bytes(size)
    return recipe.rollouts.num_processes * (_count_weights(recipe, sizes) * size + kv_cache)


def _count_weights(recipe: Recipe, sizes: ModelSizes) -> int:
    """Return the number of a model's weights, those of its adapters included."""
    trained, _ = sizes.count_trained_parameters(recipe.model)
    return sizes.num_parameters + (trained if recipe.model.lora_rank else 0)


def estimate_memory(
    recipe: Recipe,
    sizes: ModelSizes,
    optim: OptimizerConfig,
    training: TrainingCost,
    *,
    gpus: int = 1,
    nodes: int = 1,
    kl: KlConfig | None = None,
) -> MemoryEstimate:
    """Estimate training memory on each of `gpus` GPUs of each node, with the reference weights that `kl` needs.

    `kl` is None in SFT.
    """
    size = DTYPE_BYTES[recipe.model.dtype]
    B, T, rank = training.micro_batch_size, training.max_row_tokens, recipe.model.lora_rank
    on_device = recipe.model.device != "cpu"
    repeat_kv = on_device and recipe.model.attention != "varlen"
    layer_bytes = sizes.compute_text_activation_bytes(size, repeat_kv=repeat_kv, lora_rank=rank) * B * T
    if on_device:  # the keys and values of a prefix are copied for each branch; a CPU's kernel reads them in place
        key_width = sizes.query_width if repeat_kv else sizes.key_width
        layer_bytes += 2 * size * key_width * B * training.max_row_prefix_tokens_of_branches
    activations = sizes.num_layers * layer_bytes
    inputs = sizes.num_layers * size * sizes.hidden_size * B * T  # of the layers, which checkpoints keep
    checkpointed = inputs + layer_bytes
    # A frozen vision tower saves no activations.
    if not rank and recipe.model.trained_weights == "all":
        patches = B * training.max_row_visual_tokens * sizes.spatial_merge_size**2
        block = sizes.compute_vision_activation_bytes(size)
        activations += sizes.vision_depth * block * patches
        vision_inputs = sizes.vision_depth * size * sizes.vision_hidden_size * patches
        inputs += vision_inputs
        checkpointed += vision_inputs + block * min(patches, MAX_VISION_TOKENS * sizes.spatial_merge_size**2)
    trained, _ = sizes.count_trained_parameters(recipe.model)
    has_reference = kl is not None and kl.reference_device == "device" and bool(kl.loss_coef or kl.advantage_coef)
    state = estimate_state(recipe, sizes, optim, gpus=gpus, nodes=nodes)
    reference_size = size if gpus * nodes == 1 else _FLOAT32_BYTES
    state["reference_weights"] = trained * reference_size // gpus if has_reference else 0
    has_entropy_bonus = kl is not None and recipe.rl.loss.entropy_coef > 0
    copies = _LOGITS_COPIES + (_ENTROPY_COPIES if has_entropy_bonus else 0)
    num_logits = min(B * training.max_row_trained_tokens * sizes.vocab_size, MAX_LOGITS_PER_CHUNK)
    logits = int(copies * _FLOAT32_BYTES * num_logits)
    # The loss comes before the backward pass of the last layer, which the checkpoints recompute only then.
    mlp = _MLP_COPIES * size * sizes.intermediate_size * B * T
    if recipe.model.activation_checkpointing:
        step = max(inputs + logits, checkpointed + mlp)
    else:
        step = activations + max(logits, mlp)
    # One process converts gradients in the optimizer's update, without activations.
    gradients = trained * size if gpus * nodes == 1 else state["gradients"]
    num_parallel = 1 if on_device else min(recipe.model.num_threads, training.num_micro_batches)
    if num_parallel > 1:  # each micro-batch has gradients of its own until they are added
        step = num_parallel * (step + gradients)
    # SFT starts the processes to validate.
    rollout_processes = estimate_rollout_processes(recipe, sizes) if kl is not None or recipe.validation.every else 0
    persistent = sum(state.values()) - state["gradients"] + rollout_processes
    return MemoryEstimate(
        **state,
        activations=activations,
        checkpointed_activations=checkpointed,
        logits=logits,
        rollout_processes=rollout_processes,
        peak=persistent + max(gradients + step, state["gradients"]) + (_CUBLAS_BYTES if on_device else 0),
    )
