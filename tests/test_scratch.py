"""Folders of temporary files: locked while their process lives, removed by the next one if it was killed."""

import os
import signal
import subprocess
import sys

from saccade.utils import scratch

MAKE_AND_WAIT = """
import sys
from saccade.utils.scratch import make_scratch_dir
print(make_scratch_dir("saccade-x-", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    arguments = [sys.executable, "-c", MAKE_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        left = process.stdout.readline().strip()
        own = scratch.make_scratch_dir("saccade-x-", str(tmp_path))
        assert os.path.isdir(left), "its process is alive"
        process.send_signal(signal.SIGKILL)
    scratch.make_scratch_dir("saccade-y-", str(tmp_path))
    assert os.path.isdir(left), "it has another prefix"
    other = scratch.make_scratch_dir("saccade-x-", str(tmp_path))
    assert not os.path.exists(left)
    assert os.path.isdir(own)
    for folder in (own, other, own):
        scratch.remove_scratch_dir(folder)
    assert [path.name[:10] for path in tmp_path.iterdir()] == ["saccade-y-"]


def test_folders_of_others_and_of_other_prefixes_are_left(tmp_path, monkeypatch):
    theirs, longer = tmp_path / "saccade-x-theirs00", tmp_path / "saccade-x-longer-host00000"
    for folder in (theirs, longer):
        folder.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "saccade-x-linked00").symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
        scratch.remove_abandoned("saccade-x-", str(tmp_path))
    assert theirs.is_dir()
    scratch.remove_abandoned("saccade-x-", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saccade-x-linked00", longer.name, "target"]


def test_a_folder_that_another_process_removes_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    mkdtemp, removed = scratch.tempfile.mkdtemp, []

    def create(**settings):
        folder = mkdtemp(**settings)
        if not removed:
            removed.append(folder)
            os.rmdir(folder)
        return folder

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", create)
    folder = scratch.make_scratch_dir("saccade-x-", str(tmp_path))
    assert os.path.isdir(folder)
    assert folder not in removed
    scratch.remove_scratch_dir(folder)
