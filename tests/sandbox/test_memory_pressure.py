"""Waiting for memory: what the machine and the control groups of a process leave, and the error at the timeout."""

import asyncio
import functools

import pytest
from error_cases import raises
from sandbox_cases import LONG_LIMITS

from saccade.errors import SandboxError
from saccade.sandbox import FailureReason, Sandbox, client, memory_pressure
from saccade.sandbox import forkserver_client as servers
from saccade.sandbox.limits import MIB
from saccade.sandbox.memory_pressure import RESERVED_BYTES, MemoryMonitor


@pytest.fixture
def machine(tmp_path):
    """A function that writes the kernel's files and returns a MemoryMonitor of them."""

    def write_files(files, *, available=8192 * MIB, groups="0::/\n"):
        files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", **files}
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return MemoryMonitor(str(tmp_path))

    return write_files


def test_without_cgroups_the_machine_decides(machine):
    assert machine({}).measure_available() == 8192 * MIB


def test_the_tightest_cgroup_decides(machine):
    files = {
        "sys/fs/cgroup/a/memory.max": f"{4096 * MIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3000 * MIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {1000 * MIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{3000 * MIB}\n",
        "sys/fs/cgroup/a/b/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="0::/a/b\n").measure_available() == 2096 * MIB
    assert machine(files, available=99 * MIB, groups="0::/a/b\n").measure_available() == 99 * MIB


def test_cgroups_v1_count_too(machine):
    files = {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2048 * MIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2000 * MIB}\n",
        "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="7:pids:/x\n4:memory:/x\n0::/\n").measure_available() == 58 * MIB


def test_a_container_sees_its_own_cgroup_as_the_root(machine):
    files = {
        "sys/fs/cgroup/memory.max": f"{1024 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{24 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="0::/docker/0123\n").measure_available() == 1000 * MIB


@pytest.mark.slow
def test_waiting_ends_when_memory_is_available(machine, monkeypatch):
    monkeypatch.setattr(memory_pressure, "_POLL_INTERVAL", 0.01)
    monitor = machine({}, available=RESERVED_BYTES - MIB)

    async def body():
        waiting = asyncio.ensure_future(monitor.wait_for_memory())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        machine({}, available=RESERVED_BYTES + MIB)
        await asyncio.wait_for(waiting, 120)
        with raises(SandboxError, key="memory", value=513):
            await monitor.wait_for_memory(lambda: 2 * MIB, timeout=0.1)

    asyncio.run(body())


@pytest.mark.slow
def test_without_memory_neither_workers_nor_calls_start(server, machine, monkeypatch):
    monkeypatch.setattr(client, "SHORTAGE_TIMEOUT", 0.0)
    monitor = machine({}, available=RESERVED_BYTES - MIB)
    monkeypatch.setattr(monitor, "wait_for_memory", functools.partial(monitor.wait_for_memory, timeout=0.05))

    async def body():
        async with Sandbox.open(LONG_LIMITS, fork_server=server) as sandbox:
            monkeypatch.setattr(servers, "MEMORY_MONITOR", monitor)
            with raises(SandboxError, key="memory", value=511):
                await sandbox.run("print(1)")
            with raises(SandboxError, key="memory", value=511):
                await Sandbox.open(LONG_LIMITS, fork_server=server).__aenter__()
            machine({})
            await asyncio.sleep(0.5)
            return await sandbox.run("print(2)")

    assert asyncio.run(body()).text == "2\n"


def test_this_machine_can_be_measured():
    assert 0 < MemoryMonitor().measure_available() < 2**60


@pytest.mark.slow
def test_a_worker_that_holds_the_missing_memory_is_replaced(server, monkeypatch):
    """It is the code's doing: the model reads it, the episode is scored, and other episodes continue."""
    sandboxes = []

    def measure_available():
        """As if the first sandbox's worker shared two times the reserve with all others."""
        return 2 * RESERVED_BYTES - (sandboxes[0]._worker.read_memory_bytes() if sandboxes[0]._worker else 0)

    async def body():
        async with (
            Sandbox.open(LONG_LIMITS, fork_server=server) as hog,
            Sandbox.open(LONG_LIMITS, fork_server=server) as other,
        ):
            sandboxes.append(hog)
            await hog.run(f"hoard = bytearray({RESERVED_BYTES + 64 * MIB})")
            monkeypatch.setattr(servers.MEMORY_MONITOR, "measure_available", measure_available)
            waiting = asyncio.ensure_future(other.run("print('other')"))
            return await hog.run("print('first')"), await hog.run("print('hoard' in globals())"), await waiting

    monkeypatch.setattr(client, "SHORTAGE_TIMEOUT", 0.0)
    dropped, after, waiting = asyncio.run(body())
    assert (dropped.failure_reason, dropped.variables_kept, dropped.text) == (FailureReason.MEMORY, False, "")
    assert (after.text, waiting.text) == ("False\n", "other\n")
