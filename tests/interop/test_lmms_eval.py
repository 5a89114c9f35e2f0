"""Run lmms-eval itself with a Saccade environment as its model: entry point, answers, grading, logs.

The test needs lmms-eval next to Saccade, or the interpreter of another environment with the packages of both in
SACCADE_LMMS_EVAL_PYTHON. Verified with lmms-eval 0.7.3.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import SYNTHETIC, good

from saccade.interop.lmms_logs import extract_reply, read_samples
from saccade.types import Episode
from saccade.utils.jsonl import read_jsonl

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


def write_entry_points(folder):
    """Write the entry points of this checkout as an installed distribution would have them."""
    dist_info = folder / "saccade-0.dist-info"
    dist_info.mkdir(parents=True)
    dist_info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: saccade\nVersion: 0\n")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in targets.items())
        for group, targets in entries.items()
    ]
    dist_info.joinpath("entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="lmms-eval is not installed here, and SACCADE_LMMS_EVAL_PYTHON names no python")
def test_lmms_eval_runs_an_environment(tmp_path, tiny_folder):
    rows = []
    for name, settings in (("clips", []), ("images", ["synthetic.media=image"])):
        good("data", "synth", tmp_path / name, *SYNTHETIC, *settings)
        for line in (tmp_path / name / "test" / "tasks.jsonl").read_text().splitlines()[:3]:
            task = json.loads(line)
            path = str(tmp_path / name / "test" / task["media"][0]["path"])
            rows.append({"path": path, "question": task["question"], "answer": str(task["ground_truth"])})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "utils.py").write_text(UTILS)
    (tmp_path / "tasks" / "needles.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    episode_dir = tmp_path / "episodes"
    model = f"model={tiny_folder},recipe=tiny/para_grpo,episode_dir={episode_dir},full_reply=true,sampling.max_tokens=8"
    arguments = [
        "--model",
        "saccade",
        "--model_args",
        model,
        "--tasks",
        "needles",
        "--include_path",
        tmp_path / "tasks",
    ]
    path = os.pathsep.join((str(ROOT / "src"), str(write_entry_points(tmp_path / "site"))))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [PYTHON, "-m", "lmms_eval", *map(str, arguments), "--log_samples", "--output_path", str(tmp_path / "logs")],
        env={**os.environ, **offline, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    [file] = (tmp_path / "logs").rglob("*_samples_needles.jsonl")
    samples = read_samples(file)
    assert [sample["doc_id"] for sample in samples] == list(range(len(rows)))
    assert [str(sample["target"]) for sample in samples] == [row["answer"] for row in rows]
    stored = read_jsonl(tmp_path / "episodes" / "episodes.jsonl", Episode)  # in the order of completion
    episodes = sorted(stored, key=lambda episode: episode.task.id)
    assert [episode.task.id for episode in episodes] == [f"needles/test/{i}" for i in range(len(rows))]
    assert [episode.task.question for episode in episodes] == [row["question"] for row in rows]
    assert all(episode.usage.visual_tokens and episode.error is None for episode in episodes)
    assert [extract_reply(sample) for sample in samples] == [episode.turns[-1].reply.text for episode in episodes]
    for sample, episode in zip(samples, episodes, strict=True):
        counts = {"input_tokens": episode.usage.unsampled_tokens, "output_tokens": episode.usage.sampled_tokens}
        assert sample["token_counts"] == [counts]
