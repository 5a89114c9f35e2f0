"""Look again at a part of a still picture: cut out of the file at its own resolution, and shown larger."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from saccade.errors import ToolError
from saccade.ledger import Picture
from saccade.protocols import Budget
from saccade.sections import Span
from saccade.tools._tool import Between, ToolContext, tool
from saccade.types import ToolResult

Coordinates = Literal["auto", "pixel", "shown", "unit", "percent", "thousand"]

_WHOLE = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}  # what the far side is called


@tool
async def zoom_image(
    left: Annotated[float, "left side of the box, as a part of the image's width (0 to 1) or in pixels"],
    top: Annotated[float, "top side of the box, as a part of the image's height (0 to 1) or in pixels"],
    right: Annotated[float, "right side of the box"],
    bottom: Annotated[float, "bottom side of the box"],
    image: Annotated[int, "which image; the first one is 0", Between(least=0)] = 0,
    *,
    ctx: ToolContext,
    pixels: Span = (50176, 1003520),
    coordinates: Coordinates = "auto",
) -> ToolResult:
    """Look closely at a box of an image.

    The box is cut out of the file, not out of what was shown of it, and scaled to at least and at most `pixels`;
    one that leaves the picture at a side is cut there. The result's text is the box as it is shown. `coordinates`
    says what the model writes, as in the reward `box`: `pixel` of the file, pixels of the picture as it was first
    `shown`, parts of 1 (`unit`), 100 (`percent`) or 1000 (`thousand`); `auto`, which the arguments' descriptions speak
    of, is unit where no side reaches 2, else pixel: a box of two pixels would show nothing.
    """
    if not ctx.images:
        raise ToolError("there is no image to zoom into, only what you were shown; answer from that")
    if image >= len(ctx.images):
        raise ToolError(f"there is no image {image}; there are {len(ctx.images)}, and the first one is 0")
    if right <= left:
        raise ToolError(f"right {right:g} must be greater than left {left:g}")
    if bottom <= top:
        raise ToolError(f"bottom {bottom:g} must be greater than top {top:g}: it is counted from the top down")
    whole, size = ctx.images[image], await ctx.media.size(ctx.images[image].path)
    ends = _ends((left, top, right, bottom), coordinates, size, whole)
    cut = max(left, 0.0), max(top, 0.0), min(right, ends[0]), min(bottom, ends[1])
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        asked = f"the box {_listed((left, top, right, bottom))}"
        raise ToolError(f"{asked} lies outside the image, which ends at {ends[0]:g} across and {ends[1]:g} down")
    (first, last), (upper, lower) = (_touched(cut[i] / ends[i], cut[i + 2] / ends[i], size[i]) for i in (0, 1))
    box = first, upper, last, lower
    budget = Budget(min_pixels=pixels[0], max_pixels=pixels[1])
    picture = await ctx.media.image(whole.path, factor=ctx.renderer.factor, budget=budget, box=box)
    # The box stands before its picture: of several results each says which one it is.
    said = "" if cut == (left, top, right, bottom) else "Cut where the image ends: "
    return ToolResult(text=f"{said}{_listed(cut)}", pictures=(picture,), executed=True)


def _ends(box: Sequence[float], coordinates: str, size: tuple[int, int], shown: Picture) -> tuple[float, float]:
    """What the right and the bottom side of the whole picture are called in the model's coordinates."""
    if coordinates == "auto":
        coordinates = "unit" if all(abs(side) < 2 for side in box) else "pixel"
    if coordinates == "shown":
        return float(shown.width), float(shown.height)
    if coordinates == "pixel":
        return float(size[0]), float(size[1])
    return _WHOLE[coordinates], _WHOLE[coordinates]


def _touched(start: float, end: float, pixels: int) -> tuple[int, int]:
    """The first pixel that a stretch (shares of a side) touches, and the one after its last; at least one."""
    first = min(math.floor(start * pixels + 1e-6), pixels - 1)
    return first, max(math.ceil(end * pixels - 1e-6), first + 1)


def _listed(box: Sequence[float]) -> str:
    return "[" + ", ".join(f"{side:g}" for side in box) + "]"
