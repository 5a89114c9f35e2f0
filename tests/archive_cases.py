"""Build archives in memory."""

import io
import tarfile
import zipfile


def build_zip(files):
    """Return a compressed ZIP of files by name; both deflate and the checksum detect corruption."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zip_file:
        for name, content in files.items():
            zip_file.writestr(name, content)
    return buffer.getvalue()


def build_tar(files, mode="w"):
    """Return a tar of files by name; a content may be a TarInfo, for members that aren't regular files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar_file:
        for name, content in files.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info is content:
                tar_file.addfile(info)
            else:
                info.size = len(content)
                tar_file.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
