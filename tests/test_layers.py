"""Each module imports only from lower layers; there are no circles; `import saccade` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "saccade"

LAYERS = [
    ["ledger", "types", "errors"],
    ["protocols", "sections", "config", "plugins", "runlog", "waiting", "endpoint"],
    ["media", "rewards", "algorithms"],
    ["chat", "data", "model"],
    ["tools", "engines", "view", "trackers"],
    ["agents"],
    ["rollouts"],
    ["training", "evaluation"],
    [
        "recipes",
        "testing",
        "planning",
        "preflight",
        "stages",
        "exams",
        "doctor",
        "checkup",
        "demo",
        "lab",
        "interop",
        "commands",
        "cli",
    ],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# Single files of one layer may know each other; the folders of one layer may not.
NEIGHBOURS = {part for level in (0, 1, 8) for part in LAYERS[level]}
# A part that may know a neighbour nevertheless.
ALLOWED = {
    ("model", "chat"): "a checkpoint is weights and the words that go in and out of them",
    ("training", "evaluation"): "a step of RL is measured by the very numbers of an evaluation",
}
# A part that may not know another although it lies above it.
FORBIDDEN = {("agents", "engines"): "an agent knows an engine only as a protocol"}
# Third-party packages that live behind single files, or a folder that is nothing but a use of them.
OWNERS = {
    "av": ("media.video", "data.world.film"),  # reading; writing the clips of a world
    "yaml": ("config",),
    "typer": ("cli", "commands"),
    "rich": ("cli", "commands", "view.live"),
    "matplotlib": ("view.plots", "view.bands", "tools._sandbox.gallery"),  # our plots; those of a model's code
    "PIL": ("media", "data", "tools", "view.episodes", "view.plots"),
    "httpx": ("endpoint", "engines._served.server", "engines._served.process"),
    "math_verify": ("rewards._symbolic",),
    "pydantic": ("sections", "config", "plugins", "tools._tool", "data.record", "lab.design", "agents._protocol"),
    "transformers": ("model",),
    "tokenizers": ("chat.tokens", "model._tiny_tokenizer"),
    "peft": ("model._adapters",),
    "safetensors": ("model._adapters", "model.layerwise"),
    "jinja2": ("view.page",),
    "tensorboard": ("trackers.tensorboard",),
    "wandb": ("trackers.wandb",),
    "pyarrow": ("data.parquet",),
    "huggingface_hub": ("data.hub",),
    "lmms_eval": ("interop.lmms_eval",),
}

OPTIONAL = {"tensorboard", "pyarrow"}  # reached through torch's own writer; imported by name, late


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(("saccade", *(part for part in parts if part != "__init__"))), path


MODULES = dict(modules())


def imports(path):
    """The dotted names that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            yield from (_target(node.module, alias.name) for alias in node.names)


def _target(module, name):
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def part_of(module):
    return module.split(".")[1] if module.count(".") else ""


EDGES = {module: sorted(set(imports(path))) for module, path in MODULES.items()}
INSIDE = {module: [name for name in names if name.split(".")[0] == "saccade"] for module, names in EDGES.items()}


def test_every_part_has_a_layer():
    parts = {part_of(module) for module in MODULES} - {""}
    assert parts <= set(LEVEL), f"without a layer: {parts - set(LEVEL)}"


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name)])
def test_a_module_imports_only_from_lower_layers(module):
    own = part_of(module)
    for name in INSIDE[module]:
        other = part_of(name)
        if not other or other == own:
            continue
        neighbours = own in NEIGHBOURS and other in NEIGHBOURS and LEVEL[own] == LEVEL[other]
        below = LEVEL[other] < LEVEL[own] or neighbours or (own, other) in ALLOWED
        assert below, f"{module} (layer {LEVEL[own]}) imports {name} ({LEVEL[other]})"
        assert (own, other) not in FORBIDDEN, f"{module} imports {name}: {FORBIDDEN[own, other]}"


def test_the_nouns_need_the_standard_library_alone():
    for part in LAYERS[0]:
        outside = {name.split(".")[0] for name in EDGES[f"saccade.{part}"]} - set(sys.stdlib_module_names) - {"saccade"}
        assert not outside, f"{part} imports {outside}"


@pytest.mark.parametrize("package", OWNERS)
def test_third_party_packages_stay_behind_their_owners(package):
    users = {module for module, names in EDGES.items() if package in {name.split(".")[0] for name in names}}
    owners = {*OWNERS[package]}
    strangers = sorted(module for module in users if not owners & {part_of(module), module.removeprefix("saccade.")})
    assert not strangers, f"{package} is imported by {strangers}"
    idle = owners - {part_of(module) for module in users} - {module.removeprefix("saccade.") for module in users}
    assert not idle or package in OPTIONAL, f"{package} is owned by {idle}, which don't import it"


def test_there_are_no_import_circles():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for name in INSIDE[module]:
            if name in MODULES and part_of(name):
                visit(name)
        done.add(path.pop())

    for module in MODULES:
        visit(module)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["saccade", "saccade.cli", "saccade.config", "saccade.runlog", "saccade.types"])
def test_light_modules_bring_no_heavy_ones(module):
    heavy = "[name for name in ('torch', 'transformers', 'av', 'matplotlib', 'numpy') if name in sys.modules]"
    command = [sys.executable, "-c", f"import {module}, sys; print(*{heavy})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", f"import {module} brings {done.stdout.strip()}"
