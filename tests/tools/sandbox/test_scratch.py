"""Working folders: counted while they are used, gone afterwards, whatever is in them."""

import os
from pathlib import Path

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
