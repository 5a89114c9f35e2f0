"""`saccade eval RUN --bench`: a benchmark through the rollout path, gone on with, reported beside its episodes."""

import json
import shutil

import numpy as np
import pytest
from archive_cases import zipped
from commands import SFT, WORLD, bad, good
from hub_server import hub
from judge_server import server
from PIL import Image
from toy_rows import MAKERS, OPTIONS, write_copy


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
    said = " ".join(good(*words).split())
    assert "vstar (official)" in said
    assert "errors, counted as wrong 1 the first error " in said
    assert "can't be read as a picture" in said
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
    assert again["conditions"]["copy"] == "3 of the 191 questions published"


@pytest.mark.slow
def test_options_work_with_benchmarks(run):
    folder, copies = run
    words = ["eval", folder, "evaluation.temperature=1", "--bench", "vstar", "--data", copies, "--subset"]
    path = folder / "evaluations" / "vstar.jsonl"
    path.unlink(missing_ok=True)
    said = good(*words, "--limit", 2, "--repeat", 2, "--seed", 5, "--tools", "off")
    assert "avg@2" in said
    assert "pass@2" in said
    report = json.loads((folder / "evaluations" / "vstar.report.json").read_text())
    assert (report["n"], set(report["at_k"])) == (2, {"avg@2", "pass@2"})
    assert (report["whole"]["questions"], report["whole"]["metrics"].keys()) == (3, report["metrics"].keys())
    assert "% of all 3, estimated" in " ".join(said.split())
    page = (folder / "evaluations" / "benchmarks.html").read_text()
    assert "estimate of all 3 questions" in page
    assert "of the 2 asked, a limited sample" in page
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["repeat"] for record in records) == [0, 0, 1, 1]
    assert "other seed and settings" in bad(*words)
    assert "are alike" not in said
    assert "evaluation.tools can't be 'maybe'" in bad(*words, "--tools", "maybe")
    assert "evaluation.limit can't be -1" in bad(*words, "--limit", -1)
    assert "evaluation.repeat can't be 0" in bad(*words, "--repeat", 0)
    path.unlink()


@pytest.mark.slow
def test_evaluations_on_one_benchmark_are_kept_side_by_side(run):
    folder, copies = run
    place = folder / "evaluations"
    words = ["eval", folder, "--bench", "vstar", "--data", copies, "--subset"]
    good(*words)
    assert "other settings" in bad(*words, "--tools", "off")
    assert "vstar, tools off (official)" in good(*words, "--tools", "off", "--name", "tools off")
    card = json.loads((place / "vstar, tools off.report.json").read_text())
    assert (card["benchmark"], card["conditions"]["tools"]) == ("vstar", "off")
    assert {"vstar", "vstar, tools off"} <= json.loads((place / "benchmarks.json").read_text())["evaluations"].keys()
    assert "give it a name without slashes" in bad(*words, "--name", "a/b")
    # another rule reads the answers that are there
    before = (place / "vstar.jsonl").read_bytes()
    assert "vstar (tolerant)" in good(*words, "--extractor", "tolerant")
    assert (place / "vstar.jsonl").read_bytes().startswith(before)
    assert json.loads((place / "vstar.report.json").read_text())["extractor"] == "tolerant"
    good(*words)


@pytest.mark.slow
def test_options_are_shuffled_where_no_rule_depends_on_their_order(run):
    folder, copies = run
    path = folder / "evaluations" / "vstar.jsonl"
    path.unlink(missing_ok=True)
    words = ["eval", folder, "--data", copies, "--subset", "--repeat", 3, "--shuffle-options", "--bench"]
    assert "are alike" not in good(*words, "vstar")
    tasks = [json.loads(line)["scored"]["episode"]["task"] for line in path.read_text().splitlines()]
    assert len({tuple(each["choices"]) for each in tasks}) > 1
    assert {each["choices"][ord(each["gold"]) - 65] for each in tasks} == {OPTIONS[2]}
    path.unlink()
    for name in ("hrbench", "mathverse", "dynamath", "tirbench"):
        assert f"the options of {name}" in bad(*words, f"vstar,{name}")
    assert not path.exists()


