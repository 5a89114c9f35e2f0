"""The model that engine and trainer share: image features, hidden states, logits.

Axis letters: B rows, T tokens of a row, S keys a query may attend to, N selected tokens, V vocabulary, D hidden size.

The modules are those of transformers. Attention is a function registered through its public attention interface; for
sampling it has an explicit mask and KV cache, in training no mask (see `attention`). Position ids are explicit, too, so
nothing depends on state that a module keeps from its last call.
"""

import contextlib
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from saccade.chat.renderer import ChatRenderer, load_renderer
from saccade.config.schema import ModelConfig
from saccade.errors import ModelError, convert_errors
from saccade.ledger import ImageRef, Ledger
from saccade.models import checkpoint_io, lora
from saccade.models.attention import AttentionSpan, PackedTrees, VarlenIndex, attend_packed, require_varlen
from saccade.models.checkpoint_files import IGNORED_FILES, METADATA_SUFFIXES, check_dtypes
from saccade.models.pass_limits import MAX_VISION_TOKENS
from saccade.models.policy import FeatureCache, KVCacheProtocol, Policy, PolicyInputs, VisionFeatures, VisionPass
from saccade.utils.files import convert_file_errors, describe_retry, read_bytes
from saccade.utils.text import join_examples, pluralize

PEFT_CONFIG = "adapter_config.json"
_ATTENTION_IMPLEMENTATIONS = {"": "sdpa", "text_config": "saccade", "vision_config": "sdpa"}
MAX_ATTENTION_QUERIES = 2048  # per attention call: bounds the memory of kernels that materialize scores and mask
LoadPixels = Callable[[ImageRef], np.ndarray]  # uint8 RGB [height, width, 3], of a pair [2, height, width, 3]
LoadAllPixels = Callable[[Collection[ImageRef]], Mapping[str, np.ndarray]]  # the same of several images, by their keys
_logger = logging.getLogger("saccade")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    visible: Tensor | PackedTrees,
    kv_cache: KVCacheProtocol | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute grouped-query attention of packed trees or with a mask: query [B, heads, T, dim] -> [B, T, heads, dim].

    A mask [B, T, S] must be causal in token order, where the T queries are the last of the S positions.
    """
    if kv_cache is not None:
        layer: Any = module.layer_idx
        key, value = kv_cache.write(layer, key, value)
    if isinstance(visible, PackedTrees):
        return attend_packed(query, key, value, visible, scaling), None
    B, heads, T, dim = query.shape
    mask = visible[:, None]
    if T == 1:  # decoding: the heads of a group become its queries, so keys are read once and not repeated
        folded = query.reshape(B, key.shape[1], -1, dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(B, 1, heads, dim), None
    if query.is_cuda:  # kernels that support both a mask and groups materialize all scores
        key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    parts: list[Tensor] = []
    past = key.shape[2] - T
    for start in range(0, T, MAX_ATTENTION_QUERIES):
        stop = min(start + MAX_ATTENTION_QUERIES, T)
        end = past + stop  # the mask hides all later keys
        part = scaled_dot_product_attention(
            query[:, :, start:stop],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=mask[:, :, start:stop, :end],
            scale=scaling,
            enable_gqa=not query.is_cuda,
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def attend_images(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, cu_seq_lens_q: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Compute attention within each image (or window): [1, heads, N, dim] -> [1, N, heads, dim].

    `cu_seq_lens_q` holds the start of each and the end of the last. Consecutive images of one size are one call.
    """
    out, start = [], 0
    for length, run in itertools.groupby(cu_seq_lens_q.diff().tolist()):
        stop = start + length * len(list(run))
        shape = (query.shape[1], -1, length, query.shape[3])
        query_part, key_part, value_part = (
            t[0, :, start:stop].reshape(shape).transpose(0, 1) for t in (query, key, value)
        )
        part = scaled_dot_product_attention(query_part, key_part, value_part, scale=scaling)
        out.append(part.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(out)[None], None


AttentionInterface.register("saccade", attend)
# transformers passes packed images in one call to implementations with "flash" in their name, else one by one.
AttentionInterface.register("saccade_flash", attend_images)


class VisionLanguageModel:
    """A whole vision-language model of a checkpoint (vision tower, language model, output head) with its renderer.

    `settings.lora_rank` > 0 freezes the model and adds trainable adapters to the linear layers of its text model (see
    `lora`). `settings.trained_weights` = "language_model" freezes the vision tower and its projector, which merges the
    patches of a visual token (deepstack layers have one each). `model` replaces the folder's weights by a model in
    memory, which keeps its dtype. On the device "meta" no weights are read: another process has them. Raises ModelError
    for a folder that is not a supported model, whose tensors aren't those of its config.json, or hold NaN or an
    infinity.
    """

    def __init__(self, settings: ModelConfig, model: PreTrainedModel | None = None) -> None:
        self.settings = settings
        self.max_micro_batch_tokens = sys.maxsize  # with padding; lowered by training when memory is full
        self.renderer: ChatRenderer = load_renderer(settings.path)
        message = f"{settings.path} can't be loaded as a model on the device {settings.device!r}"
        with convert_errors(ModelError, message, key="model.device", value=settings.device):
            self.device = torch.device(settings.device)
        if settings.attention == "varlen":
            require_varlen(self.device, getattr(torch, settings.dtype))
        with convert_errors(ModelError, message, key="model.path", value=settings.path):
            loaded: Any = _load_model(settings, Path(settings.path)) if model is None else model
            self.model: Any = loaded.to(self.device)
            # Read now: a run deletes the checkpoint that it was loaded from when it has written newer ones.
            files = [file for file in Path(settings.path).iterdir() if file.suffix in METADATA_SUFFIXES]
            self._metadata_files = {
                file.name: read_bytes(file)
                for file in files
                if ".index." not in file.name and file.name not in IGNORED_FILES
            }
        self.model.set_attn_implementation(_ATTENTION_IMPLEMENTATIONS)
        self.model.model.visual.config._attn_implementation = "saccade_flash"
        self.model.eval()
        if settings.activation_checkpointing:
            _enable_activation_checkpointing(self.model)
        if settings.lora_rank:
            lora.attach_adapters(self.model, self.model.model.language_model, settings.lora_rank)
            if self.device.type != "meta":
                self._base_folder = lora.restore_adapters(
                    self.model, Path(settings.path), functools.partial(_load_model, settings)
                )
        if self.device.type != "meta" and (name := checkpoint_io.find_nonfinite(self.model.state_dict())):
            raise ModelError(
                f"{settings.path} can't be used: its weight {name} holds NaN or an infinity; give another checkpoint",
                key="model.path",
                value=settings.path,
            )
        if settings.trained_weights == "language_model":
            self.model.model.visual.requires_grad_(False)
        _freeze_unread_mergers(self.model)
        is_tower_frozen = not any(parameter.requires_grad for parameter in self.model.model.visual.parameters())
        # Within a policy update: kept longer, a resumed run would compute some in passes with other images, whose
        # rounding differs.
        self.frozen_features = FeatureCache(settings.vision_cache_bytes if is_tower_frozen else 0)
        self.language_model: Any = self.model.model.language_model
        self.policy = Policy(
            self.model,
            visual_ids=self.renderer.visual_ids,
            forbidden_ids=self.renderer.forbidden_ids,
            compute_dtype=self.model.dtype,
        ).to(self.device)

    @property
    def kv_cache_shape(self) -> tuple[int, int, int]:
        """Return layers, key-value heads and head size: the shape of a KV cache per token."""
        config = self.language_model.config
        return config.num_hidden_layers, config.num_key_value_heads, self.language_model.layers[0].self_attn.head_dim

    @property
    def num_parallel_micro_batches(self) -> int:
        """Return how many micro-batches should be processed in parallel: one per thread on a CPU, else one."""
        return self.settings.num_threads if self.device.type == "cpu" else 1

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters, each once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights, such as "float32"."""
        return self.settings.dtype

    @property
    def has_adapters(self) -> bool:
        """Return whether LoRA adapters are trained, on top of frozen weights."""
        return self.settings.lora_rank > 0

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors, of sharded ones as a whole."""
        return sum(tensor.numel() for tensor in self.model.state_dict().values()) * self.policy.compute_dtype.itemsize

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the tensors by their names in the model."""
        return self.model.state_dict()

    def copy_layers_to_cpu(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return a copy of each layer's tensors, by their names in a checkpoint; adapters are merged."""
        return checkpoint_io.copy_layers_to_cpu(self.model, self.policy.compute_dtype)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder; adapters are merged into its weights.

        If the weights are sharded among processes, all of them must call it, and rank 0 writes (see `checkpoint_io`).
        """
        with _convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            adapters = self._gather_adapters()
            if checkpoint_io.is_rank_zero():
                self.save_metadata(folder, adapters)
            checkpoint_io.write_weights(self.model, folder, dtype=self.policy.compute_dtype)

    def take_snapshot(self) -> "ModelSnapshot":
        """Return a copy of the model in the CPU's memory, to be written while this one is trained."""
        adapters = {name: checkpoint_io.copy_to_cpu(value) for name, value in self._gather_adapters().items()}
        return ModelSnapshot(self, adapters, self.copy_layers_to_cpu())

    def export_adapters(self, folder: Path) -> None:
        """Write the adapters alone into a folder, in peft's format; collective like `save`."""
        with _convert_write_errors(folder):
            adapters = self._gather_adapters()
            if checkpoint_io.is_rank_zero():
                lora.export_adapters(adapters, folder)

    def _gather_adapters(self) -> dict[str, Tensor]:
        weights = lora.get_adapter_weights(self.model)
        return {name: checkpoint_io.gather_tensor(value) for name, value in weights.items()}

    def save_metadata(self, folder: Path, adapters: Mapping[str, Tensor]) -> None:
        """Write everything of a checkpoint but the weights: configs, tokenizer, processor, and the adapters."""
        config = self.model.config
        config.architectures = [type(self.model).__name__.removeprefix("FSDP")]
        config.dtype = self.policy.compute_dtype
        config.save_pretrained(folder)
        self.model.generation_config.save_pretrained(folder)
        if adapters:
            lora.save_adapters(adapters, folder, self._base_folder)
        for name, content in self._metadata_files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)

    def encode_images(self, images: Sequence[ImageRef], load_pixels: LoadPixels) -> list[VisionFeatures]:
        """Return the features of each image, in passes of the vision tower of bounded size."""
        return [*self._iterate_features(images, load_pixels)]

    def _iterate_features(self, images: Sequence[ImageRef], load_pixels: LoadPixels) -> Iterator[VisionFeatures]:
        for vision_pass in self.iterate_vision_passes(images, load_pixels):
            yield from self.policy.encode_patches(*vision_pass)

    @contextlib.contextmanager
    def share_features(self) -> Iterator[None]:
        """Encode each image once in the block, if the vision tower is frozen."""
        self.frozen_features.clear()
        try:
            yield
        finally:
            self.frozen_features.clear()

    @torch.no_grad()
    def cache_frozen_features(self, images: Iterable[ImageRef], load_pixels: LoadPixels) -> None:
        """Encode images once for all passes of a policy update, if the vision tower is frozen and there is room."""
        if self.frozen_features.is_full:
            return
        new = [image for image in images if image.key not in self.frozen_features]
        for image, features in zip(new, self._iterate_features(new, load_pixels), strict=True):
            self.frozen_features.add(image.key, features)
            if self.frozen_features.is_full:  # the pass that uses the other images encodes them
                return

    def iterate_vision_passes(self, images: Sequence[ImageRef], load_pixels: LoadPixels) -> Iterator[VisionPass]:
        """Yield the images' patches, in passes of the vision tower of bounded size."""
        batch: list[ImageRef] = []
        remaining = MAX_VISION_TOKENS
        for image in images:
            num_tokens = self.renderer.count_visual_tokens(image)
            if batch and num_tokens > remaining:
                yield self._patchify(batch, load_pixels)
                batch, remaining = [], MAX_VISION_TOKENS
            batch.append(image)
            remaining -= num_tokens
        if batch:
            yield self._patchify(batch, load_pixels)

    def _patchify(self, images: Sequence[ImageRef], load_pixels: LoadPixels) -> VisionPass:
        values, grids = self.renderer.patchify([load_pixels(image) for image in images])
        patches, is_on_gpu = torch.from_numpy(values), self.device.type == "cuda"
        if is_on_gpu:  # its copy runs beside the next work of the CPU
            patches = patches.pin_memory()
        patches = patches.to(self.device, non_blocking=is_on_gpu)
        return patches.to(self.policy.compute_dtype), torch.from_numpy(grids).to(self.device)

    def pack_spans(self, spans: Sequence[AttentionSpan], num_tokens: int) -> PackedTrees:
        """Return the spans of rows of `num_tokens` tokens, to be computed as `settings.attention` says."""
        use_varlen = self.settings.attention == "varlen"
        return PackedTrees(spans, VarlenIndex.build(spans, num_tokens, self.device) if use_varlen else None)

    @torch.no_grad()
    def compute_token_logprobs(self, ledger: Ledger, tokens: Sequence[int], load_pixels: LoadPixels) -> list[float]:
        """Return the logprob of each token after the ledger, at temperature 1, by one forward pass."""
        full = ledger.append_completion(tokens, logprobs=(0.0,) * len(tokens), version=0)
        ids = torch.tensor([full.input_ids()], device=self.device)
        length, images = ids.shape[1], ledger.images()
        logit_index_N = torch.arange(length - len(tokens) - 1, length - 1, device=self.device)
        inputs = PolicyInputs(
            ids_BT=ids,
            positions_3BT=torch.from_numpy(self.renderer.compute_position_ids(full))[:, None].to(self.device),
            trees=self.pack_spans([AttentionSpan(0, 0, length)], length),
            row_N=torch.zeros_like(logit_index_N),
            logit_index_N=logit_index_N,
            token_N=ids[0, logit_index_N + 1],
            vision_passes=self.iterate_vision_passes(images, load_pixels),
            image_indices=range(len(images)),
        )
        logp_N, _ = self.policy(inputs, 1.0)
        return logp_N.tolist()


