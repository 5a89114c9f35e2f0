"""Judge answers that no rule decides: the reward `judge`, with the benchmark's own instructions.

    results ── undecided, or all ──> judge.extract_answer, if the official way extracts ──> the rule grades it
                                     │                                                  │ still undecided
                                     │                                                  v
                                     └── no extraction, or no verdict: undecided <── judge.score_answer ──> a verdict
                                         (no server, a timeout, an unexpected reply)

Requests run concurrently, as many as the judge allows; replies are cached on disk and never requested again. The answer
is sent between marks that are new in each request, as in training: nothing in it can end it early, and the
judge is instructed to follow none of it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from saccade import plugins
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import UNPARSED, Benchmark, GradedAnswer, JudgePrompt
from saccade.evaluation.judge_results import JudgeVerdict
from saccade.evaluation.runner import EvaluationProgress
from saccade.rewards.judge import Judge
from saccade.types import Ungraded
from saccade.utils.hashing import compute_digest

MAX_ANSWER_CHARS = 20_000  # of a final answer; without an answer tag it may be all of a long reply


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmJudge:
    """Decide what a benchmark's rule leaves undecided, with the judge called `model`; nothing without a client."""

    benchmark: Benchmark
    model: str = ""
    client: Judge | None = None

    @classmethod
    def from_settings(cls, benchmark: Benchmark, settings: Mapping[str, Any]) -> "LlmJudge":
        """Build the judge from the settings of `rewards/judge`, if there are any. Raises ConfigError."""
        if not settings:
            return cls(benchmark=benchmark)
        judge_prompt = benchmark.judge_prompt
        prompt = {"prompt": judge_prompt.instructions} if judge_prompt and judge_prompt.instructions else {}
        # Built even for a benchmark without a judge, so that wrong settings fail for every benchmark.
        client = plugins.resolve("rewards", "judge", {"max_answer_chars": MAX_ANSWER_CHARS, **prompt, **settings})()
        judge = cls(benchmark=benchmark, model=settings["model"], client=client)
        return judge if judge_prompt else cls(benchmark=benchmark)

    @property
    def description(self) -> str:
        """Describe how answers are graded; "" for a benchmark whose published metric has no judge."""
        judge_prompt = self.benchmark.judge_prompt
        if judge_prompt is None:
            return ""
        if self.client is None:
            return "rules alone; the published metric has a model judge (evaluation.judge)"
        if judge_prompt.extract_always:
            return f"rules, on answers extracted by the judge {self.model}"
        steps = "extracts and compares" if judge_prompt.extraction_prompt else "compares"
        return f"rules, and the judge {self.model}, which {steps} undecided answers"

    def collect_verdicts(
        self,
        results: Sequence[GradedAnswer],
        *,
        earlier: Sequence[JudgeVerdict] = (),
        on_progress: Callable[[EvaluationProgress], None],
    ) -> list[JudgeVerdict]:
        """Return the verdict, or the reason for its absence, on each result that needs the judge, in order.

        Where the judge gives none, one of `earlier` stays if the same judge was asked the same: an outage loses none.
        `on_progress` receives the progress and the accuracy of the decided answers.
        """
        judge_prompt, client = self.benchmark.judge_prompt, self.client
        if client is None or judge_prompt is None:
            return []
        pending = [result for result in results if result.is_undecided or _should_extract_first(judge_prompt, result)]
        verdicts: list[JudgeVerdict] = []
        earlier_by_request = {
            (verdict.task_id, verdict.request_digest): verdict for verdict in earlier if verdict.value is not None
        }

        def report_progress() -> None:
            values = [verdict.value for verdict in verdicts if verdict.value is not None]
            accuracy = fmean(values) if values else None
            on_progress(EvaluationProgress(done=len(verdicts), total=len(pending), accuracy=accuracy))

        async def judge_answer(result: GradedAnswer) -> JudgeVerdict:
            verdict = await self._judge_answer(result, judge_prompt, client)
            if verdict.value is None:
                verdict = earlier_by_request.get((verdict.task_id, verdict.request_digest), verdict)
            verdicts.append(verdict)
            report_progress()
            return verdict

        async def judge_all() -> list[JudgeVerdict]:
            report_progress()
            return await asyncio.gather(*map(judge_answer, pending))

        return asyncio.run(judge_all()) if pending else []

    async def _judge_answer(self, result: GradedAnswer, judge_prompt: JudgePrompt, client: Judge) -> JudgeVerdict:
        """Return the judge's verdict on one answer."""
        answer, task = extract_final_answer(result.answer.text), result.task
        question, ground_truth = judge_prompt.question(task), judge_prompt.ground_truth(task)
        extraction_prompt = "" if judge_prompt.extraction_prompt is None else judge_prompt.extraction_prompt(task)
        asked = (question, ground_truth, answer, extraction_prompt)
        verdict = JudgeVerdict(
            task_id=task.id, answer=answer, value=None, request_digest=compute_digest(client.identity, asked)
        )
        if judge_prompt.extraction_prompt is not None:
            verdict = replace(verdict, overrides_rule=judge_prompt.extract_always)
            tail = " ".join(answer.split()[-judge_prompt.max_words :]) if judge_prompt.max_words else answer
            extracted = await client.extract_answer(question, tail, extraction_prompt)
            if isinstance(extracted, Ungraded):
                return replace(verdict, reason=extracted.reason)
            grade = self.benchmark.grade_strict(extracted, task) if extracted else UNPARSED
            verdict, answer = replace(verdict, extracted=extracted, value=grade.value), extracted
        if verdict.value is not None:
            return verdict
        value = await client.score_answer(question, ground_truth, answer)
        return replace(verdict, reason=value.reason) if isinstance(value, Ungraded) else replace(verdict, value=value)


def _should_extract_first(judge_prompt: JudgePrompt, result: GradedAnswer) -> bool:
    """Return whether the judge extracts an answer that the rule could decide."""
    get_prompt = judge_prompt.extraction_prompt if judge_prompt.extract_always and result.answer.error is None else None
    return bool(get_prompt and get_prompt(result.task) and extract_final_answer(result.answer.text))
