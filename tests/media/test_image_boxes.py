"""Boxes of still images: identity, pixels, and one decoding for many boxes."""

import asyncio

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade.errors import MediaError
from saccade.ledger import ImageRef
from saccade.media import cache
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import PixelBudget
from saccade.utils.jsonl import read_jsonl, write_jsonl

SIZE = {"factor": 16, "budget": PixelBudget(min_pixels=1024, max_pixels=4096)}


@pytest.fixture
def noise(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png"), pixels


@pytest.fixture
def read_paths(monkeypatch):
    paths = []
    real = cache.read_image

    def record_path(path):
        paths.append(path)
        return real(path)

    monkeypatch.setattr(cache, "read_image", record_path)
    return paths


@pytest.mark.parametrize("workers", [0, 3])
def test_many_boxes_of_an_image_decode_it_once(noise, read_paths, workers):
    path, pixels = noise
    loader = CachingMediaLoader(workers=workers)
    boxes = [(x, y, x + 32, y + 32) for x in (0, 64, 128) for y in (0, 64)]

    async def load():
        assert await loader.get_image_size(path) == (160, 120)
        return await asyncio.gather(*(loader.load_image(path, box=box, **SIZE) for box in [*boxes, *boxes]))

    images = asyncio.run(load())
    assert images[:6] == images[6:]
    assert read_paths == [path]
    for image, (left, top, right, bottom) in zip(images, boxes, strict=False):
        assert (image.width, image.height, image.box) == (32, 32, (left, top, right, bottom))
        assert np.array_equal(loader.load_pixels(image), pixels[top:bottom, left:right])


def test_a_box_that_is_not_cached_is_decoded_again(noise):
    path, _ = noise
    loader = CachingMediaLoader()
    image = asyncio.run(loader.load_image(path, box=(10, 20, 100, 110), **SIZE))
    expected = loader.load_pixels(image).copy()
    assert np.array_equal(CachingMediaLoader().load_pixels(image), expected)
    assert np.array_equal(CachingMediaLoader(memory_bytes=1).load_pixels(image), expected)
    # a cache too small for the full image gives the same result
    other = asyncio.run(CachingMediaLoader(memory_bytes=1).load_image(path, box=(10, 20, 100, 110), **SIZE))
    assert other == image
    Image.new("RGB", (160, 120)).save(path)
    with raises(MediaError, key=path):
        CachingMediaLoader().load_pixels(image)


def test_a_box_and_its_image_have_different_keys(noise, tmp_path):
    path, _ = noise
    loader = CachingMediaLoader()
    whole = asyncio.run(loader.load_image(path, **SIZE))
    part = asyncio.run(loader.load_image(path, box=(0, 0, 80, 60), **SIZE))
    assert whole.box is None
    assert whole.key != part.key
    assert whole.key == f"{whole.digest}@None:64x48"  # frozen: cached results depend on it
    assert part.key == f"{whole.digest}@None[0, 0, 80, 60]:{part.width}x{part.height}"
    write_jsonl(tmp_path / "images.jsonl", [whole, part])
    assert read_jsonl(tmp_path / "images.jsonl", ImageRef) == [whole, part]


@pytest.mark.parametrize(
    "box", [(0, 0, 161, 10), (-1, 0, 10, 10), (5, 5, 5, 9), (9, 9, 5, 20), (0, 0, 10, 121), (0, 60, 10, 50)]
)
def test_a_box_outside_the_image_raises(noise, box):
    with raises(MediaError, key="box", value=box):
        asyncio.run(CachingMediaLoader().load_image(noise[0], box=box, **SIZE))


def test_the_size_of_a_text_file_raises(tmp_path):
    (tmp_path / "notes.png").write_text("hello")
    with raises(MediaError, key=str(tmp_path / "notes.png")):
        asyncio.run(CachingMediaLoader().get_image_size(str(tmp_path / "notes.png")))
