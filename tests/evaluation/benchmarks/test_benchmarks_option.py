"""`saccade eval RUN --benchmarks`: a benchmark through the rollout path, resumed, and reported next to its episodes."""

import json
import shutil

import numpy as np
import pytest
from archive_cases import build_zip
from commands import SFT, SYNTHETIC, bad, fail, good
from hub_server import serve_hub
from judge_server import server
from PIL import Image
from toy_rows import MAKERS, OPTIONS, write_copy

from saccade.engines.local import Local
from saccade.errors import ConfigError, DataError, RunError
from saccade.types import Completion, FinishReason


@pytest.fixture
def fixed_reply(monkeypatch):
    """Replace the random model's replies by one that is an answer."""

    async def generate(self, request):
        tokens = (
            *self._vlm.renderer.encode("It is</think><answer>seven</answer>"),
            request.sampling.stop_ids[0],
        )
        logprobs = (0.0,) * len(tokens)
        return Completion(tokens=tokens, logprobs=logprobs, version=self.version, finish_reason=FinishReason.STOP)

    monkeypatch.setattr(Local, "generate", generate)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    """Return a run that can be evaluated, and the folder of benchmark copies."""
    place = tmp_path_factory.mktemp("bench")
    good("data", "synth", place / "dataset", *SYNTHETIC)
    start = ["tiny/para_grpo", *SFT, "sft.steps=1", "sampling.max_tokens=8", "--model", tiny_folder]
    good("sft", *start, "--data", place / "dataset", "--out", place / "run")
    rows = list(MAKERS["vstar"]())[:3]
    for row in rows:
        file = place / "copies" / "vstar" / row["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    file.write_bytes(b"no image")  # the last one can't be decoded
    write_copy("vstar", place / "copies" / "vstar", rows)
    return place / "run", place / "copies"


@pytest.mark.slow
def test_benchmark_is_run_reported_and_resumed(run):
    folder, copies = run
    words = ["eval", folder, "--benchmarks", "vstar", "--benchmark-data", copies, "--allow-incomplete"]
    output = good(*words)
    assert "vstar (strict)" in output
    undecodable = list(MAKERS["vstar"]())[2]["image"]
    assert undecodable in "".join(output.split())
    path = folder / "evaluations" / "vstar.benchmark_result.json"
    report = json.loads(path.read_text())
    assert (report["num_tasks"], report["errors"], report["primary_metric"]) == (3, 1, "accuracy")
    lines = (folder / "evaluations" / "vstar.jsonl").read_text().splitlines()
    assert len(lines) == 3
    # The rest of a truncated file is evaluated again, with the same results.
    (folder / "evaluations" / "vstar.jsonl").write_text(lines[0] + "\n" + lines[1][:50])
    good(*words)
    again = json.loads(path.read_text())
    assert {key: again[key] for key in again if key != "costs"} == {
        key: report[key] for key in report if key != "costs"
    }
    assert "benchmarks.html" in "".join(output.split())
    assert "vstar" in (folder / "evaluations" / "benchmarks.html").read_text()
    assert {"3", "191"} <= {*again["conditions"]["copy"].split()}


@pytest.mark.slow
def test_options_work_with_benchmarks(run):
    folder, copies = run
    words = [
        "eval",
        folder,
        "evaluation.temperature=1",
        "--benchmarks",
        "vstar",
        "--benchmark-data",
        copies,
        "--allow-incomplete",
    ]
    path = folder / "evaluations" / "vstar.jsonl"
    path.unlink(missing_ok=True)
    output = good(*words, "--num-tasks", 2, "--num-samples", 2, "--seed", 5, "--use-tools", "off")
    assert "avg@2" in output
    assert "pass@2" in output
    report = json.loads((folder / "evaluations" / "vstar.benchmark_result.json").read_text())
    assert (report["num_tasks"], set(report["at_k"])) == (2, {"avg@2", "pass@2"})
    assert (report["full_set"]["num_questions"], report["full_set"]["metrics"].keys()) == (3, report["metrics"].keys())
    assert "% of all 3" in " ".join(output.split())
    page = (folder / "evaluations" / "benchmarks.html").read_text()
    assert "of all 3" in page
    assert "of the 2" in page
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["sample_index"] for record in records) == [0, 0, 1, 1]
    fail(RunError, *words, key=path, value=("seed", "tools"))
    fail(ConfigError, *words, "--use-tools", "maybe", key="evaluation.use_tools", value="maybe")
    fail(ConfigError, *words, "--num-tasks", -1, key="evaluation.num_tasks", value=-1)
    fail(ConfigError, *words, "--num-samples", 0, key="evaluation.num_samples", value=0)
    path.unlink()


