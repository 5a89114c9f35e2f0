"""Answers that no rule decides, put to a judge: the reward of that name, told the benchmark's own criterion.

    results ── undecided ──> judge.compare, as many at once as its server is given ──> decided
                    │               └── verdicts on disk: what was said once is never asked again
                    └── no verdict (no server, not in time, something else): still undecided, with the reason

The answer goes to the judge between marks that are drawn anew for each request, as in training: nothing in it can end
it early, and the judge is told to follow none of it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade import plugins
from saccade.data.record import write_jsonl
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import Benchmark, Criterion, Result
from saccade.evaluation.verdicts import Verdict
from saccade.rewards.judge import judge
from saccade.runlog import writing
from saccade.types import Ungraded

LONGEST = 20_000  # characters of a final answer; without an answer tag it may be all of a long reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Referee:
    """Who decides what a benchmark's rule leaves open: the judge called `model`, or nobody."""

    model: str = ""
    ask: judge | None = None
    criterion: Criterion | None = None

    @classmethod
    def of(cls, benchmark: Benchmark, settings: Mapping[str, Any]) -> "Referee":
        """The one that `settings`, those of `rewards/judge`, name; nobody where they are empty. Raises ConfigError."""
        if not settings:
            return cls()
        criterion = benchmark.criterion
        prompt = {} if criterion is None else {"prompt": criterion.prompt}
        # made even for a benchmark that needs none: settings that are wrong are so for all of them
        made = plugins.bind("rewards", "judge", {"longest": LONGEST, **prompt, **settings})()
        return cls() if criterion is None else cls(model=settings["model"], ask=made, criterion=criterion)

    def decided(self, results: Sequence[Result], path: Path) -> list[Result]:
        """The results in order, each open one with its verdict; `path` lists all that was said, or why nothing was."""
        if self.ask is None:
            return list(results)
        opened = [each for each in results if each.open]
        verdicts = asyncio.run(self._verdicts(opened))
        with writing(path):
            write_jsonl(path, verdicts)
        said = iter(verdicts)
        return [_with(each, next(said)) if each.open else each for each in results]

    async def _verdicts(self, results: Sequence[Result]) -> list[Verdict]:
        assert self.ask is not None
        assert self.criterion is not None
        return await asyncio.gather(*(_verdict(self.criterion, each, self.ask) for each in results))


def _with(result: Result, verdict: Verdict) -> Result:
    return replace(result, mark=replace(result.mark, value=verdict.value))


async def _verdict(criterion: Criterion, result: Result, referee: judge) -> Verdict:
    answer, task = final_answer(result.answer.text), result.task
    value = await referee.compare(criterion.question(task), criterion.gold(task), answer)
    if isinstance(value, Ungraded):
        return Verdict(task=task.id, answer=answer, value=None, reason=value.reason)
    return Verdict(task=task.id, answer=answer, value=value)
