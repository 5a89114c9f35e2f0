import warnings

import numpy as np
import pytest
from error_cases import raises
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from saccade.errors import MediaError
from saccade.media.image import fit_size, read_image, read_image_size, resize_image
from saccade.protocols import PixelBudget

SIDE = st.integers(1, 5000)


@given(SIDE, SIDE, st.sampled_from([16, 28, 32]), st.integers(1, 200_000), st.integers(0, 2_000_000))
@example(10, 2000, 28, 56 * 56, 0)
@example(1, 200, 32, 784, 50176)
@example(64, 64, 32, 784, 50176)
def test_sizes_equal_the_published_processor(width, height, factor, min_pixels, extra):
    budget = PixelBudget(min_pixels=min_pixels, max_pixels=min_pixels + extra)
    try:
        expected = smart_resize(height, width, factor, budget.min_pixels, budget.max_pixels)
    except ValueError:
        with raises(MediaError, key="size", value=(width, height)):
            fit_size(width, height, factor, budget)
    else:
        assert fit_size(width, height, factor, budget) == (expected[1], expected[0])


def test_no_side_becomes_zero():
    assert fit_size(1, 20, 32, PixelBudget(min_pixels=0, max_pixels=50176)) == (32, 32)
    with raises(MediaError, key="size", value=(0, 20)):
        fit_size(0, 20, 32, PixelBudget(min_pixels=0, max_pixels=50176))


def test_errors_name_the_path_once(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    for name in ("a.png", "b.png"):
        path = str(tmp_path / name)
        with raises(MediaError, key=path) as caught:
            read_image(path)
        assert str(caught.value).count(path) == 1


def save_and_read_pixel(path, image, **settings):
    image.save(path, **settings)
    return np.asarray(read_image(str(path)))[1, 1].tolist()


def test_every_mode_becomes_rgb(tmp_path):
    assert save_and_read_pixel(tmp_path / "rgb.png", Image.new("RGB", (4, 4), (9, 8, 7))) == [9, 8, 7]
    assert save_and_read_pixel(tmp_path / "grey.png", Image.new("L", (4, 4), 77)) == [77, 77, 77]
    assert save_and_read_pixel(tmp_path / "bit.png", Image.new("1", (4, 4), 1)) == [255, 255, 255]
    assert save_and_read_pixel(tmp_path / "deep.png", Image.fromarray(np.full((4, 4), 0x8001, np.uint16))) == [
        128,
        128,
        128,
    ]
    assert save_and_read_pixel(tmp_path / "cmyk.tif", Image.new("CMYK", (4, 4), (0, 0, 0, 0))) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([1, 2, 3])
    assert save_and_read_pixel(tmp_path / "palette.png", palette) == [1, 2, 3]


def test_transparency_becomes_white(tmp_path):
    assert save_and_read_pixel(tmp_path / "clear.png", Image.new("RGBA", (4, 4), (255, 0, 0, 0))) == [255, 255, 255]
    assert save_and_read_pixel(tmp_path / "half.png", Image.new("RGBA", (4, 4), (0, 0, 0, 128))) == [127, 127, 127]
    assert save_and_read_pixel(tmp_path / "grey.png", Image.new("LA", (4, 4), (0, 0))) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([1, 2, 3])
    assert save_and_read_pixel(tmp_path / "palette.png", palette, transparency=0) == [255, 255, 255]


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (8, 4), "black")
    image.paste("white", (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    upright = np.asarray(read_image(str(tmp_path / "turned.png")))
    assert upright.shape == (8, 4, 3)
    assert upright[0, 0, 0] == 255
    assert upright[-1, 0, 0] == 0


def test_unreadable_files_raise(tmp_path, monkeypatch):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:700])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    for name in ("cut", "text", "empty", "missing"):
        with raises(MediaError, key=f"{tmp_path}/{name}.png"):
            read_image(f"{tmp_path}/{name}.png")
    monkeypatch.setattr("saccade.media.image.MAX_PIXELS", 1000)
    with raises(MediaError, key=f"{tmp_path}/whole.png", value=(64, 64)):
        read_image(f"{tmp_path}/whole.png")


def test_no_other_decoder_opens_a_file_whatever_its_name(tmp_path, monkeypatch):
    """Pillow's decoder of EPS starts Ghostscript."""
    (tmp_path / "photo.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    Image.init()
    monkeypatch.setitem(Image.OPEN, "EPS", (lambda *_: pytest.fail("the decoder of EPS was called"), lambda _: True))
    for read in (read_image, read_image_size):
        with raises(MediaError, key=f"{tmp_path}/photo.jpg"):
            read(f"{tmp_path}/photo.jpg")


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_common_formats_are_read_whatever_their_name(tmp_path, name):
    Image.new("RGB", (8, 4), (200, 30, 30)).save(tmp_path / "image.dat", format=name)
    assert read_image_size(str(tmp_path / "image.dat")) == (8, 4)
    assert read_image(str(tmp_path / "image.dat")).size == (8, 4)


@pytest.mark.slow
def test_a_decompression_bomb_raises(tmp_path):
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with raises(MediaError, key=f"{tmp_path}/bomb.png"):
            read_image(f"{tmp_path}/bomb.png")


def test_resized_images_are_uint8_rgb():
    image = Image.new("RGB", (100, 50), (10, 20, 30))
    pixels = resize_image(image, 64, 32)
    assert (pixels.shape, pixels.dtype) == ((32, 64, 3), np.uint8)
    assert (pixels == (10, 20, 30)).all()
