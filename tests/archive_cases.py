"""Archives in memory."""

import io
import tarfile
import zipfile


def zipped(files):
    """A ZIP of files by name; compressed, so that damage is noticed in two ways."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return buffer.getvalue()


def taped(files, mode="w"):
    """A tar of files by name; a content may also be a TarInfo, for what is no plain file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tape:
        for name, content in files.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info is content:
                tape.addfile(info)
            else:
                info.size = len(content)
                tape.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
