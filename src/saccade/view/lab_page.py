"""One self-contained HTML page of a lab, in the looks of a run's page: no script, no link, pictures inside."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from saccade.view.page import STATIC
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
    environment = Environment(
        loader=FileSystemLoader(STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("lab.html.j2")
    drawn = [(heading, Markup(themed(picture))) for heading, picture in pictures]
    return template.render(
        css=Markup((STATIC / "report.css").read_text(encoding="utf-8")),
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
        pictures=drawn,
    )
