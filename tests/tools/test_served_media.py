"""The media that the tool python serves: cached by content, bounded in descriptors, without paths in errors."""

import os

from error_cases import raises
from PIL import Image

from saccade.errors import MediaError
from saccade.media.cache import LRUCache
from saccade.tools import served_media
from saccade.tools.served_media import ServedVideo, load_image


def test_an_unreadable_file_raises_media_error_without_its_path(tmp_path):
    path = tmp_path / "answer-B.png"
    path.write_bytes(b"nothing")
    video = ServedVideo(str(path), "video_clue_0")
    for name, read in [
        ("image_clue_0", lambda: load_image(str(path), "image_clue_0")),
        ("video_clue_0", video.read_metadata),
        ("video_clue_0", lambda: video.load_frames([0], (8, 8), bool)),
    ]:
        with raises(MediaError, key=name) as caught:
            read()
        assert "-B" not in str(caught.value)  # the model may read it, and a file name may contain the answer


def test_images_are_cached_until_their_file_changes(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (3, 2), (1, 2, 3)).save(path)
    image = load_image(str(path), "image_clue_0")
    assert (image.width, image.height, image.read_bytes()[:3]) == (3, 2, bytes((1, 2, 3)))
    assert load_image(str(path), "image_clue_1") is image
    Image.new("RGB", (4, 4), (9, 9, 9)).save(path)
    assert load_image(str(path), "image_clue_0").read_bytes()[0] == 9


def test_the_image_cache_bounds_its_descriptors(tmp_path, monkeypatch):
    monkeypatch.setattr(served_media, "_image_cache", LRUCache(served_media._CACHE_BYTES))
    monkeypatch.setattr(served_media, "_MAX_CACHED_IMAGES", 16)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (3, 2), (number, 0, 0)).save(path)
        assert load_image(str(path), "image_clue_0").read_bytes()[0] == number
    assert len(os.listdir("/proc/self/fd")) <= before + 16