def _freeze_unread_mergers(model: Any) -> None:
    """Freeze the projectors of deepstack features that no layer reads, which only a model of few layers has.

    They never have a gradient. Ranks that shard them expect one of each trained weight, with images and without.
    """
    visual, num_layers = model.model.visual, model.model.language_model.config.num_hidden_layers
    if hasattr(visual, "deepstack_merger_list"):  # not every family has them
        visual.deepstack_merger_list[num_layers:].requires_grad_(False)


def _load_model(settings: ModelConfig, folder: Path) -> PreTrainedModel:
    dtype, auto_model = getattr(torch, settings.dtype), cast(Any, AutoModelForImageTextToText)
    if settings.device == "meta":
        with torch.device("meta"):
            return auto_model.from_config(AutoConfig.from_pretrained(folder, local_files_only=True), dtype=dtype)
    if (folder / PEFT_CONFIG).exists():  # transformers would load another folder, the one that this file names
        problem = f"{folder} has adapters of peft ({PEFT_CONFIG}); merge them into the weights, then delete that file"
        raise ModelError(problem, key="model.path", value=PEFT_CONFIG)
    with _without_load_report():
        # Mismatches are refused below, with names and shapes.
        model, loading = auto_model.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    _check_tensors(folder, loading)
    if not hasattr(model.config, "quantization_config"):  # else transformers reads the scales
        check_dtypes(folder)
    return model


