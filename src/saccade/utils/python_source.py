"""Parse Python that a model wrote."""

import ast
import warnings
from typing import Any, Literal


def parse_python(source: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    """Return what `ast.parse` returns, without its warnings. Raises what it raises.

    The parser warns about odd escapes and operators; the user can't act on warnings about a model's output.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, mode=mode)
