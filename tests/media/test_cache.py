import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from coded_clips import make, number_of
from PIL import Image

from saccade.errors import MediaError
from saccade.media import cache
from saccade.media.cache import Library, Lru
from saccade.protocols import Budget

SMALL = {"factor": 16, "budget": Budget(min_pixels=256, max_pixels=96 * 64)}
TIMES = [0.5, 1.0, 1.5, 2.0]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [make(str(folder / f"{index}.mp4"), bf=2, g=20, count=60, crf=20 + index) for index in range(4)]


@pytest.fixture
def decoded(monkeypatch):
    """The times of every frame that is really decoded."""
    seen = []
    real = cache.decode

    def counting(reel, times, **settings):
        seen.extend(times)
        return real(reel, times, **settings)

    monkeypatch.setattr(cache, "decode", counting)
    return seen


@pytest.mark.parametrize("workers", [0, 3])
def test_frames_are_named_and_shown(clips, workers):
    async def look():
        library = Library(workers=workers)
        clip = await library.probe(clips[0])
        pictures = await library.frames(clips[0], [1.01, 0.0, 2.39, 1.02], **SMALL)
        assert [picture.time for picture in pictures] == [1.0, 0.0, 2.36, 1.0]
        assert {(p.path, p.digest, p.width, p.height) for p in pictures} == {(clips[0], clip.digest, 96, 64)}
        shown = [library.pixels(picture) for picture in pictures]
        assert [number_of(pixels) for pixels in shown] == [25, 0, 59, 25]
        assert {(pixels.shape, pixels.dtype.name) for pixels in shown} == {((64, 96, 3), "uint8")}
        assert shown[0] is shown[3]
        assert await library.frames(clips[0], [], **SMALL) == []
        half = await library.frames(clips[0], [1.0], factor=16, budget=Budget(min_pixels=256, max_pixels=1600))
        assert library.pixels(half[0]).shape == (half[0].height, half[0].width, 3) == (32, 48, 3)

    asyncio.run(look())


@pytest.mark.parametrize("workers", [0, 3])
def test_what_is_held_needs_no_file(clips, tmp_path, workers, monkeypatch):
    path = make(str(tmp_path / "gone.mp4"), bf=2)
    library = Library(workers=workers)
    first = asyncio.run(library.frames(path, TIMES, **SMALL))
    os.remove(path)
    monkeypatch.setattr(cache.files, "identity", lambda path: pytest.fail("a file was touched"))
    again = asyncio.run(library.frames(path, [1.51, *TIMES], **SMALL))
    assert again == [first[2], *first]
    assert [number_of(library.pixels(picture)) for picture in first] == [12, 25, 37, 50]
    assert asyncio.run(library.probe(path)).frames == 60


@pytest.mark.parametrize("workers", [0, 2])
def test_concurrent_requests_decode_once(clips, decoded, workers):
    async def look():
        library = Library(workers=workers)
        requests = [library.frames(clips[0], TIMES[start:], **SMALL) for start in (0, 1, 0, 2, 0)]
        found = await asyncio.gather(*requests)
        assert [len(pictures) for pictures in found] == [4, 3, 4, 2, 4]
        assert found[0][1:] == found[1]

    asyncio.run(look())
    assert sorted(decoded) == [0.48, 1.0, 1.48, 2.0]


def test_only_what_is_missing_is_decoded(clips, decoded):
    library = Library()
    asyncio.run(library.frames(clips[0], TIMES, **SMALL))
    asyncio.run(library.frames(clips[0], [1.01, 1.1, 2.02], **SMALL))
    assert decoded == [0.48, 1.0, 1.48, 2.0, 1.08]


def test_what_no_longer_fits_is_decoded_again(clips, decoded):
    library = Library(cache_bytes=2 * 96 * 64 * 3)
    pictures = asyncio.run(library.frames(clips[0], TIMES, **SMALL))
    assert [number_of(library.pixels(picture)) for picture in pictures] == [12, 25, 37, 50]
    assert len(decoded) > 4
    assert library._pixels.used <= 2 * 96 * 64 * 3
    nothing = Library(cache_bytes=0)
    picture = asyncio.run(nothing.frames(clips[1], [1.0], **SMALL))[0]
    assert number_of(nothing.pixels(picture)) == 25


def test_a_picture_of_another_library_has_the_same_pixels(clips):
    pictures = asyncio.run(Library().frames(clips[0], [index / 30 for index in range(40)], **SMALL))
    other = Library()
    assert [number_of(other.pixels(picture)) for picture in pictures] == [round(p.time * 25) for p in pictures]


def test_pixels_are_not_to_be_written_to(clips):
    library = Library()
    (picture,) = asyncio.run(library.frames(clips[0], [1.0], **SMALL))
    with pytest.raises(ValueError, match="read-only"):
        library.pixels(picture)[0] = 0


