"""`saccade eval RUN --bench`: a benchmark through the rollout path, gone on with, reported beside its episodes."""

import json

import numpy as np
import pytest
from commands import SFT, WORLD, bad, good
from hub_server import hub
from judge_server import server
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
    assert "1 of 3 answers are errors and count as wrong; the first: " in said
    assert "can't be read as a picture" in said
    path = folder / "evaluations" / "vstar.report.json"
    report = json.loads(path.read_text())
    assert (report["n"], report["errors"], report["headline"]) == (3, 1, "accuracy")
    lines = (folder / "evaluations" / "vstar.jsonl").read_text().splitlines()
    assert len(lines) == 3
    # of a file that a kill cut short the rest is made again, with the same results
    (folder / "evaluations" / "vstar.jsonl").write_text(lines[0] + "\n" + lines[1][:50])
    good(*words)
    assert json.loads(path.read_text()) == report


def test_what_the_user_can_mend_is_one_sentence(run):
    folder, copies = run
    words = ["eval", folder, "--data", copies]
    assert "did you mean 'videomme'" in bad(*words, "--bench", "videome")
    assert "vstar has 191 questions, this copy holds 3" in bad(*words, "--bench", "vstar")
    assert "there is no folder" in bad(*words, "--bench", "mlvu")
    assert "--extractor must be official or tolerant" in bad(*words, "--bench", "vstar", "--extractor", "kind")


@pytest.mark.slow
def test_a_copy_comes_from_the_hub_with_the_files_that_are_asked_for(run, tmp_path, monkeypatch):
    folder, copies = run
    monkeypatch.setenv("HOME", str(tmp_path))
    there = copies / "vstar"
    files = {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    with hub() as site:
        site.put("craigwu/vstar_bench", files)
        words = ["eval", folder, "--bench", "vstar", "--data", "hub:main", "--hub", site.url, "evaluation.limit=1"]
        assert "vstar has 191 questions, this copy holds 3" in bad(*words)
        assert "vstar (official)" in good(*words, "--subset")
        assert sum("HEAD" in each and each.endswith(".jpg") for each in site.asked) == 1
        assert "has no data set MLVU/MVLU" in bad(*words[:3], "mlvu", *words[4:])


@pytest.mark.slow
def test_a_judge_decides_what_the_rule_leaves_open(run, tmp_path):
    folder, copies = run
    rows = [row for row in MAKERS["mathverse"]() if row["question_type"] == "free-form"][:2]
    for row in rows:
        file = copies / "mathverse" / row["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    write_copy("mathverse", copies / "mathverse", rows)
    words = ["eval", folder, "--bench", "mathverse", "--data", copies, "--subset", "agent.name=direct"]
    path = folder / "evaluations" / "mathverse.report.json"
    good(*words)
    before = json.loads(path.read_text())
    assert before["judge"] == ""
    assert before["undecided"] == 2
    with server(lambda number, prompt: "yes") as judge:
        given = [f"evaluation.judge.url={judge.url}", "evaluation.judge.model=j"]
        said = good(*words, *given, f"evaluation.judge.cache={tmp_path}")
    after = json.loads(path.read_text())
    assert after["undecided"] == 0
    assert (after["judge"], after["metrics"]) == ("j", before["at_most"])
    assert "judge" in said
    assert len((folder / "evaluations" / "mathverse.verdicts.jsonl").read_text().splitlines()) == before["undecided"]
    assert "did you mean 'model'" in bad(*words, "evaluation.judge.url=http://x", "evaluation.judge.modle=j")
