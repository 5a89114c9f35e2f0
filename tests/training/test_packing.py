"""Shared-prefix packing against one row per sample: the same losses, the same gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import Model
from saccade.ledger import Ledger, Picture
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.training.pack import fill, pack, plant
from saccade.training.step import forward, step
from saccade.types import Message, Sample


def pixels(picture: Picture) -> np.ndarray:
    rng = np.random.default_rng(int(picture.digest))
    return rng.integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def backbone(request, tmp_path_factory) -> Backbone:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny(folder, family=request.param, seed=2)
    return Backbone(Model(path=str(folder), threads=1))


def picture(number: int, backbone: Backbone, wide: int = 1) -> Picture:
    side = backbone.renderer.factor
    return Picture(path="x", digest=str(number), time=1.0 * number, width=side * wide, height=side)


def observed(ledger: Ledger, backbone: Backbone, message: Message) -> Ledger:
    segment = backbone.renderer.render(ledger, [message])
    return ledger.observe(segment.tokens, slots=segment.slots, origin=segment.origin)


def acted(ledger: Ledger, rng: np.random.Generator, length: int) -> Ledger:
    tokens = rng.integers(0, 250, length).tolist()
    return ledger.act(tokens, logprobs=rng.normal(-2, 1, length).tolist(), version=int(rng.integers(0, 3)))


def questions(backbone: Backbone, rng: np.random.Generator) -> list[Sample]:
    """Four questions about the same frames, asked once each."""
    frames = [part for n in range(6) for part in (f"<{n}.5 seconds>", picture(50 + n, backbone))]
    asked = [Message(role="user", parts=(*frames, text)) for text in ("When?", "How many?", "When is red?", "Which?")]
    return [_sample(acted(observed(Ledger(), backbone, message), rng, 6), rng) for message in asked]


def conversations(backbone: Backbone, seed: int = 0) -> list[Sample]:
    """Two groups of main conversations with pictures in prefix and branches and several turns, and their children.

    Then different questions about the same frames.
    """
    rng = np.random.default_rng(seed)
    samples = questions(backbone, rng)
    for group, question in ((0, "When is red shown?"), (1, "When is red shown?")):
        parts = [part for n in range(3) for part in (f"<{n}.5 seconds>", picture(10 * group + n, backbone, 1 + n % 2))]
        start = observed(Ledger(), backbone, Message(role="user", parts=(*parts, question)))
        start = start.force(backbone.renderer.encode("<think>\n"))
        for member in range(4):
            ledger = acted(start, rng, int(rng.integers(3, 12)))
            for _ in range(member % 3):
                result = Message(role="tool", parts=("seen ", picture(90 + member, backbone)))
                ledger = observed(ledger, backbone, result)
                ledger = acted(ledger.force(backbone.renderer.encode("<think>\n")), rng, int(rng.integers(2, 9)))
            samples.append(_sample(ledger, rng))
            child = observed(Ledger(), backbone, Message(role="user", parts=(picture(group, backbone), "what?")))
            samples.append(_sample(acted(child, rng, 5), rng))
    return samples


def _sample(ledger: Ledger, rng: np.random.Generator) -> Sample:
    value = float(rng.normal())
    return Sample(ledger=ledger, advantages=tuple(value if sampled else 0.0 for sampled in ledger.mask()))


def gradients(backbone: Backbone, batches) -> tuple[float, dict[str, torch.Tensor], dict[tuple[int, int], float]]:
    """The summed policy loss, its gradients, and each trained token's logprob by (sample, rank in the sample)."""
    backbone.model.zero_grad(set_to_none=True)
    total, table = 0.0, {}
    for batch in batches:
        logp, _ = forward(backbone, batch, pixels=pixels, temperature=1.0)
        loss = -(torch.from_numpy(batch.advantage_N) * logp).sum()
        loss.backward()
        total += float(loss.detach())
        for sample, value in zip(batch.sample_N.tolist(), logp.tolist(), strict=True):
            table[sample, sum(key[0] == sample for key in table)] = value
    return total, {n: p.grad.clone() for n, p in backbone.model.named_parameters() if p.grad is not None}, table


@pytest.mark.slow
@pytest.mark.parametrize(("row_tokens", "rows"), [(4096, 8), (160, 3), (1, 1)])
def test_loss_and_gradients_equal_one_row_per_sample(backbone, row_tokens, rows):
    samples = conversations(backbone)
    where = backbone.renderer.positions
    packed = pack(samples, positions=where, row_tokens=row_tokens, rows_per_pass=rows)
    singles = []
    for index, sample in enumerate(samples):
        [batch] = pack([sample], positions=where, row_tokens=4096, rows_per_pass=1)
        batch.sample_N[:] = index
        singles.append(batch)
    loss, grads, logp = gradients(backbone, packed)
    loss_1, grads_1, logp_1 = gradients(backbone, singles)
    assert logp.keys() == logp_1.keys()
    assert len(logp) == sum(len(sample.ledger.sampled_tokens()) for sample in samples)
    assert max(abs(logp[key] - logp_1[key]) for key in logp) <= 1e-5
    assert abs(loss - loss_1) <= 1e-5 * max(1.0, abs(loss_1))
    assert grads.keys() == grads_1.keys()
    for name, grad in grads.items():
        scale = max(float(grads_1[name].abs().max()), 1e-3)
        assert float((grad - grads_1[name]).abs().max()) <= 1e-5 * max(scale, 1.0), name


