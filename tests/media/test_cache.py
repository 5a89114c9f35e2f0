import asyncio
import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from coded_clips import make, read_number
from error_cases import raises
from PIL import Image

from saccade.errors import MediaError
from saccade.media import cache
from saccade.media.cache import CachingMediaLoader, LRUCache
from saccade.protocols import PixelBudget

SMALL = {"factor": 16, "budget": PixelBudget(min_pixels=256, max_pixels=96 * 64)}
TIMES = [0.5, 1.0, 1.5, 2.0]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [make(str(folder / f"{index}.mp4"), bf=2, g=20, count=60, crf=20 + index) for index in range(4)]


@pytest.fixture
def decoded_times(monkeypatch):
    """Record the times of all decoded frames."""
    decoded_times = []
    real = cache.decode_frames

    def record_times(video_index, times, **settings):
        decoded_times.extend(times)
        return real(video_index, times, **settings)

    monkeypatch.setattr(cache, "decode_frames", record_times)
    return decoded_times


@pytest.mark.parametrize("workers", [0, 3])
def test_frames_have_their_own_times_and_pixels(clips, workers):
    async def load():
        loader = CachingMediaLoader(workers=workers)
        info = await loader.probe(clips[0])
        images = await loader.load_frames(clips[0], [1.01, 0.0, 2.39, 1.02], **SMALL)
        assert [image.time for image in images] == [1.0, 0.0, 2.36, 1.0]
        assert {(p.path, p.digest, p.width, p.height) for p in images} == {(clips[0], info.digest, 96, 64)}
        pixels_by_request = [loader.load_pixels(image) for image in images]
        assert [read_number(pixels) for pixels in pixels_by_request] == [25, 0, 59, 25]
        assert {(pixels.shape, pixels.dtype.name) for pixels in pixels_by_request} == {((64, 96, 3), "uint8")}
        assert pixels_by_request[0] is pixels_by_request[3]
        assert await loader.load_frames(clips[0], [], **SMALL) == []
        (half,) = await loader.load_frames(
            clips[0], [1.0], factor=16, budget=PixelBudget(min_pixels=256, max_pixels=1600)
        )
        assert loader.load_pixels(half).shape == (half.height, half.width, 3) == (32, 48, 3)

    asyncio.run(load())


@pytest.mark.parametrize("workers", [0, 3])
def test_cached_frames_need_no_file(clips, tmp_path, workers, monkeypatch):
    path = make(str(tmp_path / "gone.mp4"), bf=2)
    loader = CachingMediaLoader(workers=workers)
    first = asyncio.run(loader.load_frames(path, TIMES, **SMALL))
    os.remove(path)
    monkeypatch.setattr(cache.hashing, "get_file_identity", lambda path: pytest.fail("a file was accessed"))
    again = asyncio.run(loader.load_frames(path, [1.51, *TIMES], **SMALL))
    assert again == [first[2], *first]
    assert [read_number(loader.load_pixels(image)) for image in first] == [12, 25, 37, 50]
    assert asyncio.run(loader.probe(path)).num_frames == 60


@pytest.mark.parametrize("workers", [0, 2])
def test_concurrent_requests_decode_once(clips, decoded_times, workers):
    async def load():
        loader = CachingMediaLoader(workers=workers)
        requests = [loader.load_frames(clips[0], TIMES[start:], **SMALL) for start in (0, 1, 0, 2, 0)]
        results = await asyncio.gather(*requests)
        assert [len(images) for images in results] == [4, 3, 4, 2, 4]
        assert results[0][1:] == results[1]

    asyncio.run(load())
    assert sorted(decoded_times) == [0.48, 1.0, 1.48, 2.0]


def test_only_missing_frames_are_decoded(clips, decoded_times):
    loader = CachingMediaLoader()
    asyncio.run(loader.load_frames(clips[0], TIMES, **SMALL))
    asyncio.run(loader.load_frames(clips[0], [1.01, 1.1, 2.02], **SMALL))
    assert decoded_times == [0.48, 1.0, 1.48, 2.0, 1.08]


def test_evicted_frames_are_decoded_again(clips, decoded_times):
    loader = CachingMediaLoader(memory_bytes=2 * 96 * 64 * 3)
    images = asyncio.run(loader.load_frames(clips[0], TIMES, **SMALL))
    assert [read_number(loader.load_pixels(image)) for image in images] == [12, 25, 37, 50]
    assert len(decoded_times) > 4
    assert loader.store.total_bytes <= 2 * 96 * 64 * 3
    uncached = CachingMediaLoader(memory_bytes=0)
    image = asyncio.run(uncached.load_frames(clips[1], [1.0], **SMALL))[0]
    assert read_number(uncached.load_pixels(image)) == 25


def test_another_loader_gives_the_same_pixels(clips):
    images = asyncio.run(CachingMediaLoader().load_frames(clips[0], [index / 30 for index in range(40)], **SMALL))
    other = CachingMediaLoader()
    assert [read_number(other.load_pixels(image)) for image in images] == [round(p.time * 25) for p in images]


def test_pixels_are_read_only(clips):
    loader = CachingMediaLoader()
    (image,) = asyncio.run(loader.load_frames(clips[0], [1.0], **SMALL))
    assert not loader.load_pixels(image).flags.writeable


