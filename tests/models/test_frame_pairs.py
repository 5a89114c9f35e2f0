"""Pairs of video frames against transformers' own video input: tokens, patches, positions, logprobs, gradients.

The video processors of transformers need torchvision. Their methods that compute tokens and patches don't, and are
called here; the model receives `pixel_values_videos` and computes positions itself.
"""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from error_cases import raises
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from saccade.chat.renderer import ChatRenderer
from saccade.config.schema import ModelConfig
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.local import Local
from saccade.errors import MediaError
from saccade.ledger import Ledger
from saccade.media.cache import CachingMediaLoader
from saccade.media.frame_sampling import interleave_timestamps
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import PixelBudget
from saccade.testing import check_family
from saccade.training.packing import pack
from saccade.training.train_step import forward
from saccade.types import GenerationRequest, Message, SamplingParams, TrainingSample

FPS = 4.0
NUMBERS = [3, 9, 17, 18, 30]  # of frames: an odd number of them
BUDGET = PixelBudget(min_pixels=256, max_pixels=64 * 32)
TEXT, IMAGE, VIDEO = 0, 1, 2  # transformers' types of tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0).integers(0, 256, (40, 32, 64, 3), dtype=np.uint8)
    write_video(folder / "clip.mp4", noise, FPS)
    Image.fromarray(noise[0]).resize((48, 48)).save(folder / "still.png")
    return folder


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def vlm(request, tmp_path_factory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny_model(folder, family=request.param, seed=4)
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1))


@pytest.fixture(scope="module")
def loader():
    return CachingMediaLoader(pairs_frames=True)


@pytest.fixture(scope="module")
def load(files, loader, vlm):
    """Return a function that loads the frames of these numbers."""

    def load(*numbers, loader=loader):
        times = [number / FPS for number in numbers]
        size = {"factor": vlm.renderer.factor, "budget": BUDGET}
        return asyncio.run(loader.load_frames(str(files / "clip.mp4"), times, **size))

    return load


@pytest.fixture(scope="module")
def still(files, loader, vlm):
    size = {"factor": vlm.renderer.factor, "budget": BUDGET}
    return asyncio.run(loader.load_image(str(files / "still.png"), **size))


def append(ledger: Ledger, renderer: ChatRenderer, role: str, *parts) -> Ledger:
    segment = renderer.render(ledger, [Message(role=role, parts=parts)])
    return ledger.observe(segment.tokens, slots=segment.slots, origin=segment.origin)


def sample_reply(ledger: Ledger, seed: int, length: int = 7) -> Ledger:
    tokens = np.random.default_rng(seed).integers(0, 250, length).tolist()
    return ledger.append_completion(tokens, logprobs=[-1.0] * length, version=0)


@pytest.fixture(scope="module")
def samples(vlm, load, still) -> list[TrainingSample]:
    """Conversations with a common prompt of a still image and pairs; results show pairs, a single frame and a still."""
    prompt = append(Ledger(), vlm.renderer, "user", still, *interleave_timestamps(load(*NUMBERS)), "When?")
    ledgers = []
    for index, numbers in enumerate([(5, 6, 7, 8), (11,), ()]):
        ledger = sample_reply(prompt, index)
        shown = interleave_timestamps(load(*numbers)) if numbers else [still]
        ledger = append(ledger, vlm.renderer, "tool", "seen: ", *shown)
        ledgers.append(sample_reply(ledger, 10 + index))
    return [
        TrainingSample(ledger=ledger, advantages=tuple((index - 0.7) * flag for flag in ledger.loss_mask()))
        for index, ledger in enumerate(ledgers)
    ]


def normalize(vlm: VisionLanguageModel, frames_FHWC: np.ndarray) -> torch.Tensor:
    """Normalize a video as the torchvision backend of transformers does: [1, F, C, H, W]."""
    geometry = vlm.renderer._vision_geometry
    mean, std = (torch.tensor(values)[:, None, None] * 255 for values in (geometry.image_mean, geometry.image_std))
    return ((torch.tensor(frames_FHWC).permute(0, 3, 1, 2).float() - mean) / std)[None]