def _check_tensors(folder: Path, loading: Mapping[str, Any]) -> None:
    """Raise ModelError if a folder lacks tensors of its model, has them in other shapes, or has adapters beside them.

    Other surplus tensors are logged. `loading` is what transformers reports, by names in the model: tied weights and
    buffers that a module computes are not missing, and buffers of older versions of a family are no surplus.
    """
    fix = "copy or download the checkpoint again, or correct its config.json"
    if missing := sorted(loading["missing_keys"]):
        problem = f"{folder} lacks {_name_tensors(missing)}, which would start from random values; {fix}"
        raise ModelError(problem, key="model.path", value=tuple(missing))
    if mismatched := sorted(loading["mismatched_keys"]):
        name, shape, expected = mismatched[0]
        shapes = f"{name} has the shape {tuple(shape)} instead of {tuple(expected)}"
        problem = f"{folder} has {len(mismatched)} tensors of other shapes than its model: {shapes}; {fix}"
        raise ModelError(problem, key="model.path", value=tuple(name for name, *_ in mismatched))
    surplus = sorted(loading["unexpected_keys"])
    if adapters := [name for name in surplus if lora.is_adapter_weight(name)]:
        problem = f"{folder} has unmerged adapters, which would be ignored: {_name_tensors(adapters)}"
        raise ModelError(f"{problem}; merge them into the weights", key="model.path", value=tuple(adapters))
    if surplus:
        _logger.warning("%s has surplus tensors, which are ignored: %s", folder, _name_tensors(surplus))


