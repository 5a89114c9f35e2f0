"""Measure how often 95 % intervals hold the true mean, and how often a difference of zero is called significant.

    python benchmarks/interval_coverage.py --out docs/results/interval_coverage.json

Each repeat draws clusters (clips) with several tasks each, as a design describes it, and computes the interval of
`metrics.statistics` beside two others: plain Student's t over the clusters' means, and the percentile bootstrap over
clusters. Null designs draw two evaluations of equal accuracy; a significant difference between them is an error.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from saccade.metrics.statistics import (
    DIFFERENCE_BOUNDS,
    FRACTION_BOUNDS,
    Interval,
    compute_interval,
    explain_insignificance,
    get_t_quantile,
)

NUM_CLUSTERS = (2, 3, 5, 8, 12, 24, 48)
Kind = Literal["binary", "skewed", "difference", "rare loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BASELINES = ("plain t", "bootstrap")
NUM_RESAMPLES = 500  # of the bootstrap, which is measured on fewer repeats
Array = NDArray[np.float64]
Clusters = tuple[Array, Array]  # the means and the numbers of tasks of the clusters
SIZES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "1 task": lambda rng, count: np.ones(count),
    "6 tasks": lambda rng, count: np.full(count, 6.0),
    "1 to 12 tasks": lambda rng, count: rng.integers(1, 13, count).astype(float),
    "often few, at times many tasks": lambda rng, count: rng.geometric(0.2, count).astype(float),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Describe how scores are drawn.

    `binary`: a task is correct with its clip's probability, which is beta distributed with this `mean` and
    `correlation` of tasks about one clip (0: independent, 1: all equal). `skewed`: a task's score is beta distributed
    around it, most near one end. `difference`: tasks are gained with probability `mean` + `gain` and lost with `mean`.
    `rare loss`: a share `mean` of the clips loses so much that the gain of all others, `gain` each, is 0 on average.
    """

    kind: Kind
    mean: float
    correlation: float
    sizes: str
    gain: float = 0.0

    @property
    def name(self) -> str:
        """Return a line of words."""
        gain = f", gain {self.gain:g}" if self.bounds == DIFFERENCE_BOUNDS else ""
        return f"{self.kind}, {self.mean:g}{gain}, correlation {self.correlation:g}, {self.sizes}"

    @property
    def truth(self) -> float:
        """Return the true mean."""
        return {"difference": self.gain, "rare loss": 0.0}.get(self.kind, self.mean)

    @property
    def bounds(self) -> Interval:
        """Return the bounds of a score."""
        return DIFFERENCE_BOUNDS if self.kind in ("difference", "rare loss") else FRACTION_BOUNDS

    def draw(self, rng: np.random.Generator, count: int) -> Clusters:
        """Draw `count` clusters."""
        sizes = SIZES[self.sizes](rng, count)
        if self.kind == "rare loss":
            loss = self.gain * (1 - self.mean) / self.mean
            return np.where(rng.random(count) < self.mean, -loss, self.gain), sizes
        if self.kind != "difference":
            rate = draw_rates(rng, self.mean, self.correlation, count)
            if self.kind == "binary":
                return rng.binomial(sizes.astype(int), rate) / sizes, sizes
            # The mean of m scores that are beta distributed around the clip's rate, in one draw of the same variance.
            width = 2.0 * sizes
            return rng.beta(np.maximum(rate, 1e-6) * width, np.maximum(1 - rate, 1e-6) * width), sizes
        gained, lost = self._draw_changes(rng, count)
        gains = rng.binomial(sizes.astype(int), gained)
        losses = rng.binomial(sizes.astype(int) - gains, np.clip(lost / np.maximum(1e-9, 1 - gained), 0, 1))
        return (gains - losses) / sizes, sizes

    def _draw_changes(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Draw each clip's rates of gained and lost tasks, Dirichlet distributed."""
        means = np.array([self.mean + self.gain, self.mean, 1 - 2 * self.mean - self.gain])
        if self.correlation == 0:
            return np.full(count, means[0]), np.full(count, means[1])
        # A share of 0 stays 0: gamma draws need a positive shape.
        shares = rng.gamma(np.maximum(means * (1 / self.correlation - 1), 1e-9), size=(count, 3)) + 1e-300
        rates = shares / shares.sum(1, keepdims=True)
        return rates[:, 0], rates[:, 1]


def draw_rates(rng: np.random.Generator, mean: float, correlation: float, count: int) -> Array:
    """Draw rates of clusters, beta distributed, whose Bernoulli draws have this correlation within a cluster."""
    if correlation == 0:
        return np.full(count, mean)
    if correlation == 1:
        return (rng.random(count) < mean).astype(float)
    total = 1 / correlation - 1
    return rng.beta(mean * total, (1 - mean) * total, count)


RARE_LOSSES = [
    Design(kind="rare loss", mean=mean, gain=gain, correlation=1.0, sizes=sizes)
    for mean, gain in ((0.02, 0.02), (0.05, 0.05), (0.1, 0.1), (0.2, 0.1), (0.25, 0.25), (0.4, 0.4))
    for sizes in ("1 task", "1 to 12 tasks")
]
DESIGNS = [
    *(Design(kind="binary", mean=mean, correlation=0.0, sizes="1 task") for mean in (0.5, 0.7, 0.9, 0.95)),
    *(
        Design(kind=kind, mean=mean, correlation=correlation, sizes=sizes)
        for kind in ("binary", "skewed")
        for mean in (0.5, 0.8, 0.95)
        for correlation in (0.2, 0.8)
        for sizes in ("6 tasks", "1 to 12 tasks", "often few, at times many tasks")
    ),
    *(
        Design(kind="difference", mean=mean, gain=gain, correlation=correlation, sizes=sizes)
        for mean, gain in ((0.1, 0.0), (0.05, 0.1), (0.0, 0.2), (0.2, 0.1))
        for correlation in (0.2, 0.8)
        for sizes in ("1 task", "6 tasks", "1 to 12 tasks")
    ),
    *RARE_LOSSES,
]
NULL_DESIGNS = [
    *(
        Design(kind="difference", mean=mean, correlation=correlation, sizes=sizes)
        for mean in (0.02, 0.1, 0.3)
        for correlation in (0.0, 0.2, 0.8)
        for sizes in SIZES
    ),
    *RARE_LOSSES,
]


def compute_t_interval(means_C: Array, sizes_C: Array) -> Interval:
    """Return the plain interval: Student's t over clusters with the ratio estimator's variance."""
    weights_C, count = sizes_C / sizes_C.sum(), len(means_C)
    mean = float(weights_C @ means_C)
    half = get_t_quantile(count - 1) * np.sqrt(count / (count - 1) * (weights_C**2 @ (means_C - mean) ** 2))
    return mean - half, mean + half


def compute_bootstrap_interval(means_C: Array, sizes_C: Array, rng: np.random.Generator) -> Interval:
    """Return the percentile bootstrap over clusters."""
    drawn = rng.integers(0, len(means_C), (NUM_RESAMPLES, len(means_C)))
    low, high = np.percentile((means_C * sizes_C)[drawn].sum(1) / sizes_C[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


def measure_coverage(design: Design, count: int, repeats: int, *, seed: int = 0) -> float:
    """Return how often the interval over `count` clusters holds the true mean."""
    rng = np.random.default_rng([seed, count])
    return float(
        np.mean(
            [holds(design, compute_interval(*design.draw(rng, count), bounds=design.bounds)) for _ in range(repeats)]
        )
    )


def measure_false_alarms(design: Design, count: int, repeats: int, *, seed: int = 0) -> float:
    """Return how often a difference of zero is called significant."""
    rng = np.random.default_rng([seed, count])
    alarms = 0
    for _ in range(repeats):
        means_C, sizes_C = design.draw(rng, count)
        alarms += not explain_insignificance(means_C, compute_interval(means_C, sizes_C, bounds=design.bounds))
    return alarms / repeats


def holds(design: Design, interval: Interval) -> bool:
    """Return whether an interval holds the true mean, except for rounding."""
    return interval[0] - 1e-9 <= design.truth <= interval[1] + 1e-9


def measure(repeats: int, counts: Sequence[int] = NUM_CLUSTERS) -> Iterator[dict[str, Any]]:
    """Yield a row per design and number of clusters."""
    for design in DESIGNS:
        for count in counts:
            rng = np.random.default_rng([1, count])
            samples = [design.draw(rng, count) for _ in range(max(1, repeats // 10))]
            intervals = {
                "width": [compute_interval(*sample, bounds=design.bounds) for sample in samples],
                "plain t": [compute_t_interval(*sample) for sample in samples],
                "bootstrap": [compute_bootstrap_interval(*sample, rng) for sample in samples],
            }
            yield {
                "kind": design.kind,
                "design": design.name,
                "clusters": count,
                "coverage": measure_coverage(design, count, repeats),
                **{name: np.mean([holds(design, interval) for interval in intervals[name]]) for name in BASELINES},
                "width": _average_width(intervals["width"]),
                "width of plain t": _average_width(intervals["plain t"]),
            }


def summarize(rows: Sequence[Mapping[str, Any]], alarms: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return a row per number of clusters: the least coverage of each kind of design, and the most false alarms."""
    summary = []
    for count in NUM_CLUSTERS:
        own = [row for row in rows if row["clusters"] == count]
        kinds = {kind: min(row["coverage"] for row in own if row["kind"] == kind) for kind in KINDS}
        baselines = {name: float(min(row[name] for row in own)) for name in BASELINES}
        false_alarms = max(rate for clusters, rate in alarms if clusters == count)
        summary.append({"clusters": count, **kinds, **baselines, "most false alarms": false_alarms})
    return summary


def _average_width(intervals: Sequence[Interval]) -> float:
    return float(np.mean([high - low for low, high in intervals]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    from _common import describe_machine, parser, show

    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=2000, help="per design and number of clusters; others a tenth")
    given = options.parse_args(arguments)
    rows = list(measure(given.repeats))
    alarms = [
        (count, measure_false_alarms(design, count, given.repeats)) for design in NULL_DESIGNS for count in NUM_CLUSTERS
    ]
    summary = summarize(rows, alarms)
    about = describe_machine() | {"designs": str(len(DESIGNS)), "repeats": str(given.repeats), "seed": "0"}
    show("Coverage of 95 % intervals", rows, about, None)
    show("Coverage of 95 % intervals, the least over designs", summary, about, None)
    if given.out is not None:
        coverage = {
            design.name: [row["coverage"] for row in rows if row["design"] == design.name] for design in DESIGNS
        }
        content = {"machine": about, "rows": summary, "clusters": NUM_CLUSTERS, "coverage by design": coverage}
        text = json.dumps(content, indent=1)
        # A list of numbers takes one line.
        given.out.write_text(re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
