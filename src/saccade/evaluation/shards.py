"""Shards: equal parts of an evaluation, for machines to share.

evaluations/shards/<name>/2-of-4.jsonl     the second one's attempts, as any results file has them
evaluations/shards/<name>/2-of-4.cut.json  its cut: which attempts those are, of what whole
evaluations/<name>.jsonl                   all of them, joined (`merge`)
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.data.record import plain, typed
from saccade.errors import ConfigError, RunError
from saccade.runlog import write_text

CUT = ".cut.json"
SHARDS = Path("evaluations", "shards")
Key = tuple[str, int | None, int]  # what was attempted: task, frames and repeat of a results file's line


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One of several equal parts of an evaluation, for machines to share: the `index`-th of `of`, from 1.

    >>> Shard.read("2/4")
    Shard(index=2, of=4)
    """

    index: int
    of: int

    @classmethod
    def read(cls, text: str) -> "Shard":
        """A shard as it is written, such as "2/4". Raises ConfigError."""
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"a shard is written i/n with i from 1 to n, such as 2/4; it can't be {text!r}")
        return cls(index=int(found[1]), of=int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    @property
    def stem(self) -> str:
        """What its files are called."""
        return f"{self.index}-of-{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a shard is a part of. `whole` is a digest of all tasks, `under` says what else results depend on; of each
    attempt `keys` has the key, and `places` where it stands among the attempts of all shards.

    >>> Cut(shard=Shard(index=1, of=2), whole="a3…", under="seed=1f…", places=(0,), keys=(("4c…", 8, 0),)).shard.of
    2
    """

    shard: Shard
    whole: str
    under: str
    places: tuple[int, ...]
    keys: tuple[Key, ...]

    def write(self, results: Path) -> None:
        """Write it beside the results that it describes."""
        write_text(results.with_suffix(CUT), json.dumps(plain(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Cut":
        """The cut in a file. Raises RunError where it can't be read, DataError where it is none."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{path} can't be read: {error}; run the shard's command again") from error
        return typed(value, cls, str(path))


def shard_path(folder: Path, name: str, shard: Shard | None) -> Path:
    """The results file of an evaluation, or of a shard of it, of the run in `folder`."""
    return folder / "evaluations" / f"{name}.jsonl" if shard is None else folder / SHARDS / name / f"{shard.stem}.jsonl"


def of_shard(cut: Path, suffix: str) -> Path:
    """A file beside a shard's cut, such as its results (".jsonl")."""
    return cut.with_name(cut.name.removesuffix(CUT) + suffix)


def shards_of(folder: Path, name: str) -> Sequence[Path]:
    """The cuts of an evaluation that lie in a run."""
    return sorted((folder / SHARDS / name).glob(f"*{CUT}"))


def evaluations_in_shards(folder: Path) -> set[str]:
    """The names of the evaluations of which a run holds shards."""
    return {cut.parent.name for cut in (folder / SHARDS).glob(f"*/*{CUT}")}
