"""Compute visual tokens: their number, their M-RoPE positions, and the patches for a vision tower.

Axes: N images, T expanded tokens, P patches (height/patch * width/patch per image).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from saccade.errors import MediaError, ModelError
from saccade.ledger import ImageRef, ImageSlot
from saccade.utils.files import read_text


@dataclass(frozen=True, kw_only=True)
class VisionGeometry:
    """The geometry of a vision tower.

    `merge_size` x `merge_size` patches of `patch_size` x `patch_size` pixels are one visual token.

    >>> geometry = VisionGeometry(
    ...     patch_size=8, merge_size=2, temporal_patch_size=2, image_mean=(0.5,) * 3, image_std=(0.5,) * 3
    ... )
    >>> geometry.count_visual_tokens(ImageRef(path="a.png", digest="d", time=None, width=64, height=32))
    8
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Return the side of one visual token, pixels."""
        return self.patch_size * self.merge_size

    def compute_grid(self, image: ImageRef) -> tuple[int, int]:
        """Return the rows and columns of visual tokens. Raises MediaError if a side isn't a multiple of `factor`."""
        if image.width < 1 or image.height < 1 or image.width % self.factor or image.height % self.factor:
            size = image.width, image.height
            message = f"{image.path} is {image.width}x{image.height}: fit its sides to multiples of {self.factor}"
            raise MediaError(message, key=image.path, value=size)
        return image.height // self.factor, image.width // self.factor

    def count_visual_tokens(self, image: ImageRef) -> int:
        """Return the number of visual tokens of an image. Raises MediaError as `compute_grid`."""
        rows, columns = self.compute_grid(image)
        return rows * columns

    def compute_position_ids(self, length: int, slots: Sequence[ImageSlot]) -> NDArray[np.int64]:
        """Return M-RoPE positions [3, T] (time, height, width) of `length` tokens (Qwen2-VL, arXiv 2409.12191, 2.1).

        Text at p is p on all axes. An image at p has t = p, h = p + row, w = p + column, and the next token is at
        p + max(rows, columns). A pair of frames has the positions of an image. `slots` are in order, with `index`
        counted in expanded tokens.
        """
        positions = np.empty((3, length), dtype=np.int64)
        done, position = 0, 0  # tokens done, and the position of the next one
        for slot in slots:
            # The text before the image, then the image itself, row by row.
            rows, columns = self.compute_grid(slot.image)
            if rows * columns != slot.num_tokens:
                message = f"{slot.image.path} has {rows * columns} visual tokens, its slot {slot.num_tokens}"
                raise MediaError(message, key=slot.image.path, value=slot.num_tokens)
            positions[:, done : slot.index] = np.arange(position, position + slot.index - done)
            position, done = position + slot.index - done, slot.index + slot.num_tokens
            positions[0, slot.index : done] = position
            positions[1, slot.index : done] = position + np.repeat(np.arange(rows), columns)
            positions[2, slot.index : done] = position + np.tile(np.arange(columns), rows)
            position += max(rows, columns)
        positions[:, done:] = np.arange(position, position + length - done)
        return positions

    @cached_property
    def _normalized_levels(self) -> NDArray[np.float32]:
        """Return the normalized value of each of the 256 levels per channel [C, 256], rounded as in transformers."""
        # Rescale in float64, round, then normalize in float32: another order differs in the last bit.
        levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.image_mean, self.image_std))
        return ((levels - mean) / std).astype(np.float32)

    def patchify(self, pixels: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Convert images (uint8 RGB [H, W, 3]) to `pixel_values` float32 [sum P, 3*temporal*patch^2] and grids [N, 3].

        A grid is (1, H/patch, W/patch). A patch holds an image `temporal` times, or both frames of a pair
        [2, H, W, 3]. The result equals, bit for bit, transformers' Qwen2VLImageProcessorPil without resizing. Raises
        MediaError if a side isn't a multiple of `factor`.
        """
        width = len(self.image_mean) * self.temporal_patch_size * self.patch_size**2
        parts, grids = [np.zeros((0, width), dtype=np.float32)], [np.zeros((0, 3), dtype=np.int64)]
        for shape, group in groupby(pixels, key=np.shape):
            rows, columns = shape[-3:-1]
            if rows < 1 or columns < 1 or rows % self.factor or columns % self.factor:
                message = f"an image is {columns}x{rows}: fit its sides to multiples of {self.factor}"
                raise MediaError(message, key="pixels", value=(columns, rows))
            batch = np.stack(list(group))
            batch = batch if len(shape) == 4 else batch[:, None]
            parts.append(self._flatten_patches(batch))
            grid = [1, rows // self.patch_size, columns // self.patch_size]
            grids.append(np.tile(np.array([grid], np.int64), (len(batch), 1)))
        return np.concatenate(parts), np.concatenate(grids)

    def _flatten_patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Split images of one size [N, F, H, W, C] into patches, those of one visual token adjacent.

        Each has F frames: one, which is repeated, or as many as a patch.
        """
        count, num_frames, height, width, channels = pixels.shape
        patch, merge = self.patch_size, self.merge_size
        split = pixels.reshape(
            count, num_frames, height // self.factor, merge, patch, width // self.factor, merge, patch, channels
        )
        # Reorder bytes rather than floats: a quarter of the memory to move; then one table look-up per channel.
        ordered = np.ascontiguousarray(split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7))
        levels = ordered.reshape(-1, channels, num_frames, patch**2)
        values = np.empty((len(levels), channels, self.temporal_patch_size, patch**2), dtype=np.float32)
        for channel in range(channels):
            values[:, channel] = self._normalized_levels[channel].take(levels[:, channel])
        return values.reshape(len(levels), -1)


def load_vision_geometry(folder: str) -> VisionGeometry:
    """Load the geometry from a checkpoint's preprocessor config. Raises ModelError if it is missing or incomplete."""
    # Newer versions of transformers save one file for all processors, with the image settings nested in it.
    paths = [Path(folder) / name for name in ("preprocessor_config.json", "processor_config.json")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        message = f"{folder} has no preprocessor_config.json, which defines the model's image patches"
        raise ModelError(message, key=str(paths[0]))
    try:
        settings = dict(json.loads(read_text(path)))
        settings = settings.get("image_processor", settings)
        return VisionGeometry(
            patch_size=int(settings["patch_size"]),
            merge_size=int(settings["merge_size"]),
            temporal_patch_size=int(settings["temporal_patch_size"]),
            image_mean=tuple(float(value) for value in settings["image_mean"]),
            image_std=tuple(float(value) for value in settings["image_std"]),
        )
    except KeyError as error:
        raise ModelError(f"{path} lacks {error.args[0]!r}", key=str(error.args[0])) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} has invalid image settings: {error}", key=str(path)) from error
