"""The fork server: a worker's folder with many files delays neither its own result nor other workers."""

import errno
import os
import select
import signal
import socket
import time

import pytest

from saccade.sandbox import isolation_selftest, jail, workdir, zygote
from saccade.sandbox.isolation import IsolationLayers

ISOLATION = IsolationLayers(namespaces="", landlock=1, seccomp=True, per_worker_user=False)


def make_folder(path, num_files):
    path.mkdir()
    for number in range(num_files):
        (path / str(number)).touch()
    return str(path)


@pytest.fixture
def held_removal(monkeypatch):
    """Make each removal wait, in whatever process, until the yielded descriptor is written to."""
    hold, release = os.pipe()
    remove_tree = workdir.remove_tree

    def remove_when_released(folder):
        os.read(hold, 1)
        remove_tree(folder)

    monkeypatch.setattr(workdir, "remove_tree", remove_when_released)
    yield release
    os.close(hold)
    os.close(release)


def start_exited_worker(server, work_root):
    """Add a worker that has exited, with many files, to a fork server; return its end of the status and its pidfd."""
    pid = os.fork()
    if not pid:
        os._exit(7)
    make_folder(work_root / str(pid), zygote.MAX_FAST_REMOVAL + 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(pid)
    server._workers[pidfd] = pid, theirs
    server._poll.register(pidfd, select.EPOLLIN)
    select.select([pidfd], [], [])
    return ours, pidfd


def test_folders_are_removed_behind_the_results(tmp_path, held_removal):
    config = jail.JailConfig(
        isolation=ISOLATION,
        readable_paths=(),
        hidden_dirs=(),
        library_bytes=0,
        zygote_pid=os.getpid(),
        first_user_id=0,
        work_root=str(tmp_path),
        proc_fd=-1,
    )
    with socket.socket() as control:
        server = zygote.Zygote(config, control)
    statuses = []
    for _ in range(2):  # nothing is removed yet
        status_socket, pidfd = start_exited_worker(server, tmp_path)
        with status_socket:
            server._reap_worker(pidfd)
            statuses.append(zygote.protocol.receive_json(status_socket)[0]["status"])
    assert list(map(os.waitstatus_to_exitcode, statuses)) == [7, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["removed-0", "removed-1"]
    os.write(held_removal, b"xx")
    server._remover.handle_exit()
    server._remover.handle_exit()
    assert not list(tmp_path.iterdir())
    assert server._remover.pidfd == -1


def test_folders_that_come_too_fast_are_waited_for(tmp_path, held_removal, monkeypatch):
    monkeypatch.setattr(zygote, "MAX_WAITING_FOLDERS", 2)
    remover = zygote.FolderRemover(str(tmp_path), select.epoll())
    for number in range(3):
        remover.remove(make_folder(tmp_path / str(number), zygote.MAX_FAST_REMOVAL))
    os.write(held_removal, b"x" * 9)
    remover.remove(make_folder(tmp_path / "3", zygote.MAX_FAST_REMOVAL))
    assert not (tmp_path / "removed-0").exists()
    remover.handle_exit()
    assert not list(tmp_path.iterdir())


def test_a_deep_folder_is_not_removed_at_once(tmp_path, held_removal, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for _ in range(99):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(tmp_path)
    remover = zygote.FolderRemover(str(tmp_path), select.epoll())
    remover.remove(str(tmp_path / "work"))
    assert [path.name for path in tmp_path.iterdir()] == ["removed-0"]
    os.write(held_removal, b"x")
    remover.handle_exit()


@pytest.mark.parametrize("function", ["fork", "pidfd_open"])
def test_a_removal_that_can_not_start_is_tried_again_at_the_next_one(tmp_path, monkeypatch, function):
    def fail(*arguments):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    remover = zygote.FolderRemover(str(tmp_path), select.epoll())
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        remover.remove(make_folder(tmp_path / "0", zygote.MAX_FAST_REMOVAL))
    assert remover.pidfd == -1
    remover.remove(make_folder(tmp_path / "1", zygote.MAX_FAST_REMOVAL))
    remover.handle_exit()
    assert not list(tmp_path.iterdir())


def test_a_refused_self_test_names_the_file(monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/lib")

    monkeypatch.setattr(jail, "fork_isolated", refuse)
    assert isolation_selftest._run_selftest(ISOLATION, 0) == {"refused": "Permission denied: /root/lib"}


def test_a_self_test_that_hangs_is_killed(monkeypatch):
    statuses, waitpid = [], os.waitpid

    def hang(*arguments):
        time.sleep(30)
        os._exit(0)

    def record_status(pid, options):
        statuses.append(waitpid(pid, options)[1])
        return pid, statuses[-1]

    monkeypatch.setattr(isolation_selftest, "_run_selftest_child", hang)
    monkeypatch.setattr(isolation_selftest, "SELFTEST_TIMEOUT", 0.1)
    monkeypatch.setattr(os, "waitpid", record_status)
    assert "refused" in isolation_selftest._run_selftest(ISOLATION, 0)
    assert list(map(os.waitstatus_to_exitcode, statuses)) == [-signal.SIGKILL]


def test_small_and_missing_folders_need_no_process(tmp_path):
    remover = zygote.FolderRemover(str(tmp_path), select.epoll())
    remover.remove(make_folder(tmp_path / "a", 9))
    remover.remove(str(tmp_path / "a"))
    assert remover.pidfd == -1
    assert not list(tmp_path.iterdir())
