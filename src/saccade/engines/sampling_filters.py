"""Settings of engines that change what is sampled besides the temperature: for evaluation, never for training."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import ConfigError

NEUTRAL: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}  # each with what changes nothing


def check_neutral(settings: Mapping[str, Any]) -> None:
    """See that an engine with these settings samples from the very distribution that is trained. Raises ConfigError."""
    for name, neutral in NEUTRAL.items():
        if settings.get(name, neutral) != neutral:
            raise ConfigError(
                f"engine.settings.{name} samples from another distribution than the one that is trained; leave it "
                "out, it is for evaluation alone"
            )