def patchify_video(vlm: VisionLanguageModel, frames_FHWC: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """Return the patches and the grid of a video by the method of transformers, which Qwen2-VL's equals."""
    geometry = vlm.renderer._vision_geometry
    sizes = geometry.patch_size, geometry.merge_size, geometry.temporal_patch_size
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, normalize(vlm, frames_FHWC), *sizes)
    return patches[0], grid


def build_inputs(vlm: VisionLanguageModel, ledger: Ledger, loader) -> dict[str, torch.Tensor]:
    """Return the inputs that transformers' processors make of a ledger.

    The pairs of a message are one video of Qwen3-VL, which writes its times between them; for Qwen2.5-VL a pair is one.
    """
    ids = torch.tensor([ledger.input_ids()])
    image_id, video_id = vlm.renderer.visual_ids
    stills = [loader.load_pixels(image) for image in ledger.images() if not image.is_pair]
    messages = [[slot.image for slot in segment.slots if slot.image.is_pair] for segment in ledger.segments]
    if vlm.renderer.family == "qwen2_5_vl":
        messages = [[pair] for pairs in messages for pair in pairs]
    frames = [np.concatenate([loader.load_pixels(pair) for pair in pairs]) for pairs in messages if pairs]
    videos = [patchify_video(vlm, frames_FHWC) for frames_FHWC in frames]
    patches, grids = vlm.renderer.patchify(stills)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": IMAGE * (ids == image_id).int() + VIDEO * (ids == video_id).int(),
        "pixel_values": torch.from_numpy(patches),
        "image_grid_thw": torch.from_numpy(grids),
        "pixel_values_videos": torch.cat([patches for patches, _ in videos]),
        "video_grid_thw": torch.tensor([grid for _, grid in videos]),
    }
    if vlm.renderer.family == "qwen2_5_vl":  # no matter which: a pair is one step of time
        inputs["second_per_grid_ts"] = torch.full((len(videos),), 3.5)
    return inputs


# ---- what the model reads --------------------------------------------------------------------------------------------


def test_frames_are_paired_in_order(load, vlm, loader):
    pairs = load(*NUMBERS)
    assert [(pair.time, pair.second_time) for pair in pairs] == [(0.75, 2.25), (4.25, 4.5), (7.5, 7.5)]
    single = load(*NUMBERS, loader=CachingMediaLoader())
    assert [frame for pair in pairs for frame in pair.frames] == single
    assert [(pair.time, pair.second_time) for pair in load(11)] == [(2.75, 2.75)]
    assert load() == []
    pixels = [CachingMediaLoader().load_pixels(frame) for frame in single]
    for pair, frames in zip(pairs, (pixels[:2], pixels[2:4], [pixels[4]] * 2), strict=True):
        assert np.array_equal(loader.load_pixels(pair), np.stack(frames))
        assert not loader.load_pixels(pair).flags.writeable


def test_half_as_many_visual_tokens(load, vlm):
    single = load(*range(16), loader=CachingMediaLoader())
    pairs = load(*range(16))
    counts = []
    for images in (single, pairs):
        ledger = append(Ledger(), vlm.renderer, "user", *interleave_timestamps(images), "When?")
        counts.append(sum(slot.num_tokens for slot in ledger.slots()))
    assert counts == [16 * 8, 8 * 8]


def test_patches_equal_those_of_transformers(load, vlm, loader):
    pixels = [loader.load_pixels(pair) for pair in load(*NUMBERS)]
    patches, grids = vlm.renderer.patchify(pixels)
    frames = np.concatenate([*pixels[:2], pixels[2][:1]])  # the video processor repeats the last frame itself
    expected, (steps, rows, columns) = patchify_video(vlm, frames)
    assert grids.tolist() == [[1, rows, columns]] * steps
    assert np.abs(patches - expected.numpy()).max() < 1e-6
    # A frame that is paired with itself has the patches of an image.
    assert np.array_equal(*(vlm.renderer.patchify([image])[0] for image in (pixels[2], pixels[2][0])))


