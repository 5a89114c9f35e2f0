"""Shared-prefix packing compared with one row per sample: equal losses and gradients."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import attend_densely, build_mask
from error_cases import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from saccade.config.schema import ModelConfig
from saccade.errors import RunError
from saccade.ledger import ImageRef, Ledger
from saccade.models import vlm as vlm_module
from saccade.models.policy import FeatureCache
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.training import train_step as train_step_module
from saccade.training.packing import bin_pack, build_prefix_trees, pack, split_micro_batch
from saccade.training.train_step import forward, load_ahead, run_within_memory, split_to_fit, train_step
from saccade.types import Message, TrainingSample


def load_pixels(image: ImageRef) -> np.ndarray:
    rng = np.random.default_rng(int(image.digest))
    return rng.integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)


def load_all_pixels(images):
    return {image.key: load_pixels(image) for image in images}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def vlm(request, tmp_path_factory) -> VisionLanguageModel:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny_model(folder, family=request.param, seed=2)
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1))


def make_image(number: int, vlm: VisionLanguageModel, num_columns: int = 1) -> ImageRef:
    side = vlm.renderer.factor
    return ImageRef(path="x", digest=str(number), time=1.0 * number, width=side * num_columns, height=side)


def append_message(ledger: Ledger, vlm: VisionLanguageModel, message: Message) -> Ledger:
    segment = vlm.renderer.render(ledger, [message])
    return ledger.observe(segment.tokens, slots=segment.slots, origin=segment.origin)


def append_reply(ledger: Ledger, rng: np.random.Generator, length: int) -> Ledger:
    tokens = rng.integers(0, 250, length).tolist()
    return ledger.append_completion(
        tokens, logprobs=rng.normal(-2, 1, length).tolist(), version=int(rng.integers(0, 3))
    )


def make_questions(vlm: VisionLanguageModel, rng: np.random.Generator) -> list[TrainingSample]:
    """Make four samples with different questions about the same frames."""
    frames = [part for n in range(6) for part in (f"<{n}.5 seconds>", make_image(50 + n, vlm))]
    texts = ("When?", "How many?", "When is red?", "Which?")
    messages = [Message(role="user", parts=(*frames, text)) for text in texts]
    ledgers = [append_message(Ledger(), vlm, message) for message in messages]
    return [make_sample(append_reply(ledger, rng, 6), rng) for ledger in ledgers]


def make_samples(vlm: VisionLanguageModel, seed: int = 0) -> list[TrainingSample]:
    """Make samples of all kinds of trees.

    These are different questions about the same frames, and two groups of main conversations with several turns, images
    in prefix and branches, and sub-agents.
    """
    rng = np.random.default_rng(seed)
    samples = make_questions(vlm, rng)
    for group, question in ((0, "When is red shown?"), (1, "When is red shown?")):
        parts = [part for n in range(3) for part in (f"<{n}.5 seconds>", make_image(10 * group + n, vlm, 1 + n % 2))]
        prompt = append_message(Ledger(), vlm, Message(role="user", parts=(*parts, question)))
        prompt = prompt.prefill(vlm.renderer.encode("<think>\n"))
        for index in range(4):
            ledger = append_reply(prompt, rng, int(rng.integers(3, 12)))
            for _ in range(index % 3):
                result = Message(role="tool", parts=("seen ", make_image(90 + index, vlm)))
                ledger = append_message(ledger, vlm, result).prefill(vlm.renderer.encode("<think>\n"))
                ledger = append_reply(ledger, rng, int(rng.integers(2, 9)))
            samples.append(make_sample(ledger, rng))
            message = Message(role="user", parts=(make_image(group, vlm), "what?"))
            samples.append(make_sample(append_reply(append_message(Ledger(), vlm, message), rng, 5), rng))
    return samples


def make_sample(ledger: Ledger, rng: np.random.Generator) -> TrainingSample:
    value = float(rng.normal())
    advantages = tuple(value if is_sampled else 0.0 for is_sampled in ledger.loss_mask())
    return TrainingSample(ledger=ledger, advantages=advantages)


def compute_gradients(vlm: VisionLanguageModel, batches):
    """Return the policy loss, its gradients, and the trained tokens' logprobs by (sample, rank in the sample)."""
    vlm.model.zero_grad(set_to_none=True)
    total, logprobs = 0.0, {}
    for batch in batches:
        logp_N, _ = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
        loss = -(torch.from_numpy(batch.advantage_N) * logp_N).sum()
        loss.backward()
        total += float(loss.detach())
        for sample, value in zip(batch.sample_N.tolist(), logp_N.tolist(), strict=True):
            logprobs[sample, sum(key[0] == sample for key in logprobs)] = value
    gradients = {name: p.grad.clone() for name, p in vlm.model.named_parameters() if p.grad is not None}
    return total, gradients, logprobs


