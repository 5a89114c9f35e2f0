"""What an optimizer with 8-bit moments needs, such as the package torchao; none of it needs torch to be checked."""

import importlib.util

from saccade.config.schema import OptimizerConfig
from saccade.errors import ConfigError


def check_optimizer(settings: OptimizerConfig, stage: str = "", *, cpu_offload: bool = False) -> None:
    """Raise ConfigError, with the key below the recipe's `stage`, if the optimizer can't be used."""
    if settings.name != "adamw_8bit":
        return
    key = f"{stage}.optim.name" if stage else "optim.name"
    if importlib.util.find_spec("torchao") is None:
        problem = f"{key}={settings.name} needs the package torchao: pip install 'saccade[lowbit]'"
    elif cpu_offload:
        problem = f"{key}={settings.name} is slow on the CPU, to which model.cpu_offload moves it; set {key}=adamw"
    else:
        return
    raise ConfigError(problem, key=key, value=settings.name)
