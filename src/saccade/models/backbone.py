"""A checkpoint as engine and trainer both see it: features of pictures, hidden states, logits.

Axis letters: B rows, T tokens of a row, S keys a query may see, N chosen tokens, V vocabulary, D hidden size.

transformers' own modules do the computing. Attention is a function registered through its public attention interface,
which reads an explicit mask and, when sampling, an explicit key-value store; positions are explicit too, so nothing
depends on state that a module remembers from its last call.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from saccade.chat.render import ChatRenderer, load_renderer
from saccade.config import Model
from saccade.errors import ModelError, boundary
from saccade.ledger import Picture
from saccade.model import _adapters, layerwise

_WORDS = {".json", ".jinja", ".txt"}  # tokenizer, template, image processor: they go with the weights
_ATTENTION = {"": "sdpa", "text_config": "saccade", "vision_config": "sdpa"}
QUERIES = 2048  # of one call of attention: its scores and mask must fit where kernels keep them whole
VISUAL_TOKENS = 4096  # of one pass of the vision tower: about 80 frames of 50,176 pixels
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
    """Grouped-query attention under an explicit mask: query [B, heads, T, dim] -> [B, T, heads, dim].

    The mask is causal in the order of the tokens, the T queries being the last of the S keys.
    """
    if store is not None:
        layer: Any = module.layer_idx
        key, value = store.write(layer, key, value)
    B, heads, T, dim = query.shape
    mask = mask_BTS[:, None]
    if T == 1:  # decoding: the heads of a group become its queries, so keys are read once and never repeated
        folded = query.reshape(B, key.shape[1], -1, dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(B, 1, heads, dim), None
    if query.is_cuda:  # kernels that take both a mask and groups keep all scores in memory
        key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    parts: list[Tensor] = []
    past = key.shape[2] - T
    for start in range(0, T, QUERIES):
        stop = min(start + QUERIES, T)
        seen = past + stop  # no later key is visible
        part = scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, :seen],
            value[:, :, :seen],
            attn_mask=mask[:, :, start:stop, :seen],
            scale=scaling,
            enable_gqa=not query.is_cuda,
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def attend_pictures(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each picture (or window): [1, heads, N, dim] -> [1, N, heads, dim], equal lengths together.

    `cu_seq_lens_q` holds where each begins and the last ends. A run of pictures of one size is one call, not many.
    """
    out, start = [], 0
    for length, run in itertools.groupby(cu_seq_lens_q.diff().tolist()):
        stop = start + length * len(list(run))
        shape = (query.shape[1], -1, length, query.shape[3])
        query_part, key_part, value_part = (
            t[0, :, start:stop].reshape(shape).transpose(0, 1) for t in (query, key, value)
        )
        seen = scaled_dot_product_attention(query_part, key_part, value_part, scale=scaling)
        out.append(seen.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(out)[None], None


AttentionInterface.register("saccade", attend)
# transformers hands packed pictures as a whole to implementations whose name says "flash", and one by one to others.
AttentionInterface.register("saccade_flash", attend_pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the vision tower says of pictures: visual tokens [sum, D], and the same for each deepstack layer."""

    tokens: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """What they take of memory."""
        return sum(part.nbytes for part in (self.tokens, *self.deepstack))

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

    `settings.lora_rank` > 0 freezes the model and trains adapters on the linear layers of its text model (see
    `_adapters`). `model` is one in memory, of its own dtype, used in place of the folder's weights. Raises ModelError
    for a folder that is not a model this package can use.
    """

    def __init__(self, settings: Model, model: PreTrainedModel | None = None) -> None:
        self.settings = settings
        self.renderer: ChatRenderer = load_renderer(settings.path)
        with boundary(ModelError, f"{settings.path} can't be loaded as a model on the device {settings.device!r}"):
            self.device = torch.device(settings.device)
            loaded: Any = _read(settings, Path(settings.path)) if model is None else model
            self.model: Any = loaded.to(self.device)
            # Kept here: a run deletes the checkpoint it was loaded from as soon as it has written newer ones.
            files = [file for file in Path(settings.path).iterdir() if _is_words(file.name)]
            self._words = {file.name: file.read_bytes() for file in files}
        self.model.set_attn_implementation(_ATTENTION)
        self.model.model.visual.config._attn_implementation = "saccade_flash"
        self.model.eval()
        if settings.activation_checkpointing:
            _checkpoint_layers(self.model)
        if settings.lora_rank:
            _adapters.attach(self.model, self.model.model.language_model, settings.lora_rank)
            self._base = _adapters.resume(self.model, Path(settings.path), functools.partial(_read, settings))
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
    def vocabulary(self) -> int:
        """How many logits there are per token."""
        size: int = self.model.lm_head.out_features
        return size

    @property
    def side_by_side(self) -> int:
        """How many micro-batches are best worked on at a time: one per thread on a CPU, else one."""
        return self.settings.threads if self.device.type == "cpu" else 1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that opens like the one that was loaded; adapters are merged into its weights.

        Where weights are divided among processes all of them must call it, and the first writes (see `layerwise`).
        """
        with boundary(ModelError, f"the model can't be written to {folder}; free some space, or choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            adapters = {name: layerwise.whole(value) for name, value in _adapters.adapters(self.model).items()}
            if layerwise.is_first():
                self._save_words(folder, adapters)
            layerwise.write(self.model, folder)

    def _save_words(self, folder: Path, adapters: Mapping[str, Tensor]) -> None:
        """Write everything but the weights: what they are, adapters, tokenizer, template."""
        config = self.model.config
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        config.dtype = self.model.dtype
        config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        if adapters:
            _adapters.save(adapters, folder, self._base)
        for name, content in self._words.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def features(self, pictures: Sequence[Picture], pixels: Pixels) -> list[Features]:
        """The features of each picture, in passes of the vision tower that are bounded in size."""
        found: list[Features] = []
        chosen: list[Picture] = []
        room = VISUAL_TOKENS
        for picture in pictures:
            tokens = self.renderer.visual_tokens(picture)
            if chosen and tokens > room:
                found += self._look([pixels(each) for each in chosen])
                chosen, room = [], VISUAL_TOKENS
            chosen.append(picture)
            room -= tokens
        return found + self._look([pixels(each) for each in chosen]) if chosen else found

    def _look(self, images: Sequence[np.ndarray]) -> list[Features]:
        """One pass of the vision tower."""
        values, grids = self.renderer.patches(images)
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


def _is_words(name: str) -> bool:
    """Whether a file of a checkpoint goes with its weights, however those are divided among files.

    >>> _is_words("tokenizer.json"), _is_words("model.safetensors.index.json")
    (True, False)
    """
    return Path(name).suffix in _WORDS and not name.endswith(".index.json")


def _read(settings: Model, folder: Path) -> PreTrainedModel:
    """The model of a folder, on the CPU."""
    dtype = getattr(torch, settings.dtype)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)


def _checkpoint_layers(model: nn.Module) -> None:
    """Let every layer, in training, keep its input alone and compute the rest again in the backward pass.

    The model's own switch also lets embeddings want gradients, and a frozen vision tower would be differentiated.
    """
    layers: list[Any] = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in layers:
        part.gradient_checkpointing = True
        part._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def _deep(out: Any) -> list[Any]:
    """Deepstack features, for the families whose vision tower has them."""
    return list(out.deepstack_features) if "deepstack_features" in out else []


def log_probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [N, V] of the distribution that is sampled from; temperature 0 (greedy) counts as 1."""
    return torch.log_softmax(logits_NV / (temperature or 1.0), dim=-1)
