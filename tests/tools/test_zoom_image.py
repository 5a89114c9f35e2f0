"""The tool zoom_image: the pixels of a box in every coordinate system, and errors for the model."""

import asyncio
import inspect
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.media.cache import CachingMediaLoader
from saccade.protocols import PixelBudget
from saccade.rewards.answer_types.box import BoxAnswer
from saccade.tools.base import ToolContext
from saccade.tools.zoom_image import zoom_image

WIDTH, HEIGHT = 200, 100


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The path of an image whose pixels encode their position: red is x, green is y."""
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    file = tmp_path_factory.mktemp("zoom") / "map.png"
    Image.fromarray(np.stack([x, y, x * 0], axis=-1).astype(np.uint8)).save(file)
    return str(file)


def zoom(arguments, renderer, *paths, loader=None, **settings):
    """Call the tool; return its result, and the pixels of the images it shows."""
    loader = loader or CachingMediaLoader()

    async def ask(messages):
        raise AssertionError("the tool runs no sub-agent")

    async def body():
        prompt = {"factor": renderer.factor, "budget": PixelBudget(min_pixels=256, max_pixels=1024)}
        images = tuple([await loader.load_image(path, **prompt) for path in paths])
        ctx = ToolContext(
            media=loader, renderer=renderer, ask=ask, video_path="", seed=0, task_images=images, settings=settings
        )
        result, child = await zoom_image(arguments, ctx=ctx)
        assert child is None
        return result, [loader.load_pixels(image) for image in result.images]

    return asyncio.run(body())


def make_box(left, top, right, bottom, **more):
    return {"left": left, "top": top, "right": right, "bottom": bottom, **more}


def test_a_box_is_cropped_from_the_file_and_enlarged(renderer, path):
    result, (pixels,) = zoom(make_box(0.5, 0.2, 0.75, 0.7), renderer, path, image_pixels=(4096, 4096))
    assert (result.ok, result.text, result.error) == (True, "[0.5, 0.2, 0.75, 0.7]", None)
    (image,) = result.images
    assert (image.path, image.time, image.box) == (path, None, (100, 20, 150, 70))
    assert (image.width, image.height) == (64, 64)
    assert pixels.shape == (64, 64, 3)
    # The shown image has only 32 x 16 pixels, so these pixels come from the file.
    assert pixels[0, 0].tolist() == pytest.approx([100, 20, 0], abs=1)
    assert pixels[-1, -1].tolist() == pytest.approx([149, 69, 0], abs=1)


def test_an_error_names_the_image_and_not_its_path(renderer, path, tmp_path):
    """The folder of an image may be its label."""
    strip = tmp_path / "cat.png"
    Image.new("RGB", (3000, 20)).save(strip)
    result, _ = zoom(make_box(0.0, 0.0, 1.0, 0.01, image=1), renderer, path, str(strip))
    assert "image 1" in result.error
    assert "cat" not in result.error
    assert str(tmp_path) not in result.error


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
    result, _ = zoom(make_box(*box), renderer, path, coordinates=coordinates)
    assert result.images[0].box == (50, 50, 100, 100)
    assert result.text == f"[{', '.join(f'{side:g}' for side in box)}]"


def test_the_box_reward_has_the_same_coordinates():
    parameters = inspect.signature(BoxAnswer).parameters
    mine = inspect.signature(zoom_image).parameters["coordinates"]
    assert mine.annotation == parameters["coordinates"].annotation


def test_sizes_fit_the_budget(renderer, path):
    small, _ = zoom(make_box(0, 0, 1, 1), renderer, path, image_pixels=(256, 2048))
    assert (small.images[0].width, small.images[0].height) == (64, 32)
    large, _ = zoom(make_box(0, 0, 0.1, 0.1), renderer, path, image_pixels=(4096, 8192))
    assert (large.images[0].width, large.images[0].height) == (96, 48)


@pytest.mark.parametrize(
    ("asked", "box", "text"),
    [
        ((-0.5, 0.2, 0.5, 0.7), (0, 20, 100, 70), "Cut where the image ends: [0, 0.2, 0.5, 0.7]"),
        ((0.5, 0.5, 1.5, 1.5), (100, 50, 200, 100), "Cut where the image ends: [0.5, 0.5, 1, 1]"),
        ((150, -3, 999, 99), (150, 0, 200, 99), "Cut where the image ends: [150, 0, 200, 99]"),
    ],
)
def test_boxes_are_clipped_and_the_result_reports_it(renderer, path, asked, box, text):
    result, _ = zoom(make_box(*asked), renderer, path)
    assert (result.images[0].box, result.text, result.ok) == (box, text, True)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (make_box(0.5, 0.2, 0.4, 0.7), ("right 0.4", "left 0.5")),
        (make_box(0.5, 0.2, 0.5, 0.7), ("right 0.5", "left 0.5")),
        (make_box(0.2, 0.7, 0.4, 0.2), ("bottom 0.2", "top 0.7")),
        (make_box(300, 20, 400, 50), ("[300, 20, 400, 50]", "200", "100")),
        (make_box(0.1, 1.0, 0.2, 1.4), ("[0.1, 1, 0.2, 1.4]",)),
        (make_box(-0.4, 0.1, -0.2, 0.2), ("[-0.4, 0.1, -0.2, 0.2]",)),
        (make_box(0, 0, 1, 1, image=1), ("image 1", "0")),
        (make_box(0, 0, 1, 1, image=-1), ("image", "0", "inf")),
        ({"left": 0, "top": 0}, ("zoom_image", "right", "bottom")),
    ],
)
def test_impossible_boxes_are_readable_errors(renderer, path, arguments, values):
    result, shown = zoom(arguments, renderer, path)
    assert all(value in result.error for value in values)
    assert (result.was_executed, shown) == (False, [])


def test_a_strip_is_too_narrow_to_show(renderer, tmp_path):
    Image.new("RGB", (500, 100)).save(tmp_path / "wide.png")
    result, _ = zoom(make_box(0, 0, 1, 0.02), renderer, str(tmp_path / "wide.png"))
    assert "500x2" in result.error
    assert not result.was_executed


def test_a_task_without_images_is_a_readable_error(renderer):
    result, _ = zoom(make_box(0, 0, 1, 1), renderer)
    assert result.error


def test_one_of_several_images(renderer, path, tmp_path):
    other = str(tmp_path / "blue.png")
    Image.new("RGB", (40, 40), (0, 0, 255)).save(other)
    result, (pixels,) = zoom(make_box(0, 0, 1, 1, image=1), renderer, path, other)
    assert result.images[0].path == other
    assert pixels.reshape(-1, 3).min(axis=0).tolist() == [0, 0, 255]


def test_exif_rotation_is_applied(renderer, tmp_path):
    """Boxes refer to the upright image, for a photo with an EXIF rotation."""
    upright = Image.new("RGB", (100, 200), "black")
    upright.paste("white", (0, 0, 100, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    result, (pixels,) = zoom(make_box(0, 0, 1, 0.1), renderer, str(tmp_path / "side.png"))
    assert result.images[0].box == (0, 0, 100, 20)
    assert pixels.min() == 255


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_shows_the_pixels_it_touches(renderer, path, data):
    """Fractions and pixels select the same box: every requested pixel, and no further row or column."""
    left, top = data.draw(st.floats(0, 0.98)), data.draw(st.floats(0, 0.98))
    right, bottom = data.draw(st.floats(left + 0.01, 1)), data.draw(st.floats(top + 0.01, 1))
    result, _ = zoom(make_box(left, top, right, bottom), renderer, path)
    first, upper, last, lower = result.images[0].box
    for fraction, low, pixels in ((left, first, WIDTH), (top, upper, HEIGHT)):
        assert low <= fraction * pixels + 1e-6
        assert low > fraction * pixels - 1 - 1e-6
    for fraction, high, pixels in ((right, last, WIDTH), (bottom, lower, HEIGHT)):
        assert fraction * pixels - 1e-6 <= high < fraction * pixels + 1
    again, _ = zoom(
        make_box(left * WIDTH, top * HEIGHT, right * WIDTH, bottom * HEIGHT), renderer, path, coordinates="pixel"
    )
    assert again.images == result.images


def test_a_missing_file_is_a_readable_error(renderer, path, tmp_path):
    deleted = tmp_path / "gone.png"
    deleted.write_bytes(Path(path).read_bytes())
    loader = CachingMediaLoader()
    result, _ = zoom(make_box(0, 0, 0.5, 0.5), renderer, str(deleted), loader=loader)
    assert result.ok
    deleted.unlink()

    async def zoom_deleted():
        prompt = {"factor": renderer.factor, "budget": PixelBudget(min_pixels=256, max_pixels=1024)}
        images = (await loader.load_image(str(deleted), **prompt),)  # cached
        empty_loader = CachingMediaLoader()
        ctx = ToolContext(media=empty_loader, renderer=renderer, ask=None, video_path="", seed=0, task_images=images)
        return (await zoom_image(make_box(0, 0, 0.5, 0.5), ctx=ctx))[0]

    assert "image 0 can't be opened" in asyncio.run(zoom_deleted()).error
