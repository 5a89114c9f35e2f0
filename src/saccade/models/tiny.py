"""Tiny checkpoints: real Hugging Face folders of the real architecture, small enough to learn on two CPU cores."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from saccade.errors import ModelError
from saccade.model._tiny_tokenizer import make_tokenizer
from saccade.types import seed_of

_MERGE, _TEMPORAL, _HEAD = 2, 2, 32
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)

# The published chat templates, as far as text, pictures, tools and tool results go.
_TEMPLATE = """
{%- macro content(message) -%}
  {%- if message.content is string -%}{{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- else -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set given = messages[0].role == 'system' -%}
{%- set system = content(messages[0]) if given else DEFAULT -%}
{%- if tools or given or system -%}{{- '<|im_start|>system\n' + system -}}
  {%- if tools -%}
    {%- if given or system -%}{{- '\n\n' -}}{%- endif -%}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with ' -}}
    {{- 'function signatures within <tools></tools> XML tags:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' -}}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' -}}
    {{- '<args-json-object>}\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if given else messages) -%}
  {%- if message.role == 'tool' -%}
    {%- if not loop.previtem or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + content(message) + '\n</tool_response>' -}}
    {%- if not loop.nextitem or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + content(message) + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def make_tiny(
    folder: str,
    *,
    family: str = "qwen3_vl",
    seed: int = 0,
    vocabulary_text: Sequence[str] | None = None,
    phrases: Sequence[str] = (),
    hidden: int = 128,
    layers: int = 4,
    patch: int = 8,
    tied: bool = True,
) -> None:
    """Write a randomly initialised checkpoint that `AutoModelForImageTextToText` and `AutoTokenizer` open.

    Words of `vocabulary_text` are one token each, and so is each of `phrases` (such as a tool's schema). `hidden` is
    a multiple of 32 (the size of a head), `patch` is in pixels: one visual token is 2*patch x 2*patch of them. `tied`
    shares the input and output embeddings. The same arguments write the same files. Raises ModelError for an unknown
    family or a size that doesn't fit.
    """
    _, model_type, default_system, mean, std = _known(family)
    if hidden < 2 * _HEAD or hidden % (2 * _HEAD):
        raise ModelError(f"a tiny model's hidden size must be a multiple of {2 * _HEAD}, not {hidden}")
    template = _TEMPLATE.strip().replace("DEFAULT", repr(default_system))
    tokenizer = make_tokenizer(family, vocabulary_text or (), phrases, template)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = tiny_config(family, len(tokenizer), hidden=hidden, layers=layers, patch=patch, tied=tied, **ids)
    # The caller's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("tiny", family, seed))
        model = model_type(config)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True}
    )
    _save(Path(folder), model, tokenizer, _preprocessor(patch, mean, std))


def tiny_config(
    family: str,
    vocabulary: int,
    *,
    hidden: int = 128,
    layers: int = 4,
    patch: int = 8,
    tied: bool = True,
    **ids: Any,
) -> PreTrainedConfig:
    """The config of what `make_tiny` makes with these sizes and a vocabulary of so many tokens."""
    text, vision = _text_sizes(vocabulary, hidden, layers), _vision_sizes(hidden, patch)
    return _known(family)[0](text, vision, tie_word_embeddings=tied, **ids)


_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _text_sizes(vocabulary: int, hidden: int, layers: int) -> dict[str, Any]:
    """What both families' language models share; no pad token, whose embedding would be frozen at zero."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // _HEAD,
        "num_key_value_heads": hidden // _HEAD // 2,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "pad_token_id": None,
    }


def _vision_sizes(hidden: int, patch: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _TEMPORAL,
        "out_hidden_size": hidden,
        "initializer_range": 0.02,
    }


def _qwen3_vl(text: dict[str, Any], vision: dict[str, Any], **shared: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    return Qwen3VLConfig(
        text_config={**text, "head_dim": _HEAD, "rope_parameters": rope},
        vision_config={**vision, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **shared,
    )


def _qwen2_5_vl(text: dict[str, Any], vision: dict[str, Any], **shared: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None},
        vision_config={**vision, "fullatt_block_indexes": [1], "window_size": 8 * vision["patch_size"]},
        **shared,
    )


_Family = tuple[Callable[..., PreTrainedConfig], type[PreTrainedModel], str, Any, Any]
_FAMILIES: Mapping[str, _Family] = {
    "qwen3_vl": (_qwen3_vl, Qwen3VLForConditionalGeneration, "", _HALF, _HALF),
    "qwen2_5_vl": (
        _qwen2_5_vl,
        Qwen2_5_VLForConditionalGeneration,
        "You are a helpful assistant.",
        _CLIP_MEAN,
        _CLIP_STD,
    ),
}


def _known(family: str) -> _Family:
    if family not in _FAMILIES:
        raise ModelError(f"there is no tiny model of the family {family!r}; found: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[family]


def _preprocessor(patch: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """How pictures are prepared; bounds so wide that a picture which fits the patches is never resized."""
    return {
        "size": {"shortest_edge": (_MERGE * patch) ** 2, "longest_edge": 4096**2},
        "patch_size": patch,
        "temporal_patch_size": _TEMPORAL,
        "merge_size": _MERGE,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def _save(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, preprocessor: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Servers ask for a video processor too, although Saccade shows a video as timed pictures.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, kind in (("preprocessor", "Qwen2VLImageProcessor"), ("video_preprocessor", "Qwen3VLVideoProcessor")):
        key = "image_processor_type" if name == "preprocessor" else "video_processor_type"
        path = folder / f"{name}_config.json"
        path.write_text(json.dumps({key: kind, **preprocessor}, indent=2) + "\n", encoding="utf-8")
