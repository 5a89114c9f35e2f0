"""Still pictures, and how large a picture is shown to a model."""

import hashlib
import io
import math
import os
import secrets

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from saccade.errors import MediaError, boundary
from saccade.media import files
from saccade.protocols import Budget

MOST_PIXELS = 2**27  # a larger picture is taken for a decompression bomb
MOST_ASPECT = 200


def fit(width: int, height: int, factor: int, budget: Budget) -> tuple[int, int]:
    """(width, height) for the model: multiples of `factor`, near the picture's own shape, its area within `budget`.

    The rule of Qwen2-VL (arXiv:2409.12191) and its successors: round each side; where the area then lies outside the
    budget, scale both sides by one ratio, rounding down (too large) or up (too small). No side becomes 0, so that a
    very long picture may exceed a very small budget. Raises MediaError where one side is 200 times the other.

    >>> fit(1920, 1080, 32, Budget(min_pixels=784, max_pixels=50176))
    (288, 160)
    """
    short, long = sorted((width, height))
    if short < 1 or long > MOST_ASPECT * short:
        raise MediaError(f"a picture of {width}x{height} pixels is too narrow; crop it to an aspect ratio under 200")
    sides = [round(side / factor) * factor for side in (width, height)]
    area = sides[0] * sides[1]
    if area > budget.max_pixels:
        ratio = math.sqrt(width * height / budget.max_pixels)
        sides = [max(factor, math.floor(side / ratio / factor) * factor) for side in (width, height)]
    elif area < budget.min_pixels:
        ratio = math.sqrt(budget.min_pixels / (width * height))
        sides = [math.ceil(side * ratio / factor) * factor for side in (width, height)]
    return max(factor, sides[0]), max(factor, sides[1])


def read(path: str) -> Image.Image:
    """The picture in a file as RGB, upright (EXIF), transparency over white; of an animation the first image.

    Raises MediaError where the file is no picture, is cut off, or holds more than 2**27 pixels.
    """
    files.identity(path)
    what = f"{path} can't be read as a picture (check that it is complete, or save it as PNG)"
    with boundary(MediaError, what), _opened(path) as file:
        if file.width * file.height > MOST_PIXELS:
            raise MediaError(f"{path} has {file.width}x{file.height} pixels; scale it down below {MOST_PIXELS}")
        return _rgb(ImageOps.exif_transpose(file))


def _opened(path: str) -> Image.Image:
    try:
        return Image.open(path)
    except UnidentifiedImageError as error:  # Pillow's own sentence is about the path once more
        raise ValueError("its first bytes are those of no picture") from error


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits a pixel; a plain conversion would clip them
        return Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def store(pixels: NDArray[np.uint8], folder: str) -> str:
    """Write pixels (uint8 RGB [height, width, 3]) as a PNG named after its content; the path. Raises MediaError."""
    content = png(pixels)
    path = os.path.join(folder, f"{hashlib.sha256(content).hexdigest()[:32]}.png")
    with boundary(MediaError, f"{path} can't be written; make room there, or give a folder that can be written to"):
        os.makedirs(folder, exist_ok=True)
        if not os.path.exists(path):
            partial = f"{path}.{secrets.token_hex(4)}"
            with open(partial, "wb") as file:
                file.write(content)
            os.replace(partial, path)  # attempts of a group may show the same picture at the same time
    return path


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Pixels (uint8 RGB [height, width, 3]) as the content of a PNG file."""
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, format="PNG", compress_level=1)
    return held.getvalue()


def resized(picture: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    """The picture scaled to `width` x `height` (bicubic): uint8 RGB [height, width, 3]."""
    return np.array(picture.resize((width, height), Image.Resampling.BICUBIC))
