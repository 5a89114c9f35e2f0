"""Write what is generated from the code: docs/configuration.md, docs/api.md and the picture in docs/architecture.md.

.venv/bin/python scripts/generate_docs.py           writes them
.venv/bin/python scripts/generate_docs.py --check   exits with 1 where a page differs from the code
"""

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_origin

from api_reference import render_api
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from saccade import plugins
from saccade.config import reference, schema
from saccade.config.reference import find_comment, index_comments, is_section

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "saccade"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
PLUGIN_FOLDERS = {
    "environments": "environment.name, environment.settings",
    "tools": "environment.settings.tools",
    "engines": "engine.name, engine.settings",
    "rewards": "rewards.NAME.settings",
    "rewards.answer_types": "rewards.accuracy.settings.answer_types.NAME",
    "algorithms.advantages": "rl.advantage.estimator, rl.advantage.settings",
    "algorithms.losses": "rl.loss.name, rl.loss.settings",
    "algorithms.filters": "rl.filters.NAME",
}
INTRODUCTION = """# Configuration

Every key of a recipe with its default, generated from the schema. `saccade recipes show NAME` prints a recipe with
every default written out.

## The twenty settings that matter first

A run needs the first five; the packaged recipes set the others, so start from one of them (`saccade recipes`).
`saccade recipes explain KEY` prints the meaning of any key.

| key | what to decide |
|---|---|
| `model.path` | the checkpoint to train, `--model` on the command line |
| `data.train` | the tasks of RL; `--data FOLDER` sets all files of a dataset folder |
| `data.demonstrations` | the demonstrations of SFT |
| `environment.name` | what an episode is: `tool_calling`, `python`, `single_turn`, `openenv`, or a file of your own |
| `rewards` | the reward terms, their weights, and which term is correctness |
| `environment.settings.tools` | the tools that the model may call, with their settings |
| `environment.settings.num_frames` | frames in the prompt; `frame_budgets` draws their number instead |
| `environment.settings.max_tool_turns` | turns whose calls are run. One more reply follows |
| `environment.settings.max_context_tokens` | where a conversation ends, in expanded tokens |
| `engine.name` | `local` for tiny models, `vllm` or `sglang` for published ones |
| `sampling.max_tokens` | longest reply |
| `sft.steps` | length of SFT |
| `rl.steps` | length of RL |
| `rl.prompts_per_step` | prompts per step |
| `rl.group_size` | episodes per prompt |
| `rl.optim.lr` | learning rate of RL |
| `rl.advantage.estimator` | how rewards become advantages |
| `rl.pack_length` | length of a packed row, in tokens. Longer rows share a prompt more often, and need more memory |
| `rl.max_staleness` | 0 for synchronous RL; above 0 rollouts and training run concurrently |
| `validation.every` | how often `data.validation` is evaluated during the training |

## How recipes are merged

A recipe is a YAML file. `extends: NAME` (or a path relative to the recipe, or a list of them) names the recipes that it
builds on; `key.subkey=value` on the command line, with a value in YAML, overrides both.

| in the recipe or on the command line | effect |
|---|---|
| a mapping, such as `rewards` or `environment.settings.tools` | is merged key by key with the inherited one |
| a list or any other value | replaces the inherited one |
| `null` for an inherited mapping | removes it, for example a reward term, a filter or a tool: `rewards.tool_use=null` |
| `null` for another value | sets it to null, such as `rl.loss.tis_cap=null` (off) |
| another `name` (or `estimator`) of a plugin | drops the inherited `settings`, which belong to the previous plugin |

Only what recipes write is inherited: a plugin's own defaults, such as the tools of an environment, are replaced.

## Relative paths

Paths in a recipe start at its folder, paths on the command line where the command is run.

| path | starts at |
|---|---|
| in a recipe: `model.path`, `data.*`, a plugin (`./mine.py`), a prompt format (`./mine.yaml`) | the recipe's folder |
| the same on the command line: `data.train=train.jsonl` | the command's working directory |
| a command's recipe, `--model`, `--data`, `--out` and all other options | the command's working directory |
| `extends` in a recipe | the folder of the recipe that contains it |
| the `tool_format` file of a prompt format | the folder of the prompt format |
| `media` of a task | `data.media_root`, else the folder of the data file |
| `extras.subtitles` of a task | the folder of the task's first video |

A run stores paths inside its folder relative to it, so that the folder can be moved, and all others as absolute paths.
It copies plugin files to `plugins/` and records their digests: a run whose plugin has changed isn't resumed.

A sub-agent is an episode that a tool starts with the same weights. Limits in tokens count *expanded* tokens: an image
counts as its visual tokens, not as one placeholder.
"""


# ---- configuration -------------------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """Return a default as it is written in a recipe, in backticks."""
    if value is PydanticUndefined or value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None:
        return "`null`"
    if isinstance(value, dict):  # of sections: what differs from their defaults
        value = {k: v.model_dump(exclude_defaults=True) if isinstance(v, BaseModel) else v for k, v in value.items()}
    text = " ".join(str(value).split())
    return f'`"{text[:60]}{"…" if len(text) > 60 else ""}"`' if isinstance(value, str) else f"`{text}`"


def escape(text: str) -> str:
    """Return the text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def list_keys(section: type[BaseModel], prefix: str, values: BaseModel | None = None) -> list[str]:
    """Return the rows of a section's table, nested sections included; `values` are its defaults where it is used."""
    rows = []
    for name, field in section.model_fields.items():
        annotation, key = field.annotation, f"{prefix}{name}"
        default = getattr(values, name) if values else field.get_default(call_default_factory=True, validated_data={})
        meaning = find_comment(section, name)
        if is_section(annotation):
            rows += [f"| `{key}` | | {escape(inspect.getdoc(annotation) or '')} |"]
            rows += list_keys(annotation, f"{key}.", default)
            continue
        rows.append(f"| `{key}` | {format_value(default)} | {escape(meaning)} |")
        inner = get_args(annotation)[-1] if get_origin(annotation) is dict else None
        if is_section(inner) and not prefix:
            rows += list_keys(inner, f"{key}.NAME.")
    return rows


