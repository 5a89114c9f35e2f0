"""Score mathematics: symbolic equality with the ground-truth formula, by math-verify."""

import importlib.util
import itertools
import re
from typing import Any

from saccade.config.schema import PositiveInt
from saccade.errors import ConfigError
from saccade.rewards.answer_types.base import BaseAnswerType, parse_text
from saccade.rewards.answer_types.reader import STROKE, clean_text, find_answers
from saccade.rewards.math_worker_pool import MathWorkerError, MathWorkerPool
from saccade.rewards.text_normalization import ANSWER_LEAD_IN, find_boxed, normalize_text
from saccade.types import Episode, Ungraded

_ANSWER_LEAD_IN = re.compile(rf"^{ANSWER_LEAD_IN}", re.IGNORECASE)
_MATH_DELIMITERS = re.compile(r"^(?:\$\$?(.*?)\$\$?|\\\((.*?)\\\)|\\\[(.*?)\\\])$", re.DOTALL)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_SQUARE_ROOT = re.compile(r"(?:√|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|(\w+))")
_BOLD = ("**", "__", "```", "`")
_SCALE = re.compile(r"\d\s*(?:hundred|thousand|[a-z]{1,4}illion|dozen|lakh|crore|bn)\b|\d\s?(?:[kM]\b|[만억万萬亿億])")
# Plain-text notation as LaTeX; math-verify handles the rest (π, ×, sqrt(2)).
_PLAIN_TO_LATEX = {"**": "^", "⁄": "/", "÷": "/", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty "}
_PLAIN_TO_LATEX |= {"°": r"^\circ ", "∅": r"\emptyset ", r"\varnothing": r"\emptyset "}
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|exp|ln|log)(?![a-zA-Z])")
_SCIENTIFIC_NOTATION = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")  # 1.5e3
_MIXED_NUMBER = re.compile(r"(?<![\d.,/])(\d+) +(\d+)/(\d+)(?![\d/])")  # 1 1/2
_APPROXIMATION = r"(?:[^=]*?[=\s])?(?:[a-zA-Z]\s*)?\\approx[^=]*"  # x \approx 3.14
_TEXT_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|hbox)\s*\{([^{}]*)\}")
# Text after a word in a formula may only be the rest of a unit or a list separator: math-verify drops anything else.
_UNIT_SUFFIX = re.compile(r"(?:\s|\^\{?-?\d\}?|[/.,$)\]]|\\cdot|\\[,;! )\]])*")


class MathAnswer(BaseAnswerType):
    r"""Mathematics: 1.0 if the final answer equals the ground-truth formula, else 0.0.

    The answer is the content of its only `\boxed{}`, else what follows "the answer is", else all of it; two
    different boxes are wrong, and so is an answer of more than `max_answer_chars` characters. Ground truth and
    answer are LaTeX or plain text (`1/2`, `sqrt(2)`, `x^2`, `50%`). `\frac{1}{2}` equals `0.5`; `0.333` does not
    equal `1/3`; units are ignored. A list of values is one answer: `4 or 5` is not 4. A comparison uses at most
    `cpu_seconds` of processor time in one of `num_workers` worker processes; exceeding it is wrong. The result is
    `Ungraded` only if no worker can be started.

    Raises ConfigError if math-verify is not installed.
    """

    names = ("math", "formula")
    expected = "a formula"
    example = ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}}")

    def __init__(
        self,
        *,
        cpu_seconds: PositiveInt = 3,  # processor time of a comparison, seconds; exceeding it is wrong
        num_workers: PositiveInt = 2,  # worker processes
        max_answer_chars: PositiveInt = 400,  # a longer answer is wrong, characters
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            message = "the answer type math needs the package math-verify; install it: pip install 'saccade[math]'"
            raise ConfigError(message, key="answer_type", value="math")
        self._max_answer_chars = max_answer_chars
        self._worker_pool = MathWorkerPool(cpu_seconds=cpu_seconds, num_workers=num_workers)

    async def __call__(self, episode: Episode) -> float | Ungraded:
        """Return the score of an episode. Raises DataError if the ground truth is not a text or number."""
        self.require_valid(episode.task)
        expected, predicted = extract_formula(str(episode.task.ground_truth)), extract_formula(episode.answer or "")
        if expected is None or not predicted or len(predicted) > self._max_answer_chars:
            return 0.0
        if " ".join(predicted.split()) == " ".join(expected.split()):
            return 1.0
        if _has_prose(predicted) and not _has_prose(expected):
            return 0.0
        try:
            return float(await self._worker_pool.are_equal(expected, predicted))
        except MathWorkerError as error:
            return Ungraded(reason=str(error))

    @classmethod
    def is_valid(cls, ground_truth: object) -> bool:
        """Return whether it is a text or a number."""
        return isinstance(ground_truth, str | int | float) and bool(str(ground_truth).strip())

    @classmethod
    def parse_ground_truth(cls, value: Any) -> str | None:
        """Return the text of a published answer."""
        return parse_text(value)


math_ = MathAnswer


def extract_formula(text: str) -> str | None:
    r"""Return the only formula of an answer, or None if there is none or several.

    >>> [extract_formula(text) for text in (r"The answer is $\boxed{\frac{1}{2}}$.", "$x²$", r"\boxed{1} or \boxed{2}")]
    ['\\frac{1}{2}', 'x^{2}', None]
    """
    answers = find_answers(text)
    if len({"".join(answer.split()) for answer in answers}) != 1:
        return None
    text = answers[0] if find_boxed(clean_text(text)) else _ANSWER_LEAD_IN.sub("", " ".join(answers[0].split()))
    if _SCALE.search(text) or STROKE in text:
        return None
    text = (text.rpartition(r"\approx")[2] if re.fullmatch(_APPROXIMATION, text) else text).strip()
    for mark in _BOLD:
        if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
            text = text[len(mark) : -len(mark)].strip()
    text = normalize_text(_SUPERSCRIPT.sub(lambda match: f"^{{{normalize_text(match[0])}}}", text))
    for plain, latex in _PLAIN_TO_LATEX.items():
        text = text.replace(plain, latex)
    text = _SCIENTIFIC_NOTATION.sub(r"\1 \\cdot 10^{\2}", _MIXED_NUMBER.sub(r"(\1+\2/\3)", text))
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _SQUARE_ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text).strip().rstrip(".").strip()
    delimited = _MATH_DELIMITERS.match(text)
    text = next((body for body in delimited.groups() if body is not None), "") if delimited else text
    return text.strip() if _has_balanced_braces(text) else None


def _has_prose(formula: str) -> bool:
    r"""Return whether words in a formula are more than a unit at its end: `4 \text{ if } x > 0, 5 \text{ else}`."""
    texts = list(_TEXT_COMMAND.finditer(formula))
    rests = [formula[first.end() : second.start()] for first, second in itertools.pairwise(texts)]
    rests += [formula[texts[-1].end() :]] if texts else []
    is_joiner = [text[1].strip() in ("and", "or", ",") for text in texts]
    return any(re.search(r"\d", text[1]) for text in texts) or any(
        not _UNIT_SUFFIX.fullmatch(rest) for rest, joins in zip(rests, is_joiner, strict=True) if not joins
    )


def _has_balanced_braces(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0