@pytest.mark.slow
@pytest.mark.parametrize(("pack_length", "micro_batch_size"), [(4096, 8), (160, 3), (1, 1)])
def test_loss_and_gradients_equal_one_row_per_sample(vlm, pack_length, micro_batch_size):
    samples = make_samples(vlm)
    compute_positions = vlm.renderer.compute_position_ids
    packed = pack(
        samples, compute_positions=compute_positions, pack_length=pack_length, micro_batch_size=micro_batch_size
    )
    single = []
    for index, sample in enumerate(samples):
        [batch] = pack([sample], compute_positions=compute_positions, pack_length=4096, micro_batch_size=1)
        batch.sample_N[:] = index
        single.append(batch)
    loss, grads, logp = compute_gradients(vlm, packed)
    loss_1, grads_1, logp_1 = compute_gradients(vlm, single)
    assert logp.keys() == logp_1.keys()
    assert len(logp) == sum(len(sample.ledger.sampled_tokens()) for sample in samples)
    assert max(abs(logp[key] - logp_1[key]) for key in logp) <= 1e-5
    assert abs(loss - loss_1) <= 1e-5 * max(1.0, abs(loss_1))
    assert grads.keys() == grads_1.keys()
    for name, grad in grads.items():
        scale = max(float(grads_1[name].abs().max()), 1e-3)
        assert float((grad - grads_1[name]).abs().max()) <= 1e-5 * max(scale, 1.0), name


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(c, marks=pytest.mark.slow) for c in ({"activation_checkpointing": True}, {"lora_rank": 2}))],
    ids=str,
)
def test_logprobs_and_gradients_equal_those_of_a_dense_mask(vlm, changes, monkeypatch):
    """In float64, so that rounding, which differs from CPU to CPU, hides no difference."""
    vlm = VisionLanguageModel(vlm.settings.model_copy(update=changes))
    for name, parameter in vlm.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    vlm.model.double().train()
    batch = pack_into_one_row(vlm, make_samples(vlm))
    loss, grads, logp = compute_gradients(vlm, [batch])
    mask = build_mask(batch.tree_BT, batch.branch_BT)
    monkeypatch.setattr(vlm_module, "attend_packed", lambda q, k, v, trees, scale: attend_densely(q, k, v, mask, scale))
    dense_loss, dense_grads, dense_logp = compute_gradients(vlm, [batch])
    assert logp.keys() == dense_logp.keys()
    assert max(abs(logp[key] - dense_logp[key]) for key in logp) <= 1e-6 * max(map(abs, logp.values()))
    assert loss == pytest.approx(dense_loss, rel=1e-6, abs=1e-6)
    assert grads.keys() == dense_grads.keys()
    differences = {name: float((grad - dense_grads[name]).norm()) for name, grad in grads.items()}
    norm = float(torch.cat([grad.flatten() for grad in dense_grads.values()]).norm())
    # Logits are float32: a difference of 1e-16 before may round one of them to its neighbor.
    assert sum(value**2 for value in differences.values()) ** 0.5 <= 1e-7 * norm


