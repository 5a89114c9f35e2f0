"""`saccade doctor` without a recipe: checks of the machine."""

import pytest
from commands import good, run

from saccade.checks import machine


@pytest.mark.slow
def test_doctor_checks_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = good("doctor")
    names = ("python", "torch", "transformers", "av", "threads", "device", "video", "sandbox")
    assert all(name in output for name in names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_accepts_missing_but_not_old_extras(monkeypatch):
    find_package_version = machine.find_package_version
    monkeypatch.setattr(
        machine, "find_package_version", lambda name: None if name in ("peft", "wandb") else find_package_version(name)
    )
    results = {result.name: result for result in machine.check_machine()}
    assert results["peft"].is_ok
    assert "pytest" not in results
    monkeypatch.setattr(
        machine, "find_package_version", lambda name: "0.1" if name == "peft" else find_package_version(name)
    )
    assert "peft" in run("doctor").stderr


@pytest.mark.slow
def test_doctor_names_failed_checks(monkeypatch):
    monkeypatch.setattr(machine, "find_package_version", lambda name: "0.1" if name == "torch" else "99")
    assert "torch, transformers" in run("doctor").stderr
