"""Check what Saccade needs of a machine; every feature is tried, not assumed."""

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from saccade import sandbox
from saccade.data.synthetic.video_writer import write_video
from saccade.errors import RunError, SaccadeError, convert_errors
from saccade.media import video
from saccade.utils.files import convert_file_errors
from saccade.utils.versions import find_package_version


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The name of a check, what was found and expected, whether it passed, and the error if it raised one."""

    name: str
    message: str
    expected: str = ""
    is_ok: bool = True
    error: Exception | None = None


def check_machine() -> Iterator[CheckResult]:
    """Check versions (extras may be missing), threads, device, video codec, current folder, and sandbox isolation."""
    yield CheckResult(
        name="python", message=platform.python_version(), expected=">=3.11", is_ok=sys.version_info >= (3, 11)
    )
    for line in importlib.metadata.requires("saccade") or []:
        requirement = Requirement(line)
        is_extra = requirement.marker is not None
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "dev"}):
            continue
        version = find_package_version(requirement.name)
        is_ok = is_extra if version is None else requirement.specifier.contains(version, prereleases=True)
        message = version or ("not installed, optional" if is_extra else "not installed")
        yield CheckResult(name=requirement.name, message=message, expected=str(requirement.specifier), is_ok=is_ok)
    checks = {
        "threads": describe_threads,
        "device": describe_device,
        "video": check_video_codec,
        "this folder": check_current_folder,
        "sandbox": describe_isolation,
    }
    for name, check in checks.items():
        try:
            yield CheckResult(name=name, message=check())
        except SaccadeError as error:
            yield CheckResult(name=name, message=str(error), is_ok=False)


def describe_threads() -> str:
    """Describe the threads of torch. Raises RunError if torch can't be imported."""
    with convert_errors(RunError, "torch can't be imported", key="torch"):
        import torch
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    return f"{torch.get_num_threads()} of {os.cpu_count()} cores, OMP_WAIT_POLICY {policy}"


def describe_device() -> str:
    """Describe the GPU that torch finds, or "cpu". Raises RunError if torch can't be imported."""
    with convert_errors(RunError, "torch can't be imported", key="torch"):
        import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def check_video_codec() -> str:
    """Write a video and read it back. Raises MediaError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(path, np.zeros((8, 32, 32, 3), np.uint8), 4.0)
        info = video.probe_video(str(path))
    return f"H.264 written and read back, {info.num_frames} frames"


def describe_isolation() -> str:
    """Describe the active isolation layers of the sandbox; without any, environments that run Python are unusable."""
    try:
        report = sandbox.probe_isolation()
    except SaccadeError as error:
        return f"environments that run Python can't be used on this machine, all others can: {error}"
    layers = "; ".join(f"{layer.name} ({layer.detail}): {layer.meaning}" for layer in report.layers if layer.is_active)
    return f"{report.summary}. {layers}"


def check_current_folder() -> str:
    """Check that the current folder is writable. Raises RunError."""
    with convert_file_errors(Path.cwd()), tempfile.TemporaryFile(dir=Path.cwd()):
        return f"{Path.cwd()} is writable"
