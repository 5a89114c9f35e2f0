"""Working folders: their usage is counted, and they are removed whatever they contain."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from saccade.sandbox import workdir


@pytest.mark.slow
def test_a_folder_of_any_depth_and_mode_is_removed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    (victim / "file").write_text("mine")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "link").symlink_to(victim)
    (folder / "gone").symlink_to("/nowhere")
    (folder / "closed").mkdir(mode=0)
    (folder / "file").write_text("x")
    monkeypatch.chdir(folder)
    for _ in range(700):
        os.mkdir("deeper")
        os.chdir("deeper")
    Path("file").write_text("x")
    os.chdir(tmp_path)
    workdir.remove_tree(str(folder))
    assert not folder.exists()
    assert (victim / "file").read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o755


def test_usage_is_counted(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("/")
    size, count = workdir.measure_usage(str(tmp_path), 100)
    assert 100_000 <= size < 150_000
    assert count == 3
    assert workdir.measure_usage(str(tmp_path), 1)[1] >= 1
    assert workdir.measure_usage(str(tmp_path / "gone"), 100) == (0, 0)


def test_too_deep_folders_count_as_unbounded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(99):
        os.mkdir("d")
        os.chdir("d")
    assert workdir.measure_usage(str(tmp_path), 1000)[0] > 2**50


AS_USER = """
import os, sys
sys.path[:] = {path!r}
from saccade.sandbox import workdir
os.setgid({user}); os.setuid({user})
os.chdir({folder!r})
os.mkdir("mine", 0o755); os.mkdir("worker")
os.mkdir("worker/closed"); open("worker/closed/file", "wb").write(bytes(100_000)); os.chmod("worker/closed", 0)
before = os.open
def race(name, flags, *rest, **options):
    # The worker swaps the folder for a link between the refused open and the chmod.
    if name == "swapped" and flags & os.O_PATH and os.path.isdir("worker/swapped"):
        os.rmdir("worker/swapped"); os.symlink(os.path.abspath("mine"), "worker/swapped")
    return before(name, flags, *rest, **options)
os.mkdir("worker/swapped", 0)
os.open = race
size, count = workdir.measure_usage("worker", 100)
print(size >= 100_000, count, oct(os.stat("mine").st_mode & 0o777), os.path.islink("worker/swapped"))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, and root is let in everywhere")
def test_restricted_folders_are_counted_and_swapped_links_are_not_followed():
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        os.chmod(folder, 0o777)
        code = AS_USER.format(path=sys.path, folder=folder, user=54321)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "3", "0o755", "True"], done.stderr


def test_folders_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(workdir.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "saccade-sandbox-old"
    left.mkdir()
    (left / ".lock").touch()
    (left / "17").mkdir()
    first = workdir.create_work_root()
    assert not left.exists()
    second = workdir.create_work_root()
    assert Path(first).is_dir()  # its lock is held
    assert first != second


def test_folders_of_other_users_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "saccade-sandbox-theirs"
    left.mkdir()
    (left / ".lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    workdir.create_work_root()
    assert left.is_dir()
