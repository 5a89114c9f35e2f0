"""The policy as one module: its forward pass holds all that training computes with the weights.

    patches ──vision tower──> features ─┐
    token ids ──embeddings──────────────┴──> layers ──> last hidden states ──head, in chunks──> logprobs, entropies

Since nothing beside `Policy.forward` reads the weights in training, the module can be sharded over processes (FSDP2).

Axis letters: B rows, T tokens of a row, S keys a query may attend to, N trained tokens, V vocabulary, D hidden size.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from saccade.models.attention import PackedTrees
from saccade.models.pass_limits import MAX_LOGITS_PER_CHUNK

VisionPass = tuple[Tensor, Tensor]  # flattened patches [P, values] of a pass's images, and their grids [images, 3]


class KVCacheProtocol(Protocol):
    """A KV cache that a forward pass reads and extends."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, heads, T, dim]; return all keys and values [B, heads, S, dim] that the mask covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFeatures:
    """Features of images: visual tokens [sum, D], and the same for each deepstack layer."""

    tokens: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Return their size in memory."""
        return sum(part.nbytes for part in (self.tokens, *self.deepstack))

    @staticmethod
    def cat(parts: Sequence["VisionFeatures"]) -> "VisionFeatures":
        """Concatenate the features of several images, in order."""
        layers = zip(*(part.deepstack for part in parts), strict=True)
        return VisionFeatures(
            tokens=torch.cat([part.tokens for part in parts]), deepstack=tuple(torch.cat(layer) for layer in layers)
        )


class FeatureCache:
    """Features of images by key, at most `max_bytes`: the first ones, as all are needed again in the same order."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.total_bytes = max_bytes, 0
        self.is_full = max_bytes <= 0  # or features were refused
        self._features: dict[str, VisionFeatures] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._features

    def get(self, key: str) -> VisionFeatures | None:
        """Return an image's features, if they are cached."""
        return self._features.get(key)

    def add(self, key: str, features: VisionFeatures) -> None:
        """Cache an image's features if there is room, and no others were refused."""
        self.is_full = self.is_full or self.total_bytes + features.nbytes > self.max_bytes
        if not self.is_full:
            self._features[key] = features
            self.total_bytes += features.nbytes

    def clear(self) -> None:
        """Drop all features."""
        self._features.clear()
        self.total_bytes, self.is_full = 0, self.max_bytes <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Packed rows on the policy's device, and which of their tokens are trained."""

    ids_BT: Tensor
    positions_3BT: Tensor
    trees: PackedTrees  # which tokens attend to which
    row_N: Tensor  # row of each trained token
    logit_index_N: Tensor  # index in its row of the position whose logits predict it
    token_N: Tensor  # its id
    vision_passes: Iterable[VisionPass] = ()  # the distinct images; iterated once, in the forward pass
    # features of the distinct images, None for those of `vision_passes`; empty if all are there
    image_features: Sequence[VisionFeatures | None] = ()
    image_indices: Sequence[int] = ()  # of the rows' images, in row order, into those of the passes


