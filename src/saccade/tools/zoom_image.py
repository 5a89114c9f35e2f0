"""The tool zoom_image: crops a box out of an image file at full resolution and shows it enlarged."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from saccade.config.schema import IntRange
from saccade.errors import ToolError
from saccade.ledger import ImageRef
from saccade.protocols import PixelBudget
from saccade.tools.base import Range, ToolContext, tool
from saccade.types import ToolResult

Coordinates = Literal["auto", "pixel", "shown", "unit", "percent", "thousand"]

_COORDINATE_MAX = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}  # of the right and bottom sides


@tool
async def zoom_image(
    left: Annotated[float, "left side of the box, as a part of the image's width (0 to 1) or in pixels"],
    top: Annotated[float, "top side of the box, as a part of the image's height (0 to 1) or in pixels"],
    right: Annotated[float, "right side of the box"],
    bottom: Annotated[float, "bottom side of the box"],
    image: Annotated[int, "which image; the first one is 0", Range(minimum=0)] = 0,
    *,
    ctx: ToolContext,
    image_pixels: IntRange = (50176, 1003520),  # minimum and maximum pixels of the crop as shown
    coordinates: Coordinates = "auto",  # unit in which the model writes boxes
) -> ToolResult:
    """Look closely at a box of an image.

    The box is clipped to the image, cropped from the file rather than from the shown version, and scaled to within
    `image_pixels`. The result's text is the box as it is shown. `coordinates` is the model's unit, as in the reward
    `box`: `pixel` of the file, pixels of the image as it was first `shown`, parts of 1 (`unit`), 100 (`percent`) or
    1000 (`thousand`). `auto`, which the argument descriptions explain, means unit if every side is less than 2, else
    pixel: a box of two pixels would show nothing.
    """
    if not ctx.task_images:
        raise ToolError("there is no image to zoom into, only what you were shown; answer from that")
    if image >= len(ctx.task_images):
        raise ToolError(f"there is no image {image}; there are {len(ctx.task_images)}, and the first one is 0")
    if right <= left:
        raise ToolError(f"right {right:g} must be greater than left {left:g}")
    if bottom <= top:
        raise ToolError(f"bottom {bottom:g} must be greater than top {top:g}: it is counted from the top down")
    source, size = ctx.task_images[image], await ctx.media.get_image_size(ctx.task_images[image].path)
    box = left, top, right, bottom
    extent = _compute_image_extent(box, coordinates, size, source)
    clipped = max(left, 0.0), max(top, 0.0), min(right, extent[0]), min(bottom, extent[1])
    if clipped[2] <= clipped[0] or clipped[3] <= clipped[1]:
        end = f"which ends at {extent[0]:g} across and {extent[1]:g} down"
        raise ToolError(f"the box {_format_box(box)} lies outside the image, {end}")
    (x_start, x_end), (y_start, y_end) = (
        _compute_pixel_span(clipped[i] / extent[i], clipped[i + 2] / extent[i], size[i]) for i in (0, 1)
    )
    budget = PixelBudget(*image_pixels)
    crop = await ctx.media.load_image(
        source.path, factor=ctx.renderer.factor, budget=budget, box=(x_start, y_start, x_end, y_end)
    )
    # The text identifies the crop among the results of several calls.
    note = "" if clipped == box else "Cut where the image ends: "
    return ToolResult(text=f"{note}{_format_box(clipped)}", images=(crop,))


def _compute_image_extent(
    box: Sequence[float], coordinates: str, size: tuple[int, int], shown: ImageRef
) -> tuple[float, float]:
    """Return the (right, bottom) sides of the whole image in the model's coordinates; `size` is (width, height)."""
    if coordinates == "auto":
        coordinates = "unit" if all(abs(side) < 2 for side in box) else "pixel"
    if coordinates in _COORDINATE_MAX:
        return _COORDINATE_MAX[coordinates], _COORDINATE_MAX[coordinates]
    return size if coordinates == "pixel" else (shown.width, shown.height)


def _compute_pixel_span(start: float, end: float, pixels: int) -> tuple[int, int]:
    """Return (first, end) of the pixels that an interval of fractions of a side touches, at least one."""
    first = min(math.floor(start * pixels + 1e-6), pixels - 1)
    return first, max(math.ceil(end * pixels - 1e-6), first + 1)


def _format_box(box: Sequence[float]) -> str:
    return "[" + ", ".join(f"{side:g}" for side in box) + "]"
