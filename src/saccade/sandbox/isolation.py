"""The isolation layers that this machine supports for a worker, and what each protects; printed by `saccade doctor`.

The three layers are independent: *namespaces* (private files, processes, network), *Landlock* (files, by path) and
*seccomp* (system calls). A worker needs seccomp and at least one of the other two; "strict" requires all three.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from saccade.errors import ConfigError
from saccade.sandbox.limits import IsolationMode

Namespaces = Literal["", "root", "user"]  # none; created with root's privileges; created in a user namespace
_MEANINGS = {
    "namespaces": "a worker has private files and no network, sees no other process, and the kernel limits its files",
    "Landlock": "a worker reads files of the libraries and writes to its working folder; it opens no others",
    "seccomp": "a worker can't start a process or program, open a socket or signal another process",
    "worker user": "the kernel limits each worker's threads; otherwise the host counts them",
}
# What doesn't hold without a layer, for the report: other layers don't replace all of it.
_WEAKNESSES = {
    "namespaces": "a worker can query a path's existence, size and times, and exceed its disk limit for a moment",
    "worker user": "a worker can exceed its limit of threads for a moment",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationLayers:
    """The layers around every worker of one zygote.

    `landlock` is the version of the kernel's Landlock interface (0: none). With `per_worker_user` each worker has a
    different user id.
    """

    namespaces: Namespaces
    landlock: int
    seccomp: bool
    per_worker_user: bool

    @property
    def is_complete(self) -> bool:
        """Whether all three layers are active."""
        return bool(self.namespaces and self.landlock and self.seccomp)

    @property
    def is_sufficient(self) -> bool:
        """Whether at least one layer each protects files, network and processes."""
        return bool(self.seccomp and (self.namespaces or self.landlock))


class LayerStatus(NamedTuple):
    """One line of the report: whether the layer is active, in which form or why not, and what it protects."""

    name: str
    is_active: bool
    detail: str
    meaning: str


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """The isolation that a self-test has verified.

    `reasons` gives, by layer, why it is missing; `escapes` are forbidden actions that succeeded in the self-test.
    """

    isolation: IsolationLayers
    reasons: Mapping[str, str] = field(default_factory=dict)
    escapes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerStatus, ...]:
        """The status of the three layers, and of the workers' user ids."""
        own, reasons = self.isolation, {"worker user": "workers run under the host's user id", **self.reasons}
        creation = {"": "", "root": "created by root", "user": "created in a user namespace"}
        forms = {
            "namespaces": creation[own.namespaces],
            "Landlock": f"interface {own.landlock}" if own.landlock else "",
            "seccomp": "an allowlist of system calls" if own.seccomp else "",
            "worker user": "a different user id for each worker" if own.per_worker_user else "",
        }
        return tuple(
            LayerStatus(name, bool(form), form or reasons.get(name, ""), _MEANINGS[name])
            for name, form in forms.items()
        )

    @property
    def is_safe(self) -> bool:
        """Whether the layers are sufficient and the self-test found no escape."""
        return self.isolation.is_sufficient and not self.escapes

    @property
    def summary(self) -> str:
        """The report in one sentence."""
        if not self.is_safe:
            return f"model-written code can't be run safely here: {self._missing_summary}"
        if self.isolation.is_complete:
            return "model-written code is isolated by all layers: namespaces, Landlock and seccomp"
        missing = self._missing_summary
        text = f"model-written code is isolated, with one layer for files and network instead of two: {missing}"
        return "; ".join([text, *self.weaknesses])

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What doesn't hold on this machine."""
        return tuple(
            _WEAKNESSES[layer.name] for layer in self.layers if layer.name in _WEAKNESSES and not layer.is_active
        )

    @property
    def _missing_summary(self) -> str:
        missing = [
            f"{layer.name} {'are' if layer.name == 'namespaces' else 'is'} missing ({layer.detail})"
            for layer in self.layers[:3]
            if not layer.is_active
        ]
        return "; ".join([*(f"a worker {escape}" for escape in self.escapes), *missing])

    def check(self, mode: IsolationMode) -> None:
        """Raise ConfigError, naming the missing layers, if the machine is weaker than `mode` requires."""
        if not self.is_safe:
            hint = "use Linux 5.13 or newer with Landlock and seccomp, or a virtual machine"
            raise ConfigError(f"{self.summary}; {hint}", key="isolation", value=mode)
        if mode == "strict" and not self.isolation.is_complete:
            hint = "set isolation=best_effort to run without, or enable them on this machine"
            message = f"isolation=strict needs every isolation layer, but {self._missing_summary}; {hint}"
            raise ConfigError(message, key="isolation", value=mode)
