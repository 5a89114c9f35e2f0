"""A reply as a completion, as pure functions: whether it is sound, ids beside ids, a version for each token."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.engines._served.server import Reply, Server, Trouble
from saccade.errors import BrokenEngineError
from saccade.ledger import Ledger
from saccade.types import Completion, Sampling, Stop

_SHOWN = 8  # ids on either side of the first difference


def completion(reply: Any, ledger: Ledger, sampling: Sampling, *, server: Server, seconds: float) -> Completion:
    """The server's reply as a completion.

    Raises Trouble for what is no reply to this request or was sampled from weights that nobody here published, and
    BrokenEngineError where the server saw another prompt than the ledger holds.
    """
    url = server.url
    try:
        said = server.dialect.read(reply)
    except (LookupError, TypeError, ValueError):
        raise Trouble(f"{url} answered something that is no completion") from None
    compare(said.prompt, ledger.expanded(), url)
    if said.reason == "abort":
        raise Trouble(f"{url} aborted a request")
    stopped = bool(said.tokens) and said.tokens[-1] in sampling.stop_ids
    if problem := _unsound(said, sampling, stopped):
        raise Trouble(f"{url} answered something that is no completion: {problem}")
    each = _version_of_each(said.spans, len(said.tokens), server.versions, url)
    return Completion(
        tokens=said.tokens,
        logprobs=tuple(min(value, 0.0) for value in said.logprobs),  # a rounding may lift certainty above it
        version=each[-1],
        versions=each if len(set(each)) > 1 else (),
        stop=Stop.STOP if stopped else Stop.LENGTH,
        seconds=seconds,
    )


def ids(value: Any) -> tuple[int, ...]:
    """What must be a list of ids. Raises TypeError where it is none."""
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise TypeError
    return tuple(value)


def spans(value: Any) -> tuple[tuple[str, int, int], ...]:
    """Spans of weights as both kinds of servers write them. Raises LookupError, TypeError or ValueError."""
    return tuple((str(each["version"]), int(each["start"]), int(each["end"])) for each in value)


def _unsound(said: Reply, sampling: Sampling, stopped: bool) -> str | None:
    """What is wrong with a sampled sequence, if anything."""
    tokens, logprobs = said.tokens, said.logprobs
    if not 1 <= len(tokens) <= sampling.max_tokens:
        return f"{len(tokens)} tokens, not 1 to {sampling.max_tokens}"
    if len(logprobs) != len(tokens) or not all(-9999 < value <= 1e-4 for value in logprobs if not math.isnan(value)):
        return "there must be one finite logprob of at most 0 per token"
    if any(map(math.isnan, logprobs)):
        return "a logprob is no number"
    if not set(sampling.forbidden_ids).isdisjoint(tokens):
        return "a forbidden id was sampled"
    if not set(sampling.stop_ids).isdisjoint(tokens[:-1]):
        return "it went on after a stop id"
    if not stopped and len(tokens) < sampling.max_tokens:
        return f"it ends ({said.reason}) after {len(tokens)} tokens, without a stop id"
    return None


def _version_of_each(
    spans: Sequence[tuple[str, int, int]], length: int, versions: Mapping[str, int], url: str
) -> tuple[int, ...]:
    """The version of every token, from spans [start, end) that must lie end to end over all of them."""
    strange = [label for label, _, _ in spans if label not in versions]
    if strange:
        # Greeted anew, the server gets this run's weights again.
        raise Trouble(
            f"{url} sampled from the weights {strange[0]!r}: it was restarted, or another run publishes to it"
        )
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if not spans or [*starts, length] != [0, *ends]:
        raise Trouble(f"{url} answered something that is no completion: its weight versions don't cover the tokens")
    return tuple(versions[label] for label, start, end in spans for _ in range(start, end))


def compare(theirs: Sequence[int], ours: Sequence[int], url: str) -> None:
    """Raises BrokenEngineError, showing both around the first difference, where the server saw another prompt."""
    if tuple(theirs) == tuple(ours):
        return
    pairs = zip(theirs, ours, strict=False)
    at = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(theirs), len(ours)))
    around = slice(max(at - _SHOWN, 0), at + _SHOWN)
    raise BrokenEngineError(
        f"{url} and the ledger disagree about a prompt from token {at} on: the server has {len(theirs)} tokens, "
        f"…{list(theirs[around])}…, the ledger {len(ours)}, …{list(ours[around])}…; nothing may be learned from this. "
        "Serve the very checkpoint that is trained, with its own processor, and keep pictures within its bounds"
    )