@pytest.mark.slow
def test_without_trees_each_sample_is_a_row(vlm):
    samples, compute_positions = make_samples(vlm), vlm.renderer.compute_position_ids
    shapes = {"compute_positions": compute_positions, "micro_batch_size": 7}
    batches = pack(samples, **shapes, pack_length=4096, share_prefixes=False)
    assert sum(len(batch.ids_BT) for batch in batches) == len(samples)
    assert all((batch.branch_BT[batch.tree_BT >= 0] == 1).all() for batch in batches)
    loss, grads, logp = compute_gradients(vlm, batches)
    tree_loss, tree_grads, tree_logp = compute_gradients(vlm, pack(samples, **shapes, pack_length=4096))
    assert max(abs(logp[key] - tree_logp[key]) for key in logp) <= 1e-5
    assert loss == pytest.approx(tree_loss, rel=1e-5)
    assert grads.keys() == tree_grads.keys()


def pack_into_one_row(vlm, samples):
    compute_positions = vlm.renderer.compute_position_ids
    [batch] = pack(samples, compute_positions=compute_positions, pack_length=10**6, micro_batch_size=8)
    return batch


def test_prefixes_are_shared_and_every_sampled_token_is_trained(vlm):
    samples = make_samples(vlm)
    trees = build_prefix_trees(samples, 4096)
    assert sorted(len(tree.sample_indices) for tree in trees) == [4, 4, 4, 4, 4]
    batch = pack_into_one_row(vlm, samples)
    assert (batch.tree_BT >= 0).sum() < sum(len(sample.ledger) for sample in samples)
    for index, sample in enumerate(samples):
        assert batch.token_N[batch.sample_N == index].tolist() == list(sample.ledger.sampled_tokens())


def test_logprobs_depend_on_the_images(vlm):
    """A model that ignores its images would pass every other test."""
    batch = pack_into_one_row(vlm, make_samples(vlm))
    with torch.no_grad():
        logp, _ = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
        inverted_logp, _ = forward(vlm, batch, load_pixels=lambda image: 255 - load_pixels(image), temperature=1.0)
    assert (logp - inverted_logp).abs().max() > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 80))
def test_bin_pack_keeps_every_tree_once_within_the_pack_length(lengths, pack_length):
    ledgers = [
        Ledger().observe((n, 1)).append_completion((2,) * length, logprobs=(0.0,) * length, version=0)
        for n, length in enumerate(lengths)
    ]
    samples = [TrainingSample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    rows = bin_pack(build_prefix_trees(samples, pack_length), pack_length)
    assert sorted(index for row in rows for tree in row for index in tree.sample_indices) == list(range(len(samples)))
    assert all(len(row) == 1 or sum(tree.num_tokens for tree in row) <= pack_length for row in rows)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=3)), min_size=1, max_size=12
    ),
    st.integers(1, 60),
    st.integers(1, 3),
)
def test_samples_are_never_split_and_their_tokens_are_contiguous(drawn, pack_length, micro_batch_size):
    """Sequence ratios and rewards-to-go rely on it; and exactly the sampled tokens are trained."""
    samples = []
    for index, (prompt, lengths) in enumerate(drawn):
        ledger = Ledger().observe((prompt, 1, 1))
        for length in lengths:
            ledger = ledger.append_completion((2,) * length, logprobs=(-float(index),) * length, version=0)
            ledger = ledger.observe((3,))
        advantages = tuple(float(index + 1) * is_sampled for is_sampled in ledger.loss_mask())
        samples.append(TrainingSample(ledger=ledger, advantages=advantages))
    batches = pack(
        samples,
        compute_positions=lambda ledger: np.tile(np.arange(len(ledger)), (3, 1)),
        pack_length=pack_length,
        micro_batch_size=micro_batch_size,
    )
    assert sum(len(set(batch.sample_N.tolist())) for batch in batches) == len(samples)
    for batch in batches:
        num_runs = 1 + int((np.diff(batch.sample_N) != 0).sum()) if len(batch.sample_N) else 0
        assert num_runs == len(set(batch.sample_N.tolist()))
        assert (batch.advantage_N == batch.sample_N + 1).all()
        assert (batch.engine_logp_N == -batch.sample_N).all()
        assert (batch.token_N == 2).all()
    assert sum(len(batch.token_N) for batch in batches) == sum(sum(sample.ledger.loss_mask()) for sample in samples)


