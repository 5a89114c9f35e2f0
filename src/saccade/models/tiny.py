"""Tiny checkpoints: Hugging Face folders of the real architectures, small enough to train on two CPU cores."""

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from saccade.errors import ModelError, RunError, convert_errors
from saccade.models.checkpoint_files import convert_write_errors
from saccade.models.tiny_tokenizer import make_tokenizer
from saccade.utils.hashing import derive_seed

_SPATIAL_MERGE_SIZE, _TEMPORAL_PATCH_SIZE, _HEAD_DIM = 2, 2, 32

# The published chat templates, reduced to text, images, tools and tool results.
_CHAT_TEMPLATE = """
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


def make_tiny_model(
    folder: str,
    *,
    family: str = "qwen3_vl",
    seed: int = 0,
    vocabulary_text: Sequence[str] | None = None,
    phrases: Sequence[str] = (),
    hidden_size: int = 128,
    num_layers: int = 4,
    patch_size: int = 8,
    tie_word_embeddings: bool = True,
) -> None:
    """Write a randomly initialized checkpoint that `AutoModelForImageTextToText` and `AutoTokenizer` load.

    Each word of `vocabulary_text` is one token, and so is each of `phrases` (such as a tool's schema). `hidden_size` is
    a multiple of 64 (two heads); `patch_size` is in pixels: a visual token is 2 * patch_size x 2 * patch_size of them.
    `tie_word_embeddings` ties input and output embeddings. The same arguments write the same files. Raises ModelError
    for an unknown family or an invalid hidden size.
    """
    settings = _find_family(family)
    if hidden_size < 2 * _HEAD_DIM or hidden_size % (2 * _HEAD_DIM):
        problem = f"hidden_size={hidden_size} is invalid for a tiny model: it must be a multiple of {2 * _HEAD_DIM}"
        raise ModelError(problem, key="hidden_size", value=hidden_size)
    template = _CHAT_TEMPLATE.strip().replace("DEFAULT", repr(settings.default_system_prompt))
    tokenizer = make_tokenizer(family, vocabulary_text or (), phrases, template)
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _VISION_TOKENS.items()}
    sizes = hidden_size, num_layers, patch_size
    config = build_tiny_config(family, len(tokenizer), *sizes, tie_word_embeddings=tie_word_embeddings, **ids)
    # Don't change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("tiny", family, seed))
        model = settings.model_type(config)
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": eos_ids, "pad_token_id": eos_ids[1], "do_sample": True}
    )
    # These bounds never resize an image that consists of whole visual tokens.
    preprocessor = {
        "size": {"shortest_edge": (_SPATIAL_MERGE_SIZE * patch_size) ** 2, "longest_edge": 4096**2},
        "patch_size": patch_size,
        "temporal_patch_size": _TEMPORAL_PATCH_SIZE,
        "merge_size": _SPATIAL_MERGE_SIZE,
        "image_mean": settings.image_mean,
        "image_std": settings.image_std,
    }
    target = Path(folder)
    draft = target / ".draft"  # in the same file system
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    _save_checkpoint(draft, model, tokenizer, preprocessor)
    # config.json comes last: it is what makes the folder a model.
    for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(target / file.name)
    draft.rmdir()


def build_tiny_config(
    family: str,
    vocab_size: int,
    hidden_size: int = 128,
    num_layers: int = 4,
    patch_size: int = 8,
    *,
    tie_word_embeddings: bool = True,
    **token_ids: Any,
) -> PreTrainedConfig:
    """Return the config of a tiny model of these sizes."""
    settings = _find_family(family)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // _HEAD_DIM,
        "num_key_value_heads": hidden_size // _HEAD_DIM // 2,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "pad_token_id": None,  # its embedding would be frozen at zero
        **copy.deepcopy(settings.text),  # transformers changes the rope parameters in place
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": patch_size,
        "spatial_merge_size": _SPATIAL_MERGE_SIZE,
        "temporal_patch_size": _TEMPORAL_PATCH_SIZE,
        "out_hidden_size": hidden_size,
        "initializer_range": 0.02,
        **settings.vision,
    }
    if "fullatt_block_indexes" in vision:
        vision["window_size"] = 8 * patch_size
    return settings.config_type(
        text_config=text, vision_config=vision, tie_word_embeddings=tie_word_embeddings, **token_ids
    )


_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TinyFamily:
    """A family's classes and template, and what its configs have beyond the sizes that the families share."""

    config_type: Any
    model_type: Any
    default_system_prompt: str
    image_mean: Sequence[float]
    image_std: Sequence[float]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
FAMILIES = {
    "qwen3_vl": _TinyFamily(
        config_type=Qwen3VLConfig,
        model_type=Qwen3VLForConditionalGeneration,
        default_system_prompt="",
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        text={"head_dim": _HEAD_DIM, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        vision={"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen2_5_vl": _TinyFamily(
        config_type=Qwen2_5_VLConfig,
        model_type=Qwen2_5_VLForConditionalGeneration,
        default_system_prompt="You are a helpful assistant.",
        image_mean=(0.48145466, 0.4578275, 0.40821073),
        image_std=(0.26862954, 0.26130258, 0.27577711),
        text={"rope_parameters": _ROPE, "bos_token_id": None, "eos_token_id": None},
        vision={"fullatt_block_indexes": [1]},
    ),
}


def _find_family(family: str) -> _TinyFamily:
    if family not in FAMILIES:
        problem = f"family={family!r} has no tiny model; choose one of {', '.join(sorted(FAMILIES))}"
        raise ModelError(problem, key="family", value=family)
    return FAMILIES[family]


def _save_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, preprocessor: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Servers need a video processor config, too, although Saccade computes the patches of frames itself.
    with convert_write_errors():
        model.save_pretrained(folder)
    # tokenizers raises a plain Exception for a full disk.
    with convert_errors(RunError, f"{folder.parent} can't be written; free some space", key=str(folder.parent)):
        tokenizer.save_pretrained(folder)
    for name, key, class_name in (
        ("preprocessor", "image_processor_type", "Qwen2VLImageProcessor"),
        ("video_preprocessor", "video_processor_type", "Qwen3VLVideoProcessor"),
    ):
        content = json.dumps({key: class_name, **preprocessor}, indent=2) + "\n"
        (folder / f"{name}_config.json").write_text(content, encoding="utf-8")
