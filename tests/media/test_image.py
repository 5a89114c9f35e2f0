import warnings

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from saccade.errors import MediaError
from saccade.media.image import fit, read, resized
from saccade.protocols import Budget

SIDE = st.integers(1, 5000)


@given(SIDE, SIDE, st.sampled_from([16, 28, 32]), st.integers(1, 200_000), st.integers(0, 2_000_000))
@example(10, 2000, 28, 56 * 56, 0)
@example(1, 200, 32, 784, 50176)
@example(64, 64, 32, 784, 50176)
def test_sizes_are_those_of_the_published_processor(width, height, factor, least, more):
    budget = Budget(min_pixels=least, max_pixels=least + more)
    try:
        expected = smart_resize(height, width, factor, budget.min_pixels, budget.max_pixels)
    except ValueError:
        with pytest.raises(MediaError, match="too narrow"):
            fit(width, height, factor, budget)
    else:
        assert fit(width, height, factor, budget) == (expected[1], expected[0])


def test_no_side_becomes_nothing():
    assert fit(1, 20, 32, Budget(min_pixels=0, max_pixels=50176)) == (32, 32)
    with pytest.raises(MediaError, match="too narrow"):
        fit(0, 20, 32, Budget(min_pixels=0, max_pixels=50176))


def test_what_is_no_picture_is_told_with_its_path_named_once(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(MediaError, match="those of no picture") as found:
        read(str(tmp_path / "a.png"))
    with pytest.raises(MediaError, match="no such file") as missing:
        read(str(tmp_path / "b.png"))
    assert [str(each.value).count(str(tmp_path)) for each in (found, missing)] == [1, 1]


def pixel(path, picture, **settings):
    picture.save(path, **settings)
    return np.asarray(read(str(path)))[1, 1].tolist()


def test_every_mode_becomes_rgb(tmp_path):
    assert pixel(tmp_path / "rgb.png", Image.new("RGB", (4, 4), (9, 8, 7))) == [9, 8, 7]
    assert pixel(tmp_path / "grey.png", Image.new("L", (4, 4), 77)) == [77, 77, 77]
    assert pixel(tmp_path / "bit.png", Image.new("1", (4, 4), 1)) == [255, 255, 255]
    assert pixel(tmp_path / "deep.png", Image.fromarray(np.full((4, 4), 0x8001, np.uint16))) == [128, 128, 128]
    assert pixel(tmp_path / "cmyk.tif", Image.new("CMYK", (4, 4), (0, 0, 0, 0))) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([1, 2, 3])
    assert pixel(tmp_path / "palette.png", palette) == [1, 2, 3]


def test_what_is_transparent_is_white(tmp_path):
    assert pixel(tmp_path / "clear.png", Image.new("RGBA", (4, 4), (255, 0, 0, 0))) == [255, 255, 255]
    assert pixel(tmp_path / "half.png", Image.new("RGBA", (4, 4), (0, 0, 0, 128))) == [127, 127, 127]
    assert pixel(tmp_path / "grey.png", Image.new("LA", (4, 4), (0, 0))) == [255, 255, 255]
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([1, 2, 3])
    assert pixel(tmp_path / "palette.png", palette, transparency=0) == [255, 255, 255]


def test_a_camera_held_sideways_is_set_upright(tmp_path):
    picture = Image.new("RGB", (8, 4), "black")
    picture.paste("white", (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    picture.save(tmp_path / "turned.png", exif=exif)
    upright = np.asarray(read(str(tmp_path / "turned.png")))
    assert upright.shape == (8, 4, 3)
    assert upright[0, 0, 0] == 255
    assert upright[-1, 0, 0] == 0


def test_files_that_are_no_pictures(tmp_path, monkeypatch):
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:700])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    for name, reason in {
        "cut": "save it as PNG",
        "text": "save it as PNG",
        "empty": "empty",
        "missing": "path",
    }.items():
        with pytest.raises(MediaError, match=reason) as caught:
            read(f"{tmp_path}/{name}.png")
        assert f"{name}.png" in str(caught.value)
    monkeypatch.setattr("saccade.media.image.MOST_PIXELS", 1000)
    with pytest.raises(MediaError, match="64x64 pixels; scale it down"):
        read(f"{tmp_path}/whole.png")


@pytest.mark.slow
def test_a_decompression_bomb_is_not_unpacked(tmp_path):
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MediaError, match=r"bomb\.png"):
            read(f"{tmp_path}/bomb.png")


def test_resized_gives_what_models_are_fed():
    picture = Image.new("RGB", (100, 50), (10, 20, 30))
    pixels = resized(picture, 64, 32)
    assert (pixels.shape, pixels.dtype) == ((32, 64, 3), np.uint8)
    assert (pixels == (10, 20, 30)).all()
