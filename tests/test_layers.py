"""Each module imports only from earlier layers; there are no import circles; `import saccade` is light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "saccade"

# From the contracts up to the command line: a part imports only from earlier lines, or from itself.
LAYERS = [
    ["errors"],
    ["utils", "sandbox"],
    ["ledger", "types"],
    ["protocols", "plugins"],
    ["config"],
    ["media", "chat", "algorithms", "rewards"],
    ["models", "data"],
    ["tools"],
    ["environments", "engines"],
    ["rollouts"],
    ["metrics"],
    ["training", "evaluation"],
    ["reporting"],
    ["checks"],
    ["runs"],
    ["interop", "testing"],
    ["recipes", "cli"],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# Single files of one layer may import each other; folders of one layer may not.
FILES_BESIDE = {("types", "ledger"), ("protocols", "plugins")}
SANDBOX_MAY_IMPORT = {"errors"}
# Third-party packages that live behind single files, or a folder that is nothing but a use of them.
OWNERS = {
    "av": ("media.video", "data.synthetic.video_writer"),
    "yaml": ("config.load",),
    "typer": ("cli",),
    "rich": ("cli", "reporting.console", "reporting.training_view"),
    "matplotlib": (
        "reporting.pdf",
        "reporting.plots",
        "sandbox.figure_capture",
    ),  # the last: of model-written code
    "PIL": ("media", "data", "tools", "reporting.episode_view", "reporting.plots", "sandbox"),
    "httpx": ("utils.http_client",),
    "math_verify": ("rewards.math_worker",),
    "pydantic": (
        "config",
        "data.source_row",
        "data.conversations",
        "data.importers",
        "plugins",
        "tools.base",
        "utils.jsonl",
        "runs.ablations.spec",
        "environments.base",
        "environments.third_party_format",
        "environments.openenv",
    ),
    "pydantic_core": ("config.load", "utils.jsonl"),
    "transformers": ("models",),
    "tokenizers": ("chat.tokenizer", "models.tiny_tokenizer"),
    "peft": ("models.lora",),
    "torchao": ("training.adamw_8bit",),
    "safetensors": ("models",),
    "jinja2": ("reporting.report",),
    "tensorboard": ("reporting.loggers.tensorboard",),
    "wandb": ("reporting.loggers.wandb",),
    "swanlab": ("reporting.loggers.swanlab",),
    "starlette": ("reporting.viewer.server",),
    "uvicorn": ("reporting.viewer.server",),
    "pyarrow": ("data.parquet",),
    "huggingface_hub": ("data.hub",),
    "websockets": ("environments.openenv",),
    "ray": ("rollouts.ray",),
    "lmms_eval": ("interop.lmms_eval",),
}

OPTIONAL = {"tensorboard", "pyarrow"}  # imported by name, inside functions, or through torch's own writer


def list_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(("saccade", *(part for part in parts if part != "__init__"))), path


MODULES = dict(list_modules())


def find_imports(path):
    """Yield the dotted names that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            yield from (_resolve_target(node.module, alias.name) for alias in node.names)


def _resolve_target(module, name):
    return f"{module}.{name}" if f"{module}.{name}" in MODULES else module


def get_part(module):
    return module.split(".")[1] if module.count(".") else ""


@functools.cache
def list_edges():
    """Return what each module imports."""
    return {module: sorted(set(find_imports(path))) for module, path in MODULES.items()}


@functools.cache
def list_inner_edges():
    """Return which modules of the package each module imports."""
    return {
        module: [name for name in names if name.split(".")[0] == "saccade"] for module, names in list_edges().items()
    }


def test_every_part_has_a_layer():
    parts = {get_part(module) for module in MODULES} - {""}
    assert parts <= set(LEVEL), f"without a layer: {parts - set(LEVEL)}"


@pytest.mark.slow
def test_modules_import_only_from_earlier_layers():
    for module, name in ((module, name) for module, names in list_inner_edges().items() for name in names):
        own, other = get_part(module), get_part(name)
        if not own or not other or other == own:
            continue
        assert LEVEL[other] < LEVEL[own] or (own, other) in FILES_BESIDE, (
            f"{module} (layer {LEVEL[own]}) imports {name} (layer {LEVEL[other]})"
        )
        assert own != "sandbox" or other in SANDBOX_MAY_IMPORT, f"{module} imports {name}: the sandbox stands alone"
        assert other != "sandbox" or name == "saccade.sandbox", f"{module} imports {name}: saccade.sandbox is the API"


