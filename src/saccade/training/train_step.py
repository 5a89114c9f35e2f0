"""One forward, backward and optimiser step over packed batches; it knows no algorithm's name.

Axis letters: B rows, T tokens, N trained tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saccade.algorithms.losses import merge_stats
from saccade.model.backbone import Backbone, Features, Pixels, log_probabilities
from saccade.training.optim import Optimizer
from saccade.training.pack import Batch

LOGITS = 2**27  # of one piece of the trained tokens: half a GiB in float32
Loss = Callable[[Batch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]  # (batch, logp_N) -> loss, statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step measured: the loss, mean entropy (nats), the gradient's norm, tokens, the loss's own statistics."""

    loss: float
    entropy: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    stats: Mapping[str, float]


def forward(backbone: Backbone, batch: Batch, *, pixels: Pixels, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs [N] and entropies [N] (detached) of the trained tokens under the distribution that is sampled from."""
    device = backbone.device
    hidden = backbone.hidden(
        torch.from_numpy(batch.ids_BT).to(device),
        torch.from_numpy(batch.positions_3BT).to(device),
        visible(torch.from_numpy(batch.tree_BT).to(device), torch.from_numpy(batch.branch_BT).to(device)),
        features=_features(backbone, batch, pixels),
    )
    chosen_ND = hidden[torch.from_numpy(batch.row_N).to(device), torch.from_numpy(batch.at_N).to(device)]
    token_N = torch.from_numpy(batch.token_N).to(device)
    size = max(1, LOGITS // backbone.vocabulary)
    pieces = list(zip(torch.split(chosen_ND, size), torch.split(token_N, size), strict=True))
    if len(pieces) == 1:
        return _score(backbone, chosen_ND, token_N, temperature)
    # Logits of a large vocabulary are made again in the backward pass, one piece at a time, rather than all kept.
    scored = [checkpoint(_score, backbone, *piece, temperature, use_reentrant=False) for piece in pieces]
    logp, entropy = zip(*scored, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def visible(tree_BT: Tensor, branch_BT: Tensor) -> Tensor:
    """Which tokens of its row each token sees (see `pack`): bool [B, T, T]."""
    T = tree_BT.shape[1]
    # In place: a row of 20,000 tokens has a mask of 400 MB.
    seen_BTT = tree_BT[:, :, None] == tree_BT[:, None, :]
    seen_BTT &= (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    return seen_BTT.logical_and_(torch.ones(T, T, dtype=torch.bool, device=tree_BT.device).tril())


def _score(backbone: Backbone, hidden_ND: Tensor, token_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_NV = log_probabilities(backbone.logits(hidden_ND), temperature)
    with torch.no_grad():
        entropy_N = -(logp_NV.exp() * logp_NV.clamp(min=-1e4)).sum(dim=-1)
    return logp_NV.gather(1, token_N[:, None])[:, 0], entropy_N


def _features(backbone: Backbone, batch: Batch, pixels: Pixels) -> Features | None:
    """Each distinct picture goes through the vision tower once, however often the batch shows it."""
    unique = {picture.key: picture for picture in batch.pictures}
    if not unique:
        return None
    found = dict(zip(unique, backbone.features(list(unique.values()), pixels), strict=True))
    return Features.cat([found[picture.key] for picture in batch.pictures])


def step(
    backbone: Backbone,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    pixels: Pixels,
    temperature: float = 1.0,
) -> StepReport:
    """Accumulate gradients over the micro-batches, then one update. The losses of the batches add up."""
    backbone.model.train()

    def score(batch: Batch) -> tuple[Tensor, float, Mapping[str, Tensor]]:
        logp_N, entropy_N = forward(backbone, batch, pixels=pixels, temperature=temperature)
        value, measured = loss(batch, logp_N)
        return value, float(entropy_N.sum()), measured

    if backbone.side_by_side > 1 and len(batches) > 1:
        found = _together(backbone, batches, score)
    else:
        found = []
        for batch in batches:
            value, entropy, measured = score(batch)
            torch.autograd.backward(value)
            found.append((float(value.detach()), entropy, measured))
    norm = optimizer.step()
    backbone.model.eval()
    values, entropies, stats = zip(*found, strict=True)
    trained = sum(len(batch.token_N) for batch in batches)
    return StepReport(
        loss=sum(values),
        entropy=sum(entropies) / max(trained, 1),
        grad_norm=norm,
        tokens=sum(int((batch.tree_BT >= 0).sum()) for batch in batches),
        trained_tokens=trained,
        stats=merge_stats(stats),
    )


Measured = tuple[float, float, Mapping[str, Tensor]]  # loss, sum of entropies, statistics


def _together(
    backbone: Backbone, batches: Sequence[Batch], score: Callable[[Batch], tuple[Tensor, float, Mapping[str, Tensor]]]
) -> list[Measured]:
    """The same with a thread per micro-batch in place of threads within each operation, which wait for each other.

    Gradients are added in the order of the micro-batches, so that a run is the same every time.
    """
    many, parameters = backbone.side_by_side, backbone.parameters

    def work(batch: Batch) -> tuple[Measured, tuple[Tensor | None, ...]]:
        with torch.enable_grad():  # a thread's own setting
            value, entropy, measured = score(batch)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        return (float(value.detach()), entropy, measured), gradients

    found: list[Measured] = []
    waves = [batches[start : start + many] for start in range(0, len(batches), many)]
    with _lone_threads(many) as pool:
        for wave in waves:  # no more gradients are held at once than threads
            for scored, gradients in pool.map(work, wave):
                found.append(scored)
                _add(parameters, gradients)
    return found


@contextlib.contextmanager
def _lone_threads(many: int) -> Iterator[ThreadPoolExecutor]:
    """Threads whose operations have no threads of their own."""
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(many, thread_name_prefix="saccade-batch") as pool:
            yield pool
    finally:
        torch.set_num_threads(many)


def _add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