# ---- parallel micro-batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batch_size", "num_parallel"), [(8, 2), (3, 2), (1, 3), (64, 4)])
def test_micro_batches_have_similar_sizes_and_a_multiple_as_number(vlm, micro_batch_size, num_parallel):
    samples, compute_positions = make_samples(vlm), vlm.renderer.compute_position_ids
    [whole] = pack(samples, compute_positions=compute_positions, pack_length=60, micro_batch_size=64)
    batches = pack(
        samples,
        compute_positions=compute_positions,
        pack_length=60,
        micro_batch_size=micro_batch_size,
        num_parallel_micro_batches=num_parallel,
    )
    sizes = [len(batch.ids_BT) for batch in batches]
    assert sum(sizes) == len(whole.ids_BT)
    assert max(sizes) <= micro_batch_size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) % num_parallel == 0 or set(sizes) == {1}
    assert sum(len(batch.token_N) for batch in batches) == len(whole.token_N)


class GradientRecorder:
    """An optimizer that records the gradients and changes no weight."""

    def __init__(self, vlm):
        self.vlm, self.gradients, self.current_step = vlm, {}, 1

    def step(self):
        parameters = self.vlm.model.named_parameters()
        self.gradients = {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}
        self.vlm.model.zero_grad(set_to_none=True)
        return 1.0


def run_train_step(folder, num_threads):
    """Return the report and the gradients of a training step."""
    vlm = VisionLanguageModel(ModelConfig(path=folder, num_threads=num_threads))
    optimizer = GradientRecorder(vlm)
    batches = pack(
        make_samples(vlm),
        compute_positions=vlm.renderer.compute_position_ids,
        pack_length=60,
        micro_batch_size=3,
        num_parallel_micro_batches=vlm.num_parallel_micro_batches,
    )

    def loss(batch, logp_N):
        return -(torch.from_numpy(batch.advantage_N) * logp_N).sum(), {"tokens": torch.tensor(float(len(logp_N)))}

    with torch.enable_grad():
        return train_step(vlm, optimizer, batches, loss, load_all_pixels=load_all_pixels), optimizer.gradients