def test_stills_and_pairs_of_equal_size_keep_their_order(load, vlm, loader):
    pair, frame = loader.load_pixels(load(3, 9)[0]), loader.load_pixels(load(9)[0])[0]
    patches, grids = vlm.renderer.patchify([frame, pair, frame])
    parts = [vlm.renderer.patchify([image])[0] for image in (frame, pair, frame)]
    assert np.array_equal(patches, np.concatenate(parts))
    assert len(grids) == 3


def test_tokens_equal_those_of_transformers(load, vlm):
    renderer = vlm.renderer
    pairs = load(*NUMBERS)
    _, (grid, *_) = renderer.patchify([np.zeros((2, pairs[0].height, pairs[0].width, 3), np.uint8)])
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    if renderer.family == "qwen3_vl":
        metadata = SimpleNamespace(fps=FPS, frames_indices=list(NUMBERS))
        inputs = {"video_grid_thw": torch.tensor([[3, *grid[1:]]]), "video_metadata": [metadata]}
        text = Qwen3VLProcessor.replace_video_token(processor, inputs, 0)
    else:  # a pair is a video of its own, after a text that its template would hold
        inputs = {"video_grid_thw": torch.tensor([grid.tolist()])}
        video = Qwen2_5_VLProcessor.replace_video_token(processor, inputs, 0)
        times = ("1.5", "4.4", "7.5")
        text = "".join(f"<{time} seconds><|vision_start|>{video}<|vision_end|>" for time in times)
    ledger = append(Ledger(), renderer, "user", *interleave_timestamps(pairs), "When?")
    start = append(Ledger(), renderer, "user", "When?").unexpanded_ids()
    tail = renderer.encode("When?")
    first = next(index for index in range(len(start)) if start[index : index + len(tail)] == tail)
    num_after = len(start) - first
    assert renderer.decode(ledger.input_ids()[first:-num_after]) == text


def test_positions_equal_get_rope_index(samples, vlm, loader):
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    for sample in samples:
        inputs = build_inputs(vlm, sample.ledger, loader)
        expected, _ = vlm.model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})
        assert np.array_equal(vlm.renderer.compute_position_ids(sample.ledger), expected[:, 0].numpy())


def test_families_keep_their_contract(vlm):
    check_family(vlm.renderer)


def test_a_family_without_videos_refuses_pairs(load, vlm):
    renderer = vlm.renderer
    family = replace(renderer._family, video_token=None)
    without = ChatRenderer(family, renderer._tokenizer, renderer._vision_geometry)
    deeper = replace(renderer._vision_geometry, temporal_patch_size=4)
    for other in (without, ChatRenderer(renderer._family, renderer._tokenizer, deeper)):
        assert not other.supports_frame_pairs
        assert other.visual_ids == renderer.visual_ids[:1]
        pair = load(3, 9)[0]
        with raises(MediaError, key=pair.path, value=renderer.family):
            append(Ledger(), other, "user", pair)


# ---- what the model computes -----------------------------------------------------------------------------------------


def pack_samples(vlm, samples, **changes):
    settings = {"pack_length": 4096, "micro_batch_size": 8, **changes}
    return pack(samples, compute_positions=vlm.renderer.compute_position_ids, **settings)


def compute_logprobs(vlm, samples, loader) -> dict[int, list[float]]:
    """Return the logprobs of the trained tokens of packed samples, by sample."""
    logprobs: dict[int, list[float]] = {}
    for batch in pack_samples(vlm, samples):
        with torch.no_grad():
            logp_N, _ = forward(vlm, batch, load_pixels=loader.load_pixels, temperature=1.0)
        for sample, value in zip(batch.sample_N.tolist(), logp_N.tolist(), strict=True):
            logprobs.setdefault(sample, []).append(value)
    return logprobs


