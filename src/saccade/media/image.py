"""Read, resize and save still images."""

import contextlib
import hashlib
import io
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from saccade.errors import MediaError, convert_errors
from saccade.media import hashing
from saccade.protocols import PixelBudget
from saccade.utils.files import create_folder, write_atomically

LIBRARY_VERSION = f"Pillow {PIL.__version__}"
MAX_PIXELS = 2**27  # pixels; a larger image is treated as a decompression bomb
MAX_ASPECT_RATIO = 200
# The only decoders that open a file, whatever its name: others start programs, such as Ghostscript for EPS.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")


def fit_size(width: int, height: int, factor: int, budget: PixelBudget) -> tuple[int, int]:
    """Return the (width, height) shown to the model: multiples of `factor`, area within `budget`, similar aspect ratio.

    The rule of Qwen2-VL (arXiv:2409.12191) and its successors: round each side; if the area is then outside the budget,
    scale both sides by one ratio, rounding down (too large) or up (too small). No side becomes 0, so a very long image
    may exceed a very small budget. Raises MediaError if one side is over 200 times the other.

    >>> fit_size(1920, 1080, 32, PixelBudget(min_pixels=784, max_pixels=50176))
    (288, 160)
    """
    short, long = sorted((width, height))
    if short < 1 or long > MAX_ASPECT_RATIO * short:
        message = f"an image of {width}x{height} pixels is too narrow; crop it to an aspect ratio under 200"
        raise MediaError(message, key="size", value=(width, height))
    sides = [round(side / factor) * factor for side in (width, height)]
    area = sides[0] * sides[1]
    if area > budget.max_pixels:
        ratio = math.sqrt(width * height / budget.max_pixels)
        sides = [max(factor, math.floor(side / ratio / factor) * factor) for side in (width, height)]
    elif area < budget.min_pixels:
        ratio = math.sqrt(budget.min_pixels / (width * height))
        sides = [math.ceil(side * ratio / factor) * factor for side in (width, height)]
    return max(factor, sides[0]), max(factor, sides[1])


def read_image(path: str) -> Image.Image:
    """Read an image as RGB: upright (EXIF), transparency over white, the first frame of an animation.

    Raises MediaError if the file is in none of FORMATS, is truncated, or has more than 2**27 pixels.
    """
    with _open_image(path) as file:
        return _convert_to_rgb(ImageOps.exif_transpose(file))


def read_image_size(path: str) -> tuple[int, int]:
    """Return the upright width and height (pixels) from an image's header. Raises MediaError as `read_image` does."""
    with _open_image(path) as file:
        is_turned = file.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
        return (file.height, file.width) if is_turned else (file.width, file.height)


def decode_image(content: bytes) -> NDArray[np.uint8]:
    """Return the pixels (uint8 RGB [height, width, 3]) of an image file's bytes. Raises what Pillow raises."""
    with _open(io.BytesIO(content)) as file:
        return np.asarray(_convert_to_rgb(ImageOps.exif_transpose(file)))


def _open(source: str | io.BytesIO) -> Image.Image:
    Image.init()  # the formats that this build of Pillow lacks have no decoder
    return Image.open(source, formats=[name for name in FORMATS if name in Image.OPEN])


@contextlib.contextmanager
def _open_image(path: str) -> Iterator[Image.Image]:
    """Yield an image whose pixels are not decoded yet. Raises MediaError, also for what fails while it is open."""
    hashing.get_file_identity(path)
    size_hint = f"scale it down below {MAX_PIXELS} pixels"
    message = f"{path} can't be read as an image (check that it is complete, or save it as PNG)"
    with convert_errors(MediaError, message, key=path):
        try:
            file = _open(path)
        except UnidentifiedImageError as error:  # Pillow's own text repeats the path
            raise ValueError(f"its first bytes are those of none of {', '.join(FORMATS)}") from error
        except Image.DecompressionBombError as error:  # already at the header: beyond twice its own limit
            raise MediaError(f"{path} has too many pixels; {size_hint}", key=path) from error
        with file:
            if file.width * file.height > MAX_PIXELS:
                raise MediaError(
                    f"{path} has {file.width}x{file.height} pixels; {size_hint}",
                    key=path,
                    value=(file.width, file.height),
                )
            yield file


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel; a plain conversion would clip them
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def save_png(pixels: NDArray[np.uint8], folder: str, *, is_durable: bool = False) -> str:
    """Save pixels (uint8 RGB [height, width, 3]) as a PNG named by its digest; return the path. Raises MediaError.

    An `is_durable` file survives a power cut: episodes in a run's folder refer to it.
    """
    content = encode_png(pixels)
    path = os.path.join(folder, f"{hashlib.sha256(content).hexdigest()[:32]}.png")
    message = f"{path} can't be written; make room there, or give a folder that can be written to"
    with convert_errors(MediaError, message, key=path):
        create_folder(Path(folder))
        if not os.path.exists(path):
            # Episodes of a group may save the same image concurrently.
            with write_atomically(Path(path), is_durable=is_durable, is_shared=True) as draft:
                draft.write_bytes(content)
    return path


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels (uint8 RGB [height, width, 3]) as a PNG file's content (ISO/IEC 15948), each row filtered by Sub.

    Other arrays that Pillow knows, such as gray ones, are converted; it raises what Pillow raises for the rest.
    Unlike Pillow's encoder, zlib leaves the interpreter to other threads, and it takes half of the time.
    """
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
        pixels = np.asarray(_convert_to_rgb(Image.fromarray(pixels)))
    height, width, _ = pixels.shape
    values = pixels.reshape(height, 3 * width)
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0], rows[:, 1:4] = 1, values[:, :3]
    np.subtract(values[:, 3:], values[:, :-3], out=rows[:, 4:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return content


def resize_image(image: Image.Image, width: int, height: int) -> NDArray[np.uint8]:
    """Resize an image to `width` x `height` (bicubic): uint8 RGB [height, width, 3]."""
    return np.array(image.resize((width, height), Image.Resampling.BICUBIC))
