"""Data sets of the Hugging Face hub, fetched into ordinary folders: the only user of huggingface_hub, an extra.

    hub:main, hub:1a2b3c                a revision, for a benchmark, which knows its data set
    hub:owner/name/data/a.parquet       a file of a data set; hub:owner/name@1a2b3c/... of a revision
           │
           └── folder ── hub.json       the commit that the revision was when it was first asked for, its files
                     └── data/a.parquet, as the hub lays them out

A folder holds one commit: the first call resolves the revision, all later ones ask for that commit's files. Where these
are in place nobody is asked, so that what was fetched once is there without a network, too.
"""

import contextlib
import fnmatch
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from saccade.data.archives import Told, archives, by_hand, complete, room, sha256, unpack, untold
from saccade.data.record import whole
from saccade.errors import ConfigError, DataError, boundary
from saccade.runlog import MENDS, writing

HUB = "https://huggingface.co"
HOME = "~/.cache/saccade/hub"
MARK = "hub:"
MAIN = "main"
SECONDS = 30.0  # to wait for a listing
_FILE = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?/(?P<file>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a folder is a copy of: a data set, one commit of it, and the files of that commit, with their sizes in bytes
    and the SHA-256 of the large ones.

    >>> Pin(name="a/b", commit="1a2b", files=("x.jsonl", "old/y.jsonl")).fitting("*.parquet", "*.jsonl")
    ('x.jsonl',)
    """

    name: str
    commit: str
    files: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def fitting(self, *patterns: str) -> tuple[str, ...]:
        """The files that fit the first pattern which any fits; a star stays within a folder."""
        found = (tuple(file for file in self.files if _fits(file, pattern)) for pattern in patterns)
        return next(filter(None, found), ())


def check_installed() -> None:
    """See that the hub can be spoken with. Raises ConfigError."""
    try:
        importlib.import_module("huggingface_hub")
    except ImportError as error:
        mend = "install it with: pip install 'saccade[hub]'"
        raise ConfigError(f"fetching from the hub needs huggingface_hub; {mend}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A hub, or a mirror that speaks as it does, and the folder `home` in which what it has is kept.

    A token for data sets that want one is found by huggingface_hub as usual (`hf auth login`, or HF_TOKEN).
    """

    endpoint: str = HUB
    home: str = HOME

    def copy(self, name: str, patterns: Sequence[str], *, revision: str = MAIN) -> Path:
        """The folder with those files of a data set that fit the first pattern which any fits. Raises DataError."""
        folder, pin = self._pinned(name, revision)
        wanted = pin.fitting(*patterns)
        if not wanted:
            raise DataError(f"the data set {name} at {self.endpoint} has no file like {', '.join(patterns)}")
        self._fetch(folder, pin, wanted)
        return folder

    def file(self, address: str) -> Path:
        """A single file, such as `hub:owner/name/data/a.parquet`. Raises ConfigError (another form) and DataError."""
        found = _FILE.fullmatch(address.removeprefix(MARK))
        if found is None:
            raise ConfigError(
                f"{address}: a file on the hub is {MARK}owner/name/path or {MARK}owner/name@revision/path"
            )
        folder, pin = self._pinned(found["name"], found["revision"] or MAIN)
        if found["file"] not in pin.files:
            raise DataError(f"the data set {pin.name} at {self.endpoint} has no file {found['file']}")
        self._fetch(folder, pin, [found["file"]])
        return folder / found["file"]

    def add(self, folder: Path, paths: Iterable[str], *, named: Iterable[str] = (), told: Told = untold) -> None:
        """Fetch files into a folder that `copy` gave, such as the media of its rows: those that the hub has by
        themselves, then those that its archives hold (`archives.complete`, which `named` is for).

        DataError where some are in neither, and where an archive can't be used or doesn't fit on the disk.
        """
        pin = _read(folder)
        lacking = below(folder, (path for path in paths if not Path(path).is_file()))
        self._fetch(folder, pin, sorted(lacking.intersection(pin.files)))
        left = complete(
            folder,
            lacking.difference(pin.files),
            named=below(folder, named),
            packed=archives(pin.files),
            fetched=lambda archive: self._fetch(folder, pin, archive.parts),
            told=told,
        )
        if left:
            first = f"{folder} lacks {len(left)} files, first {min(left)}"
            how = by_hand(pin.files)
            mend = f"copy them there; {how}" if how else "copy them there"
            raise DataError(f"{first}, which {pin.name} holds neither by themselves nor in archives; {mend}")

    def unpack(self, folder: Path, names: Iterable[str], *, told: Told = untold) -> None:
        """Fetch archives into a folder that `copy` gave, and unpack all that is in them. Raises DataError as `add`."""
        pin = _read(folder)
        for archive in archives(pin.files):
            if archive.name in names:
                self._fetch(folder, pin, archive.parts)
                unpack(folder, archive, folder, told=told)

    def _pinned(self, name: str, revision: str) -> tuple[Path, Pin]:
        """The folder of a data set at a revision, and what it is pinned to: now, if it wasn't before."""
        folder = Path(self.home).expanduser() / (name if revision == MAIN else f"{name}@{revision}")
        if (folder / "hub.json").is_file():
            return folder, _read(folder)
        with self._reaching(folder, name, f"the data set {name}"):
            from huggingface_hub import HfApi

            info = HfApi(endpoint=self.endpoint).dataset_info(
                name, revision=revision, timeout=SECONDS, files_metadata=True
            )
        files = tuple(sorted(each.rfilename for each in info.siblings or ()))
        outside = next((file for file in files if file.startswith("/") or ".." in file.split("/")), None)
        if not info.sha or outside:
            why = f"it holds {outside}" if outside else "it names no commit"
            raise DataError(f"the listing of {name} at {self.endpoint} can't be used: {why}")
        pin = Pin(
            name=name,
            commit=info.sha,
            files=files,
            sizes={each.rfilename: each.size for each in info.siblings or () if each.size is not None},
            digests={each.rfilename: each.lfs.sha256 for each in info.siblings or () if each.lfs is not None},
        )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with whole(folder / "hub.json") as partial:
                partial.write_text(json.dumps(asdict(pin), indent=1), encoding="utf-8")
        return folder, pin

    def _fetch(self, folder: Path, pin: Pin, files: Iterable[str]) -> None:
        """Put into the folder what isn't there; each file appears whole or not at all."""
        for file in files:
            if (folder / file).is_file():
                continue
            room(folder, pin.sizes.get(file, 0), f"fetching {file} of {pin.name}")
            with self._reaching(folder, pin.name, f"{file} of the data set {pin.name}"):
                from huggingface_hub import hf_hub_download

                hf_hub_download(
                    *(pin.name, file),
                    repo_type="dataset",
                    revision=pin.commit,
                    local_dir=folder,
                    endpoint=self.endpoint,
                )
            if pin.digests.get(file) not in (None, sha256(folder / file)):
                (folder / file).unlink()
                raise DataError(
                    f"{file} of {pin.name} came damaged (its digest is another); run the same command again"
                )

    @contextlib.contextmanager
    def _reaching(self, folder: Path, name: str, what: str) -> Iterator[None]:
        """Say in one sentence why something can't be had from the hub, and what helps."""
        check_installed()
        mend = "check the network, or copy the data set by hand and name the copy instead"
        try:
            with boundary(DataError, f"{what} can't be fetched from {self.endpoint}; {mend}"):
                yield
        except DataError as error:
            with writing(folder):
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in MENDS:
                    raise error.__cause__ from None
            said = self._refusal(error.__cause__, name, what)
            raise DataError(said or str(error)) from error.__cause__

    def _refusal(self, why: BaseException | None, name: str, what: str) -> str:
        """What a refusal of the hub means; "" where it isn't one."""
        from huggingface_hub import errors

        if isinstance(why, errors.OfflineModeIsEnabled):
            mend = "unset HF_HUB_OFFLINE, or copy the data set by hand and name the copy instead"
            return f"{what} can't be fetched, since huggingface_hub is told to stay offline; {mend}"
        if isinstance(why, errors.GatedRepoError):
            terms = f"accept its terms at {self.endpoint}/datasets/{name}, then log in with `hf auth login`"
            return f"{what} is for those who agreed to its terms; {terms}"
        if isinstance(why, errors.RepositoryNotFoundError):
            return f"{self.endpoint} has no data set {name}, or it is private; check the name, or log in"
        if isinstance(why, errors.RevisionNotFoundError):
            return f"the data set {name} at {self.endpoint} has no such revision; check it"
        if isinstance(why, errors.RemoteEntryNotFoundError):
            return f"{self.endpoint} lists {what} but doesn't have it; try again later"
        return ""


def _fits(file: str, pattern: str) -> bool:
    names, parts = PurePosixPath(file).parts, PurePosixPath(pattern).parts
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def _read(folder: Path) -> Pin:
    with boundary(DataError, f"{folder / 'hub.json'} can't be read; delete {folder} and fetch it again"):
        found = json.loads((folder / "hub.json").read_text(encoding="utf-8"))
        return Pin(**{**found, "files": tuple(found["files"])})


def below(folder: Path, paths: Iterable[str]) -> set[str]:
    """Paths as seen from a folder. DataError for one that leads out of it, as a row may say by mistake or by intent."""
    found = set()
    for path in paths:
        seen = os.path.relpath(path, folder)
        if seen.split(os.sep)[0] == "..":
            raise DataError(f"{folder}: a row names {path}, which lies outside of it; mend the row")
        found.add(Path(seen).as_posix())
    return found