@pytest.mark.slow
def test_several_evaluations_on_one_benchmark(run):
    folder, copies = run
    place = folder / "evaluations"
    words = ["eval", folder, "--benchmarks", "vstar", "--benchmark-data", copies, "--allow-incomplete"]
    good(*words)
    fail(RunError, *words, "--use-tools", "off", key=place / "vstar.jsonl", value=("tools",))
    assert "vstar_no_tools (strict)" in good(*words, "--use-tools", "off", "--name", "no_tools")
    result = json.loads((place / "vstar_no_tools.benchmark_result.json").read_text())
    assert (result["benchmark"], result["conditions"]["tools"]) == ("vstar", "off")
    assert {"vstar", "vstar_no_tools"} <= json.loads((place / "benchmarks.json").read_text())["evaluations"].keys()
    fail(DataError, *words, "--name", "a/b", key="name", value="vstar_a/b")
    # Another rule grades the stored answers.
    before = (place / "vstar.jsonl").read_bytes()
    assert "vstar (lenient)" in good(*words, "--scoring", "lenient")
    assert (place / "vstar.jsonl").read_bytes().startswith(before)
    assert json.loads((place / "vstar.benchmark_result.json").read_text())["scoring"] == "lenient"
    good(*words)


@pytest.mark.slow
def test_options_are_shuffled_unless_a_rule_depends_on_their_order(run):
    folder, copies = run
    path = folder / "evaluations" / "vstar.jsonl"
    path.unlink(missing_ok=True)
    words = [
        "eval",
        folder,
        "--benchmark-data",
        copies,
        "--allow-incomplete",
        "--num-samples",
        3,
        "--shuffle-options",
        "--benchmarks",
    ]
    good(*words, "vstar")
    tasks = [json.loads(line)["outcome"]["episode"]["task"] for line in path.read_text().splitlines()]
    assert len({tuple(task["options"]) for task in tasks}) > 1
    assert {task["options"][ord(task["ground_truth"]) - 65] for task in tasks} == {OPTIONS[2]}
    path.unlink()
    for name in ("hrbench", "mathverse", "dynamath", "tirbench"):
        fail(ConfigError, *words, f"vstar,{name}", key="evaluation.shuffle_options", value=True)
    assert not path.exists()


@pytest.mark.slow
def test_shards_of_a_benchmark_are_merged_and_reported(run):
    folder, copies = run
    (folder / "evaluations" / "vstar.jsonl").unlink(missing_ok=True)
    words = ["eval", folder, "--benchmark-data", copies, "--allow-incomplete", "--benchmarks", "vstar"]
    for shard in ("1/2", "2/2"):
        good(*words, "--shard", shard)
    merged = good("eval", "merge", folder, "--benchmarks", "vstar")
    assert "vstar (strict)" in merged
    assert "Report: " in merged
    result = json.loads((folder / "evaluations" / "vstar.benchmark_result.json").read_text())
    assert (result["num_tasks"], result["errors"], result["conditions"]["environment"]) == (3, 1, "tool_calling")
    assert "vstar (lenient)" in good("eval", "merge", folder, "--benchmarks", "vstar", "--scoring", "lenient")
    assert "3 / 3" in good("eval", "merge", folder, "--name", "vstar")
    merge = ["eval", "merge", folder, "--name"]
    fail(RunError, *merge, "b", "--benchmarks", "vstar", key="shards", value="vstar_b")
    for shard in ("1/2", "2/2"):
        assert "estimated" not in good(*words, "--shard", shard, "--num-tasks", 2, "--name", "few")
    assert "estimated" in good("eval", "merge", folder, "--benchmarks", "vstar", "--name", "few")
    few = json.loads((folder / "evaluations" / "vstar_few.benchmark_result.json").read_text())
    assert (few["num_tasks"], few["full_set"]["num_questions"]) == (2, 3)
    fail(ConfigError, *words, "--shard", "1/4", key="--shard", value="1/4")
    fail(ConfigError, *words, "--shard", "3/2", key="--shard", value="3/2")
    before = (folder / "evaluations" / "vstar.jsonl").read_bytes()
    assert "vstar (strict)" in good(*words)  # only failed episodes are retried
    assert (folder / "evaluations" / "vstar.jsonl").read_bytes().startswith(before)
    assert json.loads((folder / "evaluations" / "vstar.benchmark_result.json").read_text())["num_tasks"] == 3
    fail(RunError, *merge, "mlvu", key="shards", value="mlvu")


@pytest.mark.slow
def test_user_errors_are_one_line(run):
    folder, copies = run
    words = ["eval", folder, "--benchmark-data", copies]
    fail(ConfigError, *words, "--benchmarks", "videome", key="--benchmarks", value="videome")
    fail(DataError, *words, "--benchmarks", "vstar", key=copies / "vstar", value=3)
    fail(DataError, *words, "--benchmarks", "mlvu", key=copies / "mlvu")
    fail(ConfigError, *words, "--benchmarks", "vstar", "--scoring", "kind", key="--scoring", value="kind")