@pytest.mark.slow
def test_parallel_micro_batches_are_reproducible_and_equal_sequential_ones(tiny_folder):
    num_threads = torch.get_num_threads()
    (report, gradients), (second_report, second_gradients) = (run_train_step(tiny_folder, 3) for _ in range(2))
    torch.set_num_threads(num_threads)
    assert report == second_report
    assert all(torch.equal(gradients[name], second_gradients[name]) for name in gradients)
    sequential, sequential_gradients = run_train_step(tiny_folder, 1)
    assert (sequential.loss, sequential.entropy) == pytest.approx((report.loss, report.entropy), rel=1e-5)
    assert (sequential.packed_tokens, sequential.trained_tokens) == (report.packed_tokens, report.trained_tokens)
    assert gradients.keys() == sequential_gradients.keys()
    for name, gradient in sequential_gradients.items():
        tolerance = 1e-5 * float(gradient.abs().max())
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("logits_per_chunk", [None, 5])
def test_the_entropy_bonus_raises_the_weighted_entropy(vlm, monkeypatch, logits_per_chunk):
    """Its gradient is minus the weighted entropies', which central differences along it confirm."""
    if logits_per_chunk:
        size = logits_per_chunk * vlm.model.lm_head.out_features
        monkeypatch.setattr("saccade.models.policy.MAX_LOGITS_PER_CHUNK", size)
    rng = np.random.default_rng(0)
    batches = [replace(batch, weight_N=rng.random(len(batch.token_N), np.float32)) for batch in pack_small(vlm)]
    optimizer = GradientRecorder(vlm)
    vlm.model.zero_grad(set_to_none=True)

    def step(entropy_coef):
        def loss(batch, logp_N):
            return 0.0 * logp_N.sum(), {"tokens": torch.tensor(float(len(logp_N)))}

        with torch.enable_grad():
            options = {"load_all_pixels": load_all_pixels, "entropy_coef": entropy_coef}
            return train_step(vlm, optimizer, batches, loss, **options), optimizer.gradients

    def measure_weighted_entropy():
        total = 0.0
        for batch in batches:
            _, entropy_N = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
            total += float(torch.from_numpy(batch.weight_N).double() @ entropy_N.double())
        return total

    report, gradients = step(0.25)
    assert report.loss == pytest.approx(-0.25 * measure_weighted_entropy(), rel=1e-5)
    assert step(0.0)[0].loss == 0.0
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert norm > 0.1
    weights = {name: parameter.detach().clone() for name, parameter in vlm.model.named_parameters()}
    entropies = []
    for distance in (-1e-3, 1e-3, 0.0):
        for name, gradient in gradients.items():
            parameter = vlm.model.get_parameter(name)
            parameter.data.copy_(weights[name]).add_(gradient, alpha=distance / norm)
        entropies.append(measure_weighted_entropy())
    assert (entropies[0] - entropies[1]) / 2e-3 == pytest.approx(norm / 0.25, rel=0.02)


# ---- micro-batches that don't fit in memory --------------------------------------------------------------------------

MEMORY_ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"),
    "numpy": lambda: MemoryError(),
}


def pack_small(vlm, pack_length=10**6, micro_batch_size=64):
    compute_positions = vlm.renderer.compute_position_ids
    return pack(
        make_samples(vlm),
        compute_positions=compute_positions,
        pack_length=pack_length,
        micro_batch_size=micro_batch_size,
    )


