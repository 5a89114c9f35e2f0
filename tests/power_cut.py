"""A power cut after any change of a folder: what may be on the disk then, for every choice of the unsynced changes.

    with record(folder, scratch) as recording:
        write(folder)                             # the real writers; os.rename, os.fsync, … are recorded
        recording.acknowledge()                   # what was written until here must survive
    for moment in recording.moments:
        for files in iterate_survivors(moment):   # what each path holds after a cut at this moment
            restore(files, other_folder)          # to read it as a resumed run would

A file's content is durable after an fsync of the file, a name after one of its folder; of everything else any part may
survive. A change of a name survives only with the earlier changes of the same name.
"""

import contextlib
import itertools
import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "symlink", "link", "truncate")
NUM_RANDOM_CHOICES = 6  # of the unsynced changes, at each moment with many
MAX_EXHAUSTIVE = 4  # unsynced changes of which every choice is tried
# What an unsynced content may become: not written, truncated, or of the new length without its content.
LOSSES = ("old", "half", "zeros")


@dataclass(frozen=True)
class NameChange:
    """Names, each a folder's inode and a text, that a change added and removed."""

    added: dict
    removed: frozenset
    synced: frozenset = frozenset()  # the folders that were synced since

    @property
    def names(self):
        return {*self.added, *self.removed}

    @property
    def is_durable(self):
        return {folder for folder, _ in self.names} <= self.synced


@dataclass(frozen=True)
class Moment:
    """The durable and the unsynced part of a folder's state; `contents` has (durable, current) versions by inode."""

    root: int
    names: dict
    changes: tuple
    contents: dict
    num_acknowledged: int


@dataclass
class Recording:
    """The states of a folder over time."""

    folder: Path
    scratch: Path  # holds a copy of every version of every file
    moments: list = field(default_factory=list)
    num_acknowledged: int = 0
    _names: dict = field(default_factory=dict)  # durable ones
    _changes: list = field(default_factory=list)  # unsynced ones
    _current: dict = field(default_factory=dict)  # names now
    _versions: dict = field(default_factory=dict)  # of each file: the durable and the current one
    _stamps: dict = field(default_factory=dict)
    _handles: dict = field(default_factory=dict)  # open, so that no inode is used again
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _is_busy: bool = False

    def start(self):
        """Take everything that is there as durable."""
        self._observe()
        self._names, self._changes = dict(self._current), []
        self._versions = {inode: (version, version) for inode, (_, version) in self._versions.items()}

    def acknowledge(self):
        """Require that what was written until now survives a cut from now on."""
        self.num_acknowledged += 1
        self.observe()

    def observe(self):
        """Record the folder's state."""
        with self._lock:
            self._observe()
            self.moments.append(
                Moment(
                    root=self.folder.stat().st_ino,
                    names=dict(self._names),
                    changes=tuple(self._changes),
                    contents=dict(self._versions),
                    num_acknowledged=self.num_acknowledged,
                )
            )

    def sync(self, descriptor):
        """Record that a file's content or a folder's names are durable."""
        inode = os.fstat(descriptor).st_ino
        if inode in self._versions:
            self._versions[inode] = (self._versions[inode][1],) * 2
        changes, self._changes = self._changes, []
        for change in changes:
            synced = NameChange(change.added, change.removed, change.synced | {inode})
            if synced.is_durable:
                apply_change(self._names, synced)
            else:
                self._changes.append(synced)

    def close(self):
        for handle in self._handles.values():
            os.close(handle)

    def _observe(self):
        names, links = {}, {}
        waiting = [(self.folder.stat().st_ino, self.folder)]
        while waiting:
            inode, folder = waiting.pop()
            for path in folder.iterdir():
                status = path.lstat()
                names[inode, path.name] = status.st_ino
                if status.st_ino not in self._handles:
                    self._handles[status.st_ino] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
                if path.is_symlink():
                    links[status.st_ino] = os.readlink(path)
                elif path.is_dir():
                    waiting.append((status.st_ino, path))
                else:
                    self._copy_version(path, status)
        for inode, target in links.items():  # a link is written with its name
            self._versions[inode] = (target, target)
        self._add_changes(names)
        self._current = names

    def _copy_version(self, path, status):
        stamp = (status.st_size, status.st_mtime_ns)
        durable, current = self._versions.get(status.st_ino, (None, None))
        if current is not None and self._stamps[status.st_ino] == stamp and status.st_size > 2**16:
            return
        content = path.read_bytes()
        if current is None or current.read_bytes() != content:
            current = self.scratch / f"version-{len(list(self.scratch.iterdir()))}"
            current.write_bytes(content)
        self._stamps[status.st_ino], self._versions[status.st_ino] = stamp, (durable, current)

    def _add_changes(self, names):
        removed = {name: inode for name, inode in self._current.items() if names.get(name) != inode}
        added = {name: inode for name, inode in names.items() if self._current.get(name) != inode}
        sources = {inode: name for name, inode in removed.items()}
        for name, inode in added.items():
            source = {sources[inode]} if inode in sources else set()
            replaced = {name} & removed.keys()
            self._changes.append(NameChange({name: inode}, frozenset(source | replaced)))
            for used in source | replaced:
                removed.pop(used, None)
        self._changes += [NameChange({}, frozenset({name})) for name in removed]


