"""Compute what baseline policies reach on tasks in which calls can't look at every place.

    oracle       knows what the media say: the most that any policy can reach within the limits of calls
    exhaustive   looks at one place after another from the first, until its calls are spent
    uniform      looks at places drawn at random, none of them twice
    fixed        looks at the places in which this split has most needles: the best that ignores the media
    constant     doesn't look, and always gives this split's most frequent answer
    no_decision  the best of the last four: the ceiling of a policy that doesn't decide where to look

A policy reads the overview; if it doesn't find the needle, it gives the most frequent answer. The best policy is that
with the highest accuracy minus the costs of its calls.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from saccade.config.schema import NeedlesConfig
from saccade.data.synthetic.dataset import ContentT, SyntheticDataset, read_dataset_file
from saccade.types import Task

NO_DECISION = "no_decision"
PolicyScores = dict[str, list[float]]  # policy -> [accuracy, calls], means over tasks


def compute_policy_baselines(tasks: Sequence[Task], settings: NeedlesConfig) -> PolicyScores:
    """Return the accuracy and the calls of each policy on a split; see the module."""
    answers, places = Counter(task.ground_truth for task in tasks), [int(task.extras["place"]) for task in tasks]
    constant = max(answers.values()) / len(tasks)
    shown = [bool(task.extras.get("is_shown")) for task in tasks]
    kind, num_places = str(tasks[0].extras["question"]), settings.num_places
    budget = min(settings.num_calls, num_places)

    def score(hit_rates: Sequence[float], calls: float) -> list[float]:
        """Return [accuracy, calls]; `hit_rates` is the probability of looking at each place."""
        found = (1.0 if is_shown else hit_rates[place] for place, is_shown in zip(places, shown, strict=True))
        return [sum(rate + (1 - rate) * constant for rate in found) / len(tasks), calls]

    def look_at(chosen: Sequence[int]) -> list[float]:
        return score([float(place in chosen) for place in range(num_places)], len(chosen))

    def compute_net(policy: Sequence[float]) -> float:
        return policy[0] - get_tool_call_penalty(kind, settings) * policy[1]

    frequent = [place for place, _ in Counter(p for p, s in zip(places, shown, strict=True) if not s).most_common()]
    frequent += [place for place in range(num_places) if place not in frequent]
    policies = {
        "exhaustive": look_at(range(budget)),
        "uniform": score([budget / num_places] * num_places, budget),
        "fixed": max((look_at(frequent[:count]) for count in range(budget + 1)), key=compute_net),
        "constant": [constant, 0.0],
    }
    best = max(policies.values(), key=compute_net)
    accuracy, calls = _score_oracle(kind, settings, sum(shown) / len(tasks))
    return {"oracle": [accuracy + (1 - accuracy) * constant, calls], **policies, NO_DECISION: best}


def add_policy_baselines(tasks: Sequence[Task], settings: NeedlesConfig) -> list[Task]:
    """Return the tasks of a split with the scores of baseline policies, and the cost of a call, in their extras."""
    cost = get_tool_call_penalty(str(tasks[0].extras["question"]), settings)
    extras = {"policies": compute_policy_baselines(tasks, settings), "tool_call_penalty": cost}
    return [replace(task, extras={**task.extras, **extras}) for task in tasks]


class PolicyDataset(SyntheticDataset[ContentT]):
    """A dataset whose tasks hold what baseline policies score on their split."""

    def build_tasks(self, contents: Sequence[ContentT], split: str) -> list[Task]:
        """Build a task per file."""
        return add_policy_baselines(super().build_tasks(contents, split), self.config.needles)

    @classmethod
    def find_split_problems(cls, root: Path, tasks: Sequence[Task]) -> list[str]:
        """Find tasks whose policies aren't those of the dataset's settings."""
        settings = NeedlesConfig.model_validate(read_dataset_file(root / "dataset.json")["settings"]["needles"])
        expected = add_policy_baselines(tasks, settings)
        wrong = [task.id for task, right in zip(tasks, expected, strict=True) if task.extras != right.extras]
        problem = "the policies of {} and {} more tasks don't follow from the tasks"
        return [problem.format(wrong[0], len(wrong) - 1)] if wrong else []


def get_tool_call_penalty(kind: str, settings: NeedlesConfig) -> float:
    """Return what a call costs in tasks of a kind, in units of accuracy."""
    return settings.tool_call_penalty if kind == "cost" else 0.0


def _score_oracle(kind: str, settings: NeedlesConfig, shown_share: float) -> tuple[float, float]:
    """Return the share of the needles that the best policy finds, and its calls per task."""
    if kind == "map" and settings.label == "small":  # one call for the label, one for its entry
        return float(settings.tool_turns >= 2), 2.0
    if kind != "search":
        return 1.0, 1.0 - shown_share
    # A turn of k calls divides each range that is left into k + 1 ranges.
    found, calls, width = 0, 0.0, settings.calls_per_turn + 1
    for turn in range(settings.tool_turns):
        new = min(settings.calls_per_turn * width**turn, settings.num_places - found)
        found += new
        calls += new * (turn + 1) * settings.calls_per_turn
    missed = settings.num_places - found
    calls += missed * settings.num_calls
    return found / settings.num_places, calls / settings.num_places
