"""Rollouts on a Ray cluster of two nodes: the same groups as in this process, whatever happens to workers."""

import asyncio
import contextlib
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from error_cases import raises
from PIL import Image

from saccade import sandbox
from saccade.config.load import load_recipe
from saccade.errors import ConfigError
from saccade.rollouts.collect import collect
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.ray.launcher import LOG_FILE, check_launcher, connect_launcher
from saccade.types import AnswerType, Media, MediaKind, Task
from saccade.utils.jsonl import encode_json_line

ENGINE = Path(__file__).with_name("logging_engine.py")
GROUP_SIZE, NUM_TASKS = 2, 4


@pytest.fixture(scope="module")
def cluster():
    """A head and a second node, each with room for one worker."""
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    cluster.add_node(**options)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    sandbox.close_shared_servers()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder, tasks = tmp_path_factory.mktemp("media"), []
    for number in range(NUM_TASKS):
        path = folder / f"{number}.png"
        Image.new("RGB", (80, 80), (255, 10 * number, 0)).save(path)
        media = (Media(path=str(path), kind=MediaKind.IMAGE),)
        question = f"Which colour is image {number}?"
        tasks.append(
            Task(id=str(number), question=question, media=media, answer_type=AnswerType.OPEN, ground_truth="red")
        )
    return tasks


def make_recipe(tiny_folder, folder, **settings):
    overrides = [f"engine.name={ENGINE}", f"model.path={tiny_folder}", "environment.settings.tools.python.timeout=60"]
    recipe = load_recipe("tiny/pyvision_image", [*overrides, "sampling.max_tokens=400"])
    environment = {**recipe.environment.settings, "max_context_tokens": 8000}
    values = {"engine.settings": {"log": str(folder / "log"), **settings}, "environment.settings": environment}
    return recipe.with_values(values)


def run_on_ray(recipe, folder, tasks, address, *, ray=None, **options):
    values = {"rollouts.launcher": "ray", "rollouts.ray.address": address, "rollouts.ray.cpus_per_worker": 1.0}
    return run_groups(recipe.with_values({**values, **(ray or {})}), folder, tasks, **options)


def run_groups(recipe, folder, tasks, *, body=None, **options):
    """Collect a group per task; return the groups and the launcher's metrics."""
    components = RolloutComponents.from_recipe(recipe)
    components.media.generated_dir = str(folder / "images")
    components = connect_launcher(components, folder)

    async def run():
        try:
            groups = await collect(
                tasks,
                components.environments,
                components.build_context(seed=3),
                group_size=GROUP_SIZE,
                score_fn=components.score_fn,
                epochs=7,
                launcher=components.launcher,
                **options,
            )
            more = await body(components) if body else None
            return groups, components.launcher.pop_metrics(), more
        finally:
            await components.engine.close()

    return asyncio.run(run())


def describe(groups, *folders):
    """Groups as text without times, and without the folder of shown images."""
    text = b"".join(map(encode_json_line, groups)).decode()
    for folder in folders:
        text = text.replace(str(folder), "RUN")
    return re.sub(r'"seconds":\s*[\d.e-]+', '"seconds":0', text)


def count_requests(folder, kind):
    lines = (folder / "log").read_text().splitlines()
    return sum(line.split()[1] == kind for line in lines), {line.split()[0] for line in lines}


@pytest.fixture(scope="module")
def local_groups(tiny_folder, tasks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    groups, _, _ = run_groups(make_recipe(tiny_folder, folder), folder, tasks)
    return describe(groups, folder)


@pytest.mark.slow
def test_groups_equal_those_of_one_process(cluster, tiny_folder, tasks, tmp_path, local_groups):
    recipe = make_recipe(tiny_folder, tmp_path)
    groups, metrics, _ = run_on_ray(recipe, tmp_path, tasks, cluster.address)
    assert describe(groups, tmp_path) == local_groups
    assert all(member.episode.results[0].images for group in groups for member in group.episodes)
    number, processes = count_requests(tmp_path, "code")
    assert number == NUM_TASKS * GROUP_SIZE
    assert str(os.getpid()) not in processes
    assert metrics["workers/lost"] == 0
