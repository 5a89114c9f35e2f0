r"""Mathematics: symbolic equality with the gold formula, by math-verify."""

import importlib.util
import itertools
import re

from saccade.errors import ConfigError, DataError
from saccade.rewards._checker import Checker, CheckerError
from saccade.rewards._text import LEAD, boxes, tidy
from saccade.types import Episode, Task, Ungraded

_LEAD = re.compile(rf"^{LEAD}", re.IGNORECASE)
_MATHS = re.compile(r"^(?:\$\$?(.*?)\$\$?|\\\((.*?)\\\)|\\\[(.*?)\\\])$", re.DOTALL)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_ROOT = re.compile(r"(?:√|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|(\w+))")
_BOLD = re.compile(r"^(\*\*|__|`+)(.+)\1$")
# What people write in plain text, in LaTeX; math-verify knows the rest (π, ×, sqrt(2)).
_LATEX = {"**": "^", "⁄": "/", "÷": "/", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "∞": r"\infty "}
_LATEX |= {"°": r"^\circ ", "∅": r"\emptyset ", r"\varnothing": r"\emptyset "}
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(pi|sin|cos|tan|exp|ln|log)(?![a-zA-Z])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")  # 1.5e3
_MIXED = re.compile(r"(?<![\d.,/])(\d+) +(\d+)/(\d+)(?![\d/])")  # 1 1/2
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|hbox)\s*\{([^{}]*)\}")
# Behind words in a formula there may be more of a unit, and what a list is joined by; math-verify drops all else.
_UNIT = re.compile(r"(?:\s|\^\{?-?\d\}?|[/.,$)\]]|\\cdot|\\[,;! )\]])*")


class math:
    r"""1.0 if the final answer is equal to the gold formula, else 0.0.

    The answer is what stands in its one `\boxed{}`, else all of it; with two different boxes it is wrong, and so is an
    answer of more than `longest` characters. Gold and answer are LaTeX or plain text (`1/2`, `sqrt(2)`, `x^2`, `50%`);
    equal are `\frac{1}{2}` and `0.5`, not `0.333` and `1/3`; units are passed over. A list of values is one answer:
    `4 or 5` isn't 4. Comparing takes at most `seconds` of processor time in one of `processes` processes of its own,
    and what takes more is wrong; `Ungraded` only where no process can be asked.

    Raises ConfigError where math-verify isn't installed, DataError for a gold that is no text or number.
    """

    def __init__(self, *, seconds: int = 3, processes: int = 2, longest: int = 400) -> None:
        if not _installed():
            raise ConfigError("the reward math needs the package math-verify: pip install 'saccade[math]'")
        if min(seconds, processes, longest) < 1:
            raise ConfigError("the reward math: seconds, processes and longest must be at least 1")
        self._longest = longest
        self._checker = Checker(seconds=seconds, processes=processes)

    async def __call__(self, episode: Episode, task: Task) -> float | Ungraded:
        """The reward of an episode."""
        if isinstance(task.gold, tuple) or not str(task.gold).strip():
            raise DataError(f"task {task.id}: the gold answer must be a formula, it is {task.gold!r}")
        gold, said = formula(str(task.gold)), formula(episode.answer or "")
        if gold is None or not said or len(said) > self._longest:
            return 0.0
        if " ".join(said.split()) == " ".join(gold.split()):
            return 1.0
        if _talks(said) and not _talks(gold):
            return 0.0
        try:
            return float(await self._checker.same(gold, said))
        except CheckerError as error:
            return Ungraded(reason=str(error))


def formula(text: str) -> str | None:
    r"""The one formula of an answer, or None where there is none or several.

    >>> formula(r"The answer is $\boxed{\frac{1}{2}}$."), formula("$x²$"), formula(r"\boxed{1} or \boxed{2}")
    ('\\frac{1}{2}', 'x^{2}', None)
    """
    found = boxes(text)
    if found is None or len({"".join(each.split()) for each in found}) > 1:
        return None
    text = found[-1] if found else _LEAD.sub("", " ".join(text.split()))
    text = (wrapped[2] if (wrapped := _BOLD.match(text.strip())) else text).strip()
    text = tidy(_SUPERSCRIPT.sub(lambda match: f"^{{{tidy(match[0])}}}", text))
    for plain, latex in _LATEX.items():
        text = text.replace(plain, latex)
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", _MIXED.sub(r"(\1+\2/\3)", text))
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text).strip().rstrip(".").strip()
    bare = _MATHS.match(text)
    text = next((each for each in bare.groups() if each is not None), "") if bare else text
    return text.strip() if _balanced(text) else None


def _talks(formula: str) -> bool:
    r"""Whether words in a formula are more than a unit at its end: `4 \text{ if } x > 0, 5 \text{ else}`."""
    texts = list(_TEXT.finditer(formula))
    behind = [formula[one.end() : two.start()] for one, two in itertools.pairwise(texts)]
    behind += [formula[texts[-1].end() :]] if texts else []
    joined = [text[1].strip() in ("and", "or", ",") for text in texts]
    return any(re.search(r"\d", text[1]) for text in texts) or any(
        not _UNIT.fullmatch(rest) for rest, join in zip(behind, joined, strict=True) if not join
    )


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _installed() -> bool:
    try:
        return importlib.util.find_spec("math_verify") is not None
    except ValueError:  # a module that somebody put there by hand has no spec
        return False
