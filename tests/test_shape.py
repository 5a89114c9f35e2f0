"""Rules that no linter holds: annotations, no `print`, no forbidden calls; paths in documents exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "saccade"
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def get_name(path):
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def list_nodes():
    """Return the name of a file and a node, for all functions and calls of all files."""
    kinds = (*FUNCTIONS, ast.Call)
    trees = ((get_name(path), ast.parse(path.read_text())) for path in FILES)
    return [(name, node) for name, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


WRITE_MODES = {"w", "wb", "a", "ab", "x", "xb", "r+b", "a+b", "w+b"}


def is_write(node):
    """Return whether a call opens a path for writing, by `open` or the method of a path."""
    if not isinstance(node, ast.Call):
        return False
    is_open = isinstance(node.func, ast.Attribute) and node.func.attr == "open"
    is_open = is_open or (isinstance(node.func, ast.Name) and node.func.id == "open")
    modes = {item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    return is_open and bool(modes & WRITE_MODES)


# What reads only files of the package, of a checkout or of the kernel, or is a program of its own.
READERS_OF_OWN_FILES = (
    *("__init__.py", "plugins.py", "cli/new.py", "cli/recipes.py", "config/reference.py", "utils/files.py", "sandbox/"),
    *("reporting/report.py", "reporting/plots.py", "reporting/benchmark_report.py", "reporting/viewer/export.py"),
)

# The function itself, what runs in the sandbox's own folders, and PyAV's `open`, which checks the path before.
WRITERS_OF_OWN_FILES = ("utils/files.py", "sandbox/", "data/synthetic/video_writer.py")


def is_read(node):
    """Return whether a call opens a file for reading."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes"):
        return True
    is_path = isinstance(node.func, ast.Attribute) and node.func.attr == "open"
    if not (is_path or (isinstance(node.func, ast.Name) and node.func.id == "open")):
        return False
    modes = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    text_options = {"encoding", "errors", "newline"} & {keyword.arg for keyword in node.keywords}
    return "rb" in modes or "r" in modes or (bool(text_options) and not modes)


@pytest.mark.slow
def test_files_of_users_are_opened_by_one_function():
    """A named pipe would block what opens it: `utils.files.open_file` refuses all but files and folders."""
    reads = {f"{name}:{node.lineno}" for name, node in list_nodes() if is_read(node)}
    assert not {read for read in reads if not read.startswith(READERS_OF_OWN_FILES)}
    writes = {f"{name}:{node.lineno}" for name, node in list_nodes() if is_write(node)}
    assert not {write for write in writes if not write.startswith(WRITERS_OF_OWN_FILES)}


@pytest.mark.slow
def test_functions_are_annotated():
    functions = [(name, node) for name, node in list_nodes() if isinstance(node, FUNCTIONS)]
    own = ("__post_init__", "__init__")
    assert not [f"{name}:{node.name}" for name, node in functions if node.returns is None and node.name not in own]


@pytest.mark.slow
def test_forbidden_words_and_calls():
    unfinished = re.compile(r"\b(TO" r"DO|FIX" r"ME|XXX)\b")
    assert not [get_name(path) for path in FILES if unfinished.search(path.read_text())]
    for name, node in list_nodes():
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        where = f"{name}, line {node.lineno}"
        assert node.func.id != "print" or name.startswith("cli/"), f"print in {where}"
        assert node.func.id != "getattr" or len(node.args) < 3, f"getattr with a default in {where}"
        assert node.func.id != "hash", f"hash() differs from process to process: {where}"


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
)
def test_paths_in_documents_exist(document):
    folders = "src|tests|scripts|docs|examples|benchmarks|requirements"
    paths = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]*\w)", (ROOT / document).read_text())
    missing = [path for path in paths if not list(ROOT.glob(path))]
    assert not missing, f"{document} names {missing}"
