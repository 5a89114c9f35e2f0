"""lmms-eval itself, with a Saccade agent as its model: found by the entry point, asked, marked, logged.

It runs where lmms-eval is installed beside Saccade, or with the interpreter of another environment that has both's
packages, named by SACCADE_LMMS_EVAL_PYTHON. Tried with lmms-eval 0.7.3.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import WORLD, good

from saccade.data.record import read_jsonl
from saccade.interop.lmms_logs import read_samples
from saccade.types import Episode

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SACCADE_LMMS_EVAL_PYTHON") or (sys.executable if importlib.util.find_spec("lmms_eval") else "")
UTILS = """
def visuals(doc):
    from PIL import Image
    return [Image.open(doc["path"])] if doc["path"].endswith(".png") else [doc["path"]]


def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def results(doc, results):
    return {"answered": float(bool(results[0]))}
"""
TASK = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: ROWS
task: needles
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visuals
doc_to_text: !function utils.text
doc_to_target: answer
process_results: !function utils.results
metric_list:
  - metric: answered
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  max_new_tokens: 16
metadata:
  - version: 0.0
"""


def installed(folder):
    """What an installation of this checkout tells the interpreter of its entry points."""
    about = folder / "saccade-0.dist-info"
    about.mkdir(parents=True)
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: saccade\nVersion: 0\n")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
        for group, named in entries.items()
    ]
    about.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="lmms-eval is not installed here, and SACCADE_LMMS_EVAL_PYTHON names no python")
def test_lmms_eval_asks_an_agent(tmp_path, tiny_folder):
    rows = []
    for name, more in (("clips", []), ("pictures", ["world.media=image"])):
        good("data", "world", tmp_path / name, *WORLD, *more)
        for line in (tmp_path / name / "test" / "tasks.jsonl").read_text().splitlines()[:3]:
            task = json.loads(line)
            path = str(tmp_path / name / "test" / task["media"][0]["path"])
            rows.append({"path": path, "question": task["question"], "answer": str(task["gold"])})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "utils.py").write_text(UTILS)
    (tmp_path / "tasks" / "needles.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    model = f"model={tiny_folder},recipe=tiny/para_grpo,keep={tmp_path / 'kept'},whole=true,sampling.max_tokens=8"
    words = ["--model", "saccade", "--model_args", model, "--tasks", "needles", "--include_path", tmp_path / "tasks"]
    path = os.pathsep.join((str(ROOT / "src"), str(installed(tmp_path / "site"))))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [PYTHON, "-m", "lmms_eval", *map(str, words), "--log_samples", "--output_path", str(tmp_path / "logs")],
        env={**os.environ, **offline, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = (tmp_path / "logs").rglob("*_samples_needles.jsonl")
    samples = read_samples(file)
    assert [each.doc_id for each in samples] == list(range(len(rows)))
    assert [each.target for each in samples] == [row["answer"] for row in rows]
    kept = read_jsonl(tmp_path / "kept" / "episodes.jsonl", Episode)  # in the order in which they ended
    episodes = sorted(kept, key=lambda each: each.task.id)
    assert [each.task.id for each in episodes] == [f"needles/test/{at}" for at in range(len(rows))]
    assert [each.task.question for each in episodes] == [row["question"] for row in rows]
    assert all(each.usage.visual_tokens and each.error is None for each in episodes)
    assert [each.responses[0] for each in samples] == [each.turns[-1].reply.text for each in episodes]
    for each, episode in zip(samples, episodes, strict=True):
        counts = {"input_tokens": episode.usage.prompt_tokens, "output_tokens": episode.usage.sampled_tokens}
        assert each.line["token_counts"] == [counts]
