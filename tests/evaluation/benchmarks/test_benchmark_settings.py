"""Settings of one benchmark: what the recipes set for it, what the command line sets after that, and bad ones."""

import json

import numpy as np
import pytest
from commands import fail, good
from error_cases import raises
from PIL import Image
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.cli.benchmark import check_benchmark_names
from saccade.config.load import dump_recipe, list_recipes, load_recipe, override_recipe
from saccade.errors import ConfigError
from saccade.evaluation.benchmark_result import describe_conditions
from saccade.rollouts.components import apply_evaluation_settings
from saccade.runs.evaluation import apply_benchmark_settings


def apply(recipe, name, *command_line):
    benchmark = plugins.load("evaluation.benchmarks", name)()
    loaded = load_recipe(recipe, command_line)
    return apply_benchmark_settings(loaded, benchmark, name, command_line)


@pytest.mark.parametrize("name", list_recipes())
def test_benchmarks_of_every_recipe_can_be_evaluated(name):
    recipe = load_recipe(name)
    check_benchmark_names(recipe)
    for benchmark in recipe.evaluation.benchmarks:
        environment = apply_evaluation_settings(apply(name, benchmark)).environment
        plugins.resolve("environments", environment.name, environment.settings)()


def test_published_settings_of_a_benchmark():
    vstar, others = apply("pyvision/image_rl", "vstar"), apply("pyvision/image_rl", "wemath")
    assert (vstar.evaluation.num_samples, vstar.evaluation.temperature) == (32, 0.01)
    assert others == load_recipe("pyvision/image_rl")
    assert describe_conditions(vstar, None)["samples"] == "32 per question"
    decoding = ("evaluation.temperature=0.5", "engine.settings.top_k=20")
    conditions = describe_conditions(apply("pyvision/image_rl", "vstar", *decoding), None)
    assert (conditions["temperature"], conditions["top_k"], conditions["samples"]) == ("0.5", "20", "32 per question")
    assert "top_k" not in describe_conditions(vstar, None)
    charades, videomme = apply("paravt/para_grpo", "charades_sta"), apply("paravt/para_grpo", "videomme")
    assert (charades.environment.name, charades.environment.settings) == (
        "third_party_format",
        {"prompt_format": "agentic_minimal"},
    )
    assert charades.evaluation.environment_settings == {}
    assert describe_conditions(charades, None)["environment.prompt_format"] == "agentic_minimal"
    assert videomme.environment.name == "tool_calling"


def test_the_command_line_applies_after_the_benchmark():
    assert apply("pyvision/image_rl", "vstar", "evaluation.num_samples=2").evaluation.num_samples == 2
    assert apply("pyvision/image_rl", "vstar", "evaluation.benchmarks.vstar=[]").evaluation.num_samples == 1
    general = apply("paravt/para_grpo", "charades_sta", "environment.settings.prompt_format=agentic_general")
    assert general.environment.settings["prompt_format"] == "agentic_general"
    same = apply("paravt/para_grpo", "charades_sta", "environment.settings.max_tool_turns=2", "seed=3")
    assert (same.environment.settings, same.seed) == ({"prompt_format": "agentic_minimal", "max_tool_turns": 2}, 3)


def test_an_override_keeps_everything_else():
    recipe = load_recipe("pyvision/mixed_rl")
    changed = override_recipe(recipe, ["evaluation.num_samples=5"], "mine")
    assert changed == recipe.with_values({"evaluation.num_samples": 5})
    assert dump_recipe(override_recipe(recipe, [], "mine")) == dump_recipe(recipe)


def test_bad_settings_of_a_benchmark():
    with raises(ConfigError, key="evaluation.benchmarks.vstr", value="vstr"):
        check_benchmark_names(load_recipe("tiny/base", ["evaluation.benchmarks={vstr: [seed=1]}"]))
    with raises(ConfigError, key="evaluation.num_smaples"):
        apply("tiny/base", "vstar", "evaluation.benchmarks={vstar: [evaluation.num_smaples=3]}")
    with raises(ConfigError, key="evaluation.num_samples", value=0):
        apply("tiny/base", "vstar", "evaluation.benchmarks={vstar: [evaluation.num_samples=0]}")


@pytest.mark.slow
def test_the_report_shows_the_settings_of_its_benchmark(tmp_path, tiny_folder):
    (row, *_) = MAKERS["vstar"]()
    file = tmp_path / "copies" / "vstar" / row["image"]
    file.parent.mkdir(parents=True)
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(file)
    write_copy("vstar", tmp_path / "copies" / "vstar", [row])
    own = "evaluation.benchmarks={vstar: [evaluation.num_samples=2, evaluation.temperature=0.5]}"
    small = ["sampling.max_tokens=4", "environment.settings.num_frames=2"]
    words = [
        "eval",
        "tiny/para_grpo",
        own,
        *small,
        "--model",
        tiny_folder,
        "--benchmarks",
        "vstar",
        "--allow-incomplete",
    ]
    words += ["--benchmark-data", tmp_path / "copies", "--out", tmp_path / "run"]
    output = " ".join(good(*words).split())
    assert "environment tool_calling, tools on, temperature 0.5, samples 2 per question" in output
    path = tmp_path / "run" / "evaluations" / "vstar.benchmark_result.json"
    result = json.loads(path.read_text())
    assert (result["num_answers"], result["conditions"]["samples"], result["conditions"]["temperature"]) == (
        2,
        "2 per question",
        "0.5",
    )
    good(*words, "--num-samples", 1)
    assert json.loads(path.read_text())["num_answers"] == 1
    bad_name = [own.replace("vstar", "vstr"), *words[3:]]
    fail(ConfigError, *words[:2], *bad_name, key="evaluation.benchmarks.vstr", value="vstr")
