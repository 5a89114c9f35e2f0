"""Rollouts on a Ray cluster of two nodes: the same groups as in this process, whatever happens to workers."""

import asyncio
import contextlib
import importlib.util
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commands import fail, good
from error_cases import raises
from http_server import serve_endless
from PIL import Image
from ray_cluster import RayCluster

from saccade import sandbox
from saccade.config.load import load_recipe
from saccade.config.schema import RewardTerm
from saccade.errors import BrokenEngineError, ConfigError, RunError
from saccade.rollouts.collect import collect
from saccade.rollouts.components import RolloutComponents
from saccade.rollouts.executors import check_executor, connect_executor
from saccade.rollouts.ray import executor
from saccade.rollouts.ray.executor import LOG_FILE
from saccade.rollouts.restart_on_sync import RestartOnSync
from saccade.types import AnswerType, EpisodeStatus, Media, MediaKind, Task
from saccade.utils.jsonl import encode_json_line

ENGINE = Path(__file__).with_name("logging_engine.py")
GROUP_SIZE, NUM_TASKS = 2, 4
# Rewards that write down their process.
EPISODE_REWARD = """
import os

def place(episode, *, log: str) -> float:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return len(episode.ledger) / 1000
"""
GROUP_REWARD = """
import os

def group_place(group, *, log: str) -> list[float]:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    return [scored.score.value for scored in group.scored_episodes]
"""


@pytest.fixture(scope="module")
def cluster():
    """A head and a second node, each with room for one worker."""
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    with RayCluster() as cluster:
        yield cluster


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
    rewards = {**recipe.rewards}
    for name, text in (("place", EPISODE_REWARD), ("group_place", GROUP_REWARD)):
        (path := folder / f"{name}.py").write_text(text)
        rewards[str(path)] = RewardTerm(settings={"log": str(folder / f"{name}.log")})
    values = {"engine.settings": {"log": str(folder / "log"), **settings}, "environment.settings": environment}
    values["media.folder"] = str(folder / "store")
    return recipe.with_values({**values, "rewards": rewards})


LOCAL = """
import os

def affinity(episode, *, log: str) -> float:
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {sorted(os.sched_getaffinity(0))}\\n")
    return 0.0
"""


def read_processes(folder, name):
    return {int(line) for line in (folder / f"{name}.log").read_text().split()}


def run_on_ray(recipe, folder, tasks, address, *, ray=None, **options):
    values = {"rollouts.executor": "ray", "rollouts.ray.address": address, "rollouts.ray.cpus_per_worker": 1.0}
    return run_groups(recipe.with_values({**values, **(ray or {})}), folder, tasks, **options)


def run_groups(recipe, folder, tasks, *, body=None, **options):
    """Collect a group per task; return the groups and the executor's metrics."""
    components = RolloutComponents.from_recipe(recipe)
    components.media.generated_dir = str(folder / "images")
    components = connect_executor(components, folder)

    async def run():
        try:
            groups = await collect(
                tasks,
                components.environments,
                components.build_context(seed=3),
                group_size=GROUP_SIZE,
                score_fn=components.score_fn,
                seed_salts=7,
                executor=components.executor,
                **options,
            )
            more = await body(components) if body else None
            return groups, components.executor.pop_metrics() if components.executor else {}, more
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
def test_a_killed_worker_costs_its_own_groups_alone(cluster, tiny_folder, tasks, tmp_path, local_groups):
    recipe = make_recipe(tiny_folder, tmp_path, kills=1)
    finished = []
    settings = {"rollouts.ray.max_episodes": GROUP_SIZE}  # one group at a time
    groups, metrics, _ = run_on_ray(
        recipe,
        tmp_path,
        tasks,
        cluster.address,
        ray=settings,
        on_group_done=lambda index, group: finished.append(index),
    )
    assert describe(groups, tmp_path) == local_groups
    assert sorted(finished) == list(range(NUM_TASKS))
    number, processes = count_requests(tmp_path, "code")
    assert number == (NUM_TASKS + 1) * GROUP_SIZE  # the killed worker's group, and no other, ran again
    assert str(os.getpid()) not in processes
    assert read_processes(tmp_path, "place") <= {int(process) for process in processes}
    assert read_processes(tmp_path, "group_place") == {os.getpid()}
    assert (metrics["workers/lost"], metrics["workers/rerun_groups"]) == (1, 1)
    assert metrics["workers/decoded_images"] + metrics["workers/images_from_store"] >= NUM_TASKS
    assert "is lost" in (tmp_path / LOG_FILE).read_text()


def list_versions(groups):
    ledgers = [member.episode.ledger for group in groups for member in group.scored_episodes]
    return {segment.version for ledger in ledgers for segment in ledger.segments if segment.is_sampled}


