import asyncio
import gc
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from coded_clips import make, read_number
from PIL import Image

from saccade.config.schema import MediaConfig
from saccade.errors import MediaError
from saccade.media import cache
from saccade.media.cache import CachingMediaLoader
from saccade.media.store import DiskStore, PixelStore, open_node_store
from saccade.protocols import PixelBudget
from saccade.tools.base import ToolContext, tool
from saccade.types import ToolResult
from saccade.utils import cpus

pytestmark = pytest.mark.slow

SMALL = {"factor": 16, "budget": PixelBudget(min_pixels=256, max_pixels=96 * 64)}
TIMES = [0.5, 1.0, 1.5, 2.0]
IMAGE_BYTES = 96 * 64 * 3


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return make(str(tmp_path_factory.mktemp("clips") / "clip.mp4"), bf=2, g=20, count=60)


def build_loader(folder, **settings):
    return CachingMediaLoader.from_config(MediaConfig(folder=str(folder), decode_threads=2, **settings))


def load(loader, path, times=TIMES):
    return asyncio.run(loader.load_frames(path, times, **SMALL))


def make_pixels(value, side=16):
    return np.full((side, side, 3), value, np.uint8)


@pytest.fixture
def passes(monkeypatch):
    """Record the times of every pass over a file."""
    passes, real = [], cache.decode_frames

    def record(video_index, times, **settings):
        passes.append(sorted(times))
        return real(video_index, times, **settings)

    monkeypatch.setattr(cache, "decode_frames", record)
    return passes


# ---- the disk ------------------------------------------------------------------------------------------------------


def test_a_later_run_reads_what_an_earlier_one_decoded(clip, tmp_path, monkeypatch):
    still = str(tmp_path / "still.png")
    Image.fromarray(make_pixels(7, 80)).save(still)
    first = build_loader(tmp_path / "store")
    images = [*load(first, clip), asyncio.run(first.load_image(still, **SMALL))]
    expected = first.load_all_pixels(images)
    for name in ("decode_frames", "index_video", "read_image"):
        monkeypatch.setattr(cache, name, lambda *_, **__: pytest.fail("something was decoded again"))
    second = build_loader(tmp_path / "store")
    assert [*load(second, clip), asyncio.run(second.load_image(still, **SMALL))] == images
    third = build_loader(tmp_path / "store")  # a trainer, which loaded no frames itself
    for loader in (second, third):
        pixels = loader.load_all_pixels(images)
        assert all(np.array_equal(pixels[key], expected[key]) for key in expected)
        assert not any(array.flags.writeable for array in pixels.values())


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_entry_is_decoded_again(clip, tmp_path, damage, passes):
    images = load(build_loader(tmp_path), clip)
    entries = list(tmp_path.glob("??/*.entry"))
    assert len(entries) == 5  # with the timeline
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[-1] ^= 1
        entry.write_bytes({"truncated": content[:-9], "flipped": content, "empty": b""}[damage])
    again = build_loader(tmp_path)
    assert [read_number(array) for array in again.load_all_pixels(images).values()] == [12, 25, 37, 50]
    assert len(passes) == 2
    assert load(build_loader(tmp_path), clip) == images
    assert len(passes) == 2  # the entries were written again


def test_other_versions_of_the_libraries_share_no_entry(tmp_path):
    DiskStore(tmp_path, 1000, versions=("1",)).write("key", b"old")
    assert DiskStore(tmp_path, 1000, versions=("2",)).read("key") is None
    assert DiskStore(tmp_path, 1000, versions=("1",)).read("key") == b"old"


def test_the_entries_unused_for_longest_are_deleted(tmp_path):
    store = DiskStore(tmp_path, 10 * 104)
    for index in range(10):
        store.write(str(index), bytes([index]) * 100)
        os.utime(store._locate(str(index)), (index + 1, index + 1))
    assert store.read("0") == bytes(100)  # used now
    store.write("10", bytes([10]) * 100)
    assert store.compute_total_bytes() <= store.max_bytes
    kept = [index for index in range(11) if store.read(str(index)) is not None]
    assert kept == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    store.write("large", bytes(2000))
    assert store.read("large") is None


def _use_store(folder, seed, failures):
    store, rng = DiskStore(Path(folder), 300 * 1004), np.random.default_rng(seed)
    for number in rng.integers(0, 600, 500).tolist():
        content = store.read(str(number), 1000)
        if content is None:
            store.write(str(number), number.to_bytes(2, "big") * 500)
        elif content != number.to_bytes(2, "big") * 500:
            failures.put(number)


def test_processes_share_a_bounded_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=_use_store, args=(str(tmp_path), seed, failures)) for seed in range(3)]
    for process in processes:
        process.start()
    store = DiskStore(tmp_path, 300 * 1004)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert failures.empty()
    assert 200 * 1004 <= store.compute_total_bytes() <= store.max_bytes
    assert not list(tmp_path.rglob("*.draft"))


