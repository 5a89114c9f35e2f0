"""The memory of a training step as `saccade recipes plan` predicts it, beside what a step needs.

    python benchmarks/memory.py
    python benchmarks/memory.py --device cuda

A step has two micro-batches of a group each, so that gradients are stored during the second one's backward pass. The
peak of what torch allocates is measured in the second step; the first one allocates the optimizer's state. On a CPU the
profiler reports each allocation; the figures don't depend on other load. Memory that is freed may stay with the process
there, so its resident set is larger.
Each case is a process of its own.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _common import describe_machine, measure_peak, parser, show
from local_engine import NoiseMediaLoader
from packing import group, loss, packed

from saccade.checks.estimates import TrainingCost, estimate_memory
from saccade.config.load import load_recipe
from saccade.models.config_sizes import read_sizes
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training.optimizer import Optimizer
from saccade.training.train_step import train_step

WORDS = 8000  # of the vocabulary
# By name: settings of the recipe's model (or, with a ".", of its section `rl`), the frames of the prompt, the replies'
# tokens.
CASES: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "all weights": ({}, 100, 95),
    "all weights, checkpointing": ({"activation_checkpointing": True}, 100, 95),
    "all weights, long replies": ({}, 20, 400),
    "all weights, long replies, entropy bonus": ({"loss.entropy_coef": 0.01}, 20, 400),
    "all weights, many frames": ({}, 300, 95),
    "all weights, bfloat16": ({"dtype": "bfloat16"}, 100, 95),
    "all weights, 8-bit moments": ({"optim.name": "adamw_8bit"}, 100, 95),
    "all weights, bfloat16, 8-bit moments": ({"dtype": "bfloat16", "optim.name": "adamw_8bit"}, 100, 95),
    "all weights, offloaded": ({"cpu_offload": True}, 100, 95),
    "all weights, bfloat16, offloaded": ({"dtype": "bfloat16", "cpu_offload": True}, 100, 95),
    "language model": ({"trained_weights": "language_model"}, 100, 95),
    "LoRA": ({"lora_rank": 8}, 100, 95),
    "LoRA, checkpointing": ({"lora_rank": 8, "activation_checkpointing": True}, 300, 95),
}


def measure_case(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the predicted and the measured bytes of a case."""
    settings, frames, reply = CASES[name]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        words = ["".join(letters) for letters in itertools.islice(itertools.product("abcdefghij", repeat=5), WORDS)]
        make_tiny_model(folder, hidden_size=options.hidden, num_layers=options.layers, vocabulary_text=words)
        sizes = read_sizes(folder)
        model = {"path": folder, "device": options.device, "num_threads": 1, **settings}
        values = {f"rl.{key}" if "." in key else f"model.{key}": value for key, value in model.items()}
        recipe = load_recipe("tiny/base").with_values(values)
        vlm = VisionLanguageModel(recipe.model)
    optim = recipe.rl.optim
    optimizer = Optimizer(vlm.model, optim, num_steps=10**6, cpu_offload=recipe.model.cpu_offload)
    [batch] = packed(group(vlm, frames, options.group, reply), vlm)
    batches = [replace(batch, weight_N=np.ones(len(batch.token_N), np.float32))] * 2

    def step() -> None:
        train_step(
            vlm,
            optimizer,
            batches,
            loss,
            load_all_pixels=NoiseMediaLoader().load_all_pixels,
            entropy_coef=recipe.rl.loss.entropy_coef,
        )

    step()
    measured = measure_peak(step, options.device)
    training = TrainingCost(
        unpacked_tokens=batch.ids_BT.size,
        visual_tokens=frames,
        trained_tokens=len(batch.token_N),
        row_lengths=(batch.ids_BT.shape[1],),
        micro_batch_size=1,
        max_row_prefix_tokens_of_branches=options.group * int((batch.branch_BT == 0).sum()),
    )
    predicted = estimate_memory(recipe, sizes, optim, training, kl=recipe.rl.kl).peak
    return {"tokens": batch.ids_BT.size, "predicted": predicted, "measured": measured}


def run_case(name: str, arguments: Sequence[str]) -> dict[str, float]:
    """Measure a case in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--case", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the case {name!r} failed:\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each case."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(__doc__, rounds=1)
    options.add_argument("--device", default="cpu")
    options.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--case", choices=CASES, help="measure one case in this process and print it as JSON")
    chosen = options.parse_args(arguments)
    if chosen.case:
        print(json.dumps(measure_case(chosen.case, chosen)))
        return
    rows = []
    for name in CASES:
        result = run_case(name, arguments)
        rows.append(
            {
                "case": name,
                "tokens": int(result["tokens"]),
                "predicted MB": result["predicted"] / 1e6,
                "measured MB": result["measured"] / 1e6,
                "predicted / measured": result["predicted"] / result["measured"],
            }
        )
    show("Memory of a training step", rows, describe_machine(chosen.device), chosen.out)


if __name__ == "__main__":
    main()
