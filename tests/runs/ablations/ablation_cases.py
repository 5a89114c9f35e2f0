"""A set so small that it is run in seconds, and exams written by hand."""

SET = """
title: A miniature
claim: nothing is claimed
asks: whether a lab works
steps: 4
baseline: plain
settings: [rl.save_every=1]
starts:
  usual: {steps: 4}
  other: {after: usual, steps: 2, leaked: 0.5, open_think: 0.5, direct: 1.0}
conditions:
  one: {about: the first, arms: [plain, hot]}
  two: {about: "another start, and an arm that can't find what to learn from", start: other, arms: [stuck]}
arms:
  plain: {recipe: tiny/para_grpo}
  hot: {about: "<b>a fast one</b>", settings: [rl.optim.lr=1e-2]}
  stuck: {settings: [rl.select.min_spread=9, rl.select.on_short=stop]}
exams: [greedy, tools_off]
tables:
  - {exam: greedy, measure: accuracy}
  - {exam: greedy, measure: sampled_tokens}
  - {exam: greedy, less: tools_off, measure: accuracy, by: frames}
curves: [accuracy, entropy]
late: [accuracy, calls]
quick: {steps: 2, start_steps: 4, tests: 1, conditions: [one], arms: [plain, hot]}
"""
SMALL = [
    *["world.train=3", "world.test=2", "world.tasks_per_video=2", "sft.tokens_per_step=500", "sft.optim.warmup=1"],
    *["rl.prompts=2", "rl.group=2", "sampling.max_tokens=12"],
]


def exam(**columns):
    """An exam of one attempt per task; what isn't given is zero."""
    count = len(next(iter(columns.values())))
    usual = {"task": [f"t{i}" for i in range(count)], "frames": [4] * count, "question": ["at"] * count}
    measures = dict.fromkeys(("accuracy", "compliance", "calls", "seconds"), [0.0] * count)
    return {**usual, "overview": ["shown"] * count, **measures, **columns}
