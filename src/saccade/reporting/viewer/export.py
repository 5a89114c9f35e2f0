"""One page that holds a run: the pages of the viewer, its scripts and styles, and the data, within a size.

    library ──answers, rows, chosen episodes, thumbnails──> gzip ──base64──┐
    static/*.js, *.css ──one module, one style sheet───────────────────────┴──> FILE.html, which requests nothing

The list of episodes is whole up to MAX_ROWS. What an episode's page shows is large, so episodes are added while they
fit: each evaluation's and the newest training step's in turn, failures and successes by turns. Tokens and videos are
left out.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from saccade.errors import MediaError, SaccadeError
from saccade.reporting.episode_view import THUMBNAIL_PIXELS, PixelLoader, encode_thumbnail
from saccade.reporting.viewer.episodes import list_images
from saccade.reporting.viewer.library import STAGE_ORDER, Library
from saccade.reporting.viewer.plain_json import dump_json

STATIC_FOLDER = Path(__file__).parent / "static"
MAX_BYTES = 5_000_000  # of a page
MAX_ROWS = 20_000  # in the list of episodes, the newest steps first
MAX_EPISODES = 400  # with their own page
MAX_ADVANTAGE_STEPS = 20  # the newest, whose advantages are shown
MAX_PAIRED_EVALUATIONS = 6  # whose paired differences are computed
FIGURE_PIXELS = 480  # of the longer side of an image without a time, such as a plot whose labels must be readable
BASE64 = 4 / 3  # bytes of text per byte of data
_IMPORT = re.compile(r'^import \{ (.+?) \} from "(.+?)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPage:
    """A page as text, and one sentence about what it holds and what was left out."""

    text: str
    note: str


def export_run(library: Library, name: str, load_pixels: PixelLoader, *, max_bytes: int = MAX_BYTES) -> ExportedPage:
    """Return the page of a run, of at most `max_bytes` bytes. The library's index must be up to date."""
    index = library.get(name).index
    total, rows = 0, list[dict[str, Any]]()
    while len(rows) < MAX_ROWS:
        total, more = index.list_episodes({}, offset=len(rows), limit=500)
        rows += more
        if not more:
            break
    data: dict[str, Any] = {"note": "", "rows": rows, "answers": dict(_collect_answers(library, name, rows))}
    frame_script = build_page("", "")
    # A list too long for the page loses its end.
    spent = len(frame_script) + _measure(data)
    while spent > max_bytes * 0.6 and len(rows) > 100:
        del rows[len(rows) // 2 :]
        spent = len(frame_script) + _measure(data)
    described, frames = _choose_episodes(library, name, rows, load_pixels, max_bytes * 0.97 - spent)
    rows.sort(key=lambda row: row["ref"] not in described)  # those that can be opened are first
    size = f"{max_bytes / 1e6:g} MB"
    note = (
        f"Exported on {datetime.now(UTC):%Y-%m-%d}, at most {size}: {len(rows):,} of {total:,} episodes are listed, "
        f"{len(described):,} of them with their conversation and small frames. Tokens and videos are left out."
    )
    page = build_page(_pack({**data, "note": note, "episodes": described, "frames": frames}), name)
    return ExportedPage(text=page, note=note)


def _collect_answers(library: Library, name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the requests of the pages, as `api.js` writes them, with their answers."""
    run = [("run", name)]
    own = [row for row in library.list_runs() if row["name"] == name]
    yield _name("runs", []), own
    for stage in STAGE_ORDER:
        yield _name("curves", [*run, ("stage", stage)]), library.build_curves([name], stage)
    yield _name("tables", run), library.build_tables(name)
    yield _name("benchmarks", run), library.build_benchmarks(name)
    index = library.get(name).index
    yield _name("facets", run), library.list_facets(name)
    steps = index.list_steps()
    yield _name("steps", run), steps
    for step in [step["step"] for step in steps if step["stage"] == "rl"][-MAX_ADVANTAGE_STEPS:]:
        try:
            advantages = library.compute_advantages(name, "rl", step)
        except (SaccadeError, ValueError, OSError):  # such as an estimator that is gone
            advantages = {}
        yield _name("advantages", [*run, ("stage", "rl"), ("step", step)]), advantages
    evaluations = list(dict.fromkeys(row["stage"] for row in rows if row["kind"] == "evaluation"))
    ordered = [stage for stage in own[0]["evaluations"] if stage in evaluations]
    for first, second in combinations(ordered[:MAX_PAIRED_EVALUATIONS], 2):
        sides = [("first", first), ("second", second)]
        pairs = [
            (f"{side}_{key}", value)
            for side, stage in sides
            for key, value in (("run", name), ("stage", stage), ("step", 0))
        ]
        both = [(name, first, 0), (name, second, 0)]
        yield _name("compare", pairs), library.compare(both[0], both[1])
        yield _name("paired", pairs), library.compare_evaluations(both[0], both[1])


def _name(query: str, pairs: Sequence[tuple[str, Any]]) -> str:
    return "\n".join([query, *(f"{key}={value}" for key, value in pairs)])


def _choose_episodes(
    library: Library, name: str, rows: Sequence[Mapping[str, Any]], load_pixels: PixelLoader, budget: float
) -> tuple[dict[str, Any], list[str]]:
    """Return descriptions by ref, and the thumbnails (base64 JPEG) that they number, within `budget` bytes."""
    described, frames = dict[str, Any](), list[str]()
    numbers: dict[str, int | None] = {}
    for ref in _order_episodes(rows):
        if len(described) == MAX_EPISODES or budget <= 0:
            break
        try:
            view = library.describe_episode(name, ref)
            images = list_images(library.read(name, ref)[0].episode)
        except (SaccadeError, OSError):  # an episode whose file is damaged or was deleted
            continue
        new = dict[str, str]()
        for image in images:
            if image.key not in numbers and image.key not in new:
                try:
                    side = FIGURE_PIXELS if image.time is None else THUMBNAIL_PIXELS
                    new[image.key] = base64.b64encode(encode_thumbnail(load_pixels(image), side)).decode()
                except MediaError:
                    numbers[image.key] = None
        cost = (len(gzip.compress(dump_json(view).encode())) + sum(map(len, new.values()))) * BASE64
        if cost > budget:
            continue  # a smaller one may fit
        budget -= cost
        for key, text in new.items():
            numbers[key] = len(frames)
            frames.append(text)
        described[ref] = {**view, "frames": [numbers[image.key] for image in images]}
    return described, frames


def _order_episodes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the refs of episodes: of each evaluation and the newest step of each stage in turn, failures and successes
    by turns; then those of earlier steps.
    """
    groups: dict[tuple[Any, ...], list[list[str]]] = {}
    newest = {row["stage"]: row["step"] for row in reversed(rows)}
    for row in rows:
        key = (row["stage"],) if row["step"] == newest[row["stage"]] else ("earlier",)
        groups.setdefault(key, [[], []])[int((row["correct"] or 0.0) >= 0.5)].append(row["ref"])
    earlier = groups.pop(("earlier",), [[], []])
    turns = [_alternate(group) for group in groups.values()]
    yield from _alternate(turns)
    yield from _alternate(earlier)


def _alternate(lists: Sequence[Sequence[str]]) -> list[str]:
    return [item for row in zip_longest(*lists) for item in row if item is not None]


def _pack(data: Any) -> str:
    return base64.b64encode(gzip.compress(dump_json(data).encode(), mtime=0)).decode()


def _measure(data: Any) -> int:
    return len(_pack(data))


def build_page(data: str, title: str) -> str:
    """Return the page with its data (base64 of gzipped JSON); its policy allows its own script and style alone."""
    style = "\n".join((STATIC_FOLDER / path).read_text() for path in ("uplot/uPlot.min.css", "viewer.css"))
    theme, charts = ((STATIC_FOLDER / path).read_text() for path in ("theme.js", "uplot/uPlot.iife.min.js"))
    module = bundle_modules(STATIC_FOLDER / "main.js")
    hashes = " ".join(map(_hash, (theme, charts, module)))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    heading = re.sub(r"[<>&]", "", title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{heading}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{style}</style>\n<script>{theme}</script>\n</head>\n<body>\n'
        '<a class="skip" href="#content">Skip to the content</a>\n<header class="bar"></header>\n'
        '<main id="content" tabindex="-1"><p class="note" role="status">Loading …</p></main>\n'
        f'<script type="application/octet-stream" id="data">{data}</script>\n<script>{charts}</script>\n'
        f'<script type="module">{module}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle_modules(entry: Path) -> str:
    """Return a module and all that it imports as one module: each becomes a function that returns what it exports."""
    sources, pending = dict[Path, str](), [entry.resolve()]
    graph: TopologicalSorter[Path] = TopologicalSorter()
    while pending:
        path = pending.pop()
        if path in sources:
            continue
        sources[path] = path.read_text()
        needed = [(path.parent / target).resolve() for _, target in _IMPORT.findall(sources[path])]
        graph.add(path, *needed)
        pending += needed
    names = {path: f"module_{number}" for number, path in enumerate(sources)}
    parts = []
    for path in graph.static_order():

        def bind(match: re.Match[str], folder: Path = path.parent) -> str:
            return f"const {{ {match[1]} }} = {names[(folder / match[2]).resolve()]};"

        body = _IMPORT.sub(bind, sources[path])
        exports = ", ".join(_EXPORT.findall(body))
        parts.append(
            f"const {names[path]} = await (async () => {{\n{_EXPORT.sub('', body)}\nreturn {{ {exports} }};\n}})();"
        )
    return "\n".join(parts)
