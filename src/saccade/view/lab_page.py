"""One self-contained HTML page of a lab, in the looks of a run's page: no script, no link, pictures inside."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from saccade.view.page import filled
from saccade.view.plots import themed


def render(
    *,
    title: str,
    name: str,
    warnings: Sequence[str],
    claim: str,
    asks: str,
    facts: Mapping[str, str],
    parts: Sequence[tuple[str, str, str]],
    reading: str,
    intervals: str,
    tables: Sequence[Mapping[str, Any]],
    pictures: Sequence[tuple[str, bytes]],
) -> str:
    """The page as text: `parts` are name, what it is, settings; `tables` title, header, rows; `pictures` title, SVG."""
    return filled(
        "lab.html.j2",
        title=title,
        name=name,
        warnings=warnings,
        claim=claim,
        asks=asks,
        facts=facts,
        parts=parts,
        reading=reading,
        intervals=intervals,
        tables=tables,
        pictures=[(heading, Markup(themed(picture))) for heading, picture in pictures],
    )
