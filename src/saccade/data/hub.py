"""Download datasets of the Hugging Face hub into ordinary folders, and models into its cache.

The only module that uses huggingface_hub, an extra.

    hub:main, hub:1a2b3c                a revision, for a benchmark, which names its dataset itself
    hub:owner/name/data/a.parquet       a file of a dataset; hub:owner/name@1a2b3c/... pins a revision
           │
           └── folder ── hub.json       the commit of the revision at the first call, and its files
                     └── data/a.parquet, with the hub's relative paths

A folder holds one commit: the first call resolves the revision, later calls download files of that commit. Files that
are in the folder need no network.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from saccade.data.archives import (
    ProgressCallback,
    explain_manual_unpacking,
    extract_missing,
    find_archives,
    require_disk_space,
    unpack,
)
from saccade.errors import ConfigError, DataError, ModelError, convert_errors
from saccade.utils.files import OS_ERROR_HINTS, convert_file_errors, open_file, read_text, write_text
from saccade.utils.text import pluralize

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_CACHE_DIR = "~/.cache/saccade/hub"
HUB_PREFIX = "hub:"
DEFAULT_REVISION = "main"
LISTING_TIMEOUT = 30.0  # seconds
_MODEL_NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILE_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # weights, tokenizer, configurations
_FILE_ADDRESS_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?/(?P<file>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSnapshot:
    """One commit of a dataset: the sizes in bytes of its files, and the SHA-256 of large ones."""

    name: str
    commit: str
    sizes: Mapping[str, int]
    digests: Mapping[str, str]


def match_files(files: Collection[str], patterns: Iterable[str]) -> list[str]:
    """Return the files of the first pattern that matches any file; a star doesn't match "/".

    >>> match_files(["x.jsonl", "old/y.jsonl"], ["*.parquet", "*.jsonl"])
    ['x.jsonl']
    """
    matches = (
        [file for file in files if file.count("/") == pattern.count("/") and PurePosixPath(file).match(pattern)]
        for pattern in patterns
    )
    return next(filter(None, matches), [])


def check_installed() -> None:
    """Raise ConfigError unless huggingface_hub is installed."""
    try:
        importlib.import_module("huggingface_hub")
    except ImportError as error:
        fix = "install it with: pip install 'saccade[data]'"
        raise ConfigError(f"downloading from the hub needs huggingface_hub; {fix}", key="huggingface_hub") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HubClient:
    """Download from a hub or a mirror of it into `cache_dir`.

    huggingface_hub finds the token for datasets that need one (`hf auth login`, or HF_TOKEN).
    """

    endpoint: str = DEFAULT_ENDPOINT
    cache_dir: str = DEFAULT_CACHE_DIR

    def download(self, name: str, patterns: Sequence[str], *, revision: str = DEFAULT_REVISION) -> Path:
        """Download the files of the first pattern that matches any; return the dataset's folder. Raises DataError."""
        folder, snapshot = self._resolve_snapshot(name, revision)
        files = match_files(snapshot.sizes, patterns)
        if not files:
            problem = f"the dataset {name} at {self.endpoint} has no file that matches {', '.join(patterns)}"
            raise DataError(problem, key=name, value=tuple(patterns))
        self._download_files(folder, snapshot, files)
        return folder

    def download_file(self, address: str) -> Path:
        """Download one file, such as `hub:owner/name/data/a.parquet`, and return its path.

        Raises ConfigError for an address of another form, DataError for a file that the dataset doesn't have.
        """
        match = _FILE_ADDRESS_PATTERN.fullmatch(address.removeprefix(HUB_PREFIX))
        if match is None:
            forms = f"{HUB_PREFIX}owner/name/path or {HUB_PREFIX}owner/name@revision/path"
            raise ConfigError(f"{address}: a file on the hub is {forms}", key=address)
        folder, snapshot = self._resolve_snapshot(match["name"], match["revision"] or DEFAULT_REVISION)
        file = match["file"]
        if file not in snapshot.sizes:
            raise DataError(f"the dataset {snapshot.name} at {self.endpoint} has no file {file}", key=file)
        self._download_files(folder, snapshot, [file])
        return folder / file

    def download_missing(
        self,
        folder: Path,
        paths: Iterable[str],
        *,
        referenced: Iterable[str] = (),
        on_progress: ProgressCallback = lambda *_: None,
    ) -> None:
        """Download the files at `paths` that are missing in a folder that `download` returned, such as media of rows.

        Files that the dataset holds directly come first, then members of its archives (see `extract_missing`, which
        needs `referenced`). Raises DataError if files are in neither, or an archive can't be read or doesn't fit.
        """
        snapshot = _read_snapshot(folder)
        missing = compute_relative_paths(folder, (path for path in paths if not os.path.isfile(path)))
        self._download_files(folder, snapshot, sorted(missing.intersection(snapshot.sizes)))
        not_found = extract_missing(
            folder,
            missing.difference(snapshot.sizes),
            referenced=compute_relative_paths(folder, referenced),
            archives=find_archives(snapshot.sizes),
            ensure_downloaded=lambda archive: self._download_files(folder, snapshot, archive.parts),
            on_progress=on_progress,
        )
        if not_found:
            problem = f"{folder} lacks {pluralize(len(not_found), 'file')}, first {min(not_found)}"
            hint = explain_manual_unpacking(snapshot.sizes)
            fix = f"copy them there{f'; {hint}' if hint else ''}"
            problem += f", which {snapshot.name} holds neither as files nor in its archives; {fix}"
            raise DataError(problem, key=str(folder), value=min(not_found))

    def unpack_archives(
        self, folder: Path, names: Iterable[str], *, on_progress: ProgressCallback = lambda *_: None
    ) -> None:
        """Download archives into a folder that `download` returned, and unpack them completely. Raises DataError."""
        snapshot = _read_snapshot(folder)
        for archive in find_archives(snapshot.sizes):
            if archive.name in names:
                self._download_files(folder, snapshot, archive.parts)
                unpack(folder, archive, folder, on_progress=on_progress)

    def _resolve_snapshot(self, name: str, revision: str) -> tuple[Path, DatasetSnapshot]:
        """Return a dataset's folder and its snapshot; the first call for a revision resolves and stores the commit."""
        folder = Path(self.cache_dir).expanduser() / (name if revision == DEFAULT_REVISION else f"{name}@{revision}")
        if (folder / "hub.json").is_file():
            return folder, _read_snapshot(folder)
        with self._translate_errors(folder, name, f"the dataset {name}"):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self.endpoint)
            info = api.dataset_info(name, revision=revision, timeout=LISTING_TIMEOUT, files_metadata=True)
        files = sorted(info.siblings or (), key=lambda file: file.rfilename)
        names = (file.rfilename for file in files)
        outside = next((file for file in names if file.startswith("/") or ".." in file.split("/")), None)
        if not info.sha or outside:
            reason = f"it lists {outside}, which leads out of the folder" if outside else "it names no commit"
            problem = f"the listing of {name} at {self.endpoint} can't be used: {reason}"
            raise DataError(problem, key=name, value=outside)
        snapshot = DatasetSnapshot(
            name=name,
            commit=info.sha,
            sizes={file.rfilename: file.size or 0 for file in files},
            digests={file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None},
        )
        write_text(folder / "hub.json", json.dumps(asdict(snapshot), indent=1))
        return folder, snapshot

    def _download_files(self, folder: Path, snapshot: DatasetSnapshot, files: Iterable[str]) -> None:
        """Download the files that aren't in the folder; huggingface_hub writes each file atomically."""
        for file in files:
            if (folder / file).is_file():
                continue
            require_disk_space(folder, snapshot.sizes.get(file, 0), f"downloading {file} of {snapshot.name}")
            with self._translate_errors(folder, snapshot.name, f"{file} of the dataset {snapshot.name}"):
                from huggingface_hub import hf_hub_download

                hf_hub_download(
                    *(snapshot.name, file),
                    repo_type="dataset",
                    revision=snapshot.commit,
                    local_dir=folder,
                    endpoint=self.endpoint,
                )
            if file in snapshot.digests:
                with open_file(folder / file) as content:
                    digest = hashlib.file_digest(content, "sha256").hexdigest()
                if digest != snapshot.digests[file]:
                    (folder / file).unlink()
                    problem = f"{file} of {snapshot.name} is damaged (its SHA-256 differs); run the same command again"
                    raise DataError(problem, key=file)

    @contextlib.contextmanager
    def _translate_errors(self, folder: Path, name: str, what: str) -> Iterator[None]:
        """Turn errors of huggingface_hub into DataError; `what` is the subject of the sentence."""
        check_installed()
        from huggingface_hub import errors

        explanations = {
            errors.OfflineModeIsEnabled: f"{what} can't be downloaded, since huggingface_hub is set to offline mode; "
            "unset HF_HUB_OFFLINE, or copy the dataset by hand and name the copy instead",
            errors.GatedRepoError: f"{what} is gated; accept its terms at {self.endpoint}/datasets/{name}, then log in "
            "with `hf auth login`",
            errors.RepositoryNotFoundError: f"{self.endpoint} has no dataset {name}, or it is private; check the name, "
            "or log in",
            errors.RevisionNotFoundError: f"the dataset {name} at {self.endpoint} has no such revision; check the "
            "revision",
            errors.RemoteEntryNotFoundError: f"{self.endpoint} lists {what} but doesn't serve it; try again later",
        }
        fix = "check the network, or copy the dataset by hand and name the copy instead"
        try:
            with convert_errors(DataError, f"{what} can't be downloaded from {self.endpoint}; {fix}", key=name):
                yield
        except DataError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in OS_ERROR_HINTS:
                with convert_file_errors(folder):
                    raise cause from None
            explanation = next((text for kind, text in explanations.items() if isinstance(cause, kind)), str(error))
            raise DataError(explanation, key=name) from cause


