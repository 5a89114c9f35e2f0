"""A tool of your own: it compares two seconds of a video.

`python examples/own_tool.py RUN VIDEO` offers it to the model of a run, beside `crop_video`, and prints what the model
does with it. The name, docstring and annotated arguments are the schema that the model reads; further keyword-only
parameters would be settings, and `ctx` gives the media, sub-agents and what an episode keeps.
"""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np

import saccade

Second = Annotated[float, "a time in the video, seconds"]


@saccade.tool
async def compare_frames(first: Second, second: Second, *, ctx: saccade.ToolContext) -> saccade.ToolResult:
    """Show two frames of the video and how much they differ, from 0 to 255."""
    budget = saccade.PixelBudget(min_pixels=784, max_pixels=50176)
    times = [first, second]
    images = await ctx.media.load_frames(ctx.video_path, times, factor=ctx.renderer.factor, budget=budget)
    pixels = [np.asarray(ctx.media.load_pixels(image), float) for image in images]
    difference = float(np.abs(pixels[0] - pixels[1]).mean())
    return saccade.ToolResult(text=f"the frames differ by {difference:.1f}", images=tuple(images))


def main(model: Path, video: Path, question: str = "When is red shown?") -> saccade.Episode:
    """Ask the model about a video with both tools at hand; return the episode."""
    tools = f"environment.settings.tools={{crop_video: {{}}, '{Path(__file__).resolve()}:compare_frames': {{}}}}"
    episode = saccade.ask(question, model=model, videos=[video], settings=[tools])
    for number, turn in enumerate(episode.turns, 1):
        print(f"turn {number}: {turn.reply.text}")
        for call, result in zip(turn.reply.calls, turn.results, strict=False):
            print(f"  {call.name}({dict(call.arguments)}) -> {result.error or result.text}")
    print(f"{episode.status}: {episode.answer}")
    return episode


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
