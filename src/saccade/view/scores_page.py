"""One self-contained HTML page of a run's benchmarks, in the looks of a run's page: no script, no link.

Questions, answers and the names of strata come from data sets and models; the template escapes them, always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from saccade.view.page import filled
from saccade.view.plots import Format, Point, points, themed


def render(
    *,
    title: str,
    facts: Mapping[str, Any],
    cards: Mapping[str, Mapping[str, Any]],
    published: Mapping[str, Sequence[Mapping[str, Any]]],
    warning: str,
) -> str:
    """The page as text: `cards` are plain `evaluation.scorecard.Scorecard`s by evaluation, `published` by benchmark."""
    picture = plot(cards, published)
    return filled(
        "scores.html.j2",
        title=title,
        facts={key: str(value) for key, value in facts.items()},
        cards={name: _beside(card, published) for name, card in cards.items()},
        published=[each for some in published.values() for each in some],
        warning=warning,
        plot=None if picture is None else Markup(themed(picture)),
    )


def _beside(card: Mapping[str, Any], published: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A card with the systems that were published for its metrics, by metric; ablations stand in the list alone."""
    known = [each for each in published.get(card["benchmark"], ()) if not each["ablation"]]
    return {**card, "others": {name: [each for each in known if each["metric"] == name] for name in card["metrics"]}}


def plot(
    cards: Mapping[str, Mapping[str, Any]],
    published: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    fmt: Format = "svg",
) -> bytes | None:
    """Score against visual tokens per question; hollow are published values whose tokens are known."""
    drawn = []
    for name, card in cards.items():
        told = card["whole"] or card  # of a limited sample what it says of the whole, as what was published does
        low, high = told["intervals"][card["headline"]]
        score, tokens = told["metrics"][card["headline"]], card["costs"]["visual_tokens"]
        named = f"{name}, estimated" if card["whole"] else name
        drawn.append(Point(name=named, group=card["benchmark"], x=tokens, y=score, low=low, high=high))
    for card in {card["benchmark"]: card for card in cards.values()}.values():
        for each in published.get(card["benchmark"], ()):
            if each["visual_tokens"] is not None and each["metric"] == card["headline"]:
                named = f"{card['benchmark']}: {each['model']} (published)"
                at = {"x": each["visual_tokens"], "y": each["value"], "low": each["value"], "high": each["value"]}
                drawn.append(Point(name=named, group=card["benchmark"], hollow=True, **at))
    return points(drawn, across="visual tokens per question", unit="score, %, with its 95 % interval", fmt=fmt)
