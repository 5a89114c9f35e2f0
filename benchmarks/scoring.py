"""Measure grading and reporting: 10,000 synthetic episodes by each benchmark's two scoring modes.

    python benchmarks/scoring.py

Each episode has some 2,000 characters of reasoning and one of fifteen answers (a letter, a box, a sentence, a span, a
formula, nothing). It is scored as it ends and graded again for the report, with every table, as `saccade eval` does.
The target is 20 s of processor time for 10,000 episodes. There is no baseline: no other program scores all of these.
"""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import torch
from _common import alternate, describe_machine, parser, show

from saccade import plugins
from saccade.evaluation.benchmark_result import build_plain_result
from saccade.evaluation.benchmarks.base import Benchmark, Scoring, build_score_fn, grade_episodes
from saccade.ledger import Ledger
from saccade.types import AnswerType, Block, BlockKind, Episode, EpisodeStatus, Reply, ScoredEpisode, Task, Turn

SCORING_MODES: tuple[Scoring, ...] = ("strict", "lenient")
OPTIONS = ("a red ball", "a blue box", "a green hat", "a dog")
THOUGHT = "The man in the coat turns to B and then, as far as I can see, (A) stays at 12.5 m. " * 24
ANSWERS = (
    *("B", "(B)", "The answer is B.", r"\boxed{B}", "a blue box", "A man walks in, so B", "B or C", "not B"),
    *("12.5 - 18 s", "from 0:12 to 0:18", r"\frac{25}{2}", "about 1,250 cm", '{"short answer": "12.5"}', "四", ""),
)
# By benchmark: the answer type, the ground truth, the options, and the extras that its rules and tables read.
TASKS: dict[str, tuple[AnswerType, Any, tuple[str, ...], dict[str, Any]]] = {
    "videomme": (
        AnswerType.CHOICE,
        "B",
        OPTIONS,
        dict.fromkeys(("duration", "domain", "sub_category", "task_type"), "x"),
    ),
    "longvideobench": (
        *(AnswerType.CHOICE, "B", OPTIONS),
        dict.fromkeys(("duration_group", "question_category", "level", "topic_category"), "x"),
    ),
    "lvbench": (AnswerType.CHOICE, "B", OPTIONS, {"capabilities": ["ER", "Rea"], "genre": "sport"}),
    "mlvu": (AnswerType.CHOICE, "B", OPTIONS, {"task": "needle"}),
    "mmvu": (AnswerType.CHOICE, "B", OPTIONS, {"discipline": "Science", "question_type": "open", "subject": "Biology"}),
    "charades_sta": (AnswerType.GROUNDING, (12.0, 18.0), (), {}),
    "vsibench": (AnswerType.NUMBER, 12.5, (), {"question_type": "room_size_estimation", "dataset": "scannet"}),
    "vstar": (AnswerType.CHOICE, "B", OPTIONS, {"category": "direct_attributes"}),
    "hrbench": (AnswerType.CHOICE, "B", OPTIONS, {"category": "single", "rotation": "0"}),
    "mathverse": (
        *(AnswerType.OPEN, r"\frac{25}{2}", ()),
        {"problem_version": "Text Lite", "subject": "Geometry", "question_type": "free-form"},
    ),
    "mathvision": (AnswerType.MATH, "12.5", (), {"subject": "algebra", "level": "3"}),
    "wemath": (AnswerType.CHOICE, "B", OPTIONS, {"steps": "one-step", "concept": "angles", "problem": "1"}),
    "dynamath": (
        *(AnswerType.OPEN, "12.5", ()),
        {"seed": "1", "variant": "1", "subject": "algebra", "level": "high school", "answer_type": "float"},
    ),
    "tirbench": (AnswerType.OPEN, "72", (), {"task": "instrument", "image_1": ""}),
}


def episodes(name: str, count: int) -> list[Episode]:
    """Return synthetic episodes of a benchmark, one per task."""
    answer_type, ground_truth, options, extras = TASKS[name]
    found = []
    for at in range(count):
        task = Task(
            id=str(at),
            question="?",
            media=(),
            answer_type=answer_type,
            ground_truth=ground_truth,
            options=options,
            extras=extras,
        )
        text = f"<think>{THOUGHT}</think><answer>{ANSWERS[at % len(ANSWERS)]}</answer>"
        reply = Reply(text=text, blocks=(Block(kind=BlockKind.TEXT, body=text, is_closed=True),))
        episode = Episode(
            task=task, environment="direct", ledger=Ledger(), turns=(Turn(reply=reply),), status=EpisodeStatus.ANSWERED
        )
        found.append(episode)
    return found


def score_episodes(benchmark: Benchmark, episodes: Sequence[Episode], scoring: Scoring) -> int:
    """Score and report episodes; return the number of questions in the report."""
    score = build_score_fn(benchmark, scoring)
    scores = asyncio.run(score(episodes))
    scored = [ScoredEpisode(episode=episode, score=one) for episode, one in zip(episodes, scores, strict=True)]
    return build_plain_result(benchmark, grade_episodes(benchmark, scored, scoring), scoring=scoring).num_tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each benchmark in turn."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--samples", type=int, default=10000, help="per benchmark")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = []
    for name in plugins.list_plugins("evaluation.benchmarks"):
        benchmark, made = plugins.resolve("evaluation.benchmarks", name, {})(), episodes(name, chosen.samples)
        assert score_episodes(benchmark, made[:1], "strict") == 1
        sides = {mode: functools.partial(score_episodes, benchmark, made, mode) for mode in SCORING_MODES}
        seconds = alternate(sides, chosen.rounds)
        busy = {f"{mode} CPU s": min(cpu for _, cpu in values) for mode, values in seconds.items()}
        rows.append({"benchmark": name, "samples": chosen.samples, **busy})
    show("Samples scored", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