@pytest.mark.slow
def test_workers_follow_weight_syncs_cancellations_and_errors(cluster, tiny_folder, tasks, tmp_path, local_groups):
    """One start of workers for all that needs no other one."""
    log = tmp_path / "log"

    async def body(components):
        settings = {"group_size": GROUP_SIZE, "score_fn": components.score_fn, "executor": components.executor}
        given = components.environments, components.build_context(seed=3)
        await components.engine.sync_weights(None, 5)
        assert list_versions(await collect(tasks[:1], *given, **settings)) == {5}

        restart_on_sync, size = RestartOnSync(), log.stat().st_size
        running = asyncio.create_task(collect(tasks[:2], *given, **settings, run_fn=restart_on_sync.run_episode))
        while log.stat().st_size == size:  # an episode has begun
            await asyncio.sleep(0.01)
        await components.engine.sync_weights(None, 6)
        assert list_versions(await running) == {6}
        assert restart_on_sync.pop_metrics()["episodes/restarted"] > 0

        discarded, done = [], []
        groups = await collect(
            [*(replace(task, question=f"{task.question} endless") for task in tasks[1:]), tasks[0]],
            *given,
            **settings,
            num_required=1,
            on_discarded=discarded.append,
            on_group_done=lambda index, group: done.append(index),
        )
        assert len(groups) == len(done) == 1
        # An episode that had ended is in a group or discarded, never lost.
        assert {episode.status for episode in discarded} <= {EpisodeStatus.ANSWERED}

        missing = replace(tasks[0], media=(Media(path="/missing.png", kind=MediaKind.IMAGE),))
        (group,) = await collect([missing], *given, **settings)
        assert {member.episode.status for member in group.scored_episodes} == {EpisodeStatus.ABORTED}

        shown = good("cluster", "status", "--address", cluster.address)
        assert len(re.findall(rf"{tmp_path.name}/\d+/\d", shown)) == 2
        assert re.search(r"[12] of 2 ", shown)  # as of the last heartbeat

        with raises(ConfigError, key="environment.name"):
            await collect([replace(tasks[0], question="explode")], *given, **settings)
        return components.executor.pop_metrics()

    recipe = make_recipe(tiny_folder, tmp_path, latency=0.2)
    groups, _, metrics = run_on_ray(recipe, tmp_path, tasks, cluster.address, body=body)
    assert describe(groups, tmp_path) == local_groups
    assert all(member.episode.results[0].images for group in groups for member in group.scored_episodes)
    assert metrics["workers/lost"] == metrics["workers/lost_drivers"] == 0


@pytest.mark.soak
def test_pinned_workers_share_no_cpu(cluster, tiny_folder, tasks, tmp_path):
    """Ray counts as many CPUs as there are workers; of a machine with fewer, a worker has none."""
    recipe = make_recipe(tiny_folder, tmp_path, latency=0.5)
    (path := tmp_path / "affinity.py").write_text(LOCAL)
    reward = RewardTerm(settings={"log": str(tmp_path / "affinity.log")})
    recipe = recipe.with_values({"rewards": {**recipe.rewards, str(path): reward}})
    cpus = sorted(os.sched_getaffinity(0))
    settings = {"rollouts.ray.pin_cpus": True, "rollouts.ray.max_episodes": GROUP_SIZE}
    run_on_ray(recipe, tmp_path, tasks, cluster.address, ray={**settings, "rollouts.ray.workers": min(2, len(cpus))})
    places = {tuple(line.split(maxsplit=1)) for line in (tmp_path / "affinity.log").read_text().splitlines()}
    assert len(places) == len({process for process, _ in places}) == len({place for _, place in places})
    assert {place for _, place in places} <= {str([cpu]) for cpu in cpus}


CPUS = """
from saccade.utils.cpus import count_cpus

def cpus(episode) -> float:
    return float(count_cpus())
"""


@pytest.mark.soak
def test_workers_of_a_node_share_a_store_and_use_the_cpus_that_are_reserved(tiny_folder, tasks, tmp_path):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    options = []
    for name in ("a", "b"):
        (folder := tmp_path / name).mkdir()
        options.append({"num_cpus": 2, "resources": {name: 1}, "env_vars": {"TMPDIR": str(folder)}})
    (path := tmp_path / "cpus.py").write_text(CPUS)
    recipe = make_recipe(tiny_folder, tmp_path, latency=0.2)
    recipe = recipe.with_values({"media.folder": None, "rewards": {str(path): RewardTerm()}})

    def run(node, workers):
        settings = {"rollouts.ray.max_episodes": GROUP_SIZE, "rollouts.ray.resources": {node: 0.1}}
        settings["rollouts.ray.workers"] = workers
        groups, metrics, _ = run_on_ray(recipe, tmp_path, tasks, cluster.address, ray=settings)
        assert {member.score.total for group in groups for member in group.scored_episodes} == {1.0}
        return metrics["workers/decoded_images"], metrics["workers/images_from_store"]

    with RayCluster(nodes=3, node_options=options) as cluster:
        first = run("a", 1)
        assert first[0] >= NUM_TASKS
        assert run("a", 2) == (0, first[0])  # workers of a later run, the last one included, find what the first stored
        assert run("b", 1) == first  # another node has its own
    assert [len([*(tmp_path / name).glob("saccade-media-*/*/*.entry")]) for name in "ab"] == [first[0]] * 2


