"""Archives are unpacked whole or in parts, resume after interruptions, and never write outside of the target."""

import os
import random
import shutil
import stat
import tarfile
import tracemalloc
import zipfile

import pytest
from archive_cases import build_tar, build_zip
from commands import fail, good
from error_cases import raises

from saccade.data import archives as module
from saccade.data.archives import Archive, extract_missing, find_archives, list_archive_files, unpack
from saccade.errors import DataError, RunError

FILES = {f"videos/{index}.mp4": bytes([index]) * 5000 for index in range(7)}
ARCHIVES = {
    "a.zip": build_zip(FILES),
    "a.tar": build_tar(FILES),
    "a.tar.gz": build_tar(FILES, "w:gz"),
    "a.tgz": build_tar(FILES, "w:gz"),
    "a.tar.xz": build_tar(FILES, "w:xz"),
    "a.tar.bz2": build_tar(FILES, "w:bz2"),
}


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def split_content(name, content, size, suffixes):
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    assert 1 < len(pieces) <= len(suffixes)
    return {f"{name}{suffix}": piece for suffix, piece in zip(suffixes, pieces, strict=False)}


LETTERS = [f"a{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize(
    "suffixes", [[""], [f".part.{letters}" for letters in LETTERS], [f".{number:03}" for number in range(1, 99)]]
)
def test_unpack_every_format_whole_and_split(name, suffixes, tmp_path):
    content = ARCHIVES[name]
    pieces = {name: content} if suffixes == [""] else split_content(name, content, len(content) // 5 + 1, suffixes)
    write_files(tmp_path, pieces)
    (archive,) = find_archives(list_archive_files(tmp_path))
    assert archive == Archive(name=name, parts=tuple(sorted(pieces)))
    assert unpack(tmp_path, archive, tmp_path / "out") == len(FILES)
    assert read_files(tmp_path / "out") == FILES
    assert unpack(tmp_path, archive, tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["v.tar.part.aa", "v.tar.part.ab", "subtitles.tar"], ["subtitles.tar", "v.tar"]),
        (["x.tar.gzaa", "x.tar.gzab"], ["x.tar.gz"]),
        (["x.zip", "x.zip.md", "x.zip.txt", "x.tar.md5", "x.jsonl", "x.tar.zst", "zip"], ["x.zip"]),
        (["x.tar.part0", "x.tar.part1"], ["x.tar"]),
        (
            [f"x.zip.part{number}" for number in range(1, 12)],
            ["x.zip"],
        ),
        (["v/x.tar.part-aa", "w/x.tar.part-aa"], ["v/x.tar", "w/x.tar"]),
        (["x.tar.gz", "x.tar.gz.part.ab"], ["x.tar.gz"]),  # already joined
    ],
)
def test_find_archives_ignores_other_files(files, names):
    random.Random(1).shuffle(files)
    assert [archive.name for archive in find_archives(files)] == names


def test_parts_are_sorted_by_number():
    (archive,) = find_archives([f"x.zip.part{number}" for number in range(1, 12)])
    assert archive.parts[-2:] == ("x.zip.part10", "x.zip.part11")


@pytest.mark.parametrize(
    ("files", "gap"),
    [
        (["v.tar.part.aa", "v.tar.part.ac"], "v.tar.part.ac"),
        (["v.tar.part.ab", "v.tar.part.ac"], "v.tar.part.ab"),
        (["v.zip.002", "v.zip.003"], "v.zip.002"),
        (["v.zip.001", "v.zip.002", "v.zip.004"], "v.zip.004"),
    ],
)
def test_missing_part_is_an_error(files, gap):
    with raises(DataError, key=gap):
        find_archives(files)


