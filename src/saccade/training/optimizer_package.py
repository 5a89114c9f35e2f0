"""The package torchao, which an optimizer with 8-bit moments needs: whether it is installed is known without torch."""

import importlib.util

from saccade.config.schema import OptimizerConfig
from saccade.errors import ConfigError


def check_optimizer(settings: OptimizerConfig, stage: str = "") -> None:
    """Raise ConfigError, with the key below the recipe's `stage`, if the optimizer's package isn't installed."""
    if settings.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        key = f"{stage}.optim.name" if stage else "optim.name"
        problem = f"{key}={settings.name} needs the package torchao: pip install 'saccade[lowbit]'"
        raise ConfigError(problem, key=key, value=settings.name)