@pytest.mark.soak
def test_a_group_that_kills_its_workers_ends_the_run(cluster, tiny_folder, tasks, tmp_path):
    recipe = make_recipe(tiny_folder, tmp_path, kills=9)
    settings = {"rollouts.ray.max_attempts": 2}
    with raises(RunError, key="rollouts.ray.max_attempts", value=2):
        run_on_ray(recipe, tmp_path, tasks[:1], cluster.address, ray=settings)


def test_engines_that_workers_can_not_sample_from_are_refused(tiny_folder, monkeypatch):
    recipe = load_recipe("tiny/pyvision_image", [f"model.path={tiny_folder}", "rollouts.executor=ray"])
    with raises(ConfigError, key="rollouts.executor", value="local"):
        check_executor(recipe)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, key="rollouts.executor", value="ray"):
        check_executor(recipe.with_values({"engine.name": "vllm"}))
    check_executor(recipe.with_values({"rollouts.executor": "local"}))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_cluster_that_was_never_reached_ends_the_run_soon(tiny_folder, tasks, tmp_path, address, monkeypatch):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of `auto`
    monkeypatch.setattr(executor, "_FIRST_CONNECTION_SECONDS", 0.1)
    with raises(BrokenEngineError, key="rollouts.ray.address", value=address):
        run_on_ray(make_recipe(tiny_folder, tmp_path), tmp_path, tasks[:1], address)


def test_the_status_of_no_cluster_is_one_sentence():
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    fail(RunError, "cluster", "status", "--address", "127.0.0.1:1", key="--address", value="127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize(("start", "drip"), [(b"", b""), (b"", b"\0"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"")])
def test_another_program_at_the_address_of_a_cluster_is_no_cluster(monkeypatch, start, drip):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    from saccade.rollouts.ray import driver

    monkeypatch.setattr(driver, "_PROBE_SECONDS", 0.3)
    with serve_endless(start, drip) as port:
        address = f"127.0.0.1:{port}"
        fail(RunError, "cluster", "status", "--address", address, key="--address", value=address)


@contextlib.contextmanager
def change_during(log, change):
    """Call `change` in a thread once a first group's episodes have begun."""

    def wait_and_change():
        while not log.exists():
            time.sleep(0.05)
        change()

    thread = threading.Thread(target=wait_and_change)
    thread.start()
    yield
    thread.join()


def check_changes_after_groups(changes, recipe, cluster, folder, tasks, local_groups):
    """Collect groups, with a change after each of the first ones; no finished group is lost, and a driver is."""
    finished = []

    def record_and_change(index, group):
        finished.append(index)
        if len(finished) <= len(changes):
            changes[len(finished) - 1]()

    groups, metrics, _ = run_on_ray(
        recipe,
        folder,
        tasks,
        cluster.address,
        ray={"rollouts.ray.max_episodes": GROUP_SIZE, "rollouts.ray.lease_timeout": 12.0},
        on_group_done=record_and_change,
    )
    assert describe(groups, folder) == local_groups
    assert sorted(finished) == list(range(NUM_TASKS))
    assert metrics["workers/lost_drivers"] >= 1


@pytest.mark.slow
def test_a_removed_node_and_then_a_restarted_head_cost_no_finished_group(
    cluster, tiny_folder, tasks, tmp_path, local_groups
):
    """One run for both; the soak tests below have one for each."""
    recipe, changes = make_recipe(tiny_folder, tmp_path, latency=1.0), [cluster.remove_node, cluster.restart]
    check_changes_after_groups(changes, recipe, cluster, tmp_path, tasks, local_groups)
    assert count_requests(tmp_path, "answer")[0] <= (NUM_TASKS + 2) * GROUP_SIZE  # no finished group ran again


@pytest.mark.soak
def test_a_removed_node_costs_no_finished_group(tiny_folder, tasks, tmp_path, local_groups):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    cluster = RayCluster()
    settings = {"rollouts.ray.max_episodes": GROUP_SIZE, "rollouts.ray.lease_timeout": 12.0}
    settings |= {"rollouts.ray.scoring": "trainer"}
    recipe = make_recipe(tiny_folder, tmp_path, latency=2.0)
    try:
        with change_during(tmp_path / "log", cluster.remove_node):
            groups, metrics, _ = run_on_ray(recipe, tmp_path, tasks, cluster.address, ray=settings)
    finally:
        cluster.shutdown()
    assert describe(groups, tmp_path) == local_groups
    assert read_processes(tmp_path, "place") == {os.getpid()}
    assert metrics["workers/lost"] <= 1
    assert count_requests(tmp_path, "answer")[0] <= (NUM_TASKS + 1) * GROUP_SIZE  # no finished group ran again


@pytest.mark.soak
def test_a_restarted_head_costs_no_finished_group(tiny_folder, tasks, tmp_path, local_groups):
    pytest.importorskip("ray", reason="the package ray is not installed: scripts/bootstrap --dev")
    with RayCluster() as cluster:
        recipe = make_recipe(tiny_folder, tmp_path, latency=2.0)
        check_changes_after_groups([cluster.restart], recipe, cluster, tmp_path, tasks, local_groups)