def test_prefixes_are_shared_and_nothing_is_lost(backbone):
    samples = conversations(backbone)
    trees = plant(samples, 4096)
    assert sorted(len(tree.members) for tree in trees) == [4, 4, 4, 4, 4]
    [batch] = pack(samples, positions=backbone.renderer.positions, row_tokens=10**6, rows_per_pass=8)
    assert (batch.tree_BT >= 0).sum() < sum(len(sample.ledger) for sample in samples)
    ours = {index: batch.token_N[batch.sample_N == index].tolist() for index in range(len(samples))}
    assert all(ours[index] == list(sample.ledger.sampled_tokens()) for index, sample in enumerate(samples))


def test_a_picture_swap_moves_the_logprobs(backbone):
    """A model that is blind to its pictures would pass every other test."""
    samples = conversations(backbone)
    [batch] = pack(samples, positions=backbone.renderer.positions, row_tokens=10**6, rows_per_pass=8)
    with torch.no_grad():
        seen, _ = forward(backbone, batch, pixels=pixels, temperature=1.0)
        other, _ = forward(backbone, batch, pixels=lambda p: 255 - pixels(p), temperature=1.0)
    assert (seen - other).abs().max() > 1e-3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 80))
def test_rows_hold_every_tree_once_and_keep_their_bound(lengths, row_tokens):
    ledgers = [
        Ledger().observe((n, 1)).act((2,) * length, logprobs=(0.0,) * length, version=0)
        for n, length in enumerate(lengths)
    ]
    samples = [Sample(ledger=ledger, advantages=(0.0,) * len(ledger)) for ledger in ledgers]
    rows = fill(plant(samples, row_tokens), row_tokens)
    assert sorted(member for row in rows for tree in row for member in tree.members) == list(range(len(samples)))
    assert all(len(row) == 1 or sum(tree.tokens for tree in row) <= row_tokens for row in rows)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=3)), min_size=1, max_size=12
    ),
    st.integers(1, 60),
    st.integers(1, 3),
)
def test_a_sequence_is_whole_in_one_micro_batch_and_its_tokens_are_neighbours(drawn, row_tokens, rows):
    """What ratios of sequences and penalties to go rely on, and: what is trained is exactly what was sampled."""
    samples = []
    for place, (prompt, turns) in enumerate(drawn):
        ledger = Ledger().observe((prompt, 1, 1))
        for length in turns:
            ledger = ledger.act((2,) * length, logprobs=(-float(place),) * length, version=0).observe((3,))
        samples.append(Sample(ledger=ledger, advantages=tuple(float(place + 1) * sampled for sampled in ledger.mask())))
    flat = lambda ledger: np.tile(np.arange(len(ledger)), (3, 1))  # noqa: E731
    batches = pack(samples, positions=flat, row_tokens=row_tokens, rows_per_pass=rows)
    homes = [set(batch.sample_N.tolist()) for batch in batches]
    assert sum(len(home) for home in homes) == len(samples)
    for batch in batches:
        changes = 1 + int((np.diff(batch.sample_N) != 0).sum()) if len(batch.sample_N) else 0
        assert changes == len(set(batch.sample_N.tolist()))
        assert (batch.advantage_N == batch.sample_N + 1).all()
        assert (batch.old_logp_N == -batch.sample_N).all()
        assert (batch.token_N == 2).all()
    assert sum(len(batch.token_N) for batch in batches) == sum(sum(sample.ledger.mask()) for sample in samples)


# ---- micro-batches side by side --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "many"), [(8, 2), (3, 2), (1, 3), (64, 4)])
def test_micro_batches_come_in_multiples_of_about_one_size(backbone, rows, many):
    samples, where = conversations(backbone), backbone.renderer.positions
    alone = pack(samples, positions=where, row_tokens=60, rows_per_pass=64)
    batches = pack(samples, positions=where, row_tokens=60, rows_per_pass=rows, side_by_side=many)
    sizes = [len(batch.ids_BT) for batch in batches]
    assert sum(sizes) == len(alone[0].ids_BT)
    assert max(sizes) <= rows
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) % many == 0 or set(sizes) == {1}
    assert sum(len(batch.token_N) for batch in batches) == len(alone[0].token_N)


class Kept:
    """An optimiser that keeps the gradients and moves nothing."""

    def __init__(self, backbone):
        self.backbone, self.found = backbone, {}

    def step(self):
        named = self.backbone.model.named_parameters()
        self.found = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        self.backbone.model.zero_grad(set_to_none=True)
        return 1.0


def gradients_of_a_step(folder, threads):
    """The gradients that a step leaves, and its report."""
    backbone = Backbone(Model(path=folder, threads=threads))
    kept = Kept(backbone)
    batches = pack(
        conversations(backbone),
        positions=backbone.renderer.positions,
        row_tokens=60,
        rows_per_pass=3,
        side_by_side=backbone.side_by_side,
    )

    def loss(batch, logp_N):
        return -(torch.from_numpy(batch.advantage_N) * logp_N).sum(), {"tokens": torch.tensor(float(len(logp_N)))}

    with torch.enable_grad():
        return step(backbone, kept, batches, loss, pixels=pixels), kept.found


@pytest.mark.slow
def test_side_by_side_is_the_same_every_time_and_the_same_as_alone(tiny_folder):
    threads = torch.get_num_threads()
    (report, one), (again, other) = (gradients_of_a_step(tiny_folder, 3) for _ in range(2))
    torch.set_num_threads(threads)
    assert report == again
    assert all(torch.equal(one[name], other[name]) for name in one)
    report, alone = gradients_of_a_step(tiny_folder, 1)
    assert (report.loss, report.entropy) == pytest.approx((again.loss, again.entropy), rel=1e-5)
    assert (report.tokens, report.trained_tokens) == (again.tokens, again.trained_tokens)
    assert one.keys() == alone.keys()
    for name, gradient in alone.items():
        assert torch.allclose(one[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name
