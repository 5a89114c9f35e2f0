"""A run with two evaluations, recorded steps, metrics and a real clip; and the application on it, without a browser."""

import asyncio
from dataclasses import replace
from itertools import islice

import numpy as np
from page_cases import example
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.config.load import load_recipe
from saccade.data.synthetic.video_writer import write_video
from saccade.evaluation.benchmark_result import build_benchmark_result, write_benchmark_result
from saccade.evaluation.benchmarks.base import Answer, grade
from saccade.evaluation.records import Record
from saccade.runs.run_folder import Run
from saccade.training.episode_log import EpisodeWriter, RolloutRecord
from saccade.training.token_log import TokenValues
from saccade.types import Score
from saccade.utils.jsonl import append_jsonl, write_jsonl

CLIP_SECONDS = 64
CHECKPOINTS = {"before": "sft/step-000010", "after": "rl/step-000003"}  # by evaluation


def write_clip(path):
    """Write a clip of 64 seconds whose brightness grows with the time."""
    frames = (np.full((1, 48, 64, 3), number % 256, dtype=np.uint8) for number in range(CLIP_SECONDS * 2))
    path.parent.mkdir(exist_ok=True)
    write_video(path, (frame[0] for frame in frames), fps=2.0)


def build_record(scored, sample_index=0, checkpoint=None):
    return Record(
        task=scored.episode.task.digest,
        frame_budget=4,
        sample_index=sample_index,
        fingerprint="seed=0",
        outcome=scored,
        checkpoint=checkpoint,
    )


def write_evaluation(folder, name, scored):
    (folder / "evaluations").mkdir(exist_ok=True)
    write_jsonl(
        folder / "evaluations" / f"{name}.jsonl", [build_record(item, checkpoint=CHECKPOINTS[name]) for item in scored]
    )


def write_benchmark(folder, name, num_right, *, hostile=""):
    """Write the result of 12 questions; `hostile` is the last reply, which is wrong."""
    benchmark = plugins.resolve("evaluation.benchmarks", "videomme", {})()
    rows = [{**row, "duration": ("short", "long")[i % 2]} for i, row in enumerate(islice(MAKERS["videomme"](), 12))]
    tasks = benchmark.load_tasks(write_copy("videomme", folder / "rows", rows), allow_incomplete=True)
    replies = ["C" if i < num_right else "I can't see it" for i in range(len(tasks))]
    replies[-1] = hostile or replies[-1]
    answers = {task.id: Answer(text=reply) for task, reply in zip(tasks, replies, strict=True)}
    conditions = {"environment": "tool_calling", "temperature": "0", "tools": "on"}
    scored = [example(name="costs")]
    result = build_benchmark_result(benchmark, scored, grade(benchmark, tasks, answers), conditions=conditions)
    write_benchmark_result(folder / "evaluations" / f"{name}.jsonl", result)


def build_rollouts(step, clip, groups=2, size=4):
    records = []
    for group in range(groups):
        for index in range(size):
            scored = example(name=f"train-{group}", path=clip, question=f"What is it, {group}?")
            value = float(index % 2)
            reasons = {"accuracy": f"answer 'red' is episode {index}"}
            score = Score(value=value, parts={"accuracy": value}, correct=value, reasons=reasons)
            outcome, reason = ("dropped", "reward_std") if group == groups - 1 else ("kept", "")
            episode = replace(scored.episode, status=scored.episode.status)
            records.append(
                RolloutRecord(
                    stage="rl",
                    step=step,
                    group=group,
                    index=index,
                    outcome=outcome,
                    reason=reason,
                    episode=episode,
                    score=score,
                )
            )
    return records


def build_token_values(ledger):
    """Return values whose logprob difference is 0.001 times the position, and whose entropy is half of it."""
    position_N = np.flatnonzero(ledger.loss_mask())
    return TokenValues(ledger=ledger, position_N=position_N, logprob_diff_N=position_N / 1000, entropy_N=position_N / 2)


def write_rollouts(folder, step, records):
    async def write():
        writer = EpisodeWriter(folder, 2**30)
        await writer.write("rl", step, records)
        ledgers = [record.episode.ledger for record in records if record.outcome == "kept"]
        await writer.write_tokens(step, [build_token_values(ledger) for ledger in ledgers])

    asyncio.run(write())


def make_run(folder, *, hostile="", num_steps=3):
    """Make a run; `hostile` is a text that its last task, reply, result, answer and error (a megabyte) hold."""
    Run.create(folder, load_recipe("tiny/para_grpo"), metadata={})
    clip = folder / "media" / 'a clip\'s "name".mp4'
    write_clip(clip)
    for step in range(1, num_steps + 1):
        row = {"stage": "rl", "step": step, "reward": step / 10, "reward/accuracy": 0.5, "accuracy": step / 10}
        append_jsonl(
            folder / "metrics.jsonl",
            {
                **row,
                **{"entropy": 1.0 / step, "grad_norm": 1e-4 * step, "visual_tokens": 6.0},
                # of numbers whose labels are long
                **{"tis_weight_mean": 1 - 2e-6 * step, "tis_weight_max": 1 + 3e-6 * step, "memory_gib": 90123 + step},
                **{"sampled_tokens_per_second": 98765.4 + 0.1 * step, "lr": 1e-6 * step, "kl": -1.25e-7 * step},
            },
        )
        write_rollouts(folder, step, build_rollouts(step, str(clip)))
    before = [example(name=f"w-{i}", path=str(clip), accuracy=float(i % 2)) for i in range(6)]
    after = [
        example(name=f"w-{i}", path=str(clip), accuracy=float(i > 1), answer="red" if i > 1 else "blue")
        for i in range(6)
    ]
    if hostile:
        texts = dict.fromkeys(("think", "response", "answer", "question"), hostile)
        after.append(example(name="hostile", path=str(clip), error=hostile + " long" * 200_000, **texts))
    write_evaluation(folder, "before", before)
    write_evaluation(folder, "after", after)
    return folder
