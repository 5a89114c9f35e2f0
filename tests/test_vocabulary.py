"""The vocabulary and the names of an earlier version stay out of code, comments, messages, documents and results."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("src", "tests", "scripts", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(path for suffix in ("yaml", "j2") for path in (ROOT / "src").rglob(f"*.{suffix}")),
        *(path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix),
    ]
)
RESULTS = sorted((ROOT / "docs").rglob("*.json"))

# Words of names and prose alike; a standard term stands beside each.
WORDS = {
    "whoever": "the caller, the client, the worker",
    "nobody": "no client, no worker",
    "somebody": "another process, another user",
    "told": "receives, is reported",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "greet": "connect, handshake",
    "greeted": "connected",
    "greeting": "handshake",
    "lateness": "staleness",
    "conductor": "controller",
    "wave": "micro-step",
    "waves": "micro-steps",
    "rehearse": "replay, check",
    "rehearsed": "replayed, checked",
    "rehearsal": "check",
    "aside": "in the background",
    "lot": "batch",
    "lots": "batches",
    "quiet": "drained, idle",
    "meet": "connect",
    "met": "connected",
    "talk": "conversation",
    "talks": "conversations",
    "shelf": "resources",
    "desk": "session",
    "hay": "background clips",
    "aimed": "resolved",
    "guessed": "inferred",
    "exam": "evaluation",
    "exams": "evaluations",
    "teller": "tool result role",
    "leaked": "Python-style",
    "foreign": "third-party",
    "gold": "ground truth",
    "golds": "ground truths",
    "blind": "constant-answer",
    "punished": "negative advantage",
    "edition": "weight version",
    "editions": "weight versions",
    "tally": "progress",
    "scorecard": "result of a benchmark",
    "scorecards": "results of benchmarks",
}
# Names of recipe keys, metrics, types, functions and files that were renamed; today's name stands beside each.
OLD_NAMES = {
    # recipe keys
    "rl.prompts": "rl.prompts_per_step",
    "rl.group": "rl.group_size",
    "rl.updates": "rl.epochs_per_batch, rl.num_mini_batches",
    "updates_per_batch": "epochs_per_batch, num_mini_batches",
    "rl.staleness": "rl.simulated_staleness",
    "rl.select": "rl.selection, rl.filters",
    "max_waiting_tokens": "max_queued_tokens",
    "row_tokens": "pack_length",
    "rows_per_pass": "micro_batch_size",
    "mean_std": "grpo",
    "leave_one_out": "rloo",
    "overlaunch": "over_provision",
    "drop_ends": "statuses",
    "must_show_image": "require_tool_image",
    "min_spread": "reward_std",
    "min_reward_std": "reward_std",
    "correct_with_negative_advantage": "drop_correct_with_negative_advantage",
    "on_short": "on_underfilled",
    "importance_cap": "tis_cap",
    "behaviour_cap": "stale_tis_cap",
    "clip_norm": "max_grad_norm",
    "decay_from": "decay_start",
    "per_scene": "demonstrations_per_prefix",
    "samples_per_context": "demonstrations_per_prefix",
    "sft.practice": "sft.auxiliary_fraction",
    "practice_first": "auxiliary_warmup",
    "gating.frames": "frame_budgets",
    "episode_seconds": "episode_timeout",
    "model.published": "model.memory_plan_model",
    "model.base_model": "model.memory_plan_model",
    "model.process_timeout": "model.collective_timeout",
    "rollouts.launcher": "rollouts.executor",
    "connect_launcher": "connect_executor",
    "RayLauncher": "RayExecutor",
    "process_timeout": "collective_timeout",
    "rl.kl.estimator": "rl.kl.penalty_estimator",
    "sum_norm": "token_sum_divisor",
    "losses.clipped": "losses.ppo_clip",
    "model.threads": "model.num_threads",
    "data.traces": "data.demonstrations",
    "evaluation.repeat": "evaluation.num_samples",
    "evaluation.frames": "evaluation.frame_budgets",
    "evaluation.tools": "evaluation.use_tools",
    "chart_side": "grid_size",
    "agent.settings": "environment.settings",
    "think_prefix": "force_think",
    "overview_frames": "num_frames",
    "overview_pixels": "frame_pixels",
    "result_tokens": "max_tool_result_tokens",
    "context_tokens": "max_context_tokens",
    "subtitle_tokens": "max_subtitle_tokens",
    "forced_answer": "final_answer_prompt",
    "bare_answer": "accept_untagged_answer",
    "usual_fps": "default_fps",
    "most_frames": "max_frames",
    "flight_tokens": "kv_cache_tokens",
    "kept_tokens": "prefix_cache_tokens",
    "pass_tokens": "max_num_batched_tokens",
    "feature_bytes": "vision_cache_bytes",
    "key_variable": "api_key_env",
    "at_once": "max_concurrency",
    "call_cost": "tool_call_penalty",
    "sub_agent_credit": "sub_agent_advantage",
    "baseline_reward": "greedy_baseline_reward",
    "with_baseline": "with_greedy_baseline",
    "group.baseline": "group.greedy_baseline",
    "open_think": "unclosed_think_fraction",
    "start_steps": "initial_checkpoint_steps",
    "environment.settings.max_turns": "environment.settings.max_tool_turns",
    "tool_error": "environment_error",
    "parallel_crop": "tool_calling",
    "rl.kl.reward_coef": "rl.kl.advantage_coef",
    "reward_coef": "advantage_coef",
    "rl.kl.reward_estimator": "rl.kl.penalty_estimator",
    "reward_estimator": "penalty_estimator",
    "on_stale_group: truncate": "on_stale_group: mask",
    "on_stale_group=truncate": "on_stale_group=mask",
    "above_tis_cap: drop": "above_tis_cap: mask",
    "above_stale_tis_cap: drop": "above_stale_tis_cap: mask",
    "rl.mini_batches": "rl.num_mini_batches",
    "planned_model": "memory_plan_model",
    "demonstrations_per_media": "demonstrations_per_prefix",
    "needles.call_seconds": "needles.window_seconds",
    "needles.turns": "needles.tool_turns",
    "evaluation.limit": "evaluation.num_tasks",
    "correct: true": "is_accuracy: true",
    "rewards.accuracy.correct": "rewards.accuracy.is_accuracy",
    "correct_negative": "drop_correct_with_negative_advantage",
    "tool_image": "require_tool_image",
    "reads_costly": "direct_answers_call_penalty",
    "initial_checkpoints/usual": "initial_checkpoints/base_sft",
    # metrics
    "tool_share": "frac_with_tool_call",
    "calls/leaked": "calls/python_style",
    "end/max_turns": "status/max_turns",
    "tokens_lost": "restart_discarded_tokens",
    "discarded_tokens": "restart_discarded_tokens",
    "tokens_per_second": "sampled_tokens_per_second, packed_tokens_per_second",
    "tool/NAME/episodes": "tool/NAME/frac_with_call",
    "source/NAME/episodes": "source/NAME/frac_with_call",
    "logprob_gap": "engine_trainer_logprob_diff",
    "logprob gap": "engine-trainer logprob difference",
    "importance_mean": "tis_weight_mean",
    "call_gain": "call_reward_diff",
    "needs_seen": "evidence_recall",
    "dropped_stale_tokens": "masked_stale_tokens",
    "over_target": "surplus",
    "looking/hit_rate": "looking/frac_calls_hit",
    "hit_fraction": "frac_episodes_hit",
    "workers/stored_images": "workers/images_from_store",
    # types and functions
    "AgentSettings": "the environment's settings",
    "MediaLibrary": "MediaLoader",
    "Lru": "LRUCache",
    "Unscored": "UngradedEpisode",
    "TOOL_BROKEN": "ENVIRONMENT_ERROR",
    "TextEngine": "ChatEngine",
    "own_weights": "has_separate_weights",
    "UNTRAINABLE": "NOT_TRAINABLE_MESSAGE",
    "RolloutStage": "RolloutComponents",
    "draw_lot": "collect_batch",
    "environment.name=external": "environment.name=third_party_format",
    "environments.external": "environments.third_party_format",
    "CallFormat.EXTERNAL": "CallFormat.THIRD_PARTY",
    "first_weights": "load_initial_weights",
    "is_punished": "is_correct_with_negative_advantage",
    "weights_of": "resolve_checkpoint",
    "MAY_CHANGE": "RESUMABLE_KEYS",
    "keyvalues": "kv_cache",
    "runlog": "run_folder",
    "preflight": "checks",
    "checkup": "checks",
    "vllm_dialect": "vllm_api",
    "sglang_dialect": "sglang_api",
    "Conductor": "Controller",
    "Waves": "MicroSteps",
    "DividedBackbone": "ShardedVisionLanguageModel",
    "DividedOptimizer": "ShardedOptimizer",
    "num_rehearsed": "num_checked",
    "saccade.Batch": "saccade.MicroBatch",
    "predictor_N": "logit_index_N",
    "seed_epochs": "seed_salts",
    "proximal_logp_N": "prox_logp_N",
    "rollout_logp_N": "engine_logp_N",
    "gap_N": "logprob_diff_N",
    "requeued_positions": "requeued_indices",
    "collapse_free": "pyvision_crop",
    "max_calls": "max_calls_per_turn",
    "TOOL_ERROR": "ENVIRONMENT_ERROR",
    "group_by_context": "group_by_prefix",
    "DemonstrationsByContext": "PrefixGroups",
    "group.rewards": "group.score_values",
    "find_refusals": "find_rejections",
    "checkpoint.is_saved": "checkpoint.should_save",
    "is_saved": "should_save",
    "objection": "insignificance_reason",
    "AnswerFormat": "BaseAnswerType",
    "describe_step": "build_finished_step",
    "answer_normalization": "task_builder",
    "data.materialize": "data.rewrite_paths",
    "find_segments": "find_attention_spans",
    # files of a run
    "notes.json": "trainer_state.json",
    "lots.jsonl": "pending_batches.jsonl",
    "versions.json": "invocations.json",
    "facts.json": "results.json",
    "starts.jsonl": "invocations.jsonl",
    "sheet.png": "contact_sheet.png",
    "status/STAGE.json": "finished_stages/STAGE.json",
    "status/sft.json": "finished_stages/sft.json",
    "status/*.json": "finished_stages/*.json",
    "sampling_weights.json": "stratum_weights.json",
    "tokens.npz": "token_values.npz",
    "refused.jsonl": "rejected.jsonl",
    # the command line
    "--bench": "--benchmarks",
    "--bench-data": "--benchmark-data",
    "data materialize": "data rewrite-paths",
    "tasks / clips": "tasks / media",
    # types and functions
    "get_definition": "get_signature",
    "KVStore": "KVCacheProtocol",
    "kv_store": "kv_cache",
    "AgentModel": "SaccadeModel",
    "RolloutQueue": "BatchCollector",
    "rollout_queue": "batch_collector",
    "GroupQueue": "GroupScheduler",
    "group_queue": "group_scheduler",
    "trainer_logp_N": "prox_logp_N",
    "checkpoints.every": "checkpoints.keep_every",
    "sft.checkpoints.every": "sft.checkpoints.keep_every",
    "rl.checkpoints.every": "rl.checkpoints.keep_every",
    "drop_correct_negative": "drop_correct_with_negative_advantage",
    "frac_correct_negative": "frac_correct_with_negative_advantage",
    "FollowerEngine": "SharedServersEngine",
    "Origin.TOOL": "Origin.OBSERVATION",
    "recipes check": "recipes plan",
    "group.episodes": "group.scored_episodes",
    "Group.episodes": "Group.scored_episodes",
    "on_weight_update": "episodes_on_sync",
    "engine.settings.in_flight": "engine.settings.replies_on_sync",
    "rl.on_weight_update": "rl.episodes_on_sync",
    "InFlightPolicy": "RepliesOnSync",
    "RestartOnUpdate": "RestartOnSync",
    "restart_on_update": "restart_on_sync",
    "stages.train": "stages.run_stages",
    "pipeline.sft": "pipeline.run_sft",
    "pipeline.rl": "pipeline.run_rl",
    "Backbone": "VisionLanguageModel",
    "backbone": "vlm",
    "ShardedBackbone": "ShardedVisionLanguageModel",
    "MaterializeReport": "RewriteReport",
}
OLD_NAME = re.compile(
    rf"(?<![\w/.])(?:{'|'.join(map(re.escape, OLD_NAMES))})(?![\w\\])"
)  # a report escapes underscores
# (file, word or name): why it may stay there.
EXCEPTIONS = {
    ("scripts/bootstrap", "quiet"): "an option of pip",
    ("scripts/check", "quiet"): "an option of ruff",
    ("src/saccade/environments/prompts/agentic_videozoomer.yaml", "told"): "a prompt, whose text results depend on",
    ("src/saccade/environments/prompts/agentic_videozoomer.yaml", "mend"): "a prompt, whose text results depend on",
    ("docs/experiments/selection/report.md", "mean_std"): "the plots of that run write it",
    ("src/saccade/reporting/plots.py", "blind"): "color-blind readers",
    ("src/saccade/rewards/judge.py", "somebody"): "a judge's prompt, by whose text cached verdicts are kept",
}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def split_name(name):
    """The lower-case words of an identifier in snake case or camel case."""
    return [word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)]


def find_names(tree):
    """Yield (line, name) of everything that a module defines: functions, classes, parameters, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def find_prose(text):
    """Yield (line, text) of comments and of string literals with a space in them, which are docstrings and messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def find_forbidden(text):
    return [word for word in re.findall(r"[a-z_]+", text.lower()) if word in WORDS]


def find_old_names(text):
    """Yield (line, name) of every old name, in code as in prose."""
    if not any(name in text for name in OLD_NAMES):  # the expression is slow
        return
    for line, content in enumerate(text.splitlines(), 1):
        yield from ((line, name) for name in OLD_NAME.findall(content))


def list_uses(path):
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    uses = [*find_old_names(text)]
    if path.suffix == ".py":
        tree = ast.parse(text)
        uses += [(line, word) for line, defined in find_names(tree) for word in split_name(defined) if word in WORDS]
        prose_of_file = find_prose(text) if find_forbidden(text) else ()  # tokenizing is slow
        uses += [(line, word) for line, prose in prose_of_file for word in find_forbidden(prose)]
    elif path.suffix != ".json":  # in results only names are checked
        uses += [(line, word) for line, prose in enumerate(text.splitlines(), 1) for word in find_forbidden(prose)]
    return [
        f"{name}:{line} {word} (write: {(WORDS | OLD_NAMES)[word]})"
        for line, word in sorted(set(uses))
        if (name, word) not in EXCEPTIONS
    ]


@pytest.mark.slow
def test_old_words_stay_out():
    uses = [use for path in (*CODE, *DOCUMENTS, *RESULTS) for use in list_uses(path)]
    assert not uses, "\n".join(uses)


def test_exceptions_are_needed():
    for name, word in EXCEPTIONS:
        text = (ROOT / name).read_text()
        used = {*find_forbidden(text), *(old for _, old in find_old_names(text))}
        assert word in used, f"{name} has no {word!r} any more"
