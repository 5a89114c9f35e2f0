"""Answers that no rule decides, put to a judge: the reward of that name, told the benchmark's own criterion.

    results ── open, or all ──> judge.read, where the official way reads first ──> the rule marks what was read
                                     │                                                  │ still open
                                     │                                                  v
                                     └── no reading, or no verdict: undecided <── judge.compare ──> a verdict
                                         (no server, not in time, something else)

As many are asked at once as the judge's server is given; what was said once is kept on disk and never asked again. The
answer goes to the judge between marks that are drawn anew for each request, as in training: nothing in it can end it
early, and the judge is told to follow none of it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade import plugins
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Criterion, Result
from saccade.evaluation.run import Tally
from saccade.evaluation.verdicts import Verdict
from saccade.rewards.judge import judge
from saccade.types import Ungraded

LONGEST = 20_000  # characters of a final answer; without an answer tag it may be all of a long reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Referee:
    """Who decides what a benchmark's rule leaves open: the judge called `model`, or nobody."""

    benchmark: Benchmark
    model: str = ""
    ask: judge | None = None

    @classmethod
    def of(cls, benchmark: Benchmark, settings: Mapping[str, Any]) -> "Referee":
        """The one that `settings`, those of `rewards/judge`, name; nobody where they are empty. Raises ConfigError."""
        if not settings:
            return cls(benchmark=benchmark)
        criterion = benchmark.criterion
        prompt = {"prompt": criterion.prompt} if criterion and criterion.prompt else {}
        # made even for a benchmark that needs none: settings that are wrong are so for all of them
        made = plugins.bind("rewards", "judge", {"longest": LONGEST, **prompt, **settings})()
        return cls(benchmark=benchmark, model=settings["model"], ask=made) if criterion else cls(benchmark=benchmark)

    @property
    def part(self) -> str:
        """What it does in the marking, in words; "" for a benchmark whose published metric has no judge."""
        criterion = self.benchmark.criterion
        if criterion is None:
            return ""
        if self.ask is None:
            return "rules alone; the published metric has a model judge (evaluation.judge)"
        if criterion.every:
            return f"the judge {self.model}, which reads the answers, and rules on what it read"
        read = "reads, then compares" if criterion.reading else "compares"
        return f"rules, and the judge {self.model}, which {read} what they leave open"

    def verdicts(self, results: Sequence[Result], *, told: Callable[[Tally], None]) -> list[Verdict]:
        """What the judge says, or why it says nothing, of each result that is put to it, in order; `told` is told how
        far it is, and how much of what was decided is right.
        """
        criterion = self.benchmark.criterion
        if self.ask is None or criterion is None:
            return []
        asked = [each for each in results if each.open or _read_first(criterion, each)]
        return asyncio.run(self._all(asked, criterion, self.ask, told)) if asked else []

    async def _all(
        self, results: Sequence[Result], criterion: Criterion, ask: judge, told: Callable[[Tally], None]
    ) -> list[Verdict]:
        done, values = 0, list[float]()

        async def one(result: Result) -> Verdict:
            nonlocal done
            verdict = await self._verdict(result, criterion, ask)
            done += 1
            values.extend([] if verdict.value is None else [verdict.value])
            told(Tally(done=done, total=len(results), accuracy=sum(values) / len(values) if values else None))
            return verdict

        told(Tally(done=0, total=len(results), accuracy=None))
        return await asyncio.gather(*map(one, results))

    async def _verdict(self, result: Result, criterion: Criterion, ask: judge) -> Verdict:
        """What the judge says of one answer."""
        answer, task = final_answer(result.answer.text), result.task
        about, plain = criterion.question(task), Verdict(task=task.id, answer=answer, value=None)
        if criterion.reading is not None:
            read = await ask.read(about, _last(answer, criterion.words), criterion.reading(task))
            plain = replace(plain, instead=criterion.every)
            if isinstance(read, Ungraded):
                return replace(plain, reason=read.reason)
            plain = replace(plain, read=read, value=(self.benchmark.official(read, task) if read else UNPARSED).value)
        if plain.value is not None:
            return plain
        value = await ask.compare(about, criterion.gold(task), answer if plain.read is None else plain.read)
        return replace(plain, reason=value.reason) if isinstance(value, Ungraded) else replace(plain, value=value)


def _read_first(criterion: Criterion, result: Result) -> bool:
    """Whether the judge reads an answer that the rule could decide."""
    if not criterion.every or criterion.reading is None or result.answer.error is not None:
        return False
    return bool(criterion.reading(result.task)) and bool(final_answer(result.answer.text))


def _last(text: str, words: int) -> str:
    """The last words of a text; all of it for 0."""
    return " ".join(text.split()[-words:]) if words else text
