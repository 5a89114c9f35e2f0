"""The shape of the code: small files, small functions, flat, explained in moderation, and nothing twice."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "saccade"
FILES = sorted(PACKAGE.rglob("*.py"))
PLUGIN_FOLDERS = (
    "agents",
    "engines",
    "rewards",
    "tools",
    "trackers",
    "chat/families",
    "chat/syntaxes",
    "data/sources",
    "evaluation/benchmarks",
)

FILE_LINES, PLUGIN_LINES, FUNCTION_LINES, NESTING, TWIN_LINES = 400, 150, 60, 3, 8
DOCSTRING_SHARE, COMMENT_SHARE = (0.12, 0.22), (0.03, 0.08)

# "path" or "path:function" -> why it may break a rule of this file
EXCEPTIONS: dict[str, str] = {}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def excused(*places):
    return any(place in EXCEPTIONS for place in places)


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTIONS) and not excused(f"{name_of(path)}:{node.name}"):
            yield node


def depth(node):
    """How deep the blocks under a node nest; `elif` is a branch of its `if`, an inner function starts anew."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, FUNCTIONS):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If) and len(value) == 1
            deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_small(path):
    is_plugin = path.parent.relative_to(PACKAGE).as_posix() in PLUGIN_FOLDERS and not path.name.startswith("_")
    limit = PLUGIN_LINES if is_plugin else FILE_LINES
    lines = len(path.read_text().splitlines())
    assert lines <= limit or excused(name_of(path)), f"{lines} lines, more than {limit}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_are_small_and_flat(path):
    for node in functions(path):
        lines = node.end_lineno - node.lineno + 1
        assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines, more than {FUNCTION_LINES}"
        assert depth(node) <= NESTING, f"{node.name} nests {depth(node)} deep, more than {NESTING}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_are_annotated(path):
    for node in functions(path):
        assert node.returns is not None or node.name == "__post_init__" or node.name == "__init__", node.name


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_forbidden_words_and_calls(path):
    text = path.read_text()
    assert not re.search(r"\b(TO" r"DO|FIX" r"ME|XXX)\b", text)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        assert node.func.id != "print" or path.name == "cli.py", f"print in line {node.lineno}"
        assert node.func.id != "getattr" or len(node.args) < 3, f"getattr with a default in line {node.lineno}"
        assert node.func.id != "hash", f"hash() differs from process to process, line {node.lineno}"


def docstring_lines(tree):
    kinds = (ast.Module, ast.ClassDef, *FUNCTIONS)
    owners = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return sum(node.body[0].end_lineno - node.body[0].lineno + 1 for node in owners)


@pytest.mark.slow
def test_the_package_is_explained_in_moderation():
    lines = docstrings = comments = 0
    for path in FILES:
        text = path.read_text()
        lines += len(text.splitlines())
        docstrings += docstring_lines(ast.parse(text))
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})
    for share, (least, most) in ((docstrings / lines, DOCSTRING_SHARE), (comments / lines, COMMENT_SHARE)):
        assert least <= share <= most, f"docstrings {docstrings / lines:.1%}, comments {comments / lines:.1%}"


def test_nothing_is_written_twice():
    """No run of eight lines of code stands in two places."""
    places = defaultdict(set)
    for path in FILES:
        numbered = [(number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1)]
        code = [(number, line) for number, line in numbered if line and not line.startswith(("#", "import ", "from "))]
        for start in range(len(code) - TWIN_LINES + 1):
            window = code[start : start + TWIN_LINES]
            text = "\n".join(line for _, line in window)
            if len(text) > 160:  # shorter runs are closing brackets and lists of names
                places[text].add(f"{name_of(path)}:{window[0][0]}")
    twins = [sorted(where) for where in places.values() if len(where) > 1 and not excused(*where)]
    assert not twins, f"the same {TWIN_LINES} lines stand at {twins[0]}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_paths_that_documents_name_exist(name):
    document = ROOT / name
    if not document.exists():
        pytest.skip(f"there is no {name}")
    folders = "src|tests|scripts|docs|examples|benchmarks|requirements"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./*-]*\w)", document.read_text())
    missing = [path for path in named if not list(ROOT.glob(path))]
    assert not missing, f"{name} names {missing}"


def test_exceptions_are_needed():
    for place in EXCEPTIONS:
        assert (PACKAGE / place.split(":")[0]).exists(), f"the exception {place} names no file"