def apply_change(names, change):
    for name in change.removed:
        names.pop(name, None)
    names.update(change.added)


@contextlib.contextmanager
def record(folder, scratch):
    """Record what happens to a folder inside the block; `scratch` is an empty folder outside it."""
    recording = Recording(folder, scratch)
    recording.start()
    real = {name: getattr(os, name) for name in (*CHANGES, "fsync")}

    def wrap(name):
        def call(*arguments, **options):
            with recording._lock:
                if recording._is_busy:
                    return real[name](*arguments, **options)
                recording._is_busy = True
                try:
                    recording.observe()
                    result = real[name](*arguments, **options)
                    recording.observe()
                    if name == "fsync":
                        recording.sync(arguments[0])
                        recording.observe()
                    return result
                finally:
                    recording._is_busy = False

        return call

    try:
        for name in real:
            setattr(os, name, wrap(name))
        yield recording
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        recording.close()


def iterate_survivors(moment, seed=0):
    """Yield what each path may hold after a cut: a file's (loss, durable version, current version), a link's target.

    Every choice of few unsynced changes is tried; of many, all, none, all but one, only one, and some random ones.
    """
    dirty = [inode for inode, (durable, current) in moment.contents.items() if durable != current]
    pending = [*range(len(moment.changes)), *(-1 - i for i in range(len(dirty)))]
    if len(pending) <= MAX_EXHAUSTIVE:
        choices = itertools.chain(*(itertools.combinations(pending, n) for n in range(len(pending) + 1)))
    else:
        generator = random.Random(seed)
        choices = [pending, *([item for item in pending if item != dropped] for dropped in pending)]
        choices += [[], *([item] for item in pending)]
        choices += [[i for i in pending if generator.random() < 0.5] for _ in range(NUM_RANDOM_CHOICES)]
    for choice in choices:
        kept = set(choice)
        for loss in LOSSES if any(-1 - i not in kept for i in range(len(dirty))) else LOSSES[:1]:
            lost = {inode: loss for i, inode in enumerate(dirty) if -1 - i not in kept}
            yield _list_files(moment, _select_names(moment, kept), lost)


def _select_names(moment, kept):
    names, dropped_names = dict(moment.names), set()
    for i, change in enumerate(moment.changes):
        if i in kept and not change.names & dropped_names:
            apply_change(names, change)
        else:
            dropped_names |= change.names
    return names


def _list_files(moment, names, lost):
    children = {}
    for (folder, name), inode in names.items():
        children.setdefault(folder, []).append((name, inode))
    files, waiting = {}, [(moment.root, "")]
    while waiting:
        folder, prefix = waiting.pop()
        for name, inode in children.get(folder, ()):
            if inode not in moment.contents:  # a folder
                files[f"{prefix}{name}/"] = None
                waiting.append((inode, f"{prefix}{name}/"))
            elif isinstance(moment.contents[inode][1], str):
                files[f"{prefix}{name}"] = moment.contents[inode][1]
            else:
                durable, current = moment.contents[inode]
                loss = lost.get(inode)
                files[f"{prefix}{name}"] = (loss, durable, current) if loss else (None, current, current)
    return files


def restore(files, folder):
    """Write what survived to a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in sorted(files.items()):
        path = folder / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            loss, durable, current = content
            if loss is None or (loss == "old" and durable is not None):
                os.link(current if loss is None else durable, path)
            else:
                path.write_bytes(_lose(loss, durable.read_bytes() if durable else b"", current.read_bytes()))


def _lose(loss, old, new):
    start = old if new.startswith(old) else b""  # an appended file keeps what was there
    rest = new[len(start) :]
    return {"old": old, "half": start + rest[: len(rest) // 2], "zeros": start + bytes(len(rest))}[loss]
