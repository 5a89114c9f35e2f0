"""Compare formulas with math-verify: a script that `math_worker_pool` runs; one line of JSON in, one line out.

It runs in its own process because evaluating a model's formula may never end (9^{9^{9^9}}), mostly inside C, where no
exception gets through. The system limits the processor time of each comparison and kills the process that exceeds it.
Nothing of Saccade is imported here, so that it starts quickly.
"""

import json
import logging
import math
import re
import resource
import sys
from typing import Any

_MEMORY_LIMIT = 4 << 30  # bytes of address space
_EQUALS_SIGN = re.compile(r"(?<![<>!=:])=(?!=)")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")


def are_equal(ground_truth: str, answer: str) -> bool:
    """Return whether two LaTeX formulas are equal; in `x = 2 + 2 = 4` every side that is a value must be equal."""
    from math_verify import verify

    expected, predicted = _parse_formula(ground_truth), _parse_formula(answer)
    if not expected or not predicted or not verify(expected, predicted, timeout_seconds=None):
        return False
    sides = _EQUALS_SIGN.split(answer)
    if len(sides) == 1 or _EQUALS_SIGN.search(ground_truth):
        return True
    # math-verify reads only the last side, so "5 = 4" would pass as 4. A first side with a letter is a variable's name.
    has_name = re.search("[a-zA-Z]", _LATEX_COMMAND.sub("", sides[0]))
    return all(verify(expected, _parse_formula(side), timeout_seconds=None) for side in sides[1 if has_name else 0 :])


def verify_texts(ground_truth: str, answer: str) -> bool:
    """Return whether math-verify finds the same formula or number in two texts, as its default settings do."""
    from math_verify import parse, verify

    expected, predicted = (parse(text, parsing_timeout=None) for text in (ground_truth, answer))
    return bool(verify(predicted, expected, timeout_seconds=None))


def _parse_formula(formula: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    boxed = f"\\boxed{{{formula}}}"
    return parse(boxed, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)


def _serve() -> None:
    """Answer line by line until stdin closes; the first line reports whether math-verify could be imported."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        _write_response({"error": str(error)})
        return
    _write_response({"ready": True})
    for line in sys.stdin:
        request, used = json.loads(line), resource.getrusage(resource.RUSAGE_SELF)
        # The processor time of this comparison; beyond it, the system ends the process with SIGXCPU.
        limit = math.ceil(used.ru_utime + used.ru_stime) + request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        compare = verify_texts if request["is_text"] else are_equal
        _write_response({"same": compare(request["ground_truth"], request["answer"])})


def _write_response(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
