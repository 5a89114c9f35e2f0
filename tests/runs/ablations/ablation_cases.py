"""An ablation that runs in seconds, and hand-written results of evaluations."""

SET = """
title: A miniature
claim: nothing is claimed
hypothesis: whether an ablation works
steps: 4
baseline: plain
settings: [rl.save_every=1]
initial_checkpoints:
  base_sft: {steps: 4}
  other:
    continues_from: base_sft
    steps: 2
    python_style_fraction: 0.5
    unclosed_think_fraction: 0.5
conditions:
  one: {description: the first, variants: [plain, hot]}
  two: {description: another checkpoint without trainable groups, initial_checkpoint: other, variants: [stuck]}
variants:
  plain: {recipe: tiny/para_grpo}
  hot: {description: "<b>a fast one</b>", settings: [rl.optim.lr=1e-2]}
  stuck: {settings: [rl.filters.reward_std.above=9, rl.selection.on_underfilled=stop]}
evaluations: [greedy, tools_off]
tables:
  - {evaluation: greedy, metric: accuracy}
  - {evaluation: greedy, metric: sampled_tokens}
  - {evaluation: greedy, minus: tools_off, metric: accuracy, group_by: frame_budget}
curves: [accuracy, entropy]
final_metrics: [accuracy, calls]
quick: {steps: 2, initial_checkpoint_steps: 4, test_videos: 1, conditions: [one], variants: [plain, hot]}
"""
SMALL = [
    *[
        "synthetic.train=3",
        "synthetic.test=2",
        "synthetic.tasks_per_video=2",
        "sft.tokens_per_step=500",
        "sft.optim.warmup_steps=1",
    ],
    *["rl.prompts_per_step=2", "rl.group_size=2", "sampling.max_tokens=12"],
]


def build_columns(**columns):
    """Return an evaluation's columns with one episode per task; columns not given are zero."""
    count = len(next(iter(columns.values())))
    slices = {"task": [f"t{i}" for i in range(count)], "frame_budget": [4] * count, "question_type": ["at"] * count}
    metrics = dict.fromkeys(("accuracy", "format_compliance", "calls", "seconds"), [0.0] * count)
    own = {**slices, "overview": ["shown"] * count, **metrics, **columns}
    return {"clip": own["task"], **own}
