"""The zoom tool: which pixels a box is, in which coordinates, and errors the model can read."""

import asyncio
import inspect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.media.cache import Library
from saccade.protocols import Budget
from saccade.rewards.box import box as box_reward
from saccade.tools._tool import ToolContext
from saccade.tools.zoom_image import zoom_image

WIDTH, HEIGHT = 200, 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A picture in which every pixel says where it is: red across, green down."""
    across, down = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    file = tmp_path_factory.mktemp("zoom") / "map.png"
    Image.fromarray(np.stack([across, down, across * 0], axis=-1).astype(np.uint8)).save(file)
    return str(file)


def zoom(arguments, renderer, *paths, library=None, **given):
    """The result, and the pixels it shows."""
    library = library or Library()

    async def ask(messages):
        raise AssertionError("no sub-agent is asked")

    async def body():
        prompt = {"factor": renderer.factor, "budget": Budget(min_pixels=256, max_pixels=1024)}
        images = tuple([await library.image(path, **prompt) for path in paths])
        ctx = ToolContext(media=library, renderer=renderer, ask=ask, path="", seed=0, images=images, settings=given)
        result, child = await zoom_image(arguments, ctx=ctx)
        assert child is None
        return result, [library.pixels(picture) for picture in result.pictures]

    return asyncio.run(body())


def sides(left, top, right, bottom, **more):
    return {"left": left, "top": top, "right": right, "bottom": bottom, **more}


def test_a_box_is_cut_from_the_file_and_enlarged(renderer, path):
    result, (pixels,) = zoom(sides(0.5, 0.2, 0.75, 0.7), renderer, path, pixels=(4096, 4096))
    assert (result.ok, result.text, result.error) == (True, "[0.5, 0.2, 0.75, 0.7]", None)
    (picture,) = result.pictures
    assert (picture.path, picture.time, picture.box) == (path, None, (100, 20, 150, 70))
    assert (picture.width, picture.height) == (64, 64)
    assert pixels.shape == (64, 64, 3)
    # the overview of this picture has 32 x 16 pixels: what is seen here was not in it
    assert pixels[0, 0].tolist() == pytest.approx([100, 20, 0], abs=1)
    assert pixels[-1, -1].tolist() == pytest.approx([149, 69, 0], abs=1)


@pytest.mark.parametrize(
    ("coordinates", "box"),
    [
        ("auto", (0.25, 0.5, 0.5, 1.0)),
        ("auto", (50, 50, 100, 100)),
        ("unit", (0.25, 0.5, 0.5, 1)),
        ("pixel", (50, 50, 100, 100)),
        ("percent", (25, 50, 50, 100)),
        ("thousand", (250, 500, 500, 1000)),
        ("shown", (8, 8, 16, 16)),  # shown as 32 x 16
    ],
)
def test_coordinates(renderer, path, coordinates, box):
    result, _ = zoom(sides(*box), renderer, path, coordinates=coordinates)
    assert result.pictures[0].box == (50, 50, 100, 100)
    assert result.text == f"[{', '.join(f'{side:g}' for side in box)}]"


def test_the_reward_for_boxes_speaks_of_the_same_coordinates():
    parameters = inspect.signature(box_reward).parameters
    mine = inspect.signature(zoom_image).parameters["coordinates"]
    assert mine.annotation == parameters["coordinates"].annotation


def test_sizes_keep_to_the_budget(renderer, path):
    small, _ = zoom(sides(0, 0, 1, 1), renderer, path, pixels=(256, 2048))
    assert (small.pictures[0].width, small.pictures[0].height) == (64, 32)
    large, _ = zoom(sides(0, 0, 0.1, 0.1), renderer, path, pixels=(4096, 8192))
    assert (large.pictures[0].width, large.pictures[0].height) == (96, 48)


@pytest.mark.parametrize(
    ("asked", "box", "text"),
    [
        ((-0.5, 0.2, 0.5, 0.7), (0, 20, 100, 70), "Cut where the image ends: [0, 0.2, 0.5, 0.7]"),
        ((0.5, 0.5, 1.5, 1.5), (100, 50, 200, 100), "Cut where the image ends: [0.5, 0.5, 1, 1]"),
        ((150, -3, 999, 99), (150, 0, 200, 99), "Cut where the image ends: [150, 0, 200, 99]"),
    ],
)
def test_what_leaves_the_picture_is_cut_and_said(renderer, path, asked, box, text):
    result, _ = zoom(sides(*asked), renderer, path)
    assert (result.pictures[0].box, result.text, result.ok) == (box, text, True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (sides(0.5, 0.2, 0.4, 0.7), "right 0.4 must be greater than left 0.5"),
        (sides(0.5, 0.2, 0.5, 0.7), "right 0.5 must be greater than left 0.5"),
        (sides(0.2, 0.7, 0.4, 0.2), "bottom 0.2 must be greater than top 0.7: it is counted from the top down"),
        (
            sides(300, 20, 400, 50),
            "the box [300, 20, 400, 50] lies outside the image, which ends at 200 across and 100 down",
        ),
        (
            sides(0.1, 1.0, 0.2, 1.4),
            "the box [0.1, 1, 0.2, 1.4] lies outside the image, which ends at 1 across and 1 down",
        ),
        (sides(-0.4, 0.1, -0.2, 0.2), "the box [-0.4, 0.1, -0.2, 0.2] lies outside the image, which ends at 1 across"),
        (sides(0, 0, 1, 1, image=1), "there is no image 1; there are 1, and the first one is 0"),
        (sides(0, 0, 1, 1, image=-1), "image must lie between 0 and inf"),
        ({"left": 0, "top": 0}, "zoom_image needs right and bottom"),
    ],
)
def test_impossible_boxes_are_errors_to_read(renderer, path, arguments, error):
    result, shown = zoom(arguments, renderer, path)
    assert error in result.error
    assert (result.executed, shown) == (False, [])


def test_a_strip_is_too_narrow_to_show(renderer, tmp_path):
    Image.new("RGB", (500, 100)).save(tmp_path / "wide.png")
    result, _ = zoom(sides(0, 0, 1, 0.02), renderer, str(tmp_path / "wide.png"))
    assert "a picture of 500x2 pixels is too narrow; crop it to an aspect ratio under 200" in result.error
    assert not result.executed


def test_without_a_picture_there_is_nothing_to_zoom_into(renderer):
    result, _ = zoom(sides(0, 0, 1, 1), renderer)
    assert result.error == "there is no image to zoom into, only what you were shown; answer from that"


def test_one_of_several_pictures(renderer, path, tmp_path):
    other = str(tmp_path / "blue.png")
    Image.new("RGB", (40, 40), (0, 0, 255)).save(other)
    result, (pixels,) = zoom(sides(0, 0, 1, 1, image=1), renderer, path, other)
    assert result.pictures[0].path == other
    assert pixels.reshape(-1, 3).min(axis=0).tolist() == [0, 0, 255]


def test_a_picture_lies_as_it_is_seen(renderer, tmp_path):
    """A camera's picture stored on its side: boxes are counted in the upright one."""
    upright = Image.new("RGB", (100, 200), "black")
    upright.paste("white", (0, 0, 100, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    result, (pixels,) = zoom(sides(0, 0, 1, 0.1), renderer, str(tmp_path / "side.png"))
    assert result.pictures[0].box == (0, 0, 100, 20)
    assert pixels.min() == 255


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_in_a_picture_shows_what_it_touches(renderer, path, data):
    """Shares and pixels name the same box; no pixel that is asked for is left out, and no other row or column comes."""
    left, top = data.draw(st.floats(0, 0.98)), data.draw(st.floats(0, 0.98))
    right, bottom = data.draw(st.floats(left + 0.01, 1)), data.draw(st.floats(top + 0.01, 1))
    result, _ = zoom(sides(left, top, right, bottom), renderer, path)
    first, upper, last, lower = result.pictures[0].box
    for share, low, pixels in ((left, first, WIDTH), (top, upper, HEIGHT)):
        assert low <= share * pixels + 1e-6
        assert low > share * pixels - 1 - 1e-6
    for share, high, pixels in ((right, last, WIDTH), (bottom, lower, HEIGHT)):
        assert share * pixels - 1e-6 <= high < share * pixels + 1
    again, _ = zoom(
        sides(left * WIDTH, top * HEIGHT, right * WIDTH, bottom * HEIGHT), renderer, path, coordinates="pixel"
    )
    assert again.pictures == result.pictures


def test_a_missing_file_is_an_error_to_read(renderer, path, tmp_path):
    gone = tmp_path / "gone.png"
    gone.write_bytes(Path(path).read_bytes())
    library = Library()
    result, _ = zoom(sides(0, 0, 0.5, 0.5), renderer, str(gone), library=library)
    assert result.ok
    gone.unlink()

    async def look():
        prompt = {"factor": renderer.factor, "budget": Budget(min_pixels=256, max_pixels=1024)}
        images = (await library.image(str(gone), **prompt),)  # held
        fresh = Library()
        ctx = ToolContext(media=fresh, renderer=renderer, ask=None, path="", seed=0, images=images)
        return (await zoom_image(sides(0, 0, 0.5, 0.5), ctx=ctx))[0]

    assert "gone.png can't be opened" in asyncio.run(look()).error