def test_a_folder_that_cannot_be_written_costs_one_warning(clip, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING, "saccade"):
        loader = build_loader(tmp_path / "file" / "store")
        images = load(loader, clip)
        assert load(loader, clip, [0.1]) != images
    assert [read_number(array) for array in loader.load_all_pixels(images).values()] == [12, 25, 37, 50]
    assert len(caplog.records) == 1


def test_a_disk_that_fills_up_keeps_what_fits(tmp_path):
    """The limit of a file's size fails a write in its middle, as a full disk does."""
    script = """
        import resource, signal, sys
        from pathlib import Path
        from saccade.media.store import DiskStore
        store = DiskStore(Path(sys.argv[1]), 10**9)
        store.write("small", bytes(1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        for name in ("large", "larger"):
            store.write(name, bytes(10000))
        assert store.read("large") is None and store.read("small") == bytes(1000)
        other = DiskStore(Path(sys.argv[1]), 10**9)
        other.write("next", bytes(1000))
        assert other.read("next") == bytes(1000)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("can't be written") == 1
    total = int.from_bytes((tmp_path / "total").read_bytes(), "big")
    assert total == DiskStore(tmp_path, 10**9).compute_total_bytes() == 2 * 1004
    assert not list(tmp_path.rglob("*.draft"))


# ---- memory --------------------------------------------------------------------------------------------------------


class Owner:
    pass


def test_pinned_images_are_never_evicted(caplog):
    store = PixelStore(4 * 768)
    store.pin(["a", "b", "late"])
    for key in ("a", "b", "c", "d", "e", "late"):
        store.put(key, make_pixels(1))
    assert [key for key in "abcde" if store.get(key) is not None] == ["a", "b", "e"]
    assert store.get("late") is not None
    store.pin(["x", "y"])
    with caplog.at_level(logging.WARNING, "saccade"):
        for key in ("x", "y", "y"):
            assert store.put(key, make_pixels(2)).mean() == 2
    assert store.get("y") is None  # beyond the bound
    assert store.total_bytes == 4 * 768
    assert len(caplog.records) == 1
    store.release(["a", "b", "late"])
    for key in ("f", "g", "h"):
        store.put(key, make_pixels(3))
    assert [key for key in "abxfgh" if store.get(key) is not None] == ["x", "f", "g", "h"]


def test_images_are_pinned_while_their_owner_exists(clip):
    loader = CachingMediaLoader(memory_bytes=5 * IMAGE_BYTES)
    images, owner, second_owner = load(loader, clip), Owner(), Owner()
    loader.pin(images, owner)
    loader.pin(images[:1], second_owner)

    def count_kept():
        load(loader, clip, [index / 25 for index in range(0, 10)])
        return sum(loader.store.get(image.key) is not None for image in images)

    assert count_kept() == 4
    del owner
    gc.collect()
    assert count_kept() == 1
    del second_owner
    gc.collect()
    assert count_kept() == 0


# ---- passes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_all_pixels_of_a_file_take_one_pass(clip, passes, workers):
    loader = CachingMediaLoader(workers=workers)
    images = load(CachingMediaLoader(), clip)
    small = asyncio.run(
        CachingMediaLoader().load_frames(
            clip, [0.5, 2.2], factor=16, budget=PixelBudget(min_pixels=256, max_pixels=1600)
        )
    )
    passes.clear()
    pixels = loader.load_all_pixels([*small, *images, *images])
    assert {key: array.shape for key, array in pixels.items()} == {
        image.key: (image.height, image.width, 3) for image in (*small, *images)
    }
    assert [read_number(pixels[image.key]) for image in images] == [12, 25, 37, 50]
    assert passes == [[0.48, 0.48, 1.0, 1.48, 2.0, 2.2]]
    loader.load_all_pixels(images)
    assert len(passes) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_crops_of_one_turn_share_a_pass(clip, passes, workers):
    async def crop():
        loader = CachingMediaLoader(workers=workers)
        await loader.probe(clip)
        windows = [[0.1, 0.2], [0.2, 1.0], [1.4, 1.0]]
        results = await asyncio.gather(*(loader.load_frames(clip, window, **SMALL) for window in windows))
        assert [[read_number(loader.load_pixels(image)) for image in images] for images in results] == [
            [2, 5],
            [5, 25],
            [35, 25],
        ]

    asyncio.run(crop())
    assert passes == [[0.08, 0.2, 1.0, 1.4]]


def test_an_error_reaches_only_the_request_whose_frames_have_it(clip, monkeypatch):
    real = cache.decode_frames

    def decode(video_index, times, **settings):
        if 1.0 in times:
            raise MediaError("damaged", key=clip)
        return real(video_index, times, **settings)

    monkeypatch.setattr(cache, "decode_frames", decode)

    async def request():
        loader = CachingMediaLoader(workers=1)
        await loader.probe(clip)
        requests = [loader.load_frames(clip, [time], **SMALL) for time in (0.5, 1.0, 1.5)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert not loader._requests_by_key
        return results

    first, second, third = asyncio.run(request())
    assert isinstance(second, MediaError)
    assert (first[0].time, third[0].time) == (0.48, 1.48)


def test_pixels_are_loaded_while_a_request_waits_for_the_event_loop(clip, passes):
    async def main():
        loader = CachingMediaLoader(workers=1)
        images = await loader.load_frames(clip, TIMES, **SMALL)
        loader.store = PixelStore(2**20)
        request = asyncio.create_task(loader.load_frames(clip, TIMES, **SMALL))
        await asyncio.sleep(0)  # the request exists; its pass begins in the next turn
        assert len(loader.load_all_pixels(images)) == 4  # a local engine does this in the event loop
        assert await request == images

    asyncio.run(main())
    assert len(passes) == 2


# ---- a node's store ------------------------------------------------------------------------------------------------


def test_a_node_has_one_store_for_all_processes_of_a_user(clip, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (CachingMediaLoader.from_config(MediaConfig(), is_shared=True) for _ in range(2))
    (folder,) = tmp_path.iterdir()
    assert first.store.disk.folder == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    load(first, clip)
    load(first, clip)  # from memory, which isn't counted
    load(second, clip)
    assert first.pop_counts() == {"decoded_images": len(TIMES), "images_from_store": 0}
    assert second.pop_counts() == {"decoded_images": 0, "images_from_store": len(TIMES)}
    assert second.pop_counts() == {"decoded_images": 0, "images_from_store": 0}
    assert first.store.disk.read_total_bytes() == first.store.disk.compute_total_bytes() > 0
    for config, is_shared in ((MediaConfig(), False), (MediaConfig(folder=""), True)):
        assert CachingMediaLoader.from_config(config, is_shared=is_shared).store.disk is None
    own = CachingMediaLoader.from_config(MediaConfig(folder=str(tmp_path / "own")), is_shared=True)
    assert own.store.disk.folder == tmp_path / "own"


def test_a_node_store_takes_half_of_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 0, 10**6))
    assert open_node_store(10**5).max_bytes == 10**5
    open_node_store(10**9).write("a", bytes(10**5))
    assert open_node_store(10**9).max_bytes == (10**6 + 10**5 + 4) // 2  # what it has isn't less room


def test_a_node_store_in_a_folder_of_others_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"saccade-media-{os.getuid()}"
    folder.symlink_to(tmp_path)
    assert open_node_store(10**9) is None
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert open_node_store(10**9) is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert open_node_store(10**9) is None
    assert len(caplog.records) == 2


def test_a_process_with_fewer_cpus_decodes_on_fewer_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpus, "_limit", None)
    assert CachingMediaLoader.from_config(MediaConfig())._pool._max_workers == 8
    cpus.limit_cpus(3)
    assert CachingMediaLoader.from_config(MediaConfig())._pool._max_workers == 3
    cpus.limit_cpus(9)
    assert cpus.count_cpus() == 8


# ---- time limits ---------------------------------------------------------------------------------------------------


def test_a_tools_time_limit_excludes_the_wait_for_a_decoding_thread(clip, tmp_path, monkeypatch):
    paths = [make(str(tmp_path / f"{index}.mp4"), count=10 + index) for index in range(3)]
    gate, real = threading.Event(), cache.decode_frames
    is_slow = threading.Event()

    def decode(video_index, times, **settings):
        assert gate.wait(120)
        if is_slow.is_set():
            threading.Event().wait(1.5)
        return real(video_index, times, **settings)

    monkeypatch.setattr(cache, "decode_frames", decode)

    @tool(timeout=1)
    async def look(path: str, *, ctx: ToolContext) -> ToolResult:
        """Look at a frame."""
        images = await ctx.media.load_frames(path, [0.1], **SMALL)
        return ToolResult(text=str(images[0].time), was_executed=True)

    async def main():
        loader = CachingMediaLoader(workers=1)
        for path in (clip, *paths):
            await loader.probe(path)
        busy = asyncio.create_task(loader.load_frames(clip, [1.0], **SMALL))
        await asyncio.sleep(0.01)
        ctx = ToolContext(media=loader, renderer=None, ask=None, video_path=paths[0], seed=0)
        calls = [asyncio.create_task(look({"path": path}, ctx=ctx)) for path in paths[:2]]
        await asyncio.sleep(2)  # twice the limit
        assert not any(call.done() for call in calls)
        gate.set()
        assert {(await call)[0].text for call in calls} == {"0.08"}
        await busy
        is_slow.set()
        assert (await look({"path": paths[2]}, ctx=ctx))[0].error

    asyncio.run(main())