@pytest.mark.slow
def test_no_private_module_is_imported_across_top_level_folders():
    crossing = [
        (module, name)
        for module, names in list_inner_edges().items()
        for name in names
        if any(part.startswith("_") for part in name.split(".")) and get_part(name) != get_part(module)
    ]
    assert not crossing


@pytest.mark.slow
def test_tests_import_private_modules_of_their_own_folder_alone():
    tests = PACKAGE.parents[1] / "tests"
    crossing = [
        (path.relative_to(tests).as_posix(), name)
        for path in tests.rglob("*.py")
        for name in find_imports(path)
        if name.startswith("saccade.")
        and any(part.startswith("_") for part in name.split("."))
        and get_part(name) != path.relative_to(tests).parts[0]
    ]
    assert not crossing


def find_private_imports(path):
    """Yield the private modules of saccade that a file imports, and the private names that it imports from modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("saccade.") and any(part.startswith("_") for part in name.split(".")):
                yield name


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_benchmarks_examples_and_scripts_import_nothing_private(folder):
    paths = sorted((PACKAGE.parents[1] / folder).rglob("*.py"))
    assert paths
    assert not [(path.name, name) for path in paths for name in find_private_imports(path)]


@pytest.mark.slow
def test_contracts_need_the_standard_library_alone():
    for part in ("errors", "ledger", "types"):
        outside = (
            {name.split(".")[0] for name in list_edges()[f"saccade.{part}"]}
            - set(sys.stdlib_module_names)
            - {"saccade"}
        )
        assert not outside, f"{part} imports {outside}"


@pytest.mark.parametrize("package", OWNERS)
def test_third_party_packages_stay_behind_their_owners(package):
    users = {module for module, names in list_edges().items() if package in {name.split(".")[0] for name in names}}
    owners = {*OWNERS[package]}
    names = {module: module.removeprefix("saccade.") for module in users}
    strangers = sorted(
        module
        for module, name in names.items()
        if not any(name == owner or name.startswith(f"{owner}.") for owner in owners)
    )
    assert not strangers, f"{package} is imported by {strangers}"
    idle = {owner for owner in owners if not any(n == owner or n.startswith(f"{owner}.") for n in names.values())}
    assert not idle or package in OPTIONAL, f"{package} is owned by {idle}, which don't import it"


def test_there_are_no_import_circles():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for name in list_inner_edges()[module]:
            if name in MODULES and get_part(name):
                visit(name)
        done.add(path.pop())

    for module in MODULES:
        visit(module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["saccade", "saccade.cli.app", "saccade.config.load", "saccade.runs.run_folder", "saccade.types"]
)
def test_light_modules_bring_no_heavy_ones(module):
    heavy = "[name for name in ('torch', 'transformers', 'av', 'matplotlib', 'numpy') if name in sys.modules]"
    command = [sys.executable, "-c", f"import {module}, sys; print(*{heavy})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", f"import {module} brings {done.stdout.strip()}"


# Of the sizes of models in the file of a folder, transformers knows more than `known_sizes.json`.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes", "plan"],
        ["recipes", "plan", "paravt/para_grpo", "rl.max_staleness=1", "--gpus", "8"],
        ["recipes", "explain", "rl.loss.settings.clip_low"],
        ["recipes", "explain", "engine.settings.max_num_seqs"],
        ["--help"],
        ["runs"],
    ],
)
def test_light_commands_bring_no_torch(tmp_path, arguments):
    (tmp_path / "runs").mkdir()
    code = (
        "import sys\nfrom saccade.cli.app import app\ntry:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(*({'torch', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""


def test_reports_do_not_know_the_synthetic_data():
    general = [module for module in MODULES if get_part(module) in {"metrics", "evaluation", "reporting", "training"}]
    found = {m: name for m in general for name in list_inner_edges()[m] if name.startswith("saccade.data.synthetic")}
    assert not found