def is_model_name(text: str) -> bool:
    """Return whether a text is the name of a model on the hub rather than a path: owner/name, without such a folder.

    >>> is_model_name("Qwen/Qwen3-VL-8B-Instruct"), is_model_name("./a/b"), is_model_name("a/b/c")
    (True, False, False)
    """
    return _MODEL_NAME_PATTERN.fullmatch(text) is not None and not Path(text).parent.exists()


def find_model(name: str, *, downloads: bool = True) -> Path:
    """Return the folder of a published model in the cache of huggingface_hub, downloading the files it lacks.

    Without `downloads` only the cache is read. Raises ConfigError without huggingface_hub, ModelError for a model that
    is neither in the cache nor on the hub.
    """
    command = f"hf download {name} --local-dir models/{name.rpartition('/')[2]}"
    try:
        check_installed()
    except ConfigError as error:
        message = f"{error}; or download the model elsewhere with: {command}"
        raise ConfigError(message, key="huggingface_hub", value=name) from error
    from huggingface_hub import snapshot_download

    fix = f"check the name, or the network; `{command}` downloads it, and --model then names that folder"
    message = f"there is no folder {name}, and no such model is in the cache"
    message += f"; {fix}" if not downloads else f" or could be downloaded from {DEFAULT_ENDPOINT}; {fix}"
    with convert_errors(ModelError, message, key=name, value=name):
        folder = snapshot_download(
            name, allow_patterns=_MODEL_FILE_PATTERNS, endpoint=DEFAULT_ENDPOINT, local_files_only=not downloads
        )
    return Path(folder)


def _read_snapshot(folder: Path) -> DatasetSnapshot:
    with convert_errors(DataError, f"{folder / 'hub.json'} can't be read; delete {folder} and download it again"):
        return DatasetSnapshot(**json.loads(read_text(folder / "hub.json")))


def compute_relative_paths(folder: Path, paths: Iterable[str]) -> set[str]:
    """Return paths relative to a folder. Raises DataError for a path outside of it, which a row may name."""
    relative_paths = set()
    for path in paths:
        relative = os.path.relpath(path, folder)
        if relative.split(os.sep)[0] == "..":
            raise DataError(f"{folder}: a row names {path}, which is outside of this folder; fix the row", key=path)
        relative_paths.add(Path(relative).as_posix())
    return relative_paths
