"""Attacks: none escapes, none reaches the trainer, and the sandbox still works after each of them."""

import ast
import asyncio
import errno
import json
import os
import platform
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
from sandbox_cases import run_attack, run_cells

import saccade
from saccade.sandbox import Limits, Sandbox
from saccade.tools.served_media import ServedVideo

SHORT_LIMITS = Limits(timeout=2.5, grace_seconds=0.5, memory_mib=512, max_images=4)
WORD = secrets.token_hex(8)
SECRETS = [f"SECRET-{WORD}"]  # on the trainer's heap


class Targets:
    """What an attack might reach: labels in a file, listening sockets."""

    def __init__(self, folder):
        folder.chmod(0o755)
        self.labels = folder / "labels.json"
        self.labels.write_text(f"ANSWER-{WORD}")
        self.labels.chmod(0o666)
        self.received, self.sockets = [], []
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
        listener = socket.socket(family, kind)
        listener.bind(address)
        if kind is socket.SOCK_STREAM:
            listener.listen()
        self.sockets.append(listener)
        threading.Thread(target=self._receive, args=(listener, kind), daemon=True).start()
        return listener

    def _receive(self, listener, kind):
        try:
            while True:
                self.received.append(listener.recvfrom(99) if kind is socket.SOCK_DGRAM else listener.accept())
        except OSError:
            return

    def state(self):
        status = self.labels.stat()
        files = sorted(path.name for path in self.labels.parent.iterdir())
        return self.labels.read_text(), status.st_mode, status.st_uid, status.st_mtime_ns, files, os.getpriority(0, 0)


@pytest.fixture(scope="module")
def targets():
    # Not pytest's temporary folder, which only its owner may enter: only the sandbox may stop an attack.
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as folder:
        targets = Targets(Path(folder))
        yield targets
        for listener in targets.sockets:
            listener.close()


def attack(server, targets, code, videos=()):
    """Run an attack and return its result.

    It may break two further calls (a thread that prints in one and dies in the next), not more.
    """

    async def body():
        served = [ServedVideo(path, f"video_clue_{number}") for number, path in enumerate(videos)]
        async with Sandbox.open(SHORT_LIMITS, videos=served, fork_server=server) as sandbox:
            return await run_attack(sandbox, code)

    first, *later = asyncio.run(body())
    for result in (first, *later):
        output = result.text + (result.error or "").replace("print('BREACH', what)", "").replace('BREACH")', "")
        assert "BREACH" not in output
        assert "MISSED" not in result.text, "the attack uses a name that no longer exists in the worker"
        assert WORD not in output.replace(f"saccade-{WORD}", "").replace(f"SECRET-{WORD}'", "")
    assert [result.text for result in later].count("42\n") >= 2, later
    assert targets.state() == targets.before
    assert targets.received == []
    return first


SIMPLE = {**FILES, **NETWORK, **PROCESSES, **CORNERS}
OWN = {**TRICKS, **HABITS}
LONG = ("a worker that doesn't run code", "a thread that reads the socket")  # are stopped after half a minute


# With one wall instead of two; `test_every_attack_fails_in_other_environments` tries every attack in others too.
@pytest.mark.slow
@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("disabled_layers", [("namespaces",), pytest.param((), marks=pytest.mark.soak)])
def test_forbidden_actions_fail(servers, targets, disabled_layers, name):
    first = attack(servers(*disabled_layers), targets, PRELUDE + SIMPLE[name].format(**targets.names))
    assert first.failure_reason is None or first.error


# Without Landlock a worker may list the folders of its private root, which holds only libraries.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES.keys() - {"the home folder", "another's working folder"}))
def test_namespaces_alone_protect_files(servers, targets, name):
    attack(servers("Landlock"), targets, PRELUDE + FILES[name].format(**targets.names))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in OWN])
def test_tricks_affect_only_their_own_episode(server, targets, name):
    attack(server, targets, PRELUDE + OWN[name].format(**targets.names))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOL)
def test_protocol_violations_affect_only_their_own_episode(server, targets, name):
    attack(server, targets, PROTOCOL_PRELUDE + PROTOCOL[name], videos=["/nowhere.mp4"])


# Everywhere else than as root with all layers, which the tests above try. (namespaces, Landlock's version; None: any)
ENVIRONMENTS = {
    "user": ("user", None),
    "refused": ("", None),
    "old Landlock": ("", 1),
    "container": ("", None),
}


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can enter these environments")
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_attack_fails_in_other_environments(targets, environment):
    if environment == "container" and platform.machine() != "x86_64":
        pytest.skip("the container's seccomp profile is written with x86-64's numbers")
    with tempfile.TemporaryDirectory(prefix="saccade-test-") as scratch:
        Path(scratch).chmod(0o777)
        script = str(Path(__file__).parent / "as_user.py")
        command = [sys.executable, script, json.dumps(targets.names), scratch, environment]
        completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout)
    assert report["breaches"] == {}
    assert report["count"] == len(SIMPLE) + len(OWN) + len(PROTOCOL)
    namespaces, landlock = ENVIRONMENTS[environment]
    assert report["isolation"]["namespaces"] == namespaces
    assert landlock in (None, report["isolation"]["landlock"])
    if environment != "container":  # there the kernel doesn't list a worker's files for its host
        assert report["unlinked"] in (["disk", False], ["raised", True])
    if environment == "refused":
        assert "max_user_namespaces" in report["reasons"]["namespaces"]
        assert os.strerror(errno.ENOSPC) not in report["reasons"]["namespaces"]
    assert targets.state() == targets.before
    assert targets.received == []


def test_the_number_of_attacks_is_sufficient():
    assert len(SIMPLE) + len(OWN) + len(PROTOCOL) >= 60


# Several attacks look up the worker's internals. `find_worker` and `require` print MISSED for a name that is gone; if
# these two failed silently, such an attack would pass without having attacked anything.
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("find_worker()", ""),
        ("require(find_worker(), '_no_such_name')", "MISSED _no_such_name\n"),
        ("print(len(nonce))", "8\n"),
    ],
)
def test_attacks_report_missing_internals(server, code, text):
    assert run_cells(server, PROTOCOL_PRELUDE + code)[0].text == text


NEVER_RAISE = {"breach", "sysc", "create_string_buffer", "prctl", "fileno"}  # whatever the kernel returns


def list_called_names(statement):
    return {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(statement) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("name", SIMPLE)
def test_every_part_of_an_attack_is_executed(targets, name):
    """Only the last part may raise: parts behind an exception would never run."""
    statements = ast.parse(SIMPLE[name].format(**targets.names)).body
    calls = [list_called_names(statement) for statement in statements if "breach" in list_called_names(statement)]
    assert all(names <= NEVER_RAISE for names in calls[:-1]), calls
