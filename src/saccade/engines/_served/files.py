"""New weights as files: a folder that servers read, in memory where there is room."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from saccade.engines._served.server import Pause, Server
from saccade.errors import EngineError, boundary
from saccade.model.backbone import Backbone

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """An edition of the weights as safetensors in `folder`; see weights.Edition."""

    version: int
    label: str
    folder: Path
    pause: Pause

    async def load(self, server: Server) -> None:
        """See weights.Edition."""
        await server.dialect.load(server, self.folder, self.label, self.pause)

    def drop(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Writer:
    """Writes the backbone's weights as safetensors, each time into a folder of their own in `place`.

    "" is memory where the system offers some that has room for them twice (the old ones stay until the new are taken),
    else the folder for temporary files: for all of them where it is for the first.
    """

    def __init__(self, backbone: Backbone, place: str, pause: Pause) -> None:
        self._backbone, self._place, self._pause = backbone, place, pause

    def write(self, version: int, label: str) -> Files:
        """An edition of the weights as they are. Raises EngineError where there is no room."""
        with boundary(EngineError, "the weights can't be written for the servers; name a folder with room for them"):
            if not self._place:
                size = sum(each.nbytes for each in self._backbone.model.state_dict().values())
                self._place = str(_roomy(2 * size) or tempfile.gettempdir())
            folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=self._place))
            edition = Files(version=version, label=label, folder=folder, pause=self._pause)
            try:
                self._backbone.save(folder)
            except BaseException:
                edition.drop()
                raise
        return edition


def _roomy(size: int) -> Path | None:
    return _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size else None
