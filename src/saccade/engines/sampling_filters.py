"""Sampling filters of engines (top_p and the like): for evaluation only, since training can't account for them."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import ConfigError

# The values that change nothing.
NEUTRAL_VALUES: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def check_neutral(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if an engine with these settings samples from another distribution than training assumes."""
    for name, neutral in NEUTRAL_VALUES.items():
        if (value := settings.get(name, neutral)) != neutral:
            raise ConfigError(
                f"engine.settings.{name}={value} makes the engine sample from another distribution than training "
                f"assumes; it is for evaluation only: leave it at {neutral:g}",
                key=f"engine.settings.{name}",
                value=value,
            )