class Policy(nn.Module):
    """A vision-language model of transformers that returns the logprobs of trained tokens when it is called.

    `compute_dtype` is the type of its activations; `visual_ids` are the placeholders of visual tokens, `forbidden_ids`
    tokens that can't be sampled.
    """

    def __init__(
        self, model: Any, *, visual_ids: Sequence[int], forbidden_ids: Sequence[int], compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = model
        self.visual_ids, self.compute_dtype = tuple(visual_ids), compute_dtype
        # Whether the vision tower's gradients are zero, not None, without images: ranks that shard it reduce the same.
        self.has_gradients_without_images = False
        forbidden = torch.tensor(tuple(forbidden_ids), dtype=torch.long)
        self.forbidden_ids: Tensor
        self.register_buffer("forbidden_ids", forbidden, persistent=False)

    def forward(
        self, inputs: PolicyInputs, temperature: float, *, has_entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs [N] and entropies [N] of the trained tokens under the sampling distribution.

        Entropies are detached unless `has_entropy_gradient`.
        """
        encoded = [
            features for patches, grids in inputs.vision_passes for features in self.encode_patches(patches, grids)
        ]
        new = iter(encoded)
        images = [next(new) if features is None else features for features in inputs.image_features] or encoded
        features = VisionFeatures.cat([images[index] for index in inputs.image_indices]) if images else None
        hidden = self.compute_hidden_states(inputs.ids_BT, inputs.positions_3BT, inputs.trees, features=features)
        logp_N, entropy_N = self._score_tokens(
            hidden[inputs.row_N, inputs.logit_index_N], inputs.token_N, temperature, has_entropy_gradient
        )
        if self.has_gradients_without_images and not images:
            logp_N = logp_N + 0.0 * sum(value.flatten()[0] for value in self.model.model.visual.parameters())
        return logp_N, entropy_N

    def _score_tokens(
        self, hidden_ND: Tensor, token_N: Tensor, temperature: float, has_entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        chunk_size = max(1, MAX_LOGITS_PER_CHUNK // self.model.lm_head.out_features)
        chunks = list(zip(torch.split(hidden_ND, chunk_size), torch.split(token_N, chunk_size), strict=True))
        if len(chunks) == 1:
            return self._compute_logprobs_and_entropies(hidden_ND, token_N, temperature, has_entropy_gradient)
        # Large logits are recomputed in the backward pass, one chunk at a time, to bound memory.
        outputs = [
            checkpoint(
                self._compute_logprobs_and_entropies, *chunk, temperature, has_entropy_gradient, use_reentrant=False
            )
            for chunk in chunks
        ]
        logp, entropy = zip(*outputs, strict=True)
        return torch.cat(logp), torch.cat(entropy)

    def _compute_logprobs_and_entropies(
        self, hidden_ND: Tensor, token_N: Tensor, temperature: float, has_entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp_NV = compute_logprobs(self.compute_logits(hidden_ND), temperature)
        with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
            entropy_N = -(logp_NV.exp() * logp_NV.clamp(min=-1e4)).sum(dim=-1)
        return logp_NV.gather(1, token_N[:, None])[:, 0].clone(), entropy_N  # FSDP2 hooks no view

    def encode_patches(self, patches: Tensor, grids: Tensor) -> list[VisionFeatures]:
        """Return the features of each image of a pass of the vision tower."""
        out = self.model.model.get_image_features(patches.to(self.compute_dtype), grids, return_dict=True)
        deepstack = out.deepstack_features if "deepstack_features" in out else ()  # not every family has them
        # transformers 5.17 has a tensor per layer, later versions one per layer and image.
        joined = (layer if isinstance(layer, Tensor) else torch.cat(tuple(layer)) for layer in deepstack)
        layers = [torch.split(layer, [len(tokens) for tokens in out.pooler_output]) for layer in joined]
        return [
            VisionFeatures(tokens=tokens, deepstack=tuple(layer[index] for layer in layers))
            for index, tokens in enumerate(out.pooler_output)
        ]

    def compute_hidden_states(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        visible: Tensor | PackedTrees,
        *,
        features: VisionFeatures | None = None,
        kv_cache: KVCacheProtocol | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, T, D]; `features` holds the visual tokens of all rows, in row order.

        `visible` is a mask [B, T, S] over the positions of `kv_cache`, or the trees of rows that are new as a whole.
        """
        language_model = self.model.model.language_model
        embeds, extra = language_model.embed_tokens(ids_BT), {}
        if features is not None:
            visual = functools.reduce(torch.logical_or, [ids_BT == token for token in self.visual_ids])
            embeds = embeds.masked_scatter(visual[..., None], features.tokens.to(embeds.dtype))
            if features.deepstack:
                extra = {"visual_pos_masks": visual, "deepstack_visual_embeds": list(features.deepstack)}
        out = language_model(
            inputs_embeds=embeds,
            position_ids=positions_3BT,
            attention_mask=None,
            use_cache=False,
            visible=visible,
            kv_cache=kv_cache,
            **extra,
        )
        return out.last_hidden_state

    def compute_logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits [N, V] in float32; forbidden tokens are -inf, for sampler and trainer alike."""
        logits: Tensor = self.model.lm_head(hidden_ND).float()
        return logits.index_fill(-1, self.forbidden_ids, float("-inf"))


def compute_logprobs(logits_NV: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities [N, V] of the sampling distribution; temperature 0 (greedy) counts as 1."""
    return torch.log_softmax(logits_NV / (temperature or 1.0), dim=-1)
