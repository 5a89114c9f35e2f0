"""Working folders: counted while they are used, gone afterwards, whatever is in them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from saccade.tools._sandbox import scratch


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
    scratch.clear(str(folder))
    assert not folder.exists()
    assert (victim / "file").read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o755


def test_what_is_used_is_counted(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("/")
    size, count = scratch.used(str(tmp_path), 100)
    assert 100_000 <= size < 150_000
    assert count == 3
    assert scratch.used(str(tmp_path), 1)[1] >= 1
    assert scratch.used(str(tmp_path / "gone"), 100) == (0, 0)


def test_folders_in_folders_without_end_are_too_much(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(99):
        os.mkdir("d")
        os.chdir("d")
    assert scratch.used(str(tmp_path), 1000)[0] > 2**50


AS_USER = """
import os, sys
sys.path[:] = {path!r}
from saccade.tools._sandbox import scratch
os.setgid({user}); os.setuid({user})
os.chdir({folder!r})
os.mkdir("mine", 0o755); os.mkdir("guest")
os.mkdir("guest/closed"); open("guest/closed/file", "wb").write(bytes(100_000)); os.chmod("guest/closed", 0)
before = os.open
def race(name, flags, *rest, **options):
    # The guest's move, between being refused and being let in.
    if name == "swapped" and flags & os.O_PATH and os.path.isdir("guest/swapped"):
        os.rmdir("guest/swapped"); os.symlink(os.path.abspath("mine"), "guest/swapped")
    return before(name, flags, *rest, **options)
os.mkdir("guest/swapped", 0)
os.open = race
size, count = scratch.used("guest", 100)
print(size >= 100_000, count, oct(os.stat("mine").st_mode & 0o777), os.path.islink("guest/swapped"))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, and root is let in everywhere")
def test_closed_folders_are_counted_and_links_put_in_their_place_are_not_followed():
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        os.chmod(folder, 0o777)
        code = AS_USER.format(path=sys.path, folder=folder, user=54321)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "3", "0o755", "True"], done.stderr


def test_what_a_dead_process_left_is_swept_away(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "saccade-sandbox-old"
    left.mkdir()
    (left / ".lock").touch()
    (left / "17").mkdir()
    first = scratch.make_base()
    assert not left.exists()
    second = scratch.make_base()
    assert Path(first).is_dir()  # its lock is held
    assert first != second
