"""Boxes of still pictures: their identity, their pixels, and one decoding for many of them."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from saccade.data.record import read_jsonl, write_jsonl
from saccade.errors import MediaError
from saccade.ledger import Picture
from saccade.media import cache
from saccade.media.cache import Library
from saccade.protocols import Budget

SHOWN = {"factor": 16, "budget": Budget(min_pixels=1024, max_pixels=4096)}


@pytest.fixture
def noise(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png"), pixels


@pytest.fixture
def opened(monkeypatch):
    seen = []
    real = cache.read

    def counting(path):
        seen.append(path)
        return real(path)

    monkeypatch.setattr(cache, "read", counting)
    return seen


@pytest.mark.parametrize("workers", [0, 3])
def test_many_boxes_of_a_picture_decode_it_once(noise, opened, workers):
    path, pixels = noise
    library = Library(workers=workers)
    boxes = [(x, y, x + 32, y + 32) for x in (0, 64, 128) for y in (0, 64)]

    async def look():
        assert await library.size(path) == (160, 120)
        return await asyncio.gather(*(library.image(path, box=box, **SHOWN) for box in [*boxes, *boxes]))

    pictures = asyncio.run(look())
    assert pictures[:6] == pictures[6:]
    assert opened == [path]
    for picture, (left, top, right, bottom) in zip(pictures, boxes, strict=False):
        assert (picture.width, picture.height, picture.box) == (32, 32, (left, top, right, bottom))
        assert np.array_equal(library.pixels(picture), pixels[top:bottom, left:right])


def test_a_box_that_is_no_longer_held_is_cut_again(noise):
    path, _ = noise
    library = Library()
    picture = asyncio.run(library.image(path, box=(10, 20, 100, 110), **SHOWN))
    shown = library.pixels(picture).copy()
    assert np.array_equal(Library().pixels(picture), shown)
    assert np.array_equal(Library(cache_bytes=1).pixels(picture), shown)
    # too small a cache for the whole picture: slower, and the same
    other = asyncio.run(Library(cache_bytes=1).image(path, box=(10, 20, 100, 110), **SHOWN))
    assert other == picture
    Image.new("RGB", (160, 120)).save(path)
    with pytest.raises(MediaError, match="has changed"):
        Library().pixels(picture)


def test_a_box_and_its_picture_are_not_the_same_pixels(noise, tmp_path):
    path, _ = noise
    library = Library()
    whole = asyncio.run(library.image(path, **SHOWN))
    part = asyncio.run(library.image(path, box=(0, 0, 80, 60), **SHOWN))
    assert whole.box is None
    assert whole.key != part.key
    assert whole.key == f"{whole.digest}@None:64x48"  # as before there were boxes
    assert part.key == f"{whole.digest}@None[0, 0, 80, 60]:{part.width}x{part.height}"
    write_jsonl(tmp_path / "pictures.jsonl", [whole, part])
    assert read_jsonl(tmp_path / "pictures.jsonl", Picture) == [whole, part]


@pytest.mark.parametrize(
    "box", [(0, 0, 161, 10), (-1, 0, 10, 10), (5, 5, 5, 9), (9, 9, 5, 20), (0, 0, 10, 121), (0, 60, 10, 50)]
)
def test_a_box_must_lie_in_the_picture(noise, box):
    with pytest.raises(MediaError, match="is no part of its 160x120 pixels"):
        asyncio.run(Library().image(noise[0], box=box, **SHOWN))


def test_no_picture_has_no_size(tmp_path):
    (tmp_path / "notes.png").write_text("hello")
    with pytest.raises(MediaError, match="can't be read as a picture"):
        asyncio.run(Library().size(str(tmp_path / "notes.png")))
