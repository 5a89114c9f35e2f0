"""What a machine must have, each thing tried rather than assumed."""

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from packaging.requirements import Requirement

from saccade.data.world.film import write_clip
from saccade.errors import SaccadeError
from saccade.media import video
from saccade.runlog import version_of, writing
from saccade.tools._sandbox import server


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was looked at, what was found and wanted, and whether that is good."""

    name: str
    found: str
    wanted: str = ""
    good: bool = True


def examine() -> Iterator[Finding]:
    """Python and packages against their bounds, threads, device, video, the current folder, the jail for Python.

    Packages of extras may be missing; one that is there must be within its bounds like any other.
    """
    yield Finding(name="python", found=platform.python_version(), wanted=">=3.11", good=sys.version_info >= (3, 11))
    for line in importlib.metadata.requires("saccade") or []:
        wanted = Requirement(line)
        extra = wanted.marker is not None
        if wanted.marker is not None and wanted.marker.evaluate({"extra": "dev"}):  # what only its own tests need
            continue
        found = version_of(wanted.name)
        good = extra if found is None else wanted.specifier.contains(found, prereleases=True)
        missing = "not installed, not needed by all" if extra else "not installed"
        yield Finding(name=wanted.name, found=found or missing, wanted=str(wanted.specifier), good=good)
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    yield Finding(name="threads", found=f"{torch.get_num_threads()} of {os.cpu_count()} cores, waiting {policy}")
    yield Finding(name="device", found=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    for name, attempt in (("video", films), ("this folder", writes), ("jail", jails)):
        try:
            yield Finding(name=name, found=attempt())
        except SaccadeError as error:
            yield Finding(name=name, found=str(error), good=False)


def films() -> str:
    """Write a clip and read it back. Raises MediaError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(path, np.zeros((8, 32, 32, 3), np.uint8), 4.0)
        clip = video.probe(str(path))
    return f"H.264 written and read back, {clip.frames} frames"


def jails() -> str:
    """Which walls stand around Python that a model wrote, each tried; without any, agents that write it are out."""
    try:
        report = server.examine()
    except SaccadeError as error:
        return f"agents that write Python can't be used here, all others can: {error}"
    stand = "; ".join(f"{each.name} ({each.found}): {each.meaning}" for each in report.layers if each.active)
    return f"{report.sentence}. {stand}"


def writes() -> str:
    """Write to the current folder. Raises RunError."""
    with writing(Path.cwd()), tempfile.TemporaryFile(dir=Path.cwd()):
        return f"{Path.cwd()} can be written"
