"""A trace of one training step, written as a file that chrome://tracing and Perfetto open."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from saccade.utils.files import convert_file_errors, write_atomically


class StepTrace:
    """Traces step `step` (from 1) of a training into `path`: operators of all threads and, on a GPU, its kernels."""

    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    @contextlib.contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Trace the block if `step` is the one to trace. Raises RunError if the file can't be written."""
        if step != self._step:
            yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # Micro-batches and policy updates run in threads of their own.
        threads = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, acc_events=True, experimental_config=threads) as profiler:
            yield
        with convert_file_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(self._path, is_durable=False) as part:
                profiler.export_chrome_trace(str(part))
