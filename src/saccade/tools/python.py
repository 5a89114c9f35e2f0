"""Run Python against the task's media, in a jailed interpreter that lives as long as the episode."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from PIL import Image

from saccade.ledger import Picture
from saccade.protocols import Budget, MediaLibrary, Renderer
from saccade.sections import Count, Positive, Span
from saccade.tools._sandbox.client import Sandbox
from saccade.tools._sandbox.limits import Fault, Isolation, Limits, Outcome, Shown
from saccade.tools._tool import ToolContext, tool
from saccade.types import Media, MediaKind, ToolResult

UNFINISHED = (Fault.TIMEOUT, Fault.CPU, Fault.THREADS, Fault.DISK)
LEFT_OUT = "[…]\n"


# The interpreter keeps its own time, and waiting for one's turn among many isn't the model's fault.
@tool(seconds=3600)
async def python(
    code: Annotated[str, "Python source; variables are kept from call to call"],
    *,
    ctx: ToolContext,
    seconds: Positive = 30.0,
    cpu_seconds: Count = 600,
    memory_mib: Count = 2048,
    max_images: Count = 32,
    pixels: Span = (3136, 2_000_000),
    isolation: Isolation = "best_effort",
) -> ToolResult:
    """Run Python: print() what you want to read, show pictures with plt.show() or their own show().

    What the conversation shows is `image_clue_0`, … (PIL), still ones at the size of their files; videos are
    `video_clue_0`, … (see _sandbox/reader.py); a picture that is shown becomes the next `image_clue_k`. A call may take
    `seconds`, one interpreter `cpu_seconds` of CPU time, `memory_mib` beyond the libraries and
    `max_images` shown pictures, each scaled to at least and at most `pixels`. `isolation` says whether a
    machine that lacks a wall is refused (strict). Raises ConfigError where it is too weak, SandboxError where the
    sandbox itself failed.
    """
    limits = Limits(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        memory_mib=memory_mib,
        pictures=max_images,
    )
    opened = functools.partial(_opened, ctx, limits, isolation)
    budget = Budget(min_pixels=pixels[0], max_pixels=pixels[1])
    if ctx.shelf is None:
        async with opened() as desk:
            outcome, pictures = await _run(desk, code, ctx, budget)
    else:
        outcome, pictures = await _run(await ctx.shelf.held("python", opened), code, ctx, budget)
    return ToolResult(
        text=outcome.text.strip("\n"),
        pictures=pictures,
        error=None if outcome.error is None else _shortened(outcome.error, ctx.renderer, ctx.result_tokens),
        executed=outcome.kept and outcome.fault not in UNFINISHED,
    )


@dataclass(frozen=True, slots=True)
class Desk:
    """An interpreter, with the pictures of its `image_clue_*` by number, and those of its own as they were shown."""

    box: Sandbox
    named: dict[int, Picture]
    own: dict[Picture, Shown]


@asynccontextmanager
async def _opened(ctx: ToolContext, limits: Limits, isolation: Isolation) -> AsyncIterator[Desk]:
    media = [_clue(picture, ctx.media) for picture in ctx.pictures]
    media += [Media(path=path, kind=MediaKind.VIDEO) for path in ctx.videos]
    async with Sandbox.open(limits, media=media, seed=ctx.seed, isolation=isolation) as box:
        yield Desk(box, dict(enumerate(ctx.pictures)), {})


async def _run(desk: Desk, code: str, ctx: ToolContext, budget: Budget) -> tuple[Outcome, tuple[Picture, ...]]:
    """What a call came to, and the pictures that it showed."""
    # Other tools show pictures too, which count like those of the interpreter.
    strange = {number: picture for number, picture in enumerate(ctx.pictures) if desk.named.get(number) != picture}
    desk.named.update(strange)
    clues = {number: desk.own.get(each) or _shown(each, ctx.media) for number, each in strange.items()}
    outcome, pictures = await desk.box.run(code, clues), []
    for shown in outcome.pictures:
        rgb_HWC = np.frombuffer(shown.rgb, np.uint8).reshape(shown.height, shown.width, 3)
        picture = await ctx.media.keep(rgb_HWC, factor=ctx.renderer.factor, budget=budget)
        desk.named[int(shown.name.rpartition("_")[2])], desk.own[picture] = picture, shown
        pictures.append(picture)
    return outcome, tuple(pictures)


def _shown(picture: Picture, media: MediaLibrary) -> Shown:
    rgb_HWC = media.pixels(picture)
    return Shown(name="", width=rgb_HWC.shape[1], height=rgb_HWC.shape[0], rgb=rgb_HWC.tobytes())


def _clue(picture: Picture, media: MediaLibrary) -> Media | Image.Image:
    """A picture of the prompt for the interpreter: a still one as its file, a frame or a part as it was shown."""
    if picture.time is None and picture.box is None:
        return Media(path=picture.path, kind=MediaKind.IMAGE)
    return Image.fromarray(media.pixels(picture))


def _shortened(error: str, renderer: Renderer, tokens: int) -> str:
    """The error within so many tokens, its end kept: the last line of a traceback says the most."""
    ids = renderer.encode(error)
    keep = max(1, tokens - len(renderer.encode(LEFT_OUT)) - 8)  # a little room: other cuts, other tokens
    return error if len(ids) <= tokens else LEFT_OUT + renderer.decode(ids[-keep:]).lstrip("\ufffd")
