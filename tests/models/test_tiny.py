import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from error_cases import raises
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from saccade.chat.renderer import load_renderer
from saccade.data.synthetic import text_templates
from saccade.data.synthetic.events import COLORS
from saccade.environments import single_turn, tool_calling
from saccade.errors import ModelError, RunError
from saccade.ledger import ImageRef, Ledger
from saccade.models.tiny import make_tiny_model
from saccade.tools.crop_video import crop_video
from saccade.types import Message

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
TEXTS = ["What colour is shown at second 37?", "Which heptagon comes right after the vermilion one?"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tiny") / request.param)
    make_tiny_model(path, family=request.param, vocabulary_text=TEXTS, phrases=["Say it in one word."])
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def test_transformers_loads_the_checkpoint(folder, tokenizer):
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.5e6
    assert model.config.text_config.pad_token_id is None
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().padding_idx is None
    heads = model.model.language_model.layers[0].self_attn
    assert heads.head_dim == 32
    prompt = tokenizer("What colour is shown?", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 4
    assert list(model.generation_config.eos_token_id) == list(load_renderer(folder).stop_ids)


def test_every_byte_round_trips(tokenizer):
    text = "".join(map(chr, range(1, 0x250))) + "\x00 日本語 🙂 \u200b\r\n\t  end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.get_vocab().keys() >= set(pre_tokenizers.ByteLevel.alphabet())


def test_words_have_one_token_and_digits_are_separate(tokenizer):
    for word in ("red", "purple", "colour", "vermilion", "heptagon"):
        (token,) = tokenizer(word)["input_ids"]
        for context in (f" {word}", f"{word}.", f"<answer>{word}</answer>", f"\n{word}", f'"{word}"', f"{word}17"):
            assert token in tokenizer(context)["input_ids"], context
    assert tokenizer.tokenize("3710.5") == ["3", "7", "1", "0", ".", "5"]


def test_words_of_packaged_prompts_and_datasets_are_single_tokens(tokenizer):
    texts = [
        tool_calling.SYSTEM_PROMPT,
        tool_calling.FINAL_ANSWER_PROMPT,
        single_turn.THINK_SYSTEM_PROMPT,
        json.dumps(crop_video.schema),
    ]
    texts += [
        *(text.replace("{target}", "") for text in text_templates.QUESTION_TEMPLATES.values()),
        text_templates.LOOK_CLOSER,
        *COLORS,
    ]
    for word in {word for text in texts for word in re.findall(r"[A-Za-z]+(?:_[a-z]+)*", text)}:
        assert len(tokenizer(word)["input_ids"]) == 1, word


def test_the_prompt_format_uses_few_tokens(folder, tokenizer):
    call = '{"name": "crop_video", "arguments": {"start_time": 16, "end_time": 32}}'
    assert len(tokenizer(call)["input_ids"]) == 7
    assert len(tokenizer("<answer>red</answer>")["input_ids"]) == 3
    assert len(tokenizer("Say it in one word.")["input_ids"]) == 1
    renderer = load_renderer(folder)
    frame = ImageRef(path="a", digest="d", time=12.5, width=16, height=16)
    empty = renderer.render(Ledger(), [Message(role="user", parts=())]).tokens
    shown = renderer.render(Ledger(), [Message(role="user", parts=("<12.5 seconds>", frame))]).tokens
    assert len(shown) - len(empty) == 7
    assert renderer.count_visual_tokens(frame) == 1


@pytest.mark.slow
def test_the_same_arguments_write_the_same_files(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        state = torch.random.get_rng_state()
        make_tiny_model(str(tmp_path / name), seed=seed, hidden_size=64, num_layers=1, vocabulary_text=TEXTS)
        assert torch.equal(state, torch.random.get_rng_state())
    first, same, other = (digests(tmp_path / name) for name in "abc")
    assert first == same
    assert first["tokenizer.json"] == other["tokenizer.json"]
    assert first["model.safetensors"] != other["model.safetensors"]
    code = (
        "import sys; from saccade.models.tiny import make_tiny_model\n"
        "make_tiny_model(sys.argv[1], seed=3, hidden_size=64, num_layers=1, vocabulary_text=sys.argv[2:])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "d"), *TEXTS], check=True, capture_output=True)
    assert digests(tmp_path / "d") == first


def test_sizes_are_arguments(tmp_path):
    make_tiny_model(str(tmp_path / "m"), hidden_size=192, num_layers=2, patch_size=14, tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert (config.text_config.hidden_size, config.text_config.num_hidden_layers) == (192, 2)
    assert load_renderer(str(tmp_path / "m")).factor == 28
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "m")
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


def test_the_template_is_in_the_folder(folder, tokenizer):
    assert "<|im_start|>" in tokenizer.chat_template
    assert json.loads((Path(folder) / "preprocessor_config.json").read_text())["patch_size"] == 8


@pytest.mark.parametrize(("name", "value"), [("family", "llama"), ("hidden_size", 100)])
def test_invalid_settings_are_refused(tmp_path, name, value):
    with raises(ModelError, key=name, value=value):
        make_tiny_model(str(tmp_path), **{name: value})


def test_a_tokenizer_that_does_not_fit_on_the_disk(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):  # as tokenizers does
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", refuse)
    with raises(RunError, key=str(tmp_path / "tiny")):
        make_tiny_model(str(tmp_path / "tiny"))
    monkeypatch.undo()
    make_tiny_model(str(tmp_path / "tiny"))
    assert (tmp_path / "tiny" / "tokenizer.json").is_file()