@pytest.mark.slow
def test_shards_of_a_benchmark_are_joined_and_reported(run):
    folder, copies = run
    (folder / "evaluations" / "vstar.jsonl").unlink(missing_ok=True)
    words = ["eval", folder, "--data", copies, "--subset", "--bench", "vstar"]
    for shard in ("1/2", "2/2"):
        good(*words, "--shard", shard)
    merged = good("eval", "merge", folder, "--bench", "vstar")
    assert "vstar (official)" in merged
    assert "The report: " in merged
    card = json.loads((folder / "evaluations" / "vstar.report.json").read_text())
    assert (card["n"], card["errors"], card["conditions"]["agent"]) == (3, 1, "parallel")
    assert "vstar (tolerant)" in good("eval", "merge", folder, "--bench", "vstar", "--extractor", "tolerant")
    assert "3 / 3" in good("eval", "merge", folder, "--name", "vstar")
    assert "holds no shard of 'vstar, b'" in bad("eval", "merge", folder, "--bench", "vstar", "--name", "b")
    for shard in ("1/2", "2/2"):
        assert "estimated" not in good(*words, "--shard", shard, "--limit", 2, "--name", "few")
    assert "estimated" in good("eval", "merge", folder, "--bench", "vstar", "--name", "few")
    few = json.loads((folder / "evaluations" / "vstar, few.report.json").read_text())
    assert (few["n"], few["whole"]["questions"]) == (2, 3)
    assert "3 tasks are too few for 4 shards" in bad(*words, "--shard", "1/4")
    assert "a shard is written i/n" in bad(*words, "--shard", "3/2")
    before = (folder / "evaluations" / "vstar.jsonl").read_bytes()
    assert "vstar (official)" in good(*words)  # only what broke is tried again
    assert (folder / "evaluations" / "vstar.jsonl").read_bytes().startswith(before)
    assert json.loads((folder / "evaluations" / "vstar.report.json").read_text())["n"] == 3
    assert "holds no shard of 'mlvu'" in bad("eval", "merge", folder, "--name", "mlvu")


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
        assert "vstar (official, a limited sample)" in " ".join(good(*words, "--subset").split())
        assert sum("HEAD" in each and each.endswith(".jpg") for each in site.asked) == 1
        assert "has no data set MLVU/MVLU" in bad(*words[:3], "mlvu", *words[4:])


@pytest.mark.slow
def test_pictures_come_out_of_archives_in_the_copy_or_on_the_hub(run, tmp_path, monkeypatch):
    folder, copies = run
    monkeypatch.setenv("HOME", str(tmp_path))
    there, data = tmp_path / "there" / "vstar", tmp_path / "there"
    shutil.copytree(copies / "vstar", there)
    for image in there.rglob("*.jpg"):
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(image)
    images = {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*.jpg")}
    for path in images:
        (there / path).unlink()
    rows = {path.name: path.read_bytes() for path in there.iterdir() if path.is_file()}
    (there / "pictures.zip").write_bytes(zipped(images))
    words = ["eval", folder, "--bench", "vstar", "--subset", "--data"]
    good(*words, data, "--limit", 1, "--name", "local")
    assert len(list(there.rglob("*.jpg"))) == 1  # what isn't asked stays packed
    good(*words, data, "--name", "local")
    card = json.loads((folder / "evaluations" / "vstar, local.report.json").read_text())
    assert (card["n"], card["errors"]) == (3, 0)
    with hub() as site:
        site.put("craigwu/vstar_bench", {**rows, "pictures.zip": zipped(images)})
        good(*words, "hub:main", "--hub", site.url, "--name", "hub")
    card = json.loads((folder / "evaluations" / "vstar, hub.report.json").read_text())
    assert (card["n"], card["errors"]) == (3, 0)


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
    assert before["conditions"]["marked by"].startswith("rules alone; the published metric has a model judge")
    assert before["undecided"] == 2
    nobody = ["evaluation.judge.url=http://127.0.0.1:9/v1", "evaluation.judge.model=j", "evaluation.judge.retries=0"]
    said = " ".join(good(*words, *nobody, f"evaluation.judge.cache={tmp_path / 'none'}").split())
    assert "on 2 answers (the judge j at http://127.0.0.1:9/v1 can't be reached" in said
    with server(lambda number, prompt: "yes") as judge:
        given = [f"evaluation.judge.url={judge.url}", "evaluation.judge.model=j"]
        said = good(*words, *given, f"evaluation.judge.cache={tmp_path}")
    after = json.loads(path.read_text())
    assert after["undecided"] == 0
    assert (after["judge"], after["metrics"]) == ("j", before["at_most"])
    assert "judge mathverse 2/2 accuracy 1.000" in said
    assert after["conditions"]["marked by"] == "rules, and the judge j, which reads, then compares what they leave open"
    verdicts = folder / "evaluations" / "mathverse.verdicts.jsonl"
    assert len(verdicts.read_text().splitlines()) == before["undecided"]
    # shards keep what was said, and once they are joined nobody is asked again
    named = [*words, "--name", "in parts"]
    with server(lambda number, prompt: "yes") as judge:
        given = [f"evaluation.judge.url={judge.url}", "evaluation.judge.model=j"]
        for shard in ("1/2", "2/2"):
            good(*named, *given, f"evaluation.judge.cache={tmp_path / 'parts'}", "--shard", shard)
    good("eval", "merge", folder, "--bench", "mathverse", "--name", "in parts")
    joined = json.loads((folder / "evaluations" / "mathverse, in parts.report.json").read_text())
    assert {key: joined[key] for key in joined if key != "costs"} == {
        key: after[key] for key in after if key != "costs"
    }
    good(*words)  # without a judge it is as if there had never been one, in the report and in a comparison
    assert json.loads(path.read_text())["undecided"] == before["undecided"]
    assert not verdicts.exists()
    assert "did you mean 'model'" in bad(*words, "evaluation.judge.url=http://x", "evaluation.judge.modle=j")
