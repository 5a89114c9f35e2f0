"""Steps with no checkpoint, with one that the training waits for, and with one that is written beside the next steps.

A round is `--interval` steps of next-token prediction with a tiny model of `--hidden` and `--layers`, whose first step
saves; the background's write is awaited at the round's end, so that its whole cost is the round's.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from _common import describe_machine, parser, show

from saccade.config.schema import CheckpointConfig, ModelConfig, OptimizerConfig
from saccade.models.attention import AttentionSpan
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training.background import run_in_thread
from saccade.training.checkpoint_writer import CheckpointWriter, FinishedStep
from saccade.training.optimizer import Optimizer

MODES = ("no saves", "blocking", "background")


class Side:
    """A training in one mode."""

    def __init__(self, model: Path, folder: Path, mode: str, given: argparse.Namespace) -> None:
        self.mode, self.folder, self.interval, self.step = mode, folder, given.interval, 0
        settings = ModelConfig(path=str(model), num_threads=given.threads, device=given.device)
        self.vlm = VisionLanguageModel(settings)
        self.optimizer = Optimizer(self.vlm.model, OptimizerConfig(name="adamw", lr=1e-5), 10**6)
        self.writer = CheckpointWriter(
            folder=folder,
            vlm=self.vlm,
            optimizer=self.optimizer,
            retention=CheckpointConfig(last=1, background=mode == "background"),
            get_scores=lambda metric: {},
        )
        self.ids_BT = torch.arange(4 * given.tokens, device=given.device).reshape(4, -1) % 200

    async def run_round(self) -> tuple[float, float, float]:
        """Return the seconds of the step that saves and of the round, and the CPU seconds of the round."""
        start, cpu_start, saving_step = time.perf_counter(), time.process_time(), 0.0
        for index in range(self.interval):
            self.step += 1
            self.writer.check()
            await run_in_thread(lambda _: self._update(), "the update")
            if index == 0 and self.mode != "no saves":
                await self.writer.save(FinishedStep(step=self.step, trainer_state={}))
            if index == 0:
                saving_step = time.perf_counter() - start
        await self.writer.finish()
        return saving_step, time.perf_counter() - start, time.process_time() - cpu_start

    def _update(self) -> None:
        (B, T), device = self.ids_BT.shape, self.ids_BT.device
        positions_3BT = torch.arange(T, device=device).expand(3, B, T)
        trees = self.vlm.pack_spans([AttentionSpan(row, 0, T) for row in range(B)], T)
        hidden = self.vlm.policy.compute_hidden_states(self.ids_BT, positions_3BT, trees)
        logits = self.vlm.policy.compute_logits(hidden[:, :-1].flatten(0, 1))
        torch.nn.functional.cross_entropy(logits, self.ids_BT[:, 1:].flatten()).backward()
        self.optimizer.step()
        if self.ids_BT.is_cuda:
            torch.cuda.synchronize()

    @property
    def checkpoint_bytes(self) -> int:
        """Return the size of the newest checkpoint."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


async def measure(sides: Sequence[Side], rounds: int) -> list[dict[str, object]]:
    """Measure the sides in turn; return the medians. The first round warms up."""
    figures: dict[str, list[tuple[float, float, float]]] = {side.mode: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            values = await side.run_round()
            if number:
                figures[side.mode].append(values)
    return [
        {
            "mode": side.mode,
            "saving step s": statistics.median(values[0] for values in figures[side.mode]),
            "round s": statistics.median(values[1] for values in figures[side.mode]),
            "round CPU s": statistics.median(values[2] for values in figures[side.mode]),
            "steps a round": side.interval,
            "checkpoint MiB": side.checkpoint_bytes / 2**20,
            "rounds": rounds,
        }
        for side in sides
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--tokens", type=int, default=128, help="of each of 4 rows")
    options.add_argument("--interval", type=int, default=4, help="steps per checkpoint")
    options.add_argument("--device", default="cpu")
    options.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    given = options.parse_args(arguments)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make_tiny_model(str(folder / "model"), hidden_size=given.hidden, num_layers=given.layers)
        sides = [Side(folder / "model", folder / mode, mode, given) for mode in MODES]
        rows = asyncio.run(measure(sides, given.rounds))
    show("Saving checkpoints", rows, describe_machine(given.device), given.out)


if __name__ == "__main__":
    main()