def test_a_changed_file_is_an_error(tmp_path):
    path = make(str(tmp_path / "clip.mp4"))
    library = Library(cache_bytes=0)
    (picture,) = asyncio.run(library.frames(path, [1.0], **SMALL))
    make(path, count=50)
    with pytest.raises(MediaError, match="has changed since"):
        library.pixels(picture)
    with pytest.raises(MediaError, match="has changed while"):
        asyncio.run(library.frames(path, [1.0], **SMALL))


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_reach_everyone_who_asked_and_are_not_kept(tmp_path, workers):
    library = Library(workers=workers)
    path = str(tmp_path / "late.mp4")

    async def ask():
        return await asyncio.gather(*(library.frames(path, [1.0], **SMALL) for _ in range(3)), return_exceptions=True)

    assert {str(error) for error in asyncio.run(ask())} == {str(error) for error in asyncio.run(ask())}
    assert all(isinstance(error, MediaError) for error in asyncio.run(ask()))
    make(path)
    assert [pictures[0].time for pictures in asyncio.run(ask())] == [1.0, 1.0, 1.0]
    with pytest.raises(MediaError, match="ends at"):
        asyncio.run(library.frames(path, [0.0, 99.0], **SMALL))
    assert not library._jobs


def test_who_stops_waiting_leaves_the_others_alone(clips, monkeypatch):
    gate, real = threading.Event(), cache.decode

    def slow(*args, **settings):
        gate.wait(5)
        return real(*args, **settings)

    monkeypatch.setattr(cache, "decode", slow)

    async def look():
        library = Library(workers=1)
        await library.probe(clips[0])
        first, second = (asyncio.create_task(library.frames(clips[0], TIMES, **SMALL)) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        gate.set()
        assert [picture.time for picture in await second] == [0.48, 1.0, 1.48, 2.0]

    asyncio.run(look())


@pytest.mark.slow
def test_the_event_loop_goes_on_while_64_clips_are_decoded(tmp_path, clips):
    paths = []
    for index in range(64):
        paths.append(str(tmp_path / f"{index}.mp4"))
        Path(paths[-1]).write_bytes(Path(clips[index % 4]).read_bytes() + bytes(8) + index.to_bytes(4, "big"))
    runs = []

    async def beat(lags):
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - start - 0.002)

    async def look():
        runs.append([])
        pulse = asyncio.create_task(beat(runs[-1]))
        library = Library(workers=2)
        every = [index / 25 for index in range(60)]
        found = await asyncio.gather(*(library.frames(path, every, **SMALL) for path in paths))
        pulse.cancel()
        return [[picture.time for picture in pictures] for pictures in found] == [every] * 64

    for _ in range(4):  # other programs may hold the processor, but not every time
        assert asyncio.run(look())
        assert len(runs[-1]) > 5
        if max(runs[-1]) < 0.05:
            break
    assert min(map(max, runs)) < 0.05, f"the loop stood still for {min(map(max, runs)) * 1000:.0f} ms"


def test_a_tiny_clip_takes_milliseconds(tmp_path):
    path = make(str(tmp_path / "tiny.mp4"), rate=4, count=256, draw=lambda i: np.full((64, 64, 3), i, np.uint8))
    times = [2.0 + 4 * index for index in range(16)]
    budget = Budget(min_pixels=256, max_pixels=4096)

    async def ask():
        library = Library()
        await library.probe(path)
        start = time.perf_counter()
        pictures = await library.frames(path, times, factor=16, budget=budget)
        middle = time.perf_counter()
        await library.frames(path, times, factor=16, budget=budget)
        assert [picture.time for picture in pictures] == times
        return middle - start, time.perf_counter() - middle

    fresh, held = (min(seconds) for seconds in zip(*(asyncio.run(ask()) for _ in range(5)), strict=True))
    assert fresh < 0.1
    assert held < 0.005


@pytest.mark.parametrize("workers", [0, 2])
def test_images(tmp_path, workers):
    path = str(tmp_path / "picture.png")
    Image.new("RGB", (100, 60), (1, 2, 3)).save(path)

    async def look():
        library = Library(workers=workers)
        settings = {"factor": 32, "budget": Budget(min_pixels=784, max_pixels=50176)}
        one, two = await asyncio.gather(library.image(path, **settings), library.image(path, **settings))
        assert one == two == await library.image(path, **settings)
        assert (one.time, one.width, one.height) == (None, 96, 64)
        assert (library.pixels(one) == (1, 2, 3)).all()
        assert (Library().pixels(one) == library.pixels(one)).all()
        with pytest.raises(MediaError, match="read as a picture"):
            await library.image(__file__, **settings)

    asyncio.run(look())


def test_the_least_recently_used_goes_first():
    recent = Lru(10)
    for key, cost in (("a", 4), ("b", 4), ("a", 5), ("c", 3)):
        recent.put(key, key.upper(), cost)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), recent.used) == ("A", None, "C", 8)
    recent.put("huge", "HUGE", 11)
    assert (recent.get("huge"), recent.get("a"), recent.used) == (None, "A", 8)
