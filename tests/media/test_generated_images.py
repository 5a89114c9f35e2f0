"""Pictures that tools make: sized, written, found again by anybody, and bounded on disk."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from saccade.errors import MediaError
from saccade.media.cache import Files, Library
from saccade.protocols import Budget

WIDE = {"factor": 32, "budget": Budget(min_pixels=784, max_pixels=10**6)}


def noise(height=64, width=96, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def keep(library, pixels, **options):
    return asyncio.run(library.keep(pixels, **{**WIDE, **options}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_made_picture_can_be_read_by_another_library(tmp_path, workers):
    library = Library(workers=workers, made=str(tmp_path / "made"))
    picture = keep(library, noise())
    assert (picture.width, picture.height, picture.time, picture.box) == (96, 64, None, None)
    assert np.array_equal(library.pixels(picture), noise())
    assert np.array_equal(Library().pixels(picture), noise())
    assert [path.name for path in (tmp_path / "made").iterdir()] == [Path(picture.path).name]


def test_equal_pictures_are_one_file(tmp_path):
    library = Library(made=str(tmp_path))
    assert keep(library, noise()) == keep(library, noise())
    assert keep(library, noise()) != keep(library, noise(seed=1))
    assert len(list(tmp_path.iterdir())) == 2


def test_made_pictures_are_sized_like_frames(tmp_path):
    picture = keep(Library(made=str(tmp_path)), noise(500, 1000), budget=Budget(min_pixels=784, max_pixels=50176))
    assert picture.width * picture.height <= 50176
    assert picture.width % 32 == picture.height % 32 == 0
    assert Library().pixels(picture).shape == (picture.height, picture.width, 3)


def test_without_a_folder_there_is_one_for_the_process():
    assert np.array_equal(Library().pixels(keep(Library(), noise())), noise())


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MediaError, match=r"file/.* can't be written"):
        keep(Library(made=str(tmp_path / "file")), noise())


def test_the_oldest_files_go_first(tmp_path):
    held = Files(10)
    for name in "abca":
        path = tmp_path / name
        path.write_text(name)
        held.put(str(path), 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
