"""The tool python: runs code on the task's media in a jailed interpreter that lives as long as the episode."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from PIL import Image

from saccade.config.schema import IntRange, PositiveFloat, PositiveInt
from saccade.ledger import ImageRef
from saccade.protocols import MediaLoader, PixelBudget
from saccade.sandbox import ExecutionResult, FailureReason, IsolationMode, Limits, Sandbox, SealedImage, ShownImage
from saccade.tools.base import EpisodeResources, ToolContext, tool
from saccade.tools.served_media import ServedVideo, load_image
from saccade.types import ToolResult

UNFINISHED_REASONS = (FailureReason.TIMEOUT, FailureReason.CPU, FailureReason.THREADS, FailureReason.DISK)


# The sandbox enforces the time limit and excludes waiting for a CPU slot, which isn't the model's fault.
@tool(timeout=3600)
async def python(
    code: Annotated[str, "Python source; variables are kept from call to call"],
    *,
    ctx: ToolContext,
    timeout: PositiveFloat = 30.0,  # time limit of a call, seconds
    cpu_seconds: PositiveInt = 600,  # processor time of an episode, seconds
    memory_mib: PositiveInt = 2048,  # memory of an episode beyond the libraries, MiB
    max_images: PositiveInt = 32,  # images that an episode may show
    image_pixels: IntRange = (3136, 2_000_000),  # minimum and maximum pixels of a shown image
    isolation: IsolationMode = "best_effort",  # strict = refuse a machine that lacks an isolation layer
) -> ToolResult:
    """Run Python: print() what you want to read, show pictures with plt.show() or their own show().

    The images of the conversation are `image_clue_0`, … (PIL; image files at full size), the videos `video_clue_0`, …
    (see sandbox/README.md); an image that the code shows becomes the next `image_clue_k`. `timeout` is in seconds
    per call; `cpu_seconds`, `memory_mib` (beyond the libraries) and `max_images` bound the whole episode. Shown images
    are scaled to within `image_pixels`. With `isolation` strict, a machine that lacks an isolation layer is refused.
    Raises ConfigError if the machine is too weak, SandboxError if the sandbox itself fails.
    """
    timeout *= ctx.time_factor
    limits = Limits(timeout=timeout, cpu_seconds=cpu_seconds, memory_mib=memory_mib, max_images=max_images)
    open_session = functools.partial(_open_session, ctx, limits, isolation)
    budget = PixelBudget(*image_pixels)
    async with contextlib.nullcontext(ctx.resources) if ctx.resources else EpisodeResources() as resources:
        session = await resources.get_or_open("python", open_session)
        result, images = await _run_code(session, code, ctx, budget)
    return ToolResult(
        text=result.text.strip("\n"),
        images=images,
        error=result.error,
        was_executed=result.variables_kept and result.failure_reason not in UNFINISHED_REASONS,
    )


@dataclass(frozen=True, slots=True)
class InterpreterSession:
    """An interpreter, the images bound to its `image_clue_*` by number, and the pixels of images it showed."""

    sandbox: Sandbox
    images_by_number: dict[int, ImageRef]
    shown_by_image: dict[ImageRef, ShownImage]


@contextlib.asynccontextmanager
async def _open_session(
    ctx: ToolContext, limits: Limits, isolation: IsolationMode
) -> AsyncIterator[InterpreterSession]:
    images = await asyncio.to_thread(_load_images, ctx.shown_images, ctx.media)
    videos = [ServedVideo(path, f"video_clue_{number}") for number, path in enumerate(ctx.video_paths)]
    async with Sandbox.open(limits, images=images, videos=videos, seed=ctx.seed, isolation=isolation) as sandbox:
        yield InterpreterSession(sandbox, dict(enumerate(ctx.shown_images)), {})


async def _run_code(
    session: InterpreterSession, code: str, ctx: ToolContext, budget: PixelBudget
) -> tuple[ExecutionResult, tuple[ImageRef, ...]]:
    """Run code; return its result and the images it showed, saved by the media loader."""
    # Images that other tools showed since the last call are numbered together with the interpreter's.
    new_images = {}
    for number, image in enumerate(ctx.shown_images):
        if session.images_by_number.get(number) != image:
            session.images_by_number[number] = image
            new_images[number] = session.shown_by_image.get(image) or _to_shown_image(image, ctx.media)
    result, images = await session.sandbox.run(code, new_images), []
    for shown in result.images:
        rgb_HWC = np.frombuffer(shown.rgb_bytes, np.uint8).reshape(shown.height, shown.width, 3)
        image = await ctx.media.save_image(rgb_HWC, factor=ctx.renderer.factor, budget=budget)
        session.images_by_number[int(shown.name.rpartition("_")[2])] = image
        session.shown_by_image[image] = shown
        images.append(image)
    return result, tuple(images)


def _to_shown_image(image: ImageRef, media: MediaLoader) -> ShownImage:
    rgb_HWC = media.load_pixels(image.frames[0])
    return ShownImage(name="", width=rgb_HWC.shape[1], height=rgb_HWC.shape[0], rgb_bytes=rgb_HWC.tobytes())


def _load_images(images: Sequence[ImageRef], media: MediaLoader) -> list[Image.Image | SealedImage]:
    """Load images for the interpreter: a whole image from its file, a frame or crop as it was shown.

    A pair is its first frame.
    """
    return [
        load_image(image.path, f"image_clue_{number}")
        if image.time is None and image.box is None
        else Image.fromarray(media.load_pixels(image.frames[0]))
        for number, image in enumerate(images)
    ]
