"""Called by scripts/bootstrap inside .venv-vllm and .venv-trl: fixes torchvision, then runs a check, `import ...`.

The wheel of torchvision that goes with a CPU build of torch brings compiled operators that don't load, and its import
fails because their names are unknown. vLLM and TRL use its Python part alone (transforms), so the names are all it
takes. A .pth file declares them whenever a Python of this environment imports torchvision, and at no other time.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

PATCH = '''"""Declares the operators that torchvision's Python part names, before it is imported."""

import importlib.abc
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
KEPT = []  # a library's definitions live as long as it does


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            KEPT.append(torch.library.Library("torchvision", "DEF"))
            for schema in SCHEMAS:
                KEPT[0].define(schema)
        return None


sys.meta_path.insert(0, Finder())
'''


def main(check: str) -> None:
    """Write the patch, and try it."""
    site = Path(sysconfig.get_paths()["purelib"])
    for old in site.glob("saccade_torchvision_*"):  # two of them would define the operators twice
        old.unlink()
    (site / "saccade_torchvision_patch.py").write_text(PATCH)
    (site / "saccade_torchvision_patch.pth").write_text("import saccade_torchvision_patch\n")
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bootstrap: {check!r} fails in {sys.prefix}:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main(sys.argv[1])
