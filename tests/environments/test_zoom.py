"""Pictures in tool results: in the order of the calls, in exact slots, and seen by the model, in both families."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from error_cases import ANY, raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade import plugins
from saccade.chat.renderer import load_renderer
from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.environments.tool_calling import ToolCalling
from saccade.errors import ConfigError
from saccade.ledger import Origin
from saccade.media.cache import CachingMediaLoader
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Context
from saccade.rollouts.components import TrainingComponents
from saccade.rollouts.runner import run_episode
from saccade.types import AnswerType, EpisodeStatus, Media, MediaKind, SamplingParams, Task

FAMILIES = ("qwen3_vl", "qwen2_5_vl")
ANSWER = "I see.</think><answer>red</answer>"
SIZES = {"image_pixels": (256, 1024), "frame_pixels": (256, 256)}
TOOLS = {"zoom_image": {"image_pixels": (256, 2048)}}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tiny") / request.param)
    make_tiny_model(path, family=request.param, hidden_size=64, num_layers=2)
    return path


@pytest.fixture(scope="module")
def renderer(folder):
    return load_renderer(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    pixels = np.random.default_rng(0).integers(0, 256, (160, 240, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    Image.new("RGB", (100, 300), "blue").save(folder / "b.png")
    write_video(folder / "c.mp4", np.full((32, 32, 32, 3), 90, np.uint8), 4.0)
    return folder


def task(folder, *names):
    kinds = {"mp4": MediaKind.VIDEO, "png": MediaKind.IMAGE}
    media = tuple(Media(path=str(folder / name), kind=kinds[name[-3:]]) for name in names)
    return Task(id="t", question="What is it?", media=media, answer_type=AnswerType.OPEN, ground_truth="red")


def call(left, top, right, bottom, image=0):
    arguments = f'{{"left": {left}, "top": {top}, "right": {right}, "bottom": {bottom}, "image": {image}}}'
    return f'<tool_call>{{"name": "zoom_image", "arguments": {arguments}}}</tool_call>'


def run(renderer, of, *replies, library=None, **given):
    engine = Scripted(renderer, replies=replies)
    ctx = Context(
        engine=engine,
        renderer=renderer,
        media=library or CachingMediaLoader(),
        sampling=SamplingParams(max_tokens=2000),
        seed=5,
    )
    return asyncio.run(run_episode(of, partial(ToolCalling, **{"tools": TOOLS, **SIZES, **given}), ctx)), engine


def boxes(segment):
    return [slot.image.box for slot in segment.slots]


# ---- order and exactness -------------------------------------------------------------------------------------------


def test_results_with_pictures_come_in_the_order_of_the_calls(renderer, files):
    crop_boxes = [(0, 0, 24, 16), (24, 16, 48, 32), (100, 60, 140, 100)]
    calls = "".join(call(*box) for box in crop_boxes)
    broken = call(9, 9, 3, 3) + "<tool_call>{</tool_call>"
    for library in (CachingMediaLoader(), CachingMediaLoader(workers=4)):
        episode, _ = run(renderer, task(files, "a.png"), f"Hm.</think>{calls}{broken}", ANSWER, library=library)
        results = episode.ledger.segments[3]
        assert (results.origin, boxes(results)) == (Origin.OBSERVATION, crop_boxes)
        assert [len(result.images) for result in episode.results] == [1, 1, 1, 0, 0]
        assert [result.ok for result in episode.results] == [True, True, True, False, False]
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        shown = [f"<tool_response>\n{list(box)}{picture}\n</tool_response>\n" for box in crop_boxes]
        text = renderer.decode(results.tokens)
        assert text.count(picture) == 3
        assert text.index("".join(shown)) < text.index("Error: right 3 ")
        assert (episode.status, episode.children, len(episode.ledger.images())) == (EpisodeStatus.ANSWERED, (), 4)


shares = st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.5, 0.8, 1.0, 1.2, -0.1])
written = st.builds(call, shares, shares, shares, shares, st.integers(0, 2))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.lists(written, min_size=1, max_size=6), min_size=1, max_size=3))
def test_whatever_is_called_the_ledger_agrees_with_the_pictures(renderer, files, turns):
    """Unexpanded ids hold a placeholder a picture, expanded ones one per visual token, both in the order of results."""
    replies = [f"Hm.</think>{''.join(calls)}" for calls in turns]
    episode, engine = run(renderer, task(files, "a.png", "b.png"), *replies, ANSWER, max_calls_per_turn=4)
    ledger, pad = episode.ledger, renderer.forbidden_ids[0]
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.ANSWERED, len(turns) + 1)
    shown = [picture for result in episode.results for picture in result.images]
    pictures = ledger.images()
    assert [picture.box for picture in pictures[:2]] == [None, None]
    assert list(pictures[2:]) == shown
    assert ledger.unexpanded_ids().count(pad) == len(pictures)
    assert ledger.input_ids().count(pad) == sum(renderer.count_visual_tokens(picture) for picture in pictures)
    assert episode.usage.visual_tokens == ledger.input_ids().count(pad)
    for slot, picture in zip(ledger.slots(), pictures, strict=True):
        assert slot.image == picture
        assert slot.num_tokens == picture.width * picture.height // renderer.factor**2
        assert set(ledger.input_ids()[slot.index : slot.index + slot.num_tokens]) == {pad}
    # per turn: each result's own pictures, one result after the other
    results = [segment for segment in ledger.segments if segment.origin is Origin.OBSERVATION]
    assert [boxes(segment) for segment in results] == [
        [picture.box for result in turn.results for picture in result.images] for turn in episode.turns[:-1]
    ]
    assert renderer.compute_position_ids(ledger).shape == (3, len(ledger))
    # what the engine sampled is what the ledger holds, and each prompt continues the one before
    assert [tuple(completion.tokens) for _, completion in engine.history] == [
        segment.tokens for segment in ledger.segments if segment.is_sampled
    ]
    for before, _ in engine.history:
        assert ledger.input_ids()[: len(before)] == before.input_ids()


def test_results_that_exceed_the_context_end_the_episode_between_images(renderer, files):
    small = {"show_tool_schemas": False, "system_prompt": "", "max_context_tokens": 330}
    episode, _ = run(renderer, task(files, "a.png"), f"</think>{call(0, 0, 1, 1) * 5}", ANSWER, **small)
    assert episode.status is EpisodeStatus.CONTEXT_FULL
    assert len(episode.ledger.images()) == 1
    assert len(episode.results) == 5


# ---- which tools are offered ---------------------------------------------------------------------------------------


CROP = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 4}}</tool_call>'


@pytest.mark.parametrize(
    ("tools", "ok"),
    [
        ({}, (False, False)),
        ({"crop_video": {}}, (True, False)),
        ({"zoom_image": {}}, (False, True)),
        ({"zoom_image": {}, "crop_video": {}}, (True, True)),
    ],
)
def test_tools_are_offered_by_name(renderer, files, tools, ok):
    of = task(files, "c.mp4", "a.png")
    replies = [f"Hm.</think>{CROP}{call(0, 0, 0.5, 0.5)}", *["a wall"] * ok[0], ANSWER]
    episode, _ = run(renderer, of, *replies, tools=tools, num_frames=2)
    prompt = renderer.decode(episode.ledger.segments[0].tokens)
    assert [f'"name": "{name}"' in prompt for name in ("crop_video", "zoom_image")] == list(ok)
    assert tuple(result.ok for result in episode.results) == ok
    assert len(episode.children) == ok[0]
    if len(tools) == 1:
        other = "zoom_image" if ok[0] else "crop_video"
        (error,) = (result.error for result in episode.results if result.error)
        assert f"'{other}'" in error
        assert min(tools) in error


def test_a_frame_of_a_video_is_no_still_picture(renderer, files):
    replies = [f"</think>{call(0, 0, 0.5, 0.5)}{call(0, 0, 0.5, 0.5, image=1)}", ANSWER]
    episode, _ = run(renderer, task(files, "c.mp4", "b.png"), *replies, num_frames=2)
    first, second = episode.results
    assert first.images[0].path.endswith("b.png")
    assert second.error


def test_a_tool_from_a_file_is_offered(renderer, files, tmp_path):
    (tmp_path / "shout.py").write_text(
        '"""A tool."""\nfrom typing import Annotated\nfrom saccade.tools.base import ToolContext, tool\n\n\n'
        '@tool\nasync def shout(word: Annotated[str, "what"], *, ctx: ToolContext) -> str:\n'
        '    """Say it loudly."""\n    return word.upper()\n'
    )
    reply = '</think><tool_call>{"name": "shout", "arguments": {"word": "red"}}</tool_call>'
    episode, _ = run(renderer, task(files, "b.png"), reply, ANSWER, tools={str(tmp_path / "shout.py"): {}})
    assert episode.results[0].text == "RED"


@pytest.mark.parametrize(
    ("tools", "key", "value"),
    [
        (["zoom_imag"], "environment.settings.tools", "zoom_imag"),
        (["./no.py"], "no.py", ANY),
        ("zoom_image", "environment.settings.tools", "zoom_image"),
    ],
)
def test_an_unknown_tool_is_rejected_before_a_run(tools, key, value):
    recipe = load_recipe("tiny/base")
    config = recipe.environment.model_copy(update={"settings": {**recipe.environment.settings, "tools": tools}})
    with raises(ConfigError, key=key, value=value):
        check_recipe(recipe.model_copy(update={"environment": config}))


def test_what_is_no_tool_is_refused(tmp_path):
    (tmp_path / "plain.py").write_text('"""Not one."""\n\n\ndef plain(word):\n    return word\n')
    with raises(ConfigError, key="environment.settings.tools", value=str(tmp_path / "plain.py")):
        plugins.resolve("environments", "tool_calling", {"tools": [str(tmp_path / "plain.py")]})


# ---- a model sees them ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_sees_what_it_zoomed_into(folder, files, tmp_path):
    """Real weights: other pixels in the box change what is sampled after it; pixels that no box shows don't."""
    recipe = load_recipe("tiny/base", ["model.num_threads=1", "sampling.max_tokens=100", f"model.path={folder}"])
    stage = TrainingComponents.from_recipe(recipe)
    agent = partial(ToolCalling, tools=TOOLS, show_tool_schemas=False, system_prompt="", **SIZES)

    class Calling:
        """Writes the call, then lets the model go on."""

        async def generate(self, request):
            if any(segment.is_sampled for segment in request.ledger.segments):
                return await stage.engine.generate(request)
            return await Scripted(stage.vlm.renderer, replies=[f"</think>{call(0.5, 0.5, 1, 1)}"]).generate(request)

    def look(change):
        pixels = np.zeros((160, 240, 3), np.uint8)
        change(pixels)
        path = tmp_path / f"{change.__name__}.png"
        Image.fromarray(pixels).save(path)
        of = replace(task(files), media=(Media(path=str(path), kind=MediaKind.IMAGE),))
        context = replace(stage.build_context(seed=1, temperature=0.0), engine=Calling())
        episode = asyncio.run(run_episode(of, agent, context))
        assert episode.error is None
        return [value for value in episode.ledger.logprobs() if value]

    def paint_nothing(pixels): ...

    def paint_inside(pixels):
        pixels[100:, 160:] = 255

    assert look(paint_nothing) == look(paint_nothing) != look(paint_inside)
