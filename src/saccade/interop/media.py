"""Media in the forms in which other systems hand them over, as files: what is none yet is put into a folder.

a path, file:///v/a.mp4           the file
data:image/png;base64,…, bytes    a file of that content; one file for equal contents
{"path": …, "bytes": …}           what the mapping holds, as data sets of Hugging Face have it
a PIL image, an array             a PNG
"""

import base64
import io
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from saccade.errors import DataError, boundary
from saccade.media.image import png
from saccade.runlog import writing

# where mappings hold a medium, the content before the name that it once had
_KEYS = ("bytes", "path", "url", "uri", "image", "image_url", "image_path", "video", "video_url", "video_path")
_SUFFIX = {"jpeg": ".jpg", "quicktime": ".mov", "x-matroska": ".mkv"}


def pictured(name: str, held: Any, folder: Path) -> str:
    """The path of a picture's file. Raises DataError, which begins with `name`, for what is no picture."""
    if isinstance(held, np.ndarray):
        with boundary(DataError, f"{name}: the array is no picture; give height, width and channels, of 8 bits"):
            return _kept(png(held), ".png", folder)
    if hasattr(held, "save") and hasattr(held, "convert"):
        buffer = io.BytesIO()
        with boundary(DataError, f"{name}: the picture can't be kept as a file"):
            held.convert("RGB").save(buffer, "PNG")
        return _kept(buffer.getvalue(), ".png", folder)
    return _file(name, held, folder, "image", ".png")


def filmed(name: str, held: Any, folder: Path) -> str:
    """The path of a video's file. Raises DataError, which begins with `name`, for what is none."""
    return _file(name, held, folder, "video", ".mp4")


def _file(name: str, held: Any, folder: Path, kind: str, suffix: str) -> str:
    if isinstance(held, Mapping):
        found = next((held[key] for key in _KEYS if held.get(key) is not None), None)
        return pictured(name, found, folder) if kind == "image" else _file(name, found, folder, kind, suffix)
    if isinstance(held, bytes | bytearray | memoryview):
        return _kept(bytes(held), suffix, folder)
    if isinstance(held, Path):
        return str(held)
    if not isinstance(held, str) or not held:
        raise DataError(f"{name}: the {kind} is a {type(held).__name__}; an agent takes the path of a file")
    if held[:5].lower() == "data:":
        return _kept(*_data(name, held, kind, suffix), folder)
    if held[:7].lower() in ("http://", "https:/"):
        raise DataError(f"{name}: the {kind} is at {held:.80}; download it, and give the path of the file")
    # A path as other programs write it after the scheme may hold anything; only a host or %20 tells an address.
    if held[:7].lower() == "file://":
        plain = held[7:]
        return plain if Path(plain).exists() else url2pathname(urlsplit(held).path) or plain
    return held


def _data(name: str, held: str, kind: str, suffix: str) -> tuple[bytes, str]:
    """The content of a data address, and how the name of its file ends."""
    head, comma, body = held[5:].partition(",")
    form, *marks = head.lower().split(";")
    if not comma or not form.startswith(f"{kind}/"):
        raise DataError(f"{name}: the {kind} is {held[:40]!r}, which is no data address of one")
    with boundary(DataError, f"{name}: the data address of the {kind} can't be read; give the path of a file"):
        plain = unquote_to_bytes(body)
        content = base64.b64decode(plain, validate=True) if "base64" in marks else plain
    short = form.partition("/")[2]
    return content, _SUFFIX.get(short, f".{short}" if short.isalnum() else suffix)


def _kept(content: bytes, suffix: str, folder: Path) -> str:
    """The file of this content; equal contents share one."""
    file = folder / f"{sha256(content).hexdigest()[:24]}{suffix}"
    if not file.exists():
        with writing(file):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    return str(file)
