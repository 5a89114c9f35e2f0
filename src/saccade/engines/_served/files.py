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


def write(backbone: Backbone, place: str, pause: Pause, version: int, label: str) -> Files:
    """Write the backbone's weights as safetensors into a folder of their own in `place`.

    "" is memory where the system offers some that has room for them twice (the old ones stay until the new are taken),
    else the folder for temporary files. Raises EngineError where there is no room.
    """
    size = sum(each.nbytes for each in backbone.model.state_dict().values())
    with boundary(EngineError, "the weights can't be written for the servers; name a folder with room for them"):
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=place or _roomy(2 * size)))
        edition = Files(version=version, label=label, folder=folder, pause=pause)
        try:
            backbone.save(folder)
        except BaseException:
            edition.drop()
            raise
    return edition


def _roomy(size: int) -> Path | None:
    return _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > size else None
