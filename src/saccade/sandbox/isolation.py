"""Which walls this machine can raise around a guest, and what each of them means; the report of `saccade doctor`.

Three walls stand independently: *namespaces* (own files, processes, network), *Landlock* (files, by path) and *seccomp*
(system calls). A guest needs seccomp and at least one of the other two; "strict" wants all three.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from saccade.errors import ConfigError
from saccade.tools._sandbox.limits import Isolation

Namespaces = Literal["", "root", "user"]  # none; made by root's right; made with a user namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """What stands around every guest of one zygote.

    `landlock` is the version of its interface (0: none); `own_user`: each guest runs as a user of its own.

    >>> Walls(namespaces="user", landlock=6, seccomp=True, own_user=False).complete
    True
    """

    namespaces: Namespaces
    landlock: int
    seccomp: bool
    own_user: bool

    @property
    def complete(self) -> bool:
        """Whether all three walls stand."""
        return bool(self.namespaces and self.landlock and self.seccomp)

    @property
    def enough(self) -> bool:
        """Whether files, network and processes are each behind one wall at least."""
        return bool(self.seccomp and (self.namespaces or self.landlock))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One line of the report: is it active, what was found, and what that means."""

    name: str
    active: bool
    found: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a zygote found it can do, after trying it: `escapes` are forbidden things that worked nevertheless."""

    walls: Walls
    layers: tuple[Layer, ...]
    reasons: Mapping[str, str]
    escapes: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The walls that don't stand."""
        return tuple(layer.name for layer in self.layers[:3] if not layer.active)

    @property
    def safe(self) -> bool:
        """Whether there are enough walls, and nothing got through them."""
        return self.walls.enough and not self.escapes

    @property
    def sentence(self) -> str:
        """The whole in one sentence."""
        if not self.safe:
            return f"model-written code can't be run safely here: {self._lack}"
        if self.walls.complete:
            return "model-written code is behind all walls: namespaces, Landlock and seccomp"
        return f"model-written code is jailed, with one wall for files and network instead of two: {self._lack}"

    @property
    def _lack(self) -> str:
        lacks = [
            f"{layer.name} are missing ({layer.found})"
            if layer.name == "namespaces"
            else f"{layer.name} is missing ({layer.found})"
            for layer in self.layers[:3]
            if not layer.active
        ]
        return "; ".join([*(f"a guest {escape}" for escape in self.escapes), *lacks])

    def check(self, isolation: Isolation) -> None:
        """Raises ConfigError where the machine is weaker than `isolation` allows, naming what is missing."""
        if not self.safe:
            raise ConfigError(
                f"{self.sentence}; use Linux 5.13 or newer with Landlock and seccomp, or a virtual machine"
            )
        if isolation == "strict" and not self.walls.complete:
            mend = "set isolation to best_effort to do without, or allow them on this machine"
            raise ConfigError(f"isolation strict wants every wall, but {self._lack}; {mend}")


def report(walls: Walls, reasons: Mapping[str, str], escapes: tuple[str, ...] = ()) -> Report:
    """The report on walls; `reasons` say why what is missing is missing."""
    made = {"root": "made by root", "user": "made in a user namespace", "": reasons.get("namespaces", "")}
    layers = (
        Layer(
            name="namespaces",
            active=bool(walls.namespaces),
            found=made[walls.namespaces],
            meaning="a guest has its own files, no network and sees no other process",
        ),
        Layer(
            name="Landlock",
            active=walls.landlock > 0,
            found=f"interface {walls.landlock}" if walls.landlock else reasons.get("Landlock", ""),
            meaning="a guest reads the libraries and writes to its working folder, nothing else",
        ),
        Layer(
            name="seccomp",
            active=walls.seccomp,
            found="an allowlist of system calls" if walls.seccomp else reasons.get("seccomp", ""),
            meaning="a guest starts no process or program, opens no socket, signals nobody",
        ),
        Layer(
            name="own user",
            active=walls.own_user,
            found="a user id for each guest" if walls.own_user else reasons.get("own user", "the user's own id"),
            meaning="threads are counted for each guest by the kernel; without, the host counts four times a second",
        ),
    )
    return Report(walls=walls, layers=layers, reasons=reasons, escapes=escapes)


def packed(found: Report) -> dict[str, Any]:
    """A report as JSON takes it; `unpacked` reads it."""
    return {"walls": asdict(found.walls), "reasons": dict(found.reasons), "escapes": list(found.escapes)}


def unpacked(data: Mapping[str, Any]) -> Report:
    """The report that `packed` made."""
    return report(Walls(**data["walls"]), data["reasons"], tuple(data["escapes"]))
