"""Attacks: none gets out, none reaches the trainer, and the sandbox works on after each of them."""

import ast
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from attacks import FILES, NETWORK, PRELUDE, PROCESSES, PROTOCOL, PROTOCOL_PRELUDE, TRICKS
from corners import CORNERS, HABITS
from sandbox_cases import play

import saccade
from saccade.tools._sandbox.limits import Limits
from saccade.types import Media

HASTY = Limits(seconds=2.5, grace=0.5, memory_mib=512, pictures=4)
WORD = secrets.token_hex(8)
HELD = [f"SECRET-{WORD}"]  # on the trainer's heap


class Outside:
    """What an attack might reach: answers in a file, sockets somebody listens at."""

    def __init__(self, folder):
        folder.chmod(0o755)
        self.labels = folder / "labels.json"
        self.labels.write_text(f"ANSWER-{WORD}")
        self.labels.chmod(0o666)
        self.heard, self.sockets = [], []
        tcp = self._listen(socket.AF_INET, ("127.0.0.1", 0))
        udp = self._listen(socket.AF_INET, ("127.0.0.1", tcp.getsockname()[1]), socket.SOCK_DGRAM)
        self._listen(socket.AF_UNIX, str(folder / "socket"))
        self._listen(socket.AF_UNIX, f"\0saccade-{WORD}")
        self._listen(socket.AF_UNIX, str(folder / "datagrams"), socket.SOCK_DGRAM)
        for path in ("socket", "datagrams"):
            (folder / path).chmod(0o777)
        assert udp is not None
        self.names = {
            "labels": str(self.labels),
            "folder": str(folder),
            "port": tcp.getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": f"saccade-{WORD}",
            "datagram": str(folder / "datagrams"),
            "host": os.getpid(),
            "home": str(Path.home()),
            "source": str(Path(saccade.__file__).parent / "types.py"),
            "word": WORD,
        }
        self.before = self.state()

    def _listen(self, family, address, kind=socket.SOCK_STREAM):
        each = socket.socket(family, kind)
        each.bind(address)
        if kind is socket.SOCK_STREAM:
            each.listen()
        self.sockets.append(each)
        threading.Thread(target=self._hear, args=(each, kind), daemon=True).start()
        return each

    def _hear(self, each, kind):
        try:
            while True:
                self.heard.append(each.recvfrom(99) if kind is socket.SOCK_DGRAM else each.accept())
        except OSError:
            return

    def state(self):
        status = self.labels.stat()
        files = sorted(path.name for path in self.labels.parent.iterdir())
        return self.labels.read_text(), status.st_mode, status.st_uid, status.st_mtime_ns, files, os.getpriority(0, 0)


@pytest.fixture(scope="module")
def outside():
    # Not pytest's folder, which only its owner may enter: nothing but the sandbox shall be in an attack's way.
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        made = Outside(Path(folder))
        yield made
        for each in made.sockets:
            each.close()


def attack(server, outside, code, media=()):
    """The outcome of an attack, which may cost one more call (an alarm, a dying thread) and no other."""
    first, *later = play(server, code, *["print(6 * 7)"] * 3, limits=HASTY, media=media)
    for outcome in (first, *later):
        everything = outcome.text + (outcome.error or "").replace("print('BREACH', what)", "").replace('BREACH")', "")
        assert "BREACH" not in everything
        assert WORD not in everything.replace(f"saccade-{WORD}", "").replace(f"SECRET-{WORD}'", "")
    assert [each.text for each in later].count("42\n") >= 2, later
    assert outside.state() == outside.before
    assert outside.heard == []
    return first


SIMPLE = {**FILES, **NETWORK, **PROCESSES, **CORNERS}
OWN = {**TRICKS, **HABITS}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMPLE)
def test_forbidden_things_fail(any_server, outside, name):
    first = attack(any_server, outside, PRELUDE + SIMPLE[name].format(**outside.names))
    assert first.fault is None or first.error


# Without Landlock a guest may list the skeleton of its own root, in which there is nothing but libraries.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES.keys() - {"the home folder", "another's working folder"}))
def test_namespaces_alone_hold_files(servers, outside, name):
    attack(servers("Landlock"), outside, PRELUDE + FILES[name].format(**outside.names))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_tricks_hurt_only_their_own_episode(server, outside, name):
    attack(server, outside, PRELUDE + OWN[name].format(**outside.names))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOL)
def test_a_damaged_connection_hurts_only_its_own_episode(server, outside, name):
    attack(server, outside, PROTOCOL_PRELUDE + PROTOCOL[name], media=(Media(path="/nowhere.mp4"),))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("refused", [False, True], ids=["ordinary user", "namespaces refused"])
def test_an_ordinary_user_is_as_safe(outside, refused):
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as scratch:
        Path(scratch).chmod(0o777)
        command = [sys.executable, str(Path(__file__).parent / "as_user.py"), json.dumps(outside.names), scratch]
        done = subprocess.run([*command, *(["refused"] if refused else [])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["breaches"] == {}
    assert found["count"] > 100
    if refused:
        assert not found["complete"]
    assert outside.state() == outside.before
    assert outside.heard == []


def test_there_are_enough_attacks():
    assert len(SIMPLE) + len(OWN) + len(PROTOCOL) >= 60


NEVER_RAISE = {"breach", "sysc", "create_string_buffer", "prctl", "fileno"}  # whatever the kernel says


def called(statement):
    return {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(statement) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("name", SIMPLE)
def test_every_part_of_an_attack_is_tried(outside, name):
    """What can raise may do so once: nothing after it would be tried."""
    statements = ast.parse(SIMPLE[name].format(**outside.names)).body
    attempts = [called(each) for each in statements if "breach" in called(each)]
    assert all(each <= NEVER_RAISE for each in attempts[:-1]), attempts
