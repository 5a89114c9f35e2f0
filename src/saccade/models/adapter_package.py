"""The package peft, which adapters need: whether it is there is known without torch."""

import importlib.util

from saccade.errors import ConfigError


def check_adapters(rank: int) -> None:
    """Raise ConfigError if `rank` > 0 and peft isn't installed."""
    if rank and importlib.util.find_spec("peft") is None:
        problem = f"model.lora_rank={rank} needs the package peft: pip install 'saccade[lora]'"
        raise ConfigError(problem, key="model.lora_rank", value=rank)
