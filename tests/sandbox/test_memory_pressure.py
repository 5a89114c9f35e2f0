"""Waiting for memory: what the machine and the groups around a process leave, and a sentence where it is too little."""

import asyncio
import functools

import pytest
from sandbox_cases import PATIENT

from saccade.errors import SandboxError
from saccade.tools._sandbox import memory
from saccade.tools._sandbox import server as servers
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import MIB
from saccade.tools._sandbox.memory import ROOM, Memory


@pytest.fixture
def machine(tmp_path):
    """Writes the kernel's files as they would be; the answer is what is left by them."""

    def written(files, *, available=8192 * MIB, groups="0::/\n"):
        files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n", **files}
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Memory(str(tmp_path))

    return written


def test_without_groups_the_machine_decides(machine):
    assert machine({}).available() == 8192 * MIB


def test_the_tightest_group_decides(machine):
    files = {
        "sys/fs/cgroup/a/memory.max": f"{4096 * MIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3000 * MIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {1000 * MIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{3000 * MIB}\n",
        "sys/fs/cgroup/a/b/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="0::/a/b\n").available() == 2096 * MIB
    assert machine(files, available=99 * MIB, groups="0::/a/b\n").available() == 99 * MIB


def test_older_groups_count_as_well(machine):
    files = {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2048 * MIB}\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2000 * MIB}\n",
        "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="7:pids:/x\n4:memory:/x\n0::/\n").available() == 58 * MIB


def test_a_container_sees_its_own_group_as_the_top(machine):
    files = {
        "sys/fs/cgroup/memory.max": f"{1024 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{24 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    assert machine(files, groups="0::/docker/0123\n").available() == 1000 * MIB


def test_whoever_waits_goes_on_when_there_is_room(machine, monkeypatch):
    monkeypatch.setattr(memory, "_AGAIN_SECONDS", 0.01)
    short = machine({}, available=ROOM - MIB)

    async def body():
        waiting = asyncio.ensure_future(short.room())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        machine({}, available=ROOM + MIB)
        await asyncio.wait_for(waiting, 10)
        with pytest.raises(SandboxError, match=r"no memory is left for model-written code: 513 MiB are available"):
            await short.room(lambda: 2 * MIB, patience=0.1)

    asyncio.run(body())


def test_without_room_neither_interpreters_nor_calls_begin(server, machine, monkeypatch):
    short = machine({}, available=ROOM - MIB)
    monkeypatch.setattr(short, "room", functools.partial(short.room, patience=0.05))

    async def body():
        async with Sandbox.open(PATIENT, host=server) as box:
            monkeypatch.setattr(servers, "MEMORY", short)
            with pytest.raises(SandboxError, match="no memory is left"):
                await box.run("print(1)")
            with pytest.raises(SandboxError, match="no memory is left"):
                await Sandbox.open(PATIENT, host=server).__aenter__()
            machine({})
            await asyncio.sleep(0.5)
            return await box.run("print(2)")

    assert asyncio.run(body()).text == "2\n"


def test_this_machine_can_be_asked():
    assert 0 < Memory().available() < 2**60