@pytest.mark.slow
def test_logprobs_equal_those_of_transformers(samples, vlm, loader):
    model = AutoModelForImageTextToText.from_pretrained(vlm.settings.path).eval()
    logprobs = compute_logprobs(vlm, samples, loader)
    for index, sample in enumerate(samples):
        inputs = build_inputs(vlm, sample.ledger, loader)
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        logits[:, list(vlm.renderer.forbidden_ids)] = float("-inf")
        trained = torch.tensor(sample.ledger.loss_mask())[1:]
        logp = torch.log_softmax(logits[:-1], dim=-1).gather(1, inputs["input_ids"][0, 1:, None])[trained, 0]
        assert len(logp) == 14
        assert (logp - torch.tensor(logprobs[index])).abs().max() < 1e-5


@pytest.mark.slow
def test_the_second_frame_changes_the_logprobs(load, vlm, loader):
    ledgers = []
    for numbers in ((3, 9), (3, 20)):
        shown = [replace(image, time=1.0) if image.second_time is None else image for image in load(*numbers)]
        ledgers.append(sample_reply(append(Ledger(), vlm.renderer, "user", *shown, "When?"), 0))
    samples = [TrainingSample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    assert ledgers[0].input_ids() == ledgers[1].input_ids()
    first, second = compute_logprobs(vlm, samples, loader).values()
    assert np.abs(np.subtract(first, second)).max() > 1e-4


@pytest.mark.slow
def test_packed_rows_have_the_losses_and_gradients_of_plain_rows(samples, vlm, loader):
    """In float64, so that rounding, which differs from CPU to CPU, hides no difference."""
    exact = VisionLanguageModel(vlm.settings)
    exact.model.double().train()

    def compute(batches):
        exact.model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            logp_N, _ = forward(exact, batch, load_pixels=loader.load_pixels, temperature=1.0)
            loss = -(torch.from_numpy(batch.advantage_N) * logp_N).sum()
            loss.backward()
            total += float(loss.detach())
        return total, {name: p.grad.clone() for name, p in exact.model.named_parameters() if p.grad is not None}

    packed = pack_samples(exact, samples)
    plain = pack_samples(exact, samples, share_prefixes=False, micro_batch_size=1)
    assert [len(batch.ids_BT) for batch in (*packed, *plain)] == [1, 1, 1, 1]
    assert len(packed[0].images) == 4 + 2 + 1 + 1  # the prompt's once
    (loss, grads), (plain_loss, plain_grads) = compute(packed), compute(plain)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert any(name.startswith("model.visual") for name in grads)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert float((grad - plain_grads[name]).abs().max()) <= 1e-6 * max(1.0, float(plain_grads[name].abs().max()))


@pytest.mark.slow
def test_the_trainer_scores_what_the_engine_sampled(load, still, vlm, loader):
    async def converse(engine, seed):
        ledger = append(Ledger(), vlm.renderer, "user", *interleave_timestamps(pairs), still, "When?")
        for turn in range(3):
            sampling = SamplingParams(max_tokens=12, seed=seed + turn, forbidden_ids=vlm.renderer.forbidden_ids)
            reply = await engine.generate(GenerationRequest(ledger, sampling))
            ledger = ledger.append_completion(reply.tokens, logprobs=reply.logprobs, version=reply.version)
            if turn < 2:
                ledger = append(ledger, vlm.renderer, "tool", *interleave_timestamps(results[turn]), still)
        return ledger

    async def main():
        engine = Local(vlm, loader)
        ledgers = await asyncio.gather(*(converse(engine, 10 * index) for index in range(4)))
        await engine.close()
        return ledgers

    pairs, results = load(*NUMBERS), [load(5, 6, 7, 8), load(11)]
    ledgers = asyncio.run(main())
    samples = [TrainingSample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    logprobs = compute_logprobs(vlm, samples, loader)
    for index, ledger in enumerate(ledgers):
        sampled = [value for value, flag in zip(ledger.logprobs(), ledger.loss_mask(), strict=True) if flag]
        assert len(sampled) == 36
        assert np.abs(np.subtract(sampled, logprobs[index])).max() < 1e-5
