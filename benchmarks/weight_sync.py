"""Measure for how long a weight sync holds back requests, with one server and with several.

    python benchmarks/weight_sync.py [--servers 7] [--load 2]

The servers are scripted: each takes `--load` seconds to load weights, and every other request of the update, the label
and the comparison of logprobs are real. `one by one` is what updating as many servers in turn would take: the first
row times their number.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import describe_machine, parser, show
from _scripted_server import LOGPROBS
from safetensors.torch import save_file
from wire import scripted_servers

from saccade.chat.renderer import load_renderer
from saccade.engines.vllm import Vllm
from saccade.ledger import Ledger
from saccade.models.tiny import make_tiny_model
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams


class Source:
    """Weights of some size whose logprobs are those of the scripted servers."""

    dtype, has_adapters = "float32", False

    def __init__(self, megabytes: int) -> None:
        self.num_bytes = megabytes * 2**20

    def save(self, folder: Path) -> None:
        """Write a file of the weights' size."""
        save_file({"weights": torch.zeros(self.num_bytes, dtype=torch.uint8)}, folder / "model.safetensors")

    def compute_token_logprobs(self, ledger: Ledger, tokens: Sequence[int], load_pixels: Any) -> list[float]:
        """Return what the servers report."""
        return LOGPROBS[: len(tokens)]


async def measure(urls: Sequence[str], renderer: Any, source: Source, rounds: int) -> dict[str, float]:
    """Return the medians of a weight sync's metrics; the first one is not counted."""
    engine = Vllm(renderer, FakeMediaLoader(), servers=tuple(urls), verify_weights=False)
    ledger = Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=("warm",)),)),))
    await engine.generate(GenerationRequest(ledger, SamplingParams(max_tokens=1, seed=1)))
    while len(engine._pool.servers_up) < len(urls):
        await asyncio.sleep(0.05)
    metrics = [await engine.sync_weights(source, version) for version in range(1, rounds + 2)]  # type: ignore[arg-type]
    await engine.close()
    # The first one also compares checksums.
    return {key.partition("/")[2]: statistics.median(row[key] for row in metrics[1:]) for key in metrics[1]}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--servers", type=int, default=7)
    options.add_argument("--load", type=float, default=2.0, help="seconds that a server takes to load weights")
    options.add_argument("--megabytes", type=int, default=256, help="size of the weights")
    given = options.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), tie_word_embeddings=False)
        renderer = load_renderer(folder)
        for count in (1, given.servers):
            with scripted_servers(Path(folder), count, given.load, 0.0, 0.0) as (urls, _):
                figures = asyncio.run(measure(urls, renderer, Source(given.megabytes), given.rounds))
            rows.append({"servers": count, **figures})
    for row in rows:
        row["times one server"] = row["pause_seconds"] / rows[0]["pause_seconds"]
        row["one by one"] = row["servers"] * rows[0]["pause_seconds"]
    show("The pause of a weight sync", rows, describe_machine(), given.out)


if __name__ == "__main__":
    main()
