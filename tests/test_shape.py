"""Rules that no linter holds: annotations, no `print`, no forbidden calls; paths in documents exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "saccade"
FILES = sorted(PACKAGE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def get_name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=get_name)
def test_functions_are_annotated(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTIONS):
            assert node.returns is not None or node.name in ("__post_init__", "__init__"), node.name


@pytest.mark.parametrize("path", FILES, ids=get_name)
def test_forbidden_words_and_calls(path):
    text = path.read_text()
    assert not re.search(r"\b(TO" r"DO|FIX" r"ME|XXX)\b", text)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        assert node.func.id != "print" or path.parent.name == "cli", f"print in line {node.lineno}"
        assert node.func.id != "getattr" or len(node.args) < 3, f"getattr with a default in line {node.lineno}"
        assert node.func.id != "hash", f"hash() differs from process to process, line {node.lineno}"


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
)
def test_paths_in_documents_exist(document):
    folders = "src|tests|scripts|docs|examples|benchmarks|requirements"
    paths = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]*\w)", (ROOT / document).read_text())
    missing = [path for path in paths if not list(ROOT.glob(path))]
    assert not missing, f"{document} names {missing}"