@pytest.mark.parametrize("name", ARCHIVES)
def test_truncated_archive_is_an_error_and_complete_members_stay(name, tmp_path):
    noise = {f"{index}.mp4": random.Random(index).randbytes(20000) for index in range(5)}
    mode = {"a.tar": "w", "a.tar.xz": "w:xz", "a.tar.bz2": "w:bz2"}.get(name, "w:gz")
    content = build_zip(noise) if name == "a.zip" else build_tar(noise, mode)
    write_files(tmp_path, {name: content[: len(content) * 7 // 10]})
    with raises(DataError, key=str(tmp_path / name)):
        unpack(tmp_path, *find_archives([name]), tmp_path / "out")
    written = read_files(tmp_path / "out") if (tmp_path / "out").exists() else {}
    assert written.items() <= noise.items()  # complete members only
    write_files(tmp_path, {name: content})
    unpack(tmp_path, *find_archives([name]), tmp_path / "out")
    assert read_files(tmp_path / "out") == noise


def test_corrupt_zip_is_an_error(tmp_path):
    stored = build_zip({"1.mp4": random.Random(0).randbytes(4000)})
    broken = bytearray(stored)
    broken[2000] ^= 1
    write_files(tmp_path, {"a.zip": bytes(broken)})
    with raises(DataError, key=str(tmp_path / "a.zip")):
        unpack(tmp_path, *find_archives(["a.zip"]), tmp_path / "out")
    assert read_files(tmp_path / "out") == {}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:\\x", "a/..", "\\x"])
@pytest.mark.parametrize("build", [build_zip, build_tar])
def test_member_outside_of_the_target_is_an_error(build, name, tmp_path):
    suffix = "zip" if build is build_zip else "tar"
    write_files(tmp_path / "in", {f"a.{suffix}": build({"good": b"1", name: b"2"})})
    with raises(DataError, key=str(tmp_path / "in" / f"a.{suffix}"), value=name):
        unpack(tmp_path / "in", *find_archives([f"a.{suffix}"]), tmp_path / "in" / "out")
    assert read_files(tmp_path) == {
        f"in/a.{suffix}": (tmp_path / "in" / f"a.{suffix}").read_bytes(),
        "in/out/good": b"1",
    }
    # extract_missing writes only to the paths that rows name
    write_files(tmp_path / "in", {f"b.{suffix}": build({name: b"2", "deep/in/x": b"3"})})
    left = extract_missing(tmp_path / "in", {"v/y"}, referenced=["v/y"], archives=find_archives([f"b.{suffix}"]))
    assert left == {"v/y"}
    assert len(read_files(tmp_path)) == 3


def test_links_and_devices_are_skipped(tmp_path):
    link, hard, device = tarfile.TarInfo("link"), tarfile.TarInfo("hard"), tarfile.TarInfo("device")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard.type, hard.linkname = tarfile.LNKTYPE, "/etc/passwd"
    device.type = tarfile.CHRTYPE
    write_files(tmp_path, {"a.tar": build_tar({"link": link, "hard": hard, "device": device, "link/x": b"1"})})
    unpack(tmp_path, *find_archives(["a.tar"]), tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as zip_file:
        info = zipfile.ZipInfo("other")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        zip_file.writestr(info, "/etc/passwd")
    unpack(tmp_path, *find_archives(["b.zip"]), tmp_path / "out")
    assert read_files(tmp_path / "out") == {"link/x": b"1"}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_extract_missing_matches_members_by_path_end_or_unique_name(tmp_path):
    write_files(
        tmp_path,
        {
            "videos.zip": build_zip(
                {"Set/data/1.mp4": b"1", "Set/data/9.mp4": b"9", "__MACOSX/Set/data/._1.mp4": b"no"}
            ),
            "scannet.zip": build_zip({"s1.mp4": b"s1"}),  # its name isn't unique, but its archive is
            "more.zip": build_zip({"clips/2.mp4": b"2", "clips/s1.mp4": b"not it", "clips/twice.png": b"which?"}),
        },
    )
    missing = {"data/1.mp4", "videos/2.mp4", "scannet/s1.mp4", "v5/twice.png"}
    referenced = {*missing, "other/s1.mp4", "v1/twice.png"}
    left = extract_missing(
        tmp_path, missing, referenced=referenced, archives=find_archives(list_archive_files(tmp_path))
    )
    extracted = {name: content for name, content in read_files(tmp_path).items() if not name.endswith(".zip")}
    assert extracted == {"data/1.mp4": b"1", "videos/2.mp4": b"2", "scannet/s1.mp4": b"s1"}
    assert left == {"v5/twice.png"}


def test_archives_named_after_a_folder_come_first_and_no_others_are_downloaded(tmp_path):
    write_files(tmp_path, {"a.tar": build_tar({"x": b"1"}), "subtitles.tar": build_tar({"subtitles/1.json": b"{}"})})
    downloaded = []
    extract_missing(
        tmp_path,
        {"subtitles/1.json"},
        referenced=[],
        archives=find_archives(list_archive_files(tmp_path)),
        ensure_downloaded=lambda archive: downloaded.append(archive.name),
    )
    assert downloaded == ["subtitles.tar"]


def test_full_disk_is_an_error_and_the_next_call_resumes(tmp_path, monkeypatch):
    write_files(tmp_path, {"a.zip": ARCHIVES["a.zip"]})
    usage, calls = shutil.disk_usage(tmp_path), []

    def short(path):
        calls.append(path)
        return usage._replace(free=10**9 if len(calls) < 4 else 100)

    monkeypatch.setattr(module.shutil, "disk_usage", short)
    with raises(DataError, key=str(tmp_path / "out" / "videos"), value=5000):
        unpack(tmp_path, *find_archives(["a.zip"]), tmp_path / "out")
    assert read_files(tmp_path / "out").items() < FILES.items()
    monkeypatch.undo()
    assert unpack(tmp_path, *find_archives(["a.zip"]), tmp_path / "out") == 4
    assert read_files(tmp_path / "out") == FILES


def test_unwritable_folder_is_an_error(tmp_path):
    write_files(tmp_path, {"a.zip": ARCHIVES["a.zip"], "out": b"a file"})
    with raises(RunError):
        unpack(tmp_path, *find_archives(["a.zip"]), tmp_path / "out")


def test_encrypted_archive_is_an_error(tmp_path):
    content = bytearray(build_zip({"1.mp4": b"x" * 99}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    write_files(tmp_path, {"a.zip": bytes(content)})
    with raises(DataError, key=str(tmp_path / "a.zip")):
        unpack(tmp_path, *find_archives(["a.zip"]), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_zip, build_tar])
def test_large_members_are_streamed_in_chunks(build, tmp_path):
    name = "a.zip" if build is build_zip else "a.tar"
    write_files(tmp_path, {name: build({"1.mp4": bytes(60 * 2**20)})})
    tracemalloc.start()
    unpack(tmp_path, *find_archives([name]), tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert os.path.getsize(tmp_path / "out" / "1.mp4") == 60 * 2**20
    assert peak < 12 * 2**20


def test_command_unpacks_and_resumes(tmp_path):
    write_files(tmp_path, split_content("a.tar", ARCHIVES["a.tar"], 20000, [f".part.{letters}" for letters in LETTERS]))
    words = ["data", "unpack", *sorted(tmp_path.glob("a.tar.*")), "--out", tmp_path / "out"]
    assert "7" in good(*words).split()
    (tmp_path / "out" / "videos" / "3.mp4").unlink()
    assert "1" in good(*words).split()
    assert read_files(tmp_path / "out") == FILES
    fail(DataError, *words[:2], *words[3:], key=tmp_path / "a.tar.part.ab")
    fail(DataError, "data", "unpack", tmp_path / "b.zip", "--out", tmp_path / "out", key=tmp_path / "b.zip")
    (tmp_path / "b.mp4").write_bytes(b"x")
    fail(DataError, "data", "unpack", tmp_path / "b.mp4", "--out", tmp_path / "out", key=tmp_path / "b.mp4")


@pytest.mark.parametrize(
    ("names", "volume", "first"),
    [
        (["a.7z"], "a.7z", "a.7z"),
        (["a.7z.002", "a.7z.001"], "a.7z.001", "a.7z.001"),
        (["a.part1.rar"], "a.part1.rar", "a.part1.rar"),
        (["a.zip", "a.z01", "a.z02"], "a.z01", "a.zip"),
        (["a.zip"], "a.z01", "a.zip"),  # the other volumes are beside it
    ],
)
def test_unsupported_archive_error_gives_the_command_that_unpacks_it(tmp_path, names, volume, first):
    for name in names:
        (tmp_path / name).write_bytes(build_zip({"a.mp4": b"x" * 500})[80:])
    (tmp_path / "a.z01").write_bytes(b"PK")
    files = [tmp_path / name for name in names]
    message = fail(DataError, "data", "unpack", *files, "--out", tmp_path / "out", key=files[0])
    assert message.split()[0] == str(tmp_path / volume)
    assert f"`7z x {tmp_path / first}`" in message
    assert not (tmp_path / "out").exists()
    assert message.count("\n") <= 1