def split_into_samples(batch):
    """Split a micro-batch as far as possible; return the parts with the indices of their trained tokens."""
    halves = split_micro_batch(batch)
    if not halves:
        return [(batch, np.arange(len(batch.token_N)))]
    return [
        (part, np.flatnonzero(is_half_N)[index_N])
        for half, is_half_N in halves
        for part, index_N in split_into_samples(half)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("pack_length", [10**6, 200])  # one row of five trees; many rows
def test_parts_of_a_micro_batch_train_each_of_its_tokens_once(vlm, pack_length):
    [batch] = pack_small(vlm, pack_length)
    parts = split_into_samples(batch)
    assert sorted([*set(part.sample_N.tolist())] for part, _ in parts) == [[index] for index in range(20)]
    assert sorted(np.concatenate([index_N for _, index_N in parts])) == [*range(len(batch.token_N))]
    with torch.no_grad():
        whole_N, _ = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
        for part, index_N in parts:
            part_N, _ = forward(vlm, part, load_pixels=load_pixels, temperature=1.0)
            assert (part_N - whole_N[index_N]).abs().max() <= 1e-5
            for name in ("token_N", "engine_logp_N", "advantage_N", "sample_N", "version_N"):
                assert (getattr(part, name) == getattr(batch, name)[index_N]).all(), name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where"), [("cuda", "backward"), ("cpu", "backward"), ("numpy", "forward")])
def test_a_step_that_exceeds_memory_equals_one_with_enough(vlm, kind, where, monkeypatch):
    batches, max_tokens, num_failures = pack_small(vlm, 200, 3), 500, 0

    def loss(batch, logp_N):
        nonlocal num_failures
        value = -(torch.from_numpy(batch.advantage_N) * logp_N).sum() / 100
        is_full = batch.ids_BT.size > max_tokens
        num_failures += is_full
        if is_full and where == "forward":
            raise MEMORY_ERRORS[kind]()
        if is_full:
            logp_N.register_hook(fail)  # the head's gradients have been added then
        return value, {"tokens": torch.tensor(float(len(logp_N)))}

    def fail(gradient):
        raise MEMORY_ERRORS[kind]()

    def step():
        with torch.enable_grad():
            report = train_step(vlm, optimizer, batches, loss, load_all_pixels=load_all_pixels)
        return report, optimizer.gradients

    vlm.model.zero_grad(set_to_none=True)
    optimizer, max_tokens = GradientRecorder(vlm), 10**9
    report, gradients = step()
    max_tokens = 500
    assert max(batch.ids_BT.size for batch in batches) > max_tokens
    try:
        split_report, split_gradients = step()
        failures_of_first_step = num_failures
        step()
    finally:
        vlm.max_micro_batch_tokens = 10**9
    assert 0 < failures_of_first_step == num_failures  # the second step splits at once
    assert split_report.loss == pytest.approx(report.loss, rel=1e-6, abs=1e-6)
    assert split_report.entropy == pytest.approx(report.entropy, rel=1e-6)
    assert split_report.trained_tokens == report.trained_tokens
    for name, gradient in gradients.items():
        assert (split_gradients[name] - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name


def test_a_sample_that_does_not_fit_alone_is_one_sentence(vlm):
    [batch] = pack_small(vlm)
    with raises(RunError, key="environment.settings.max_context_tokens") as caught:
        split_to_fit(batch, 10)
    assert 10 < caught.value.value < batch.ids_BT.size


def test_other_errors_of_a_pass_are_raised(vlm):
    def run():
        with train_step_module.detect_full_memory(pack_small(vlm)[0]):
            raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        run_within_memory(vlm, run)


# ---- pixels --------------------------------------------------------------------------------------------------------


def pack_micro_batches(vlm: VisionLanguageModel):
    return pack(
        make_samples(vlm),
        compute_positions=vlm.renderer.compute_position_ids,
        pack_length=60,
        micro_batch_size=1,
    )


def test_the_next_micro_batch_is_loaded_while_one_is_used(vlm):
    batches, loaded, has_loaded = pack_micro_batches(vlm), [], threading.Semaphore(0)

    def load(images):
        loaded.append([image.key for image in images])
        has_loaded.release()
        return load_all_pixels(images)

    for index, (batch, load_one) in enumerate(load_ahead(vlm, batches, load)):
        for _ in range(2 if index == 0 else int(index + 1 < len(batches))):
            assert has_loaded.acquire(timeout=60)
        assert len(loaded) == min(index + 2, len(batches))
        assert loaded[index] == list({image.key: None for image in batch.images})
        assert all(np.array_equal(load_one(image), load_pixels(image)) for image in batch.images)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_vl", {"trained_weights": "language_model"}),
        ("qwen2_5_vl", {"lora_rank": 2}),
        pytest.param("qwen2_5_vl", {"trained_weights": "language_model"}, marks=pytest.mark.soak),
        pytest.param("qwen3_vl", {"lora_rank": 2}, marks=pytest.mark.soak),
    ],
)
def test_a_frozen_tower_encodes_each_image_once_per_update(family, settings, tmp_path):
    if "lora_rank" in settings:
        pytest.importorskip("peft")
    make_tiny_model(tmp_path, family=family, seed=2)
    num_threads_before = torch.get_num_threads()

    def run(num_threads=1, **more):
        """Return logprobs of a pass without gradients, of one with them, the gradients, and the loaded keys."""
        torch.set_num_threads(num_threads)  # of the pass without gradients, too: their number decides the rounding
        vlm, loaded = (
            VisionLanguageModel(ModelConfig(path=str(tmp_path), num_threads=num_threads, **settings, **more)),
            [],
        )
        batches, optimizer = pack_micro_batches(vlm), GradientRecorder(vlm)

        def load(images):
            loaded.extend(image.key for image in images)
            return load_all_pixels(images)

        logprobs = []

        def loss(batch, logp_N):
            logprobs.append(logp_N.detach())
            return -logp_N.sum(), {"tokens": torch.tensor(float(len(logp_N)))}

        with vlm.share_features():
            with torch.no_grad():
                reference = [
                    forward(vlm, batch, load_pixels=load_one, temperature=1.0)[0]
                    for batch, load_one in load_ahead(vlm, batches, load)
                ]
            with torch.enable_grad():
                train_step(vlm, optimizer, batches, loss, load_all_pixels=load)
        assert vlm.frozen_features.total_bytes == 0
        return torch.cat(reference), torch.cat(logprobs), optimizer.gradients, loaded, batches

    reference, logp, gradients, loaded, batches = run()
    plain_reference, plain_logp, plain_gradients, plain_loaded, _ = run(vision_cache_bytes=0)
    distinct = {image.key for batch in batches for image in batch.images}
    # A micro-batch is loaded ahead, before the features of the one in use are known: not more than once each.
    assert distinct <= set(loaded)
    assert len(loaded) < len(plain_loaded) / 2 or len(loaded) <= 2 * len(distinct)
    assert torch.allclose(reference, plain_reference, rtol=0, atol=2e-6)
    assert torch.allclose(logp, plain_logp, rtol=0, atol=2e-6)
    assert torch.equal(reference, logp)  # of the same weights, whatever the pass
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, plain_gradients[name], rtol=1e-5, atol=1e-6 * float(gradient.abs().max())), name
    assert torch.equal(run()[1], logp)
    parallel, again = run(num_threads=2), run(num_threads=2)
    torch.set_num_threads(num_threads_before)
    assert torch.allclose(parallel[0], reference, rtol=0, atol=2e-6)
    assert all(torch.equal(parallel[2][name], again[2][name]) for name in gradients)


