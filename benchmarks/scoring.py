"""Samples scored and reported: 10,000 made-up episodes by each benchmark's two rules.

    python benchmarks/scoring.py

Each episode thinks in some 2,000 characters and answers in one of fifteen manners (a letter, a box, a sentence, a span,
a formula, nothing). It is scored as it ends and marked again for the report, with every table, as `saccade eval` does.
The bar is 20 s of the processor for 10,000 samples. There is no baseline: no other program scores all of these.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from _common import alternate, machine, parser, show

from saccade import plugins
from saccade.evaluation.benchmarks._benchmark import Benchmark, Extractor, report
from saccade.evaluation.benchmarks._episodes import results_of, scorer
from saccade.ledger import Ledger
from saccade.types import Block, BlockKind, End, Episode, Kind, Reply, Scored, Task, Turn

EXTRACTORS: tuple[Extractor, ...] = ("official", "tolerant")
OPTIONS = ("a red ball", "a blue box", "a green hat", "a dog")
THOUGHT = "The man in the coat turns to B and then, as far as I can see, (A) stays at 12.5 m. " * 24
ANSWERS = (
    *("B", "(B)", "The answer is B.", r"\boxed{B}", "a blue box", "A man walks in, so B", "B or C", "not B"),
    *("12.5 - 18 s", "from 0:12 to 0:18", r"\frac{25}{2}", "about 1,250 cm", '{"short answer": "12.5"}', "四", ""),
)
# Of each benchmark: a kind of task, its gold, its options, and what else its rules and tables read.
KINDS: dict[str, tuple[Kind, Any, tuple[str, ...], dict[str, Any]]] = {
    "videomme": (Kind.CHOICE, "B", OPTIONS, dict.fromkeys(("duration", "domain", "sub_category", "task_type"), "x")),
    "longvideobench": (
        *(Kind.CHOICE, "B", OPTIONS),
        dict.fromkeys(("duration_group", "question_category", "level", "topic_category"), "x"),
    ),
    "lvbench": (Kind.CHOICE, "B", OPTIONS, {"capabilities": ["ER", "Rea"], "genre": "sport"}),
    "mlvu": (Kind.CHOICE, "B", OPTIONS, {"task": "needle"}),
    "mmvu": (Kind.CHOICE, "B", OPTIONS, {"discipline": "Science", "question_type": "open", "subject": "Biology"}),
    "charades_sta": (Kind.GROUNDING, (12.0, 18.0), (), {}),
    "vsibench": (Kind.NUMBER, 12.5, (), {"question_type": "room_size_estimation", "dataset": "scannet"}),
    "vstar": (Kind.CHOICE, "B", OPTIONS, {"category": "direct_attributes"}),
    "hrbench": (Kind.CHOICE, "B", OPTIONS, {"category": "single", "rotation": "0"}),
    "mathverse": (
        *(Kind.OPEN, r"\frac{25}{2}", ()),
        {"problem_version": "Text Lite", "subject": "Geometry", "question_type": "free-form"},
    ),
    "mathvision": (Kind.MATH, "12.5", (), {"subject": "algebra", "level": "3"}),
    "wemath": (Kind.CHOICE, "B", OPTIONS, {"steps": "one-step", "concept": "angles", "problem": "1"}),
    "dynamath": (
        *(Kind.OPEN, "12.5", ()),
        {"seed": "1", "variant": "1", "subject": "algebra", "level": "high school", "answer_type": "float"},
    ),
    "tirbench": (Kind.OPEN, "72", (), {"task": "instrument", "image_1": ""}),
}


def episodes(name: str, count: int) -> list[Episode]:
    """Made-up episodes of a benchmark, one per task."""
    kind, gold, choices, extras = KINDS[name]
    found = []
    for at in range(count):
        task = Task(id=str(at), question="?", media=(), kind=kind, gold=gold, choices=choices, extras=extras)
        text = f"<think>{THOUGHT}</think><answer>{ANSWERS[at % len(ANSWERS)]}</answer>"
        reply = Reply(text=text, blocks=(Block(kind=BlockKind.TEXT, body=text, closed=True),))
        episode = Episode(task=task, agent="direct", ledger=Ledger(), turns=(Turn(reply=reply),), end=End.ANSWERED)
        found.append(episode)
    return found


def judge(benchmark: Benchmark, made: Sequence[Episode], extractor: Extractor) -> int:
    """Score and report; how many questions the report speaks of."""
    score = scorer(benchmark, extractor)
    scored = [Scored(episode=episode, score=score(episode, episode.task)) for episode in made]
    return report(benchmark, results_of(benchmark, scored, extractor), extractor=extractor).n


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each benchmark in turn."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--samples", type=int, default=10000, help="per benchmark")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = []
    for name in plugins.names("evaluation.benchmarks"):
        benchmark, made = plugins.bind("evaluation.benchmarks", name, {})(), episodes(name, chosen.samples)
        assert judge(benchmark, made[:1], "official") == 1
        sides = {each: functools.partial(judge, benchmark, made, each) for each in EXTRACTORS}
        seconds = alternate(sides, chosen.rounds)
        busy = {f"{each} CPU s": min(cpu for _, cpu in values) for each, values in seconds.items()}
        rows.append({"benchmark": name, "samples": chosen.samples, **busy})
    show("Samples scored", rows, machine(), chosen.out)


if __name__ == "__main__":
    main()
