"""`saccade export RUN OUT`: write a checkpoint of a run as a plain Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import RunFolder, out
from saccade.reporting.console import print_text


def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must be new or empty.")],
    step: Annotated[str, typer.Option(help="A step, last, or best: the best validation that is kept.")] = "last",
    stage: Annotated[str, typer.Option(help="sft or rl; by default rl if it has a checkpoint.")] = "",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapters alone, for peft, instead of merged weights.")
    ] = False,
) -> None:
    """Write a checkpoint as a folder that transformers and vLLM load: weights, processor, chat template, and a model
    card with the recipe and the scores.
    """
    from saccade.runs.export import export_checkpoint

    print_text(out, f"wrote {export_checkpoint(run, folder, stage=stage, step=step, adapter=adapter)}")