@pytest.mark.slow
def test_copy_from_the_hub_with_required_files(run, tmp_path, monkeypatch):
    folder, copies = run
    monkeypatch.setenv("HOME", str(tmp_path))
    there = copies / "vstar"
    files = {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    with serve_hub() as site:
        site.add_dataset("craigwu/vstar_bench", files)
        words = [
            "eval",
            folder,
            "--benchmarks",
            "vstar",
            "--benchmark-data",
            "hub:main",
            "--hub",
            site.url,
            "evaluation.num_tasks=1",
        ]
        assert {"191", "3"} <= {*bad(*words).replace(";", " ").replace(",", " ").split()}
        assert "vstar (strict, a limited sample)" in " ".join(good(*words, "--allow-incomplete").split())
        assert sum("HEAD" in request and request.endswith(".jpg") for request in site.requests) == 1
        fail(DataError, *words[:3], "mlvu", *words[4:], key="MLVU/MVLU")


@pytest.mark.slow
def test_images_come_out_of_archives(run, tmp_path, monkeypatch):
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
    (there / "pictures.zip").write_bytes(build_zip(images))
    words = ["eval", folder, "--benchmarks", "vstar", "--allow-incomplete", "--benchmark-data"]
    good(*words, data, "--num-tasks", 1, "--name", "local")
    assert len(list(there.rglob("*.jpg"))) == 1  # files that aren't needed stay packed
    good(*words, data, "--name", "local")
    result = json.loads((folder / "evaluations" / "vstar_local.benchmark_result.json").read_text())
    assert (result["num_tasks"], result["errors"]) == (3, 0)
    with serve_hub() as site:
        site.add_dataset("craigwu/vstar_bench", {**rows, "pictures.zip": build_zip(images)})
        good(*words, "hub:main", "--hub", site.url, "--name", "hub")
    result = json.loads((folder / "evaluations" / "vstar_hub.benchmark_result.json").read_text())
    assert (result["num_tasks"], result["errors"]) == (3, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_reply")
def test_judge_decides_undecided_answers(run, tmp_path):
    folder, copies = run
    rows = [row for row in MAKERS["mathverse"]() if row["question_type"] == "free-form"][:2]
    for row in rows:
        file = copies / "mathverse" / row["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    write_copy("mathverse", copies / "mathverse", rows)
    words = [
        "eval",
        folder,
        "--benchmarks",
        "mathverse",
        "--benchmark-data",
        copies,
        "--allow-incomplete",
        "environment.name=single_turn",
    ]
    path = folder / "evaluations" / "mathverse.benchmark_result.json"
    good(*words)
    before = json.loads(path.read_text())
    assert before["judge"] == ""
    assert "judge j" not in before["conditions"]["graded by"]
    assert before["undecided"] == 2
    without_judge = [
        "evaluation.judge.url=http://127.0.0.1:9/v1",
        "evaluation.judge.model=j",
        "evaluation.judge.max_retries=0",
    ]
    output = good(*words, *without_judge, f"evaluation.judge.cache_dir={tmp_path / 'none'}")
    assert "http://127.0.0.1:9/v1" in "".join(output.split())
    with server(lambda number, prompt: "yes") as judge:
        given = [f"evaluation.judge.url={judge.url}", "evaluation.judge.model=j"]
        output = good(*words, *given, f"evaluation.judge.cache_dir={tmp_path}")
    after = json.loads(path.read_text())
    assert after["undecided"] == 0
    assert (after["judge"], after["metrics"]) == ("j", before["upper_bounds"])
    assert "mathverse 2/2 accuracy 1.000" in output
    assert "judge j" in after["conditions"]["graded by"]
    verdicts = folder / "evaluations" / "mathverse.verdicts.jsonl"
    assert len(verdicts.read_text().splitlines()) == before["undecided"]
    good(*words, *without_judge, "evaluation.judge.cache_dir=null")  # an outage loses no verdict
    assert json.loads(path.read_text()) == after
    # Shards keep verdicts, and merging needs no further requests.
    named = [*words, "--name", "in_parts"]
    with server(lambda number, prompt: "yes") as judge:
        given = [f"evaluation.judge.url={judge.url}", "evaluation.judge.model=j"]
        for shard in ("1/2", "2/2"):
            good(*named, *given, f"evaluation.judge.cache_dir={tmp_path / 'parts'}", "--shard", shard)
    good("eval", "merge", folder, "--benchmarks", "mathverse", "--name", "in_parts")
    joined = json.loads((folder / "evaluations" / "mathverse_in_parts.benchmark_result.json").read_text())
    assert {key: joined[key] for key in joined if key != "costs"} == {
        key: after[key] for key in after if key != "costs"
    }
    good(*words)  # without a judge its verdicts no longer apply
    assert json.loads(path.read_text())["undecided"] == before["undecided"]
    assert not verdicts.exists()
    wrong = ["evaluation.judge.url=http://x", "evaluation.judge.modle=j"]
    fail(ConfigError, *words, *wrong, key="rewards.judge.settings.modle", value="j")
