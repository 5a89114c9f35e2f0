"""A small byte-level tokenizer with a family's special tokens, for checkpoints that are trained from scratch.

It splits words, digits, white space and punctuation: a word has the same token with and without a space before it, and
each digit is a token. Known words and phrases of the prompt format are one token each; other words fall back to learned
pieces and then to bytes, so nothing is out of vocabulary.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAG_TOKENS = {
    "qwen3_vl": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "qwen2_5_vl": ("<tool_call>", "</tool_call>"),
}

# Frequent phrases of the chat template and the prompt format.
PHRASES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    "You are a helpful assistant.",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "',
    '": {"description": "',
    '"}, "',
    '"}}, "required": ["',
    '", "',
    '"]}}}',
    '{"name": "',
    '", "arguments": {"',
    '{"name": "crop_video", "arguments": {"start_time": ',
    ', "end_time": ',
    ', "question": "',
    '"start_time": ',
    '": ',
    '"}}',
    "}}",
    ".0 seconds>",
    ".5 seconds>",
    " seconds>",
    *(f"<{slash}{tag}>" for tag in ("think", "answer", "tool_response", "tool_code", "code") for slash in ("", "/")),
    "```python\n",
    "```",
    "\n\n",
)

# Words of the packaged environments, tools and synthetic datasets; `vocabulary_text` adds those of others.
CORPUS = """
system user assistant tool What Which How When Where Who Is Are Does Did The This There It In At Of
what which how many much when where who is are was were do does did the a an in at of on and or not no none nothing
comes come right after before between first last next then earlier later during start end begin ends
colour color colours shape shapes square squares disc discs circle triangle star cross ring flash flashes event events
red green blue yellow purple orange pink brown black white grey gray cyan magenta teal lime navy olive
shown show shows seen see appear appears look looking crop video frame frames image images clip second seconds minute
minutes time times long short range window number count answer letter option options one only word with from to by
zero one two three four five six seven eight nine ten once twice
think need know found find I Let me so because must wait call calls again same other each more less most least
start_time end_time question name arguments description type string number required properties crop_video
Give Answer Say Write Look Use Reply final your you it in as between every listed order list tags inside
A B C D E F G H I J yes true false null error Error
You No Think To about can few its questions these this there reply run turn closer closely briefly tools tool_call
be begins given give has lasts lies lie needs needed outside out within now possible per too takes take failed
argument arguments card character closed deadline deeply episode finish finite function key large nested object
parameters read valid Python JSON dark light plain background sees seen saw yet still already done
picture pictures
"""


def make_tokenizer(family: str, texts: Sequence[str], phrases: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a tiny checkpoint; each word of `texts` and each of `phrases` becomes one token."""
    tags = TAG_TOKENS[family]
    whole = sorted({*PHRASES, *phrases} - {*tags, ""}, key=lambda phrase: (-len(phrase), phrase))
    splitter = pre_tokenizers.Split(Regex(_build_pattern(whole)), "isolated")
    words = Counter(word for text in (CORPUS, *texts) for word, _ in splitter.pre_tokenize_str(text))
    # Learned pieces are for unknown words only: known words and phrases are looked up before merging (`ignore_merges`).
    vocabulary, merges = _train_bpe([word for word in sorted(words) if len(word) > 1 and word not in whole])
    for word in (*whole, *sorted(words)):
        pieces = _BYTE_LEVEL.pre_tokenize_str(word)  # one printable character per byte
        vocabulary.setdefault("".join(piece for piece, _ in pieces), len(vocabulary))
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, _BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def _build_pattern(phrases: Sequence[str]) -> str:
    """Return a pattern of the phrases in the given order, then a digit, a word, or any single character."""
    # A phrase that ends in a letter must not match the start of a longer word.
    whole = [
        re.sub(r"[\\.^$*+?{}\[\]|()/-]", r"\\\g<0>", phrase) + (r"(?!\p{L})" if phrase[-1].isalpha() else "")
        for phrase in phrases
    ]
    return "|".join([*whole, r"\p{N}", r"[\p{L}_]+", r"[\s\S]"])


def _train_bpe(words: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train byte-level BPE: all 256 bytes and a few hundred pieces of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _BYTE_LEVEL
    # Sorted, so that ids are the same on every machine.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, min_frequency=3, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [(left, right) for left, right in model["merges"]]
