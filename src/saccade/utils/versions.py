"""Collect the versions that a run depends on: packages, platform, commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python, of the numerical packages and of the platform, and the source tree's commit."""
    packages = ("saccade", "torch", "transformers", "numpy", "av")
    versions = {name: find_package_version(name) for name in packages}
    return {"python": platform.python_version(), **versions, "platform": platform.platform(), "commit": _find_commit()}


def find_package_version(package: str) -> str | None:
    """Return the installed version of a package without importing it; None if it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_commit() -> str | None:
    """Return the commit of Saccade's source tree (with -dirty if modified); None for an installed copy."""
    folder, name = Path(__file__).parent, Path(__file__).name
    try:
        # An installed copy may be inside an unrelated repository, whose commit is meaningless here.
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", name], cwd=folder, capture_output=True)
        if tracked.returncode:
            return None
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, cwd=folder, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
