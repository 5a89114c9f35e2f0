"""AdamW whose moments are stored in 8 bits with a scale per 256 values (arXiv 2110.02861), through torchao."""

import contextlib
from typing import Any

import torch
from torchao import optim


class AdamW8bit(optim.AdamW8bit):
    """torchao's optimizer: moments of fewer than 4,096 values, or of an odd part of a block, stay in float32.

    torchao compiles the update of each shape of a weight. On a CPU its operations run one by one instead: the result
    is the same, and no C++ compiler and no minutes of compiling are needed.
    """

    def step(self, closure: Any = None) -> Any:
        """Update the parameters by their gradients."""
        is_on_cpu = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        with torch.compiler.set_stance("force_eager") if is_on_cpu else contextlib.nullcontext():
            return super().step(closure)