def _name_tensors(names: Sequence[str]) -> str:
    """Return how many tensors there are, and the names of the first.

    >>> _name_tensors(["a.weight"]), _name_tensors(["a", "b", "c", "d"])
    ('1 tensor (a.weight)', '4 tensors (a, b, c, …)')
    """
    count = pluralize(len(names), "tensor")
    return f"{count} ({join_examples(names)})"


@contextlib.contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from logging a table of missing and surplus tensors, unless it also explains a failure."""

    def is_needed(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or "CONVERSION" in message

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_needed)
    try:
        yield
    finally:
        logger.removeFilter(is_needed)


def _enable_activation_checkpointing(model: nn.Module) -> None:
    """Make every layer keep only its input in training, and recompute the rest in the backward pass.

    transformers' own switch also makes embeddings require gradients, which would differentiate a frozen vision tower.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A copy of a model's weights: adapters by name, and the layers, in which they are merged."""

    vlm: VisionLanguageModel
    adapters: Mapping[str, Tensor]
    layers: Sequence[Mapping[str, Tensor]]

    def save(self, folder: Path) -> None:
        """Write what `VisionLanguageModel.save` would have written when the copy was made."""
        with _convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.vlm.save_metadata(folder, self.adapters)
            checkpoint_io.write_layers(map(dict, self.layers), folder)


@contextlib.contextmanager
def _convert_write_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the file system and of safetensors, which has its own type for a full disk."""
    message = f"the model can't be written to {folder}; free some space, {describe_retry(folder)}"
    with convert_errors(ModelError, message, key=str(folder)), convert_file_errors(folder):
        yield
