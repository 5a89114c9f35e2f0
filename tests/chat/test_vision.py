import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from saccade.errors import MediaError
from saccade.ledger import Ledger, Picture
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


def prompt(renderer, layout):
    pictures = [
        Picture(path="a", digest=str(i), time=float(i), width=columns * renderer.factor, height=rows * renderer.factor)
        for i, (rows, columns) in enumerate(layout)
    ]
    parts = [part for picture in pictures for part in (f"<{picture.time:g} seconds>", picture)]
    segment = renderer.render(Ledger(), [Message(role="user", parts=(*parts, "What colour is shown?"))])
    ledger = Ledger(segments=(segment,))
    tail = tuple(renderer.encode("<think>\nred</think>"))
    return ledger.act(tail, logprobs=[-1.0] * len(tail), version=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_patches_equal_transformers_bit_for_bit(renderer, folder, layout):
    if not layout:
        values, grids = renderer.patches([])
        assert values.shape[0] == 0
        assert grids.shape == (0, 3)
        return
    pixels = make_pixels(layout, renderer.factor)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(pixels, do_resize=False, return_tensors="np")
    values, grids = renderer.patches(pixels)
    assert values.dtype == np.float32
    assert np.array_equal(values, expected["pixel_values"])
    assert np.array_equal(grids, expected["image_grid_thw"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_equal_get_rope_index(renderer, model, layout):
    ledger = prompt(renderer, layout)
    ids = torch.tensor([ledger.expanded()])
    _, grids = renderer.patches(make_pixels(layout, renderer.factor))
    expected, _ = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == renderer.forbidden_ids[0]).int(),
        image_grid_thw=torch.from_numpy(grids) if layout else None,
        attention_mask=torch.ones_like(ids),
    )
    positions = renderer.positions(ledger)
    assert positions.dtype == np.int64
    assert np.array_equal(positions, expected[:, 0].numpy())


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_logits_equal_transformers_own_path(renderer, folder, model, layout):
    """Explicit positions and our patches against the processor, the tokenizer and implicit positions."""
    pixels = make_pixels(layout, renderer.factor, seed=1)
    ledger = prompt(renderer, layout)
    values, grids = renderer.patches(pixels)
    processed = Qwen2VLImageProcessorPil.from_pretrained(folder)(pixels, return_tensors="pt")
    text = renderer.decode(ledger.compact())
    for grid in processed["image_grid_thw"]:
        text = text.replace("<|image_pad|>", "<|hole|>" * int(grid.prod() // 4), 1)
    ids = AutoTokenizer.from_pretrained(folder)(text.replace("<|hole|>", "<|image_pad|>"), return_tensors="pt")[
        "input_ids"
    ]
    assert ids[0].tolist() == list(ledger.expanded())
    with torch.no_grad():
        ours = model(
            input_ids=torch.tensor([ledger.expanded()]),
            position_ids=torch.from_numpy(renderer.positions(ledger))[:, None],
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


def test_pictures_change_the_logits(renderer, model):
    ledger = prompt(renderer, [(1, 1)])
    logits = []
    for seed in (0, 1):
        values, grids = renderer.patches(make_pixels([(1, 1)], renderer.factor, seed))
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([ledger.expanded()]),
                position_ids=torch.from_numpy(renderer.positions(ledger))[:, None],
                pixel_values=torch.from_numpy(values),
                image_grid_thw=torch.from_numpy(grids),
            )
        logits.append(output.logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_pixels_that_do_not_fit_are_named(renderer):
    with pytest.raises(MediaError, match="a picture is 17x16: fit its sides to multiples of 16"):
        renderer.patches([np.zeros((16, 17, 3), np.uint8)])
    with pytest.raises(MediaError, match="a picture is 0x0"):
        renderer.patches([np.zeros((0, 0, 3), np.uint8)])