def get_summary(plugin: Any) -> str:
    """Return the first paragraph of a docstring."""
    return (inspect.getdoc(plugin) or "").split("\n\n")[0]


def render_configuration() -> str:
    """Return the page of every recipe key and every plugin setting."""
    recipe = schema.DataBuildRecipe
    table = ["", "| key | default | meaning |", "|---|---|---|"]
    plain, sections = [], []
    for row in list_keys(recipe, ""):
        name = row.split("`")[1].split(".")[0]
        if not is_section(recipe.model_fields[name].annotation):
            plain.append(row)
        elif f"| `{name}` |" in row:
            sections += ["", f"## {name}", get_summary(recipe.model_fields[name].annotation), *table]
        else:
            sections.append(row)
    parts = [INTRODUCTION, "## Top level", *table, *plain, *sections, ""]
    parts += [
        "# Plugin settings",
        "The keyword-only parameters of a plugin, or its settings class, are its settings.",
        "",
    ]
    for folder, key in PLUGIN_FOLDERS.items():
        parts += [f"## {folder}: `{key}`", ""]
        described: dict[type, str] = {}  # the first plugin whose settings are those of this base
        for name in plugins.list_plugins(folder):
            plugin = plugins.load(folder, name)
            signature = plugins.get_signature(folder, name)
            rows, doc = list_settings(name, signature), signature.doc.partition(">>>")[0].strip()
            if not rows or signature.settings_type:
                doc = doc.split("\n\n")[0]
            elif isinstance(plugin, type) and "__init__" not in vars(plugin):  # its base has the settings
                first = described.setdefault(plugin.__bases__[0], name)
                if first != name:
                    doc, rows = f"{doc}\n\nIts settings are those of [{first}](#{first}).", []
                else:
                    doc += "\n\n" + (inspect.getdoc(plugin.__base__) or "").partition("\n\n")[2]
            parts += [f"### {name}", "", *(f"{format_paragraph(text)}\n" for text in doc.split("\n\n"))]
            if rows:
                parts += ["| setting | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(parts).rstrip() + "\n"


def format_paragraph(text: str) -> str:
    """Return a paragraph of a docstring in Markdown: lists stay lists, indented tables become blocks."""
    if text.startswith("  "):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    return "\n".join(escape(item) for item in re.split(r"\n(?=- )", text))


def list_settings(plugin: str, signature: plugins.PluginSignature) -> list[str]:
    """Return the rows of the settings of a plugin. Raises ValueError for a setting without a comment: its meaning."""
    rows = []
    for name, (parameter, meaning) in reference.list_settings(signature).items():
        if not meaning:
            raise ValueError(f"{plugin}: write a comment behind {name} that says what it means")
        rows.append(f"| `{name}` | {format_value(parameter.default)} | {escape(meaning)} |")
    return rows


# ---- architecture --------------------------------------------------------------------------------------------------


def count_imports() -> Counter[tuple[str, str]]:
    """Return how many modules of one top-level part import each other part."""
    edges: Counter[tuple[str, str]] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "saccade":
                below = node.module.split(".")[1:]
                targets |= {below[0]} if below else {alias.name for alias in node.names}
        edges.update((parts[0], target) for target in targets if target != parts[0])
    return edges


def render_picture() -> str:
    """Return a Mermaid drawing: one row per layer of tests/test_layers.py, an arrow per import between parts.

    An arrow that a longer path implies is left out (the transitive reduction).
    """
    namespace: dict[str, Any] = {}
    for node in ast.parse((ROOT / "tests" / "test_layers.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LAYERS":
            namespace["LAYERS"] = ast.literal_eval(node.value)
    layers: list[list[str]] = namespace["LAYERS"]
    parts = {part for layer in layers for part in layer}
    edges = {(a, b) for a, b in count_imports() if a in parts and b in parts}
    below: dict[str, set[str]] = {}

    def reach(part: str) -> set[str]:
        if part not in below:
            below[part] = set()
            direct = {b for a, b in edges if a == part}
            below[part] = direct.union(*(reach(b) for b in direct)) if direct else set()
        return below[part]

    kept = sorted((a, b) for a, b in edges if not any(b in reach(c) for x, c in edges if x == a and c != b))
    lines = ["```mermaid", "flowchart TB"]
    for number, layer in enumerate(reversed(layers)):
        lines += [
            f"  subgraph layer{number}[ ]",
            "    direction LR",
            *(f"    {part}" for part in sorted(layer)),
            "  end",
        ]
    lines += [f"  {a} --> {b}" for a, b in kept]
    return "\n".join([*lines, "```"])


def replace_block(text: str, block: str) -> str:
    """Return the page with its generated block replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def main() -> None:
    """Write the generated pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    check = parser.parse_args().check
    architecture = ROOT / "docs" / "architecture.md"
    pages = {ROOT / "docs" / "configuration.md": render_configuration()}
    pages[ROOT / "docs" / "api.md"] = render_api(index_comments, escape)
    pages[architecture] = replace_block(architecture.read_text(), render_picture())
    outdated = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    for page in outdated:
        sys.stdout.write(
            f"{page.relative_to(ROOT)} {'is out of date: run scripts/generate_docs.py' if check else 'written'}\n"
        )
        if not check:
            page.write_text(pages[page])
    sys.exit(bool(outdated) and check)


if __name__ == "__main__":
    main()
