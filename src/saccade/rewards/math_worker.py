"""Symbolic equality by math-verify: a script that `_checker` runs, one line of JSON in, one out.

It runs in a process of its own since what a model writes may take for ever to work out (9^{9^{9^9}}), most of the time
inside C, where no exception gets through. So the system counts its seconds of processor time, and kills it where they
are used up. Nothing of Saccade is imported here, so that it starts quickly.
"""

import json
import logging
import math
import re
import resource
import sys
from typing import Any

_MEMORY = 4 << 30  # bytes of address space; what needs more fails as it does on a small machine
_EQUALS = re.compile(r"(?<![<>!=:])=(?!=)")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def same(gold: str, answer: str) -> bool:
    """Whether two formulas in LaTeX are equal; of `x = 2 + 2 = 4` every side that is a value must be."""
    from math_verify import verify

    wanted, said = _read(gold), _read(answer)
    if not wanted or not said or not verify(wanted, said, timeout_seconds=None):
        return False
    sides = _EQUALS.split(answer)
    if len(sides) == 1 or _EQUALS.search(gold):
        return True
    # math-verify reads the last side alone, so that "5 = 4" would be 4; a first side with a letter is a name
    named = re.search("[a-zA-Z]", _COMMAND.sub("", sides[0]))
    return all(verify(wanted, _read(side), timeout_seconds=None) for side in sides[1 if named else 0 :])


def _read(formula: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        f"\\boxed{{{formula}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return found


def _limit(seconds: int) -> None:
    """Let this process use that many more seconds of processor time; then the system ends it with SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def _serve() -> None:
    """Answer line by line until there are no more; the first line says whether math-verify is there."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        _say({"error": str(error)})
        return
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _limit(asked["seconds"])
        _say({"same": same(asked["gold"], asked["answer"])})


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
