"""Import training rows of PyVision-RL: `prompt`, `reward_model`, `extra_info`, `mm_hint`, and their origin."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from saccade.data.conversations import Messages
from saccade.data.source_row import MediaFiles, RowModel, SourceRow, Text
from saccade.data.task_builder import build_task
from saccade.types import MediaKind, Task

# "env_name": the row's field names the recipe's environment; or the recipe's names by the row's; None: the default one
EnvironmentNames = Literal["env_name"] | dict[str, str] | None


class _RewardModel(RowModel):
    ground_truth: Any


class _MediaHint(RowModel):
    hint_path: MediaFiles
    hint_type: MediaKind


class _PyVisionRlExtraInfo(RowModel):
    question: Text = ""  # without the prompt's instructions


class _PyVisionRlRow(RowModel):
    prompt: Messages
    reward_model: _RewardModel
    mm_hint: _MediaHint
    extra_info: _PyVisionRlExtraInfo = _PyVisionRlExtraInfo()
    data_source: Text = ""
    ability: Text = ""
    env_name: Text | None = None


def pyvision_rl(
    row: SourceRow,
    *,
    use_prompt: bool = False,
    environments: EnvironmentNames = None,
) -> Iterator[Task]:
    """Yield one task: the question of `extra_info` (or the prompt's text), the media of `mm_hint`, the ground truth.

    With `use_prompt`, the question is the prompt's text, published instructions included, which `system_prompt: row` of
    an environment shows as it stands. `environments` is `env_name` if that field selects the recipe's environment of
    its name, or maps the field's names to the recipe's; without it the recipe's default environment is selected.
    """
    values = row.parse(_PyVisionRlRow)
    prompt = "\n".join(message.question for message in values.prompt if message.role == "user")
    info = row.get_mapping("extra_info") if row.has("extra_info") else {}
    origin = {name: row.values[name] for name in ("data_source", "ability", "env_name") if row.has(name)}
    system = "\n".join(message.text for message in values.prompt if message.role == "system")
    own_prompt = {"system": system} if use_prompt else {}
    yield build_task(
        row,
        row.convert((not use_prompt and values.extra_info.question) or prompt, Text, "extra_info.question"),
        values.reward_model.ground_truth,
        tuple(replace(media, kind=values.mm_hint.hint_type) for media in values.mm_hint.hint_path),
        field_name="reward_model.ground_truth",
        declared_type=find_declared_type(values.data_source, values.ability),
        extras={**own_prompt, **origin, **{name: info[name] for name in info if name not in ("question", "answer")}},
        environment=select_environment(row, values.env_name, environments),
    )


def select_environment(row: SourceRow, env_name: str | None, environments: EnvironmentNames) -> str | None:
    """Return the recipe's environment for a row's `env_name`; None for the recipe's default.

    Raises DataError if `environments` lacks the name.
    """
    if environments is None or env_name is None:
        return None
    if environments == "env_name":
        return env_name
    if env_name not in environments:
        problem = f"{env_name!r} isn't in the setting environments, which has {', '.join(environments) or 'no name'}"
        raise row.build_field_error("env_name", problem, value=env_name)
    return environments[env_name]


def find_declared_type(data_source: str, ability: str) -> str | None:
    """Return the answer type that a row's origin implies; None if it depends on the answer."""
    source = data_source.lower()
    if source == "vsi_numerical" or source.endswith("_rule_verifiable"):
        return "number"
    return "math" if "math" in ability.lower() else None
