"""The tool python: its schema, its settings, an interpreter per episode or per call, and errors for the model."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from error_cases import raises
from PIL import Image

from saccade import sandbox
from saccade.errors import ConfigError, SandboxError
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import PixelBudget
from saccade.tools import python as python_tool
from saccade.tools.base import EpisodeResources, ToolContext
from saccade.tools.python import python


@pytest.fixture(scope="module", autouse=True)
def close_servers():
    yield
    sandbox.close_shared_servers()


def run_cells(renderer, *cells, media=None, paths=(), with_resources=True, settings=None, **fields):
    """Call the tool for each cell in one episode; return the results."""

    async def body():
        loader = media or CachingMediaLoader()
        budget = PixelBudget(min_pixels=256, max_pixels=4096)
        images = [await loader.load_image(str(path), factor=renderer.factor, budget=budget) for path in paths]
        ctx = ToolContext(
            media=loader,
            renderer=renderer,
            ask=None,
            video_path="",
            seed=0,
            shown_images=tuple(images),
            settings={"timeout": 60.0, **(settings or {})},
            **fields,
        )
        if not with_resources:
            return [(await python({"code": cell}, ctx=ctx))[0] for cell in cells]
        async with EpisodeResources() as resources:
            ctx = replace(ctx, resources=resources)
            return [(await python({"code": cell}, ctx=ctx))[0] for cell in cells]

    return asyncio.run(body())


def test_the_schema_has_code_alone():
    function = python.schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("python", ["code"])
    assert list(function["parameters"]["properties"]) == ["code"]
    assert function["description"].startswith("Run Python: print() what you want to read")


def test_a_replay_extends_the_time_limit(renderer, monkeypatch):
    opened = []

    def refuse(limits, **_):
        opened.append(limits.timeout)
        raise SandboxError("not opened")

    monkeypatch.setattr(python_tool.Sandbox, "open", refuse)
    with raises(SandboxError, by=refuse):
        run_cells(renderer, "print(1)", settings={"timeout": 5.0}, time_factor=6.0)
    assert opened == [30.0]


@pytest.mark.slow
def test_variables_live_as_long_as_the_episode(renderer):
    first, second = run_cells(renderer, "x = 6", "print(x * 7)")
    assert (first.text, first.ok, second.text) == ("", True, "42")
    first, second = run_cells(renderer, "x = 6", "print('x' in globals())", with_resources=False)
    assert (first.ok, second.text) == (True, "False")


@pytest.mark.slow
def test_calls_of_one_turn_run_in_order(renderer):
    async def body():
        async with EpisodeResources() as resources:
            ctx = ToolContext(
                media=CachingMediaLoader(), renderer=renderer, ask=None, video_path="", seed=0, resources=resources
            )
            cells = ["n = []", *(f"n.append({number}); print(n)" for number in range(4))]
            return await asyncio.gather(*(python({"code": cell}, ctx=ctx) for cell in cells))

    assert [result.text for result, _ in asyncio.run(body())] == ["", "[0]", "[0, 1]", "[0, 1, 2]", "[0, 1, 2, 3]"]


@pytest.mark.slow
def test_image_files_have_their_full_size(renderer, tmp_path):
    Image.new("RGB", (1000, 500), "lime").save(tmp_path / "a.png")
    (result,) = run_cells(
        renderer, "print(image_clue_0.size, image_clue_0.getpixel((999, 499)))", paths=[tmp_path / "a.png"]
    )
    assert result.text == "(1000, 500) (0, 255, 0)"


def test_shown_images_fit_the_budget(renderer):
    (result,) = run_cells(
        renderer, "Image.new('RGB', (500, 500), 'red').show()", settings={"image_pixels": (256, 4096)}
    )
    (image,) = result.images
    assert image.width * image.height <= 4096
    assert image.width % renderer.factor == 0
    assert (CachingMediaLoader().load_pixels(image) == np.array([255, 0, 0])).all()


@pytest.mark.slow
def test_unfinished_code_is_not_executed(renderer):
    raised, exited = run_cells(renderer, "1 / 0", "import os; os._exit(3)")
    (timed_out,) = run_cells(renderer, "while True: pass", settings={"timeout": 0.5})
    assert (raised.was_executed, raised.ok) == (True, False)
    assert (timed_out.was_executed, exited.was_executed) == (False, False)
    assert "0.5 s" in timed_out.error
    assert "3" in exited.error


def test_memory_is_a_setting(renderer):
    (result,) = run_cells(renderer, "b = bytes(300 * 2**20)", settings={"memory_mib": 128})
    assert "MemoryError" in result.error


def test_an_unreadable_image_is_a_readable_error(renderer, tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(path)

    class DeletingLoader(CachingMediaLoader):
        async def load_image(self, *arguments, **options):
            image = await super().load_image(*arguments, **options)
            path.unlink()
            return image

    (result,) = run_cells(renderer, "print(1)", media=DeletingLoader(), paths=[path])
    assert "image_clue_0" in result.error
    assert str(tmp_path) not in result.error


@pytest.mark.slow
def test_a_machine_that_is_too_weak_is_refused(renderer, monkeypatch):
    start = sandbox.ForkServerClient.start
    monkeypatch.setattr(
        sandbox.ForkServerClient,
        "start",
        lambda isolation: start(isolation, disabled_layers=("namespaces",)),
    )
    with raises(ConfigError, key="isolation", value="strict"):
        run_cells(renderer, "print(1)", settings={"isolation": "strict"})
