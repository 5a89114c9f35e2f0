import numpy as np
import pytest
import torch
from error_cases import raises
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from saccade.errors import MediaError
from saccade.ledger import ImageRef, Ledger
from saccade.types import Message

LAYOUTS = [
    [],
    [(1, 1)],
    [(1, 1)] * 5,
    [(2, 2), (2, 2)],
    [(1, 3), (4, 1), (2, 5), (2, 2), (3, 3)],
    [(5, 2), (1, 1), (2, 5)],
]  # rows and columns of visual tokens


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def make_pixels(layout, factor, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (rows * factor, columns * factor, 3), dtype=np.uint8) for rows, columns in layout]


def make_ledger(renderer, layout):
    images = [
        ImageRef(path="a", digest=str(i), time=float(i), width=columns * renderer.factor, height=rows * renderer.factor)
        for i, (rows, columns) in enumerate(layout)
    ]
    parts = [part for image in images for part in (f"<{image.time:g} seconds>", image)]
    segment = renderer.render(Ledger(), [Message(role="user", parts=(*parts, "What colour is shown?"))])
    ledger = Ledger(segments=(segment,))
    tail = tuple(renderer.encode("<think>\nred</think>"))
    return ledger.append_completion(tail, logprobs=[-1.0] * len(tail), version=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patches_equal_transformers_bit_for_bit(renderer, folder, layout):
    if not layout:
        values, grids = renderer.patchify([])
        assert values.shape[0] == 0
        assert grids.shape == (0, 3)
        return
    pixels = make_pixels(layout, renderer.factor)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(pixels, do_resize=False, return_tensors="np")
    values, grids = renderer.patchify(pixels)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected["pixel_values"])
    assert np.array_equal(grids, expected["image_grid_thw"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_equal_get_rope_index(renderer, model, layout):
    ledger = make_ledger(renderer, layout)
    ids = torch.tensor([ledger.input_ids()])
    _, grids = renderer.patchify(make_pixels(layout, renderer.factor))
    expected, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == renderer.forbidden_ids[0]).int(),
        image_grid_thw=torch.from_numpy(grids) if layout else None,
        attention_mask=torch.ones_like(ids),
    )
    positions = renderer.compute_position_ids(ledger)
    assert positions.dtype == np.int64
    assert np.array_equal(positions, expected[:, 0].numpy())


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_logits_equal_those_of_transformers(renderer, folder, model, layout):
    """Compare explicit positions and our patches with transformers' processor, tokenizer and implicit positions."""
    pixels = make_pixels(layout, renderer.factor, seed=1)
    ledger = make_ledger(renderer, layout)
    values, grids = renderer.patchify(pixels)
    processed = Qwen2VLImageProcessorPil.from_pretrained(folder)(pixels, return_tensors="pt")
    text = renderer.decode(ledger.unexpanded_ids())
    for grid in processed["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|hole|>" * int(grid.prod() // 4), 1)
    ids = AutoTokenizer.from_pretrained(folder)(text.replace("<|hole|>", "<|image_pad|>"), return_tensors="pt")[
        "input_ids"
    ]
    assert ids[0].tolist() == list(ledger.input_ids())
    with torch.no_grad():
        ours = model(
            input_ids=torch.tensor([ledger.input_ids()]),
            position_ids=torch.from_numpy(renderer.compute_position_ids(ledger))[:, None],
            pixel_values=torch.from_numpy(values),
            image_grid_thw=torch.from_numpy(grids),
        ).logits
        theirs = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == renderer.forbidden_ids[0]).int(),
            **processed,
        ).logits
    assert (ours - theirs).abs().max() < 1e-5


def test_images_change_the_logits(renderer, model):
    ledger = make_ledger(renderer, [(1, 1)])
    logits = []
    for seed in (0, 1):
        values, grids = renderer.patchify(make_pixels([(1, 1)], renderer.factor, seed))
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([ledger.input_ids()]),
                position_ids=torch.from_numpy(renderer.compute_position_ids(ledger))[:, None],
                pixel_values=torch.from_numpy(values),
                image_grid_thw=torch.from_numpy(grids),
            )
        logits.append(output.logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_wrong_image_sizes_raise(renderer):
    with raises(MediaError, key="pixels", value=(17, 16)):
        renderer.patchify([np.zeros((16, 17, 3), np.uint8)])
    with raises(MediaError, key="pixels", value=(0, 0)):
        renderer.patchify([np.zeros((0, 0, 3), np.uint8)])