def test_features_beyond_the_bound_are_computed_in_each_pass(vlm):
    batch, known = pack_micro_batches(vlm)[0], FeatureCache(10**6)
    whole, _ = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
    images = list({image.key: image for image in batch.images}.values())
    with torch.no_grad():
        features = vlm.encode_images(images, load_pixels)
    known.max_bytes = sum(part.nbytes for part in features[:2])
    for image, part in zip(images, features, strict=True):
        known.add(image.key, part)
    assert [image.key in known for image in images] == [index < 2 for index in range(len(images))]
    trained, vlm.frozen_features = vlm.frozen_features, known
    mixed, _ = forward(vlm, batch, load_pixels=load_pixels, temperature=1.0)
    vlm.frozen_features = trained
    assert torch.allclose(mixed, whole, rtol=0, atol=2e-6)


def test_a_full_feature_cache_encodes_no_image_in_advance(vlm, monkeypatch):
    """The first refusal ends it: images that aren't cached are encoded by the passes that use them alone."""
    batch, encoded = pack_micro_batches(vlm)[0], []
    images = list({image.key: image for image in batch.images}.values())
    with torch.no_grad():
        [features, *_] = vlm.encode_images(images[:1], load_pixels)
    monkeypatch.setattr(vlm, "frozen_features", FeatureCache(features.nbytes + 1))
    monkeypatch.setattr(vlm_module, "MAX_VISION_TOKENS", 1)  # one image per pass of the vision tower
    encode_patches = vlm.policy.encode_patches
    monkeypatch.setattr(
        vlm.policy, "encode_patches", lambda *arguments: encoded.append(1) or encode_patches(*arguments)
    )
    assert len(images) > 3
    vlm.cache_frozen_features(images, load_pixels)
    assert len(encoded) == 2  # one is cached, one refused
    vlm.cache_frozen_features(images, load_pixels)
    assert len(encoded) == 2
    vlm.frozen_features.clear()
    vlm.cache_frozen_features(images[:1], load_pixels)
    assert images[0].key in vlm.frozen_features
