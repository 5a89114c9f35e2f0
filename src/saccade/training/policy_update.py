"""From samples to an update of the policy: pack, look back at other policies where a setting asks for it, step.

Axis letters: N trained tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from saccade.algorithms.losses import k1, k3, policy_loss, reward_to_go, token_weights
from saccade.config import Kl, Rl
from saccade.errors import EngineError
from saccade.rollouts.stage import Stage
from saccade.training.aside import Going
from saccade.training.optim import Optimizer
from saccade.training.pack import Batch, pack
from saccade.training.reference import Reference
from saccade.training.step import StepReport, forward, step
from saccade.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a micro-batch's tokens besides the micro-batch: weights, and what other policies say of them."""

    weight_N: Tensor
    proximal_N: Tensor | None
    reference_N: Tensor | None


def learn(
    stage: Stage,
    samples: Sequence[Sample],
    settings: Rl,
    optimizer: Optimizer,
    reference: Reference | None = None,
    going: Going = lambda: None,
) -> StepReport:
    """Update on one batch of samples, `updates` times.

    The trainer's own logprobs before the update (the proximal policy) are those of the first update's forward pass, so
    they are only looked up beforehand where later updates need them. `reference` is asked where there is one. `going`
    is called before each micro-batch. Raises EngineError where a token that was packed is not the engine's own.
    """
    backbone = stage.backbone
    batches = pack(
        samples,
        positions=backbone.renderer.positions,
        row_tokens=settings.row_tokens,
        rows_per_pass=settings.rows_per_pass,
        side_by_side=stage.backbone.side_by_side,
    )
    assert_engine_tokens(samples, batches)
    held: list[Tensor | None] = [None] * len(batches)
    if reference is not None:
        with reference.in_place():
            held = [*_logprobs(stage, batches, going)]
        batches = [_penalised(batch, logp_N, settings.kl) for batch, logp_N in zip(batches, held, strict=True)]
    late = settings.updates > 1 and settings.loss.against == "proximal"
    proximal = [*_logprobs(stage, batches, going)] if late else [None] * len(batches)
    weights = _weights(batches, settings)
    known = {
        id(batch): Known(weight_N=weight_N, proximal_N=old_N, reference_N=ref_N)
        for batch, weight_N, old_N, ref_N in zip(batches, weights, proximal, held, strict=True)
    }
    version = stage.engine.version

    def loss(batch: Batch, logp_N: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        going()
        device, own = logp_N.device, known[id(batch)]
        return policy_loss(
            logp_N,
            own.proximal_N,
            torch.from_numpy(batch.advantage_N).to(device),
            own.weight_N.to(device),
            settings=settings.loss,
            engine_logp_N=torch.from_numpy(batch.old_logp_N).to(device),
            stale_N=torch.from_numpy(batch.version_N < version).to(device),
            seq_N=torch.from_numpy(batch.sample_N).to(device),
            ref_logp_N=own.reference_N,
            kl_weight=settings.kl.loss,
        )

    pixels, temperature = stage.media.pixels, stage.recipe.sampling.temperature
    reports = [
        step(backbone, optimizer, batches, loss, pixels=pixels, temperature=temperature)
        for _ in range(settings.updates)
    ]
    # Loss and norm as on-policy; what the ratios became shows after the last update alone.
    return replace(reports[0], stats={**reports[-1].stats, **_staleness(batches, version)})


def _weights(batches: Sequence[Batch], settings: Rl) -> list[Tensor]:
    """Each token's weight in the loss of the whole batch, by micro-batch."""
    weight_N = token_weights(
        torch.from_numpy(np.concatenate([batch.sample_N for batch in batches])),
        aggregation=settings.loss.aggregation,
        sum_norm=settings.loss.sum_norm,
    )
    return list(torch.split(weight_N, [len(batch.token_N) for batch in batches]))


def _logprobs(stage: Stage, batches: Sequence[Batch], going: Going) -> list[Tensor]:
    """What the weights as they are now say of each micro-batch's tokens, without a gradient."""
    temperature, pixels = stage.recipe.sampling.temperature, stage.media.pixels
    found: list[Tensor] = []
    with torch.no_grad():
        for batch in batches:
            going()
            found.append(forward(stage.backbone, batch, pixels=pixels, temperature=temperature)[0])
    return found


def _penalised(batch: Batch, reference_N: Tensor | None, settings: Kl) -> Batch:
    """The batch with the penalty in the reward: each advantage less `reward` times the distance from here on."""
    if not settings.reward or reference_N is None:
        return batch
    estimate = k1 if settings.estimator == "k1" else k3
    # A reward speaks of the policy that acted, so its logprobs are the engine's.
    distance_N = estimate(torch.from_numpy(batch.old_logp_N), reference_N.cpu())
    cost_N = settings.reward * reward_to_go(distance_N, torch.from_numpy(batch.sample_N))
    return replace(batch, advantage_N=batch.advantage_N - cost_N.numpy())


def _staleness(batches: Sequence[Batch], version: int) -> dict[str, float]:
    """How many versions of the weights lie between sampling and learning, over the trained tokens."""
    age_N = version - np.concatenate([batch.version_N for batch in batches])
    return {"staleness_mean": float(age_N.mean()), "staleness_max": float(age_N.max())}


def assert_engine_tokens(samples: Sequence[Sample], batches: Sequence[Batch]) -> None:
    """Check that the batches train exactly the tokens that were sampled, each once, in order."""
    trained: dict[int, list[int]] = {}
    for batch in batches:
        for sample, token in zip(batch.sample_N.tolist(), batch.token_N.tolist(), strict=True):
            trained.setdefault(sample, []).append(token)
    for index, sample in enumerate(samples):
        if tuple(trained.get(index, ())) != sample.ledger.sampled_tokens():
            raise EngineError(f"sample {index} trains other tokens than the engine sampled; the batch can't be trusted")
