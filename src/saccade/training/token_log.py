"""What the trainer computed for the tokens that a step trained on, on disk beside the step's episodes.

    update_policy ──TokenValues──> EpisodeWriter ──thread──> episodes/rl-000012.token_values.npz ──> read_token_values

A conversation is found by a digest of its tokens and images, so episodes of other steps may be read without it. Values
are float16: at most 8 bytes per trained token before compression. The difference is stored rather than the trainer's
logprob, since float16 resolves small differences and not small changes of large values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.errors import DataError, convert_errors
from saccade.ledger import Ledger
from saccade.utils.files import open_file

SUFFIX = ".token_values.npz"
_KEY_CHARS = 32  # of a digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """The values of a conversation's N trained tokens at the first pass over them."""

    ledger: Ledger  # the conversation
    position_N: np.ndarray  # index of each token among the ledger's expanded tokens
    logprob_diff_N: np.ndarray  # the trainer's logprob minus the engine's, nats
    entropy_N: np.ndarray  # entropy of the trainer's distribution, nats


def write_token_values(path: Path, rows: Sequence[TokenValues]) -> None:
    """Write the values of a step."""
    with open_file(path, "wb") as file:
        np.savez_compressed(
            file,
            key=np.array([identify_conversation(row.ledger) for row in rows], dtype=f"S{_KEY_CHARS}"),
            length=np.array([len(row.position_N) for row in rows], dtype=np.int32),
            position=_join([row.position_N for row in rows], np.int32),
            logprob_diff=_join([row.logprob_diff_N for row in rows], np.float16),
            entropy=_join([row.entropy_N for row in rows], np.float16),
        )


def _join(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    with np.errstate(over="ignore"):  # an infinite difference stays one
        return np.concatenate([np.zeros(0), *parts]).astype(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValues:
    """The values of a conversation's N trained tokens, as `TokenValues` has them."""

    position_N: np.ndarray
    logprob_diff_N: np.ndarray
    entropy_N: np.ndarray

    def by_position(self) -> dict[int, tuple[float, float]]:
        """Return logprob difference and entropy by the position of their token."""
        pairs = zip(self.logprob_diff_N.tolist(), self.entropy_N.tolist(), strict=True)
        return dict(zip(self.position_N.tolist(), pairs, strict=True))


def read_token_values(path: Path) -> Mapping[str, StoredValues]:
    """Return the values of a step by conversation (`identify_conversation`); empty without the file.

    Raises DataError for a damaged file.
    """
    if not path.exists():
        return {}
    message = f"{path} can't be read; delete it, and the pages leave these values out"
    with (
        convert_errors(DataError, message, key=str(path)),
        open_file(path) as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        keys, ends = arrays["key"].astype(str).tolist(), np.cumsum(arrays["length"])[:-1]
        columns = (np.split(arrays[name], ends) for name in ("position", "logprob_diff", "entropy"))
        return {
            key: StoredValues(position_N=position_N, logprob_diff_N=logprob_diff_N, entropy_N=entropy_N)
            for key, position_N, logprob_diff_N, entropy_N in zip(keys, *columns, strict=True)
        }


def identify_conversation(ledger: Ledger) -> str:
    """Return a digest of a ledger's tokens and images."""
    return (ledger.prefix_hashes() or ("",))[-1][:_KEY_CHARS]