def test_a_changed_file_raises(tmp_path):
    path = make(str(tmp_path / "clip.mp4"))
    loader = CachingMediaLoader(memory_bytes=0)
    (image,) = asyncio.run(loader.load_frames(path, [1.0], **SMALL))
    make(path, count=50)
    with raises(MediaError, key=path):
        loader.load_pixels(image)
    with raises(MediaError, key=path):
        asyncio.run(loader.load_frames(path, [1.0], **SMALL))


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_reach_all_requests_and_are_not_cached(tmp_path, workers):
    loader = CachingMediaLoader(workers=workers)
    path = str(tmp_path / "missing.mp4")

    async def request():
        return await asyncio.gather(
            *(loader.load_frames(path, [1.0], **SMALL) for _ in range(3)), return_exceptions=True
        )

    assert {str(error) for error in asyncio.run(request())} == {str(error) for error in asyncio.run(request())}
    assert all(isinstance(error, MediaError) for error in asyncio.run(request()))
    make(path)
    assert [images[0].time for images in asyncio.run(request())] == [1.0, 1.0, 1.0]
    with raises(MediaError, key=path, value=99.0):
        asyncio.run(loader.load_frames(path, [0.0, 99.0], **SMALL))
    assert not loader._jobs
    assert not loader._requests_by_key


def test_cancelling_a_request_does_not_cancel_others(clips, monkeypatch):
    gate, real = threading.Event(), cache.decode_frames

    def slow(*args, **settings):
        gate.wait(120)
        return real(*args, **settings)

    monkeypatch.setattr(cache, "decode_frames", slow)

    async def load():
        loader = CachingMediaLoader(workers=1)
        await loader.probe(clips[0])
        first, second = (asyncio.create_task(loader.load_frames(clips[0], TIMES, **SMALL)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        gate.set()
        assert [image.time for image in await second] == [0.48, 1.0, 1.48, 2.0]

    asyncio.run(load())


@pytest.mark.slow
def test_decoding_64_clips_does_not_block_the_event_loop(tmp_path, clips, monkeypatch):
    paths = []
    for index in range(64):
        paths.append(str(tmp_path / f"{index}.mp4"))
        Path(paths[-1]).write_bytes(Path(clips[index % 4]).read_bytes() + bytes(8) + index.to_bytes(4, "big"))
    decoding_threads, real = set(), cache.decode_frames

    def decode(*args, **settings):
        decoding_threads.add(threading.get_ident())
        return real(*args, **settings)

    monkeypatch.setattr(cache, "decode_frames", decode)

    async def load():
        loader = CachingMediaLoader(workers=2)
        times = [index / 25 for index in range(60)]
        results = await asyncio.gather(*(loader.load_frames(path, times, **SMALL) for path in paths))
        return [[image.time for image in images] for images in results] == [times] * 64

    assert asyncio.run(load())
    assert 1 <= len(decoding_threads) <= 2
    assert threading.get_ident() not in decoding_threads


def test_frames_of_a_tiny_clip_are_decoded_once(tmp_path, monkeypatch):
    path = make(str(tmp_path / "tiny.mp4"), rate=4, count=256, draw=lambda i: np.full((64, 64, 3), i, np.uint8))
    times = [2.0 + 4 * index for index in range(16)]
    budget, calls, real = PixelBudget(min_pixels=256, max_pixels=4096), [], cache.decode_frames
    monkeypatch.setattr(cache, "decode_frames", lambda *args, **settings: calls.append(1) or real(*args, **settings))

    async def load_twice():
        loader = CachingMediaLoader()
        for _ in range(2):
            images = await loader.load_frames(path, times, factor=16, budget=budget)
            assert [image.time for image in images] == times

    asyncio.run(load_twice())
    assert len(calls) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_still_images(tmp_path, workers):
    path = str(tmp_path / "image.png")
    Image.new("RGB", (100, 60), (1, 2, 3)).save(path)

    async def load():
        loader = CachingMediaLoader(workers=workers)
        settings = {"factor": 32, "budget": PixelBudget(min_pixels=784, max_pixels=50176)}
        first, second = await asyncio.gather(loader.load_image(path, **settings), loader.load_image(path, **settings))
        assert first == second == await loader.load_image(path, **settings)
        assert (first.time, first.width, first.height) == (None, 96, 64)
        assert (loader.load_pixels(first) == (1, 2, 3)).all()
        assert (CachingMediaLoader().load_pixels(first) == loader.load_pixels(first)).all()
        with raises(MediaError, key=__file__):
            await loader.load_image(__file__, **settings)

    asyncio.run(load())


def test_the_least_recently_used_is_evicted_first():
    lru_cache = LRUCache(10)
    for key, cost in (("a", 4), ("b", 4), ("a", 5), ("c", 3)):
        lru_cache.put(key, key.upper(), cost)
    assert (lru_cache.get("a"), lru_cache.get("b"), lru_cache.get("c"), lru_cache.total_cost) == ("A", None, "C", 8)
    lru_cache.put("huge", "HUGE", 11)
    assert (lru_cache.get("huge"), lru_cache.get("a"), lru_cache.total_cost) == (None, "A", 8)
