"""Pictures as visual tokens: how many, where they are, and the patches that a vision tower takes.

Axes: N pictures, T expanded tokens, P patches (height/patch * width/patch per picture).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.errors import MediaError, ModelError
from saccade.ledger import Picture, Slot


@dataclass(frozen=True, kw_only=True)
class Vision:
    """The geometry of a vision tower: `merge` x `merge` patches of `patch` x `patch` pixels are one visual token.

    >>> vision = Vision(patch=8, merge=2, temporal=2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> vision.tokens(Picture(path="a.png", digest="d", time=None, width=64, height=32))
    8
    """

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Pixels per side of one visual token."""
        return self.patch * self.merge

    def grid(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of visual tokens. Raises MediaError where a side isn't a multiple of `factor`."""
        if picture.width < 1 or picture.height < 1 or picture.width % self.factor or picture.height % self.factor:
            raise MediaError(
                f"{picture.path} is {picture.width}x{picture.height}: fit its sides to multiples of {self.factor}"
            )
        return picture.height // self.factor, picture.width // self.factor

    def tokens(self, picture: Picture) -> int:
        """How many visual tokens a picture has."""
        rows, columns = self.grid(picture)
        return rows * columns

    def positions(self, length: int, slots: Sequence[Slot]) -> NDArray[np.int64]:
        """M-RoPE positions [3, T] (time, height, width) of `length` expanded tokens (Qwen2-VL, arXiv 2409.12191, 2.1).

        Text at p is p on all axes. A picture at p has t = p, h = p + row, w = p + column, and what follows it is at
        p + max(rows, columns). `slots` are in order, `at` counted in expanded tokens.
        """
        positions = np.empty((3, length), dtype=np.int64)
        done, place = 0, 0  # tokens written, and the position of the next
        for slot in slots:
            # The text before the picture, then the picture itself, row by row.
            rows, columns = self.grid(slot.picture)
            if rows * columns != slot.tokens:
                raise MediaError(f"{slot.picture.path} has {rows * columns} visual tokens, its slot {slot.tokens}")
            positions[:, done : slot.at] = np.arange(place, place + slot.at - done)
            place, done = place + slot.at - done, slot.at + slot.tokens
            positions[0, slot.at : done] = place
            positions[1, slot.at : done] = place + np.repeat(np.arange(rows), columns)
            positions[2, slot.at : done] = place + np.tile(np.arange(columns), rows)
            place += max(rows, columns)
        positions[:, done:] = np.arange(place, place + length - done)
        return positions

    @cached_property
    def _levels(self) -> NDArray[np.float32]:
        """The normalised value of each of the 256 levels per channel [C, 256], in transformers' order of rounding."""
        # Rescaled in float64, rounded, then normalised in float32: another order differs in the last bit.
        levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return ((levels - mean) / std).astype(np.float32)

    def patches(self, pixels: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Pictures (uint8 RGB [H, W, 3] each) to `pixel_values` float32 [sum P, 3*temporal*patch^2] and grids [N, 3].

        A grid is (1, H/patch, W/patch). Equal, bit for bit, to transformers' Qwen2VLImageProcessorPil without
        resizing. Raises MediaError where a side isn't a multiple of `factor`.
        """
        width = len(self.mean) * self.temporal * self.patch**2
        parts, grids = [np.zeros((0, width), dtype=np.float32)], [np.zeros((0, 3), dtype=np.int64)]
        for (rows, columns, _), group in groupby(pixels, key=np.shape):
            if rows < 1 or columns < 1 or rows % self.factor or columns % self.factor:
                raise MediaError(f"a picture is {columns}x{rows}: fit its sides to multiples of {self.factor}")
            same = np.stack(list(group))
            parts.append(self._flatten(same))
            grids.append(np.tile(np.array([[1, rows // self.patch, columns // self.patch]], np.int64), (len(same), 1)))
        return np.concatenate(parts), np.concatenate(grids)

    def _flatten(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Pictures of one size [N, H, W, C] to patches, those of one visual token side by side."""
        count, height, width, channels = pixels.shape
        patch, merge = self.patch, self.merge
        cut = pixels.reshape(count, height // self.factor, merge, patch, width // self.factor, merge, patch, channels)
        # Cut and sort the bytes first: a quarter of the memory to move, and one table look-up per channel after it.
        levels = np.ascontiguousarray(cut.transpose(0, 1, 4, 2, 5, 7, 3, 6)).reshape(-1, channels, patch**2)
        values = np.empty((len(levels), channels, self.temporal, patch**2), dtype=np.float32)
        for channel in range(channels):
            values[:, channel] = self._levels[channel].take(levels[:, channel])[:, None]
        return values.reshape(len(levels), -1)


def read_vision(folder: str) -> Vision:
    """The geometry in a checkpoint's preprocessor config. Raises ModelError where it is missing or incomplete."""
    # Newer versions of transformers save one file for all processors, with the pictures' settings nested in it.
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = Path(folder) / name
        if path.is_file():
            settings = _read(path)
            return _vision(settings.get("image_processor", settings), path)
    raise ModelError(f"{folder} has no preprocessor_config.json, so nothing says how the model sees pictures")


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is not a JSON object") from error


def _vision(settings: dict[str, Any], path: Path) -> Vision:
    try:
        return Vision(
            patch=int(settings["patch_size"]),
            merge=int(settings["merge_size"]),
            temporal=int(settings["temporal_patch_size"]),
            mean=tuple(float(value) for value in settings["image_mean"]),
            std=tuple(float(value) for value in settings["image_std"]),
        )
    except KeyError as error:
        raise ModelError(f"{path} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} doesn't say how the model sees pictures: {error}") from error
