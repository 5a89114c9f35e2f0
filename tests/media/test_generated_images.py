"""Generated images: resized, saved, readable by other loaders, and limited on disk."""

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade.errors import MediaError
from saccade.media import cache
from saccade.media.cache import CachingMediaLoader
from saccade.media.image import decode_image, encode_png
from saccade.protocols import PixelBudget

SIZE = {"factor": 32, "budget": PixelBudget(min_pixels=784, max_pixels=10**6)}


def noise(height=64, width=96, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(loader, pixels, **options):
    return asyncio.run(loader.save_image(pixels, **{**SIZE, **options}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_image_is_readable_by_another_loader(tmp_path, workers):
    loader = CachingMediaLoader(workers=workers, generated_dir=str(tmp_path / "generated"))
    image = save(loader, noise())
    assert (image.width, image.height, image.time, image.box) == (96, 64, None, None)
    assert np.array_equal(loader.load_pixels(image), noise())
    assert np.array_equal(CachingMediaLoader().load_pixels(image), noise())
    assert [path.name for path in (tmp_path / "generated").iterdir()] == [Path(image.path).name]


def test_equal_images_share_one_file(tmp_path):
    loader = CachingMediaLoader(generated_dir=str(tmp_path))
    assert save(loader, noise()) == save(loader, noise())
    assert save(loader, noise()) != save(loader, noise(seed=1))
    assert len(list(tmp_path.iterdir())) == 2


def test_saved_images_are_resized_like_frames(tmp_path):
    image = save(
        CachingMediaLoader(generated_dir=str(tmp_path)),
        noise(500, 1000),
        budget=PixelBudget(min_pixels=784, max_pixels=50176),
    )
    assert image.width * image.height <= 50176
    assert image.width % 32 == image.height % 32 == 0
    assert CachingMediaLoader().load_pixels(image).shape == (image.height, image.width, 3)


def test_without_a_folder_images_are_saved_in_a_temporary_one():
    assert np.array_equal(CachingMediaLoader().load_pixels(save(CachingMediaLoader(), noise())), noise())


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 1, 3), (7, 9, 3), (6, 4), (6, 4, 4)])
def test_a_png_has_the_pixels_as_rgb(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    if shape[2:] == (4,):
        pixels[..., 3] = 255
    content = encode_png(pixels[::-1])  # not contiguous
    with Image.open(io.BytesIO(content)) as file:
        file.verify()
    assert np.array_equal(decode_image(content), np.asarray(Image.fromarray(pixels[::-1]).convert("RGB")))


def test_an_unwritable_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(MediaError) as caught:
        save(CachingMediaLoader(generated_dir=str(tmp_path / "file")), noise())
    assert Path(caught.value.key).parent == tmp_path / "file"


def test_the_oldest_files_are_deleted_first(tmp_path, monkeypatch):
    size = len(encode_png(noise()))
    monkeypatch.setattr(cache, "MAX_GENERATED_BYTES", int(2.5 * size))
    loader = CachingMediaLoader(generated_dir=str(tmp_path))
    first, second = save(loader, noise(seed=0)), save(loader, noise(seed=1))
    assert save(loader, noise(seed=0)) == first  # the second is the oldest now
    third = save(loader, noise(seed=2))
    assert {str(path) for path in tmp_path.iterdir()} == {first.path, third.path}
    assert second.path not in (first.path, third.path)
