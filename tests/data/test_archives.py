"""Archives: whole or in parts, unpacked as far as wanted, gone on with; nothing in them says where anything goes."""

import os
import random
import shutil
import stat
import tarfile
import tracemalloc
import zipfile

import pytest
from archive_cases import taped, zipped
from commands import bad, good

from saccade.data import archives as module
from saccade.data.archives import Archive, archives, complete, packed_in, unpack
from saccade.errors import DataError, RunError

FILES = {f"films/{at}.mp4": bytes([at]) * 5000 for at in range(7)}
PACKED = {
    "a.zip": zipped(FILES),
    "a.tar": taped(FILES),
    "a.tar.gz": taped(FILES, "w:gz"),
    "a.tgz": taped(FILES, "w:gz"),
    "a.tar.xz": taped(FILES, "w:xz"),
    "a.tar.bz2": taped(FILES, "w:bz2"),
}


def put(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def held(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(name, content, size, suffixes):
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    assert 1 < len(pieces) <= len(suffixes)
    return {f"{name}{suffix}": piece for suffix, piece in zip(suffixes, pieces, strict=False)}


LETTERS = [f"a{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    "suffixes", [[""], [f".part.{each}" for each in LETTERS], [f".{at:03}" for at in range(1, 99)]]
)
def test_every_form_is_unpacked_whole_or_in_parts(name, suffixes, tmp_path):
    content = PACKED[name]
    pieces = {name: content} if suffixes == [""] else cut(name, content, len(content) // 5 + 1, suffixes)
    put(tmp_path, pieces)
    (found,) = archives(packed_in(tmp_path))
    assert found == Archive(name=name, parts=tuple(sorted(pieces)))
    assert unpack(tmp_path, found, tmp_path / "out") == len(FILES)
    assert held(tmp_path / "out") == FILES
    assert unpack(tmp_path, found, tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["v.tar.part.aa", "v.tar.part.ab", "subtitles.tar"], ["subtitles.tar", "v.tar"]),
        (["x.tar.gzaa", "x.tar.gzab"], ["x.tar.gz"]),
        (["x.zip", "x.zip.md", "x.zip.txt", "x.tar.md5", "x.jsonl", "x.tar.zst", "zip"], ["x.zip"]),
        (["x.tar.part0", "x.tar.part1"], ["x.tar"]),
        (
            [f"x.zip.part{at}" for at in range(1, 12)],
            ["x.zip"],
        ),
        (["v/x.tar.part-aa", "w/x.tar.part-aa"], ["v/x.tar", "w/x.tar"]),
        (["x.tar.gz", "x.tar.gz.part.ab"], ["x.tar.gz"]),  # joined already
    ],
)
def test_parts_are_told_from_other_files(files, names):
    random.Random(1).shuffle(files)
    assert [each.name for each in archives(files)] == names


def test_ten_parts_are_in_the_order_of_their_numbers():
    (found,) = archives([f"x.zip.part{at}" for at in range(1, 12)])
    assert found.parts[-2:] == ("x.zip.part10", "x.zip.part11")


@pytest.mark.parametrize(
    ("files", "gap"),
    [
        (["v.tar.part.aa", "v.tar.part.ac"], "v.tar.part.ac"),
        (["v.tar.part.ab", "v.tar.part.ac"], "v.tar.part.ab"),
        (["v.zip.002", "v.zip.003"], "v.zip.002"),
        (["v.zip.001", "v.zip.002", "v.zip.004"], "v.zip.004"),
    ],
)
def test_a_missing_part_is_told(files, gap):
    with pytest.raises(DataError, match=f"{gap}: a part before it is missing; download all parts of v"):
        archives(files)


@pytest.mark.parametrize("name", PACKED)
def test_an_archive_whose_end_is_missing_is_told_and_what_came_before_stays(name, tmp_path):
    noise = {f"{at}.mp4": random.Random(at).randbytes(20000) for at in range(5)}
    mode = {"a.tar": "w", "a.tar.xz": "w:xz", "a.tar.bz2": "w:bz2"}.get(name, "w:gz")
    content = zipped(noise) if name == "a.zip" else taped(noise, mode)
    put(tmp_path, {name: content[: len(content) * 7 // 10]})
    with pytest.raises(DataError, match=rf"{name} can't be unpacked \(.+\); download it again, all its parts"):
        unpack(tmp_path, *archives([name]), tmp_path / "out")
    there = held(tmp_path / "out") if (tmp_path / "out").exists() else {}
    assert there.items() <= noise.items()  # whole ones alone
    put(tmp_path, {name: content})
    unpack(tmp_path, *archives([name]), tmp_path / "out")
    assert held(tmp_path / "out") == noise


def test_a_changed_byte_in_a_zip_is_told(tmp_path):
    stored = zipped({"1.mp4": random.Random(0).randbytes(4000)})
    broken = bytearray(stored)
    broken[2000] ^= 1
    put(tmp_path, {"a.zip": bytes(broken)})
    with pytest.raises(DataError, match="can't be unpacked"):
        unpack(tmp_path, *archives(["a.zip"]), tmp_path / "out")
    assert held(tmp_path / "out") == {}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:\\x", "a/..", "\\x"])
@pytest.mark.parametrize("make", [zipped, taped])
def test_a_name_that_leads_out_is_refused(make, name, tmp_path):
    end = "zip" if make is zipped else "tar"
    put(tmp_path / "in", {f"a.{end}": make({"good": b"1", name: b"2"})})
    with pytest.raises(DataError, match=r"which leads out of .*; don't trust it"):
        unpack(tmp_path / "in", *archives([f"a.{end}"]), tmp_path / "in" / "out")
    assert held(tmp_path) == {f"in/a.{end}": (tmp_path / "in" / f"a.{end}").read_bytes(), "in/out/good": b"1"}
    # what rows name decides where files go, so that such a name has no say
    put(tmp_path / "in", {f"b.{end}": make({name: b"2", "deep/in/x": b"3"})})
    left = complete(tmp_path / "in", {"v/y"}, named=["v/y"], packed=archives([f"b.{end}"]))
    assert left == {"v/y"}
    assert len(held(tmp_path)) == 3


def test_links_and_devices_are_never_made(tmp_path):
    link, hard, device = tarfile.TarInfo("link"), tarfile.TarInfo("hard"), tarfile.TarInfo("device")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard.type, hard.linkname = tarfile.LNKTYPE, "/etc/passwd"
    device.type = tarfile.CHRTYPE
    put(tmp_path, {"a.tar": taped({"link": link, "hard": hard, "device": device, "link/x": b"1"})})
    unpack(tmp_path, *archives(["a.tar"]), tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        info = zipfile.ZipInfo("other")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        packed.writestr(info, "/etc/passwd")
    unpack(tmp_path, *archives(["b.zip"]), tmp_path / "out")
    assert held(tmp_path / "out") == {"link/x": b"1"}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_what_rows_name_is_found_wherever_an_archive_has_it(tmp_path):
    put(
        tmp_path,
        {
            "films.zip": zipped({"Set/data/1.mp4": b"1", "Set/data/9.mp4": b"9", "__MACOSX/Set/data/._1.mp4": b"no"}),
            "scannet.zip": zipped({"s1.mp4": b"s1"}),  # beside others of that name, by its archive
            "more.zip": zipped({"clips/2.mp4": b"2", "clips/s1.mp4": b"not it", "clips/twice.png": b"which?"}),
        },
    )
    wanted = {"data/1.mp4", "videos/2.mp4", "scannet/s1.mp4", "v5/twice.png"}
    named = {*wanted, "other/s1.mp4", "v1/twice.png"}
    left = complete(tmp_path, wanted, named=named, packed=archives(packed_in(tmp_path)))
    found = {name: content for name, content in held(tmp_path).items() if not name.endswith(".zip")}
    assert found == {"data/1.mp4": b"1", "videos/2.mp4": b"2", "scannet/s1.mp4": b"s1"}
    assert left == {"v5/twice.png"}


def test_archives_of_the_right_name_come_first_and_no_more_than_needed(tmp_path):
    put(tmp_path, {"a.tar": taped({"x": b"1"}), "subtitles.tar": taped({"subtitles/1.json": b"{}"})})
    asked = []
    complete(
        tmp_path,
        {"subtitles/1.json"},
        named=[],
        packed=archives(packed_in(tmp_path)),
        fetched=lambda archive: asked.append(archive.name),
    )
    assert asked == ["subtitles.tar"]


def test_a_full_disk_is_told_and_the_same_call_goes_on(tmp_path, monkeypatch):
    put(tmp_path, {"a.zip": PACKED["a.zip"]})
    usage, calls = shutil.disk_usage(tmp_path), []

    def short(path):
        calls.append(path)
        return usage._replace(free=10**9 if len(calls) < 4 else 100)

    monkeypatch.setattr(module.shutil, "disk_usage", short)
    with pytest.raises(DataError, match=r"films/3.mp4 of .*a.zip needs 0.00 GiB and the disk of .*free some space and"):
        unpack(tmp_path, *archives(["a.zip"]), tmp_path / "out")
    assert held(tmp_path / "out").items() < FILES.items()
    monkeypatch.undo()
    assert unpack(tmp_path, *archives(["a.zip"]), tmp_path / "out") == 4
    assert held(tmp_path / "out") == FILES


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    put(tmp_path, {"a.zip": PACKED["a.zip"], "out": b"a file"})
    with pytest.raises(RunError, match="can't be written"):
        unpack(tmp_path, *archives(["a.zip"]), tmp_path / "out")


def test_an_encrypted_archive_is_told(tmp_path):
    content = bytearray(zipped({"1.mp4": b"x" * 99}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    put(tmp_path, {"a.zip": bytes(content)})
    with pytest.raises(DataError, match=r"a.zip can't be unpacked: .*password.*; unpack it by hand"):
        unpack(tmp_path, *archives(["a.zip"]), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("make", [zipped, taped])
def test_large_members_are_streamed(make, tmp_path):
    name = "a.zip" if make is zipped else "a.tar"
    put(tmp_path, {name: make({"1.mp4": bytes(60 * 2**20)})})
    tracemalloc.start()
    unpack(tmp_path, *archives([name]), tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert os.path.getsize(tmp_path / "out" / "1.mp4") == 60 * 2**20
    assert peak < 12 * 2**20


def test_the_command_unpacks_and_goes_on(tmp_path):
    put(tmp_path, cut("a.tar", PACKED["a.tar"], 20000, [f".part.{each}" for each in LETTERS]))
    words = ["data", "unpack", *sorted(tmp_path.glob("a.tar.*")), "--out", tmp_path / "out"]
    assert "7 files written" in good(*words)
    (tmp_path / "out" / "films" / "3.mp4").unlink()
    assert "1 file written" in good(*words)
    assert held(tmp_path / "out") == FILES
    assert "a part before it is missing" in bad(*words[:2], *words[3:])
    assert "there is no file" in bad("data", "unpack", tmp_path / "b.zip", "--out", tmp_path / "out")
    (tmp_path / "b.mp4").write_bytes(b"x")
    assert "is no archive" in bad("data", "unpack", tmp_path / "b.mp4", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a.7z"], "a.7z can't be unpacked here; unpack it by hand: `7z x"),
        (["a.7z.002", "a.7z.001"], "a.7z.001 can't be unpacked here"),
        (["a.part1.rar"], "a.part1.rar can't be unpacked here"),
        (["a.zip", "a.z01", "a.z02"], "a.z01 is a volume of an archive that is split; unpack it by hand: `7z x"),
        (["a.zip"], "a.z01 is a volume of an archive that is split"),  # the others lie beside it
    ],
)
def test_archives_of_other_forms_and_split_ones_are_told_with_what_unpacks_them(tmp_path, names, sentence):
    for name in names:
        (tmp_path / name).write_bytes(zipped({"a.mp4": b"x" * 500})[80:])
    (tmp_path / "a.z01").write_bytes(b"PK")
    said = bad("data", "unpack", *(tmp_path / name for name in names), "--out", tmp_path / "out")
    assert sentence in said
    assert "in one folder" in said
    assert not (tmp_path / "out").exists()
    assert said.count("\n") <= 1
