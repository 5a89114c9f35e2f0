"""The model writes Python against its media, and reads what the code prints and shows.

PyVision-RL, arXiv 2602.20739. Code is in `<code>` blocks (see chat/parser.py) and runs in the episode's own
interpreter (see tools/python.py); its output is inside `<interpreter>`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.config.schema import NonNegativeInt, PositiveInt
from saccade.environments.prompt import (
    fill_question,
    find_row_system_prompt,
    interleave_subtitles,
    load_media,
    load_overview,
    with_system,
)
from saccade.environments.tool_environment import ToolEnvironment, ToolSettings
from saccade.ledger import ImageRef
from saccade.media.subtitles import Cue
from saccade.protocols import Context
from saccade.tools.base import Tools, load_tool
from saccade.types import Message, Task, ToolResult

SYSTEM_PROMPT = (
    "You answer questions about images and videos, and you may run Python to look closer. Write it in one block:\n"
    "<code>\n```python\n...\n```\n</code>\n"
    "It runs in an interpreter that keeps its variables. Image i is the PIL picture image_clue_i; video j is the "
    "reader video_clue_j (len, indices, get_batch, get_avg_fps; frames have asnumpy). Print what you want to read; "
    "show pictures with plt.show() or their own show(). The result comes inside <interpreter>, and each picture that "
    "was shown is the next image_clue_i. When you know, answer inside <answer>\\boxed{...}</answer>."
)
FINAL_ANSWER_PROMPT = "No more code can be run. Give your answer now, inside <answer>\\boxed{...}</answer>."
NO_OUTPUT_TEXT = "[nothing was printed and nothing was shown]"

DEFAULT_TOOLS: Mapping[str, Mapping[str, Any]] = {"python": {}}


class PythonSettings(ToolSettings):
    """Settings of `python`."""

    tools: Tools = DEFAULT_TOOLS  # tools by name; other tools than python are called with <tool_call>
    video_in_prompt: bool = False  # show an overview of a video's frames; otherwise only its size, length and rate
    image_in_prompt: bool = True  # show the task's images; otherwise only their sizes, and code shows what it takes
    max_tool_turns: NonNegativeInt = 4  # turns whose code is run; one more reply follows the last one
    max_calls_per_turn: PositiveInt = 1  # code blocks per turn; further ones are refused
    num_frames: PositiveInt = 16  # frames of all videos together, unless the task has a frame budget
    max_tool_result_tokens: PositiveInt = 2048  # longest text of a result, tokens; the rest is truncated
    force_think: bool = False  # start every reply with <think>
    system_prompt: str = SYSTEM_PROMPT  # system prompt; empty = none
    final_answer_prompt: str = FINAL_ANSWER_PROMPT  # user's message after the last tool turn; empty = none


class Python(ToolEnvironment):
    """Run the Python blocks of each reply: `max_calls_per_turn` per turn, `max_tool_turns` turns.

    The published environment runs the last block of a turn, or a fence outside of a block; here every further block is
    refused with an error result, and a fence alone is text. Images, and frames in the prompt, are named and bound as
    variables; with `image_in_prompt: false` the prompt has an image's name and size alone. Subtitles are shown beside
    frames, or without frames all of them, subsampled to `max_subtitle_tokens`.
    """

    settings: PythonSettings

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """See ToolEnvironment; the system prompt describes python."""
        return tuple(load_tool(name).schema for name in self.settings.tools if name != "python")

    async def build_prompt(self, task: Task, ctx: Context) -> tuple[Message, ...]:
        """Return images under their names, facts about the videos, and the question.

        A row's own prompt states the facts itself.
        """
        video_indices, own_system = itertools.count(), find_row_system_prompt(task, self.settings)

        async def load_video(path: str, max_frames: int, cues: tuple[Cue, ...]) -> list[str | ImageRef]:
            clip = await ctx.media.probe(path)
            fps = clip.num_frames / max(clip.duration, 1e-9)
            length = f"{clip.num_frames} frames, {fps:.2f} per second, {clip.duration:.1f} s"
            name = f"video_clue_{next(video_indices)}"
            facts = [] if own_system is not None else [f"{name}: {clip.width}x{clip.height} pixels, {length}\n"]
            if self.settings.video_in_prompt:
                return [*facts, *await load_overview(path, max_frames, ctx, self.settings, cues)]
            return [*facts, *interleave_subtitles([], cues, ctx, self.settings)]

        parts = await load_media(task, ctx, self.settings, load_video)
        if not self.settings.image_in_prompt:
            self.runtime_images = tuple(part for part in parts if isinstance(part, ImageRef) and part.time is None)
            indices = range(len(self.runtime_images)) if own_system is None else ()
            facts = iter([await self.describe_image(index, ctx) for index in indices])
            parts = [next(facts, "") if part in self.runtime_images else part for part in parts]
        named_parts = wrap_images_in_names(parts, len(self.runtime_images))
        user = Message(role="user", parts=(*named_parts, await fill_question(task, ctx, self.settings)))
        return with_system(self.settings.system_prompt if own_system is None else own_system, user)

    async def describe_image(self, index: int, ctx: Context) -> str:
        """Return the facts about an image that the prompt doesn't show."""
        width, height = await ctx.media.get_image_size(self.runtime_images[index].path)
        return f"image_clue_{index}: {width}x{height} pixels\n"

    def format_result(self, result: ToolResult, first_image_index: int) -> tuple[str | ImageRef, ...]:
        """See ToolEnvironment."""
        text = "\n".join(part for part in (result.text, result.error) if part)
        text = text if text or result.images else NO_OUTPUT_TEXT
        head = f"<interpreter>\nText Result:\n{text}\n" if text else "<interpreter>\n"
        head += "Image Result:\n" if result.images else ""
        return head, *wrap_images_in_names(result.images, first_image_index), "</interpreter>"


def wrap_images_in_names(parts: Sequence[str | ImageRef], first_image_index: int) -> list[str | ImageRef]:
    """Return the parts with each image between its tags, such as `<image_clue_0>` and `</image_clue_0>`."""
    wrapped: list[str | ImageRef] = []
    for part in parts:
        if isinstance(part, ImageRef):
            wrapped += [f"<image_clue_{first_image_index}>", part, f"</image_clue_{first_image_index}>\n"]
            first_image_index += 1
        else:
            wrapped.append(part)
    return wrapped


python = Python
