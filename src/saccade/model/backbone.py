"""A checkpoint as engine and trainer both see it: features of pictures, hidden states, logits.

Axis letters: B rows, T tokens of a row, S keys a query may see, N chosen tokens, V vocabulary, D hidden size, P pictures.

transformers' own modules do the computing. Attention is a function registered through its public attention interface,
which reads an explicit mask and, when sampling, an explicit key-value store; positions are explicit too, so nothing
depends on state that a module remembers from its last call.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForImageTextToText

from saccade.chat.render import ChatRenderer, load_renderer
from saccade.config import Model
from saccade.errors import ModelError, boundary
from saccade.ledger import Picture

_WORDS = {".json", ".jinja", ".txt"}  # tokenizer, template, image processor: they go with the weights
Pixels = Callable[[Picture], np.ndarray]  # uint8 RGB [height, width, 3]


class KeyValueStore(Protocol):
    """Where a forward pass puts its keys and values, and finds those of the past."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, heads, T, dim]; returns all keys and values [B, heads, S, dim] that the mask speaks of."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    mask_BTS: Tensor,
    store: KeyValueStore | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention under an explicit mask: query [B, heads, T, dim] -> [B, T, heads, dim]."""
    if store is not None:
        layer: Any = module.layer_idx
        key, value = store.write(layer, key, value)
    B, heads, T, dim = query.shape
    mask = mask_BTS[:, None]
    if T == 1:  # decoding: the heads of a group become its queries, so keys are read once and never repeated
        folded = query.reshape(B, key.shape[1], -1, dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(B, 1, heads, dim), None
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("saccade", attend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the vision tower says of pictures: visual tokens [sum, D], and the same for each deepstack layer."""

    tokens: Tensor
    deepstack: tuple[Tensor, ...]

    @staticmethod
    def cat(parts: Sequence["Features"]) -> "Features":
        """Join the features of several pictures, in order."""
        layers = zip(*(part.deepstack for part in parts), strict=True)
        return Features(
            tokens=torch.cat([part.tokens for part in parts]),
            deepstack=tuple(torch.cat(layer) for layer in layers),
        )


class Backbone:
    """A loaded checkpoint with its renderer.

    Raises ModelError for a folder that is not a model this package can use.
    """

    def __init__(self, settings: Model) -> None:
        self.settings = settings
        self.renderer: ChatRenderer = load_renderer(settings.path)
        self.device = torch.device(settings.device)
        dtype = getattr(torch, settings.dtype)
        with boundary(ModelError, f"{settings.path} can't be loaded as a model"):
            self.model: Any = AutoModelForImageTextToText.from_pretrained(
                settings.path,
                dtype=dtype,
                attn_implementation={"text_config": "saccade", "vision_config": "sdpa", "": "sdpa"},
                local_files_only=True,
            ).to(self.device)
        self.model.eval()
        if settings.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.text: Any = self.model.model.language_model
        self.image_token: int = self.model.config.image_token_id
        forbidden = torch.tensor(self.renderer.forbidden_ids, dtype=torch.long)
        self.forbidden = forbidden.to(self.device)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key-value heads and head size: the shape of what a key-value store holds per token."""
        config = self.text.config
        width: int = self.text.layers[0].self_attn.head_dim
        return config.num_hidden_layers, config.num_key_value_heads, width

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that opens like the one that was loaded."""
        with boundary(ModelError, f"the model can't be written to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self.model.save_pretrained(folder)
            for file in Path(self.settings.path).iterdir():
                if file.suffix in _WORDS and not (folder / file.name).exists():
                    shutil.copy(file, folder)

    def features(self, pictures: Sequence[Picture], pixels: Pixels) -> list[Features]:
        """The features of each picture, computed in one pass of the vision tower."""
        if not pictures:
            return []
        values, grids = self.renderer.patches([pixels(picture) for picture in pictures])
        out = self.model.model.get_image_features(
            torch.from_numpy(values).to(self.device, self.model.dtype),
            torch.from_numpy(grids).to(self.device),
            return_dict=True,
        )
        layers = [torch.split(torch.cat(tuple(layer)), [len(t) for t in out.pooler_output]) for layer in _deep(out)]
        return [
            Features(tokens=tokens, deepstack=tuple(layer[index] for layer in layers))
            for index, tokens in enumerate(out.pooler_output)
        ]

    def hidden(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        mask_BTS: Tensor,
        *,
        features: Features | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """Last hidden states [B, T, D]. `features` hold the visual tokens of all rows, row by row, in order."""
        embeds = self.text.embed_tokens(ids_BT)
        visual = ids_BT == self.image_token if features is not None else None
        if visual is not None and features is not None:
            embeds = embeds.masked_scatter(visual[..., None], features.tokens.to(embeds.dtype))
        extra = {}
        if features is not None and features.deepstack:
            extra = {"visual_pos_masks": visual, "deepstack_visual_embeds": list(features.deepstack)}
        out = self.text(
            inputs_embeds=embeds,
            position_ids=positions_3BT,
            attention_mask=None,
            use_cache=False,
            mask_BTS=mask_BTS,
            store=store,
            **extra,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] in float32; tokens that may never be sampled are −inf, for sampler and trainer alike."""
        logits: Tensor = self.model.lm_head(hidden_ND).float()
        return logits.index_fill(-1, self.forbidden, float("-inf"))


def _deep(out: Any) -> list[Any]:
    """Deepstack features, for the families whose vision tower has them."""
    return list(out.deepstack_features) if "deepstack_features" in out else []


def log_probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [N, V] of the distribution that is sampled from; temperature 0 (greedy) counts as 1."""
    return torch.log_softmax(logits_NV / (temperature or 1.0), dim=-1)
