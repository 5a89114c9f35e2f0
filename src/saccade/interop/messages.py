"""Convert chat messages of other systems to tasks; media without a file are written to a folder."""

import base64
import io
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

import numpy as np

from saccade.errors import DataError, convert_errors
from saccade.media.image import encode_png
from saccade.types import AnswerType, Media, MediaKind, Task
from saccade.utils.files import convert_file_errors, create_folder, write_atomically

# Keys under which mappings hold a medium; content takes precedence over names.
_CONTENT_KEYS = ("bytes", "path", "url", "uri", "image", "image_url", "image_path", "video", "video_url", "video_path")
_SUFFIX_BY_SUBTYPE = {"jpeg": ".jpg", "quicktime": ".mov", "x-matroska": ".mkv"}


def build_task(name: str, messages: Sequence[Mapping[str, Any]], image_dir: Path) -> Task:
    """Build a task from chat messages whose contents are lists of `{"type": "text" | "image" | "video", ...}`.

    The question joins all texts, those of system messages first; the environment has its own system prompt. A medium is
    a path, a `file:` or `data:` URL, bytes, or a mapping with a key such as `path` or `bytes`; an image may also be an
    object with `save` like a PIL image, or an array (height, width, channels); a video may also be a list of images,
    which become separate media. Media without a file are stored in `image_dir`.

    Raises DataError for anything an environment can't take: assistant messages, audio, a part of a video, a web URL.
    """
    texts_by_role: dict[str, list[str]] = {"system": [], "user": []}
    media: list[Media] = []
    for message in messages:
        if message["role"] not in texts_by_role:
            raise DataError(
                f"{name}: messages of the role {message['role']!r} are not supported, only system and user; "
                "remove the few-shot examples",
                key="role",
                value=message["role"],
            )
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                texts_by_role[message["role"]].append(part["text"])
            else:
                media += _build_media(name, part, image_dir)
    # The other system grades, so there is no ground truth here.
    question = "\n".join(text for texts in texts_by_role.values() for text in texts if text.strip())
    return Task(id=name, question=question, media=tuple(media), answer_type=AnswerType.OPEN, ground_truth="")


def _build_media(name: str, part: Mapping[str, Any], image_dir: Path) -> list[Media]:
    media_type, value = part["type"], part.get("url")
    if media_type not in ("image", "video"):
        raise DataError(
            f"{name}: content of the type {media_type!r} is not supported; give text, image or video",
            key="type",
            value=media_type,
        )
    # Showing the whole video instead could silently reveal the answer.
    for key in ("start_time", "end_time"):
        if part.get(key) is not None:
            raise DataError(
                f"{name}: {key}={part[key]} selects a part of a video, which is not supported; cut it out first",
                key=key,
                value=part[key],
            )
    if media_type == "video" and isinstance(value, list | tuple) and value:
        return [
            Media(path=_save_media(name, image, MediaKind.IMAGE, image_dir), kind=MediaKind.IMAGE) for image in value
        ]
    kind = MediaKind(media_type)
    return [Media(path=_save_media(name, value, kind, image_dir), kind=kind)]


def _save_media(name: str, value: Any, media_type: MediaKind, folder: Path) -> str:
    """Return the path of a medium's file. Raises DataError, starting with `name`, if `value` is not of this type."""
    suffix = ".png" if media_type is MediaKind.IMAGE else ".mp4"
    if isinstance(value, Mapping):
        content = next((value[key] for key in _CONTENT_KEYS if value.get(key) is not None), None)
        return _save_media(name, content, media_type, folder)
    if media_type is MediaKind.IMAGE and isinstance(value, np.ndarray):
        message = f"{name}: the array is not an image; give [height, width, channels] with 8 bits"
        with convert_errors(DataError, message, key="image", value=value.shape):
            return _write_content(encode_png(value), suffix, folder)
    if media_type is MediaKind.IMAGE and hasattr(value, "save") and hasattr(value, "convert"):
        buffer = io.BytesIO()
        with convert_errors(DataError, f"{name}: the image can't be saved as a file", key="image"):
            value.convert("RGB").save(buffer, "PNG")
        return _write_content(buffer.getvalue(), suffix, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return _write_content(bytes(value), suffix, folder)
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{name}: the {media_type} is a {type(value).__name__}; give the path of a file",
            key=media_type,
            value=value,
        )
    if value[:5].lower() == "data:":
        return _write_content(*_decode_data_url(name, value, media_type, suffix), folder)
    if value[:7].lower() in ("http://", "https:/"):
        raise DataError(
            f"{name}: the {media_type} is the web URL {value:.80}; download it and give the path of the file",
            key=media_type,
            value=value,
        )
    # Other programs write unescaped paths after the scheme: prefer the literal path if it exists.
    if value[:7].lower() == "file://":
        plain = value[7:]
        return plain if Path(plain).exists() else url2pathname(urlsplit(value).path) or plain
    return value


def _decode_data_url(name: str, value: str, media_type: str, suffix: str) -> tuple[bytes, str]:
    """Return the content of a data URL and the suffix of its file."""
    head, comma, body = value[5:].partition(",")
    mime_type, *parameters = head.lower().split(";")
    if not comma or not mime_type.startswith(f"{media_type}/"):
        raise DataError(
            f"{name}: {value[:40]!r} is not a data URL of the type {media_type}; give the path of a file",
            key=media_type,
            value=value[:40],
        )
    message = f"{name}: the data URL of the {media_type} can't be decoded; give the path of a file"
    with convert_errors(DataError, message, key=media_type, value=value[:40]):
        raw = unquote_to_bytes(body)
        content = base64.b64decode(raw, validate=True) if "base64" in parameters else raw
    subtype = mime_type.partition("/")[2]
    return content, _SUFFIX_BY_SUBTYPE.get(subtype, f".{subtype}" if subtype.isalnum() else suffix)


def _write_content(content: bytes, suffix: str, folder: Path) -> str:
    """Write content to a file named by its digest, unless that file exists, and return its path."""
    file = folder / f"{sha256(content).hexdigest()[:24]}{suffix}"
    if not file.exists():
        with convert_file_errors(file):
            create_folder(folder)
            with write_atomically(file, is_shared=True) as draft:
                draft.write_bytes(content)
    return str(file)
