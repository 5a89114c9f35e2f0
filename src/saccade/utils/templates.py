"""Fill templates whose text is the user's, such as prompts: only the named placeholders are replaced."""

import re
from collections.abc import Mapping


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replace each `{name}` of `values` in one pass; other braces, and braces inside values, stay as they are.

    >>> fill_template("{start}: {question} {x}", {"start": "3", "question": "{start}?"})
    '3: {start}? {x}'
    """
    pattern = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({pattern})\}}", lambda match: values[match[1]], template) if values else template
