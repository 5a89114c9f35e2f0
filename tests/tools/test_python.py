"""The tool python: its schema, its settings, an interpreter per episode or per call, and errors to read."""

import asyncio

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError
from saccade.media.cache import Library
from saccade.protocols import Budget
from saccade.tools._sandbox import server
from saccade.tools._tool import Shelf, ToolContext
from saccade.tools.python import python


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end():
    yield
    server.close_shared()


def serve(renderer, *sources, media=None, paths=(), shelf=True, settings=None, **given):
    """The results of calls in one episode."""

    async def body():
        library = media or Library()
        budget = Budget(min_pixels=256, max_pixels=4096)
        pictures = [await library.image(str(path), factor=renderer.factor, budget=budget) for path in paths]
        ctx = ToolContext(
            media=library,
            renderer=renderer,
            ask=None,
            path="",
            seed=0,
            pictures=tuple(pictures),
            settings={"seconds": 60.0, **(settings or {})},
            **given,
        )
        if not shelf:
            return [(await python({"code": source}, ctx=ctx))[0] for source in sources]
        async with Shelf() as held:
            ctx = ToolContext(**{name: getattr(ctx, name) for name in ToolContext.__slots__} | {"shelf": held})
            return [(await python({"code": source}, ctx=ctx))[0] for source in sources]

    return asyncio.run(body())


def test_the_schema_asks_for_code_alone():
    function = python.schema["function"]
    assert (function["name"], function["parameters"]["required"]) == ("python", ["code"])
    assert list(function["parameters"]["properties"]) == ["code"]
    assert function["description"].startswith("Run Python: print() what you want to read")


@pytest.mark.slow
def test_variables_live_as_long_as_the_episode(renderer):
    first, second = serve(renderer, "x = 6", "print(x * 7)")
    assert (first.text, first.ok, second.text) == ("", True, "42")
    first, second = serve(renderer, "x = 6", "print('x' in globals())", shelf=False)
    assert (first.ok, second.text) == (True, "False")


def test_calls_of_one_turn_run_in_their_order(renderer):
    async def body():
        async with Shelf() as held:
            ctx = ToolContext(media=Library(), renderer=renderer, ask=None, path="", seed=0, shelf=held)
            cells = ["n = []", *(f"n.append({number}); print(n)" for number in range(4))]
            return await asyncio.gather(*(python({"code": cell}, ctx=ctx) for cell in cells))

    assert [result.text for result, _ in asyncio.run(body())] == ["", "[0]", "[0, 1]", "[0, 1, 2]", "[0, 1, 2, 3]"]


def test_still_pictures_come_at_the_size_of_their_file(renderer, tmp_path):
    Image.new("RGB", (1000, 500), "lime").save(tmp_path / "a.png")
    (result,) = serve(
        renderer, "print(image_clue_0.size, image_clue_0.getpixel((999, 499)))", paths=[tmp_path / "a.png"]
    )
    assert result.text == "(1000, 500) (0, 255, 0)"


def test_shown_pictures_fit_the_budget(renderer):
    (result,) = serve(renderer, "Image.new('RGB', (500, 500), 'red').show()", settings={"pixels": (256, 4096)})
    (picture,) = result.pictures
    assert picture.width * picture.height <= 4096
    assert picture.width % renderer.factor == 0
    assert (Library().pixels(picture) == np.array([255, 0, 0])).all()


@pytest.mark.slow
def test_what_did_not_run_to_its_end_is_not_executed(renderer):
    settings = {"seconds": 0.5}
    raised, late, gone = serve(renderer, "1 / 0", "while True: pass", "import os; os._exit(3)", settings=settings)
    assert (raised.executed, raised.ok) == (True, False)
    assert (late.executed, gone.executed) == (False, False)
    assert late.error == "Execution timeout: stopped after 0.5 s. Variables are kept."
    assert "exit code 3" in gone.error


def test_memory_is_a_setting(renderer):
    (result,) = serve(renderer, "b = bytes(300 * 2**20)", settings={"memory_mib": 128})
    assert "MemoryError" in result.error


def test_a_picture_that_cannot_be_read_is_an_error_to_read(renderer, tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(path)

    class Vanishing(Library):
        async def image(self, *arguments, **options):
            found = await super().image(*arguments, **options)
            path.unlink()
            return found

    (result,) = serve(renderer, "print(1)", media=Vanishing(), paths=[path])
    assert "image_clue_0 can't be opened" in result.error
    assert str(tmp_path) not in result.error


@pytest.mark.slow
def test_a_machine_that_is_too_weak_is_refused(renderer, monkeypatch):
    started = server.Server.start
    monkeypatch.setattr(server.Server, "start", lambda isolation: started(isolation, without=("namespaces",)))
    with pytest.raises(ConfigError, match="isolation strict wants every wall, but namespaces are missing"):
        serve(renderer, "print(1)", settings={"isolation": "strict"})
