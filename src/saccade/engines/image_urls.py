"""Pictures as data URLs, as servers take them."""

import base64

from saccade.errors import EngineError, MediaError
from saccade.ledger import Picture
from saccade.media.cache import Lru
from saccade.media.image import png
from saccade.protocols import MediaLibrary

_BYTES = 2**28  # of encoded pictures that are kept


def picture_url(png: bytes) -> str:
    """A picture as a data URL.

    >>> picture_url(b"png")
    'data:image/png;base64,cG5n'
    """
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


class Urls:
    """The data URL of each picture of a media library, encoded once for as long as there is room."""

    def __init__(self, media: MediaLibrary) -> None:
        self._media = media
        self._kept: Lru[str, str] = Lru(_BYTES)

    def __call__(self, picture: Picture) -> str:
        """The URL. Raises EngineError where the pixels can't be had any more: then the attempt ends."""
        found = self._kept.get(picture.key)
        if found is None:
            try:
                found = picture_url(png(self._media.pixels(picture)))
            except MediaError as error:  # a clip may have changed or gone
                raise EngineError(str(error)) from error
            self._kept.put(picture.key, found, len(found))
        return found
