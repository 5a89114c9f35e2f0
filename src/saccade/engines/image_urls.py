"""Images as data URLs, the format in which servers accept them."""

import base64

from saccade.errors import EngineError, MediaError
from saccade.ledger import ImageRef
from saccade.media.cache import LRUCache
from saccade.media.image import encode_png
from saccade.protocols import MediaLoader

_CACHE_BYTES = 2**28  # of encoded images


def encode_data_url(png: bytes) -> str:
    """Encode a PNG as a data URL.

    >>> encode_data_url(b"png")
    'data:image/png;base64,cG5n'
    """
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


class ImageUrls:
    """Encodes a media loader's images as data URLs, with an LRU cache."""

    def __init__(self, media: MediaLoader) -> None:
        self._media = media
        self._cache: LRUCache[str, str] = LRUCache(_CACHE_BYTES)

    def __call__(self, image: ImageRef) -> str:
        """Return an image's data URL. Raises EngineError, which ends the episode, if its pixels can't be loaded."""
        url = self._cache.get(image.key)
        if url is None:
            try:
                url = encode_data_url(encode_png(self._media.load_pixels(image)))
            except MediaError as error:  # the file may have changed or been deleted
                raise EngineError(str(error), key=error.key, value=error.value) from error
            self._cache.put(image.key, url, len(url))
        return url
