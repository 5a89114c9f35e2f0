"""The documents' commands and code blocks run, their settings exist, and their generated parts are up to date.

Python is executed, `saccade` commands run, YAML is loaded as a recipe or a prompt file, JSON as rows of tasks. A block
is skipped only where a comment before it gives a reason: `<!-- not run: needs a GPU -->`.
"""

import ast
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import SMALL, good
from typer.main import get_command

import saccade
from saccade import plugins, testing
from saccade.checks.estimates import PlanAssumptions
from saccade.checks.plan import build_plan
from saccade.cli.app import app
from saccade.config.load import load_data_build_recipe, load_recipe
from saccade.environments.third_party_format import load_prompt_format

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "src" / "saccade" / "sandbox" / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "report.md"),
]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
TAKES_SETTINGS = ("data", "sft", "rl", "train", "eval", "demo")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def find_blocks(page):
    """Return (kind, text) of the page's blocks that are to be run."""
    return [(found["kind"], found["text"]) for found in BLOCK.finditer(page.read_text()) if not found["reason"]]


def find_commands(text):
    """Return the `saccade` commands of a block, continued lines joined."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [
        re.split(r"\s+#", line)[0].removeprefix(".venv/bin/")
        for line in lines
        if re.match(r"(\.venv/bin/)?saccade ", line)
    ]


def shrink(command):
    """Return a command's words with settings that make it quick."""
    words = shlex.split(command)[1:]
    if (
        words[0] not in TAKES_SETTINGS
        or (words[1] not in ("synth",) and words[0] == "data")
        or words[1] in ("compare", "merge")
    ):
        return words
    # A run is resumed with the settings that it was started with.
    return [*words, *SMALL, *(["evaluation.num_tasks=2"] if words[0] == "eval" else [])]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_import_the_public_api_alone(page):
    for kind, text in find_blocks(page):
        for node in ast.walk(ast.parse(text)) if kind == "python" else ():
            if isinstance(node, ast.ImportFrom) and node.module == "saccade":
                assert {alias.name for alias in node.names} <= {*saccade.__all__, "testing"}, text
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                private = [name for name in modules if name.startswith("saccade.") and name != "saccade.sandbox"]
                assert not private, f"not in the public API: {private}"


def check_yaml(text, folder):
    """Load a block: a prompt file, or a recipe or part of one."""
    (folder / "block.yaml").write_text(
        text if "tool_format:" in text or "extends:" in text else f"extends: tiny/para_grpo\n{text}"
    )
    if "tool_format:" in text:
        load_prompt_format("./block.yaml")
    elif "data_build:" in text:
        load_data_build_recipe(str(folder / "block.yaml"))
    else:
        good("recipes", "show", "block.yaml")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_has_a_reason(page):
    for kind, text in find_blocks(page):
        assert kind in ("python", "yaml", "json", "text", "mermaid", ""), f"a block of kind {kind}"
        if kind == "":
            lines = [line for line in re.sub(r" *\\\n *", " ", text).splitlines() if line.strip()]
            assert len(lines) == len(find_commands(text)), f"this is not run, and no comment says why:\n{text}"


def parse_command(words):
    """Parse a command line without running it; return the command's parameters."""
    command, context = get_command(app), None
    while True:
        context = command.make_context(command.name, words, parent=context)
        if not hasattr(command, "commands"):
            return context.params
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reproduce").glob("*.md")), ids=name_of)
def test_commands_that_reproduce_a_row_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = find_commands("".join(found["text"] for found in BLOCK.finditer(page.read_text()) if not found["kind"]))
    recipes, runs = set(), set()
    for command in commands:
        params = parse_command(shlex.split(command)[1:])
        recipe = str(params.get("recipe") or params.get("run") or "")
        if recipe and not recipe.startswith("runs"):
            load_recipe(recipe, params.get("settings") or ())
            recipes.add(recipe)
            runs.add(str(params.get("folder") or params.get("output_folder")))
        elif recipe:  # trained by a command above
            assert recipe in runs, command
        if "source" in params:
            settings = [word.partition("=") for word in params["arguments"] if "=" in word]
            values = {key: yaml.safe_load(value) for key, _, value in settings}
            plugins.resolve("data.importers", params["source"], values)
        for benchmark in filter(None, (params.get("benchmarks") or "").split(",")):
            assert f"`{benchmark}`" in page.read_text()
    assert len(recipes) > 4
    assert all(f"`{name}`" in page.read_text() for name in recipes if "ablations" in name)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reproduce").glob("*.md")), ids=name_of)
