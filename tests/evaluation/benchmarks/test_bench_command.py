"""`saccade eval RUN --bench`: a benchmark through the rollout path, gone on with, reported beside its episodes."""

import json

import numpy as np
import pytest
from commands import SFT, WORLD, bad, good
from PIL import Image
from toy_rows import MAKERS, write_copy


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    """A run that can be evaluated, and its place."""
    place = tmp_path_factory.mktemp("bench")
    good("data", "world", place / "world", *WORLD)
    start = ["tiny/para_grpo", *SFT, "sft.steps=1", "sampling.max_tokens=8", "--model", tiny_folder]
    good("sft", *start, "--world", place / "world", "--out", place / "run")
    rows = list(MAKERS["vstar"]())[:3]
    for row in rows:
        file = place / "copies" / "vstar" / row["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    file.write_bytes(b"no picture")  # the last one can't be read
    write_copy("vstar", place / "copies" / "vstar", rows)
    return place / "run", place / "copies"


@pytest.mark.slow
def test_a_benchmark_is_run_reported_and_gone_on_with(run):
    folder, copies = run
    words = ["eval", folder, "--bench", "vstar", "--data", copies, "--subset"]
    said = good(*words)
    assert "vstar (official)" in said
    path = folder / "evaluations" / "vstar.report.json"
    report = json.loads(path.read_text())
    assert (report["n"], report["errors"], report["headline"]) == (3, 1, "accuracy")
    lines = (folder / "evaluations" / "vstar.jsonl").read_text().splitlines()
    assert len(lines) == 3
    # of a file that a kill cut short the rest is made again, with the same results
    (folder / "evaluations" / "vstar.jsonl").write_text(lines[0] + "\n" + lines[1][:50])
    good(*words)
    again = json.loads(path.read_text())
    assert {key: again[key] for key in again if key != "costs"} == {
        key: report[key] for key in report if key != "costs"
    }
    assert "The report: " in said
    assert "vstar" in (folder / "evaluations" / "benchmarks.html").read_text()


def test_what_the_user_can_mend_is_one_sentence(run):
    folder, copies = run
    words = ["eval", folder, "--data", copies]
    assert "did you mean 'videomme'" in bad(*words, "--bench", "videome")
    assert "vstar has 191 questions, this copy holds 3" in bad(*words, "--bench", "vstar")
    assert "there is no folder" in bad(*words, "--bench", "mlvu")
    assert "--extractor must be official or tolerant" in bad(*words, "--bench", "vstar", "--extractor", "kind")