def test_memory_of_the_plans_is_todays(page):
    table = page.read_text().partition("| plan |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", table, re.M)
    assert rows
    for plan, cells in rows:
        plan, _, num_gpus = plan.partition(" --gpus ")
        name, *settings = plan.split()
        tables = build_plan(name, load_recipe(name, settings), PlanAssumptions(), gpus=int(num_gpus or 1))
        (peak,) = [row for row in tables[-1].rows if row[0] == "peak"]
        amounts = dict(zip(tables[-1].header[1:], peak[1:], strict=True))
        stages = ("RL", "SFT")[: cells.count("|") + 1]
        assert cells.split(" | ") == [amounts.get(stage, "–").removesuffix(" GiB") for stage in stages], plan


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if find_blocks(page)], ids=name_of)
def test_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for kind, text in find_blocks(page):
        if kind == "python":
            file = re.match(r'"""(\w+\.py):', text)
            if file:  # a plugin's file, for the commands and blocks after it
                (tmp_path / file[1]).write_text(text)
                monkeypatch.syspath_prepend(str(tmp_path))
            exec(compile(text, f"{name_of(page)}", "exec"), scope)
        if kind == "yaml":
            check_yaml(text, tmp_path)
        if kind == "json":
            for media in json.loads(text)["media"]:
                (tmp_path / media["path"]).parent.mkdir(exist_ok=True)
                (tmp_path / media["path"]).touch()
            (tmp_path / "rows.jsonl").write_text(" ".join(text.splitlines()))
            assert len(saccade.load_tasks(tmp_path / "rows.jsonl")) == 1
        for command in find_commands(text):
            good(*shrink(command))
    if page.name == "index.md":  # its commands train a run
        lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
        assert find_undocumented_metrics({key for line in lines for key in json.loads(line)}) == set()


def find_undocumented_metrics(names):
    tables = (ROOT / "docs" / "metrics.md").read_text().partition("## Evaluations")[0]
    cells = " ".join(line.split("|")[1] for line in tables.splitlines() if line.startswith("| `"))
    patterns = [re.escape(name).replace("NAME", ".+") for name in re.findall(r"`(.+?)`", cells)]
    return {name for name in names - {"stage", "step"} if not any(re.fullmatch(one, name) for one in patterns)}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_in_the_text_exist(page):
    settings = re.findall(
        r"`((?:model|synthetic|data|environment|engine|sampling|rewards|sft|rl|evaluation)(?:\.[a-z_]+)+=[^`…]+)`",
        page.read_text(),
    )
    for setting in settings:
        good("recipes", "show", "tiny/para_grpo", *shlex.split(setting))


def test_the_settings_that_matter_first_exist():
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.partition("## The twenty settings that matter first")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| `([\w.]+)` \|", table, re.M)
    assert len(keys) == 20
    for key in keys:
        good("recipes", "explain", key)


def test_the_public_api_is_documented():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert {*saccade.__all__, *testing.__all__} - {"__version__"} <= {*headings}


def test_functions_on_the_way_of_a_token_exist():
    text = (ROOT / "docs" / "concepts.md").read_text()
    section = text.partition("## One token, from engine to gradient")[2].partition("\n## ")[0]
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", section)
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(f"saccade.{name}")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.slow
def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is missing: scripts/bootstrap --dev installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
