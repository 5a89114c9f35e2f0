"""Conversations at their longest: what a recipe's agent shows, samples and is told, in tokens.

A prompt is the family's own scaffold around the pictures the agent would show; nothing is decoded or loaded for it.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade import plugins
from saccade.chat.families._family import Piece, Scaffold, Spoken
from saccade.chat.render import load_renderer
from saccade.config import Plugin, Recipe
from saccade.errors import ConfigError
from saccade.ledger import Ledger, Picture
from saccade.media.image import fit
from saccade.media.picks import timed
from saccade.model.sizes import Sizes, published_sizes, read_sizes, tiny_sizes
from saccade.protocols import Budget
from saccade.types import Message

_MARKS = 8  # tokens around a turn, or around a tool's response
_FORCED = 2  # of a forced prefix
_TOKEN = re.compile(r"<\|\w+\|>|\d| ?[^\W\d_]{1,8}|[^\w\s]+|\s+|_")

Tokens = Callable[
    [Sequence[Message], Sequence[Mapping[str, Any]]], int
]  # of a prompt: its messages, the tools' schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a recipe doesn't say: width and height of the video (or picture), and tokens of a question with its options.

    `reply` (tokens) and `calls` (per tool turn) stand for the recipe's limits where a usual step is wanted rather than
    the largest.
    """

    video: tuple[int, int] = (1920, 1080)
    question: int = 64
    reply: int | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation: frames, tokens and visual tokens of its prompt, tokens sampled, and tokens in all."""

    frames: int
    prompt: int
    visual: int
    sampled: int
    length: int

    @property
    def rest(self) -> int:
        """Tokens after the prompt."""
        return self.length - self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What an attempt may hold: its own conversation (one per frame budget K), and `subs` conversations of sub-agents.

    `turns` is the number of tool turns, `calls` that of the calls in each.
    """

    talks: tuple[Talk, ...]
    sub: Talk | None
    turns: int
    calls: int

    @property
    def subs(self) -> int:
        """How many sub-agents may be asked."""
        return self.turns * self.calls if self.sub else 0

    @property
    def largest(self) -> Talk:
        """The conversation with the most frames."""
        return max(self.talks, key=lambda talk: talk.length)

    def dealt(self, count: int) -> list[Talk]:
        """The conversations of `count` prompts: budgets in turn from the largest, each as frequent as any other."""
        talks = sorted(self.talks, key=lambda talk: -talk.length)
        return [talks[place % len(talks)] for place in range(count)]


def sizes_of(recipe: Recipe) -> Sizes:
    """The sizes of the recipe's model: its folder's, the published model's, or those of a tiny one."""
    if recipe.model.path:
        return read_sizes(recipe.model.path)
    return published_sizes(recipe.model.published) if recipe.model.published else tiny_sizes(recipe.model.family)


def settings_of(folder: str, plugin: Plugin) -> dict[str, Any]:
    """The settings of a plugin: those that are given, as its signature has them, and its defaults."""
    parameters = inspect.signature(plugins.load(folder, plugin.name)).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return {**defaults, **plugins.bind(folder, plugin.name, plugin.settings).keywords}


def tools_of(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each tool that an agent with such settings offers, by name."""
    offered = given.get("tools", {})
    return {name: settings_of("tools", Plugin(name=name, settings=dict(own))) for name, own in offered.items()}


def attempt_of(recipe: Recipe, sizes: Sizes, assumed: Assumed) -> Attempt:
    """The conversations of one attempt. Raises ConfigError where a prompt leaves no room for a reply."""
    given, tokens = settings_of("agents", recipe.agent), counter(recipe, sizes)
    tools = tools_of(given)
    turns = given.get("max_turns", 0) if tools else 0
    calls = 1 if given.get("dispatch") == "sequential" else given.get("max_calls", 1)
    calls = calls if assumed.calls is None else min(calls, assumed.calls)
    reply = min(recipe.sampling.max_tokens, assumed.reply or recipe.sampling.max_tokens)
    forced = _FORCED if given.get("think_prefix") else 0
    pictured = sum(visual(own, calls, turns, sizes.factor) for own in tools.values() if "pixels" in own)
    told = calls * (min(given.get("result_tokens", 512), reply) + _MARKS) + pictured + _MARKS  # by the tools, in a turn
    context = given.get("context_tokens", 32768)
    schemas = [plugins.load("tools", name).schema for name in tools] if given.get("tool_schemas", True) else []
    system = [Message(role="system", parts=(given["system"],))] if given.get("system") else []
    still = recipe.world.media == "image"  # one picture then, which is no frame of a video

    def talk(frames: int, pixels: tuple[int, int], replies: int, *, main: bool) -> Talk:
        shown = pictures(frames, pixels, sizes.factor, assumed.video)
        asked = Message(role="user", parts=tuple(shown if still else timed(shown)))
        prompt = tokens([*system, asked], schemas) if main else tokens([asked], ())
        prompt += assumed.question + (forced if main else 0)
        if prompt >= context:
            raise ConfigError(
                f"a prompt of {frames} frames takes {prompt} tokens, and the context ends at {context}; show fewer or "
                "smaller frames, or raise agent.settings.context_tokens"
            )
        return Talk(
            frames=frames,
            prompt=prompt,
            visual=sum(picture.width * picture.height for picture in shown) // sizes.factor**2,
            sampled=min(replies * reply, context - prompt),
            length=min(context, prompt + replies * reply + (replies - 1) * (told + forced)),
        )

    overview = given.get("image_pixels" if still else "overview_pixels", (784, 50176))
    blind = given.get("video") == "runtime" and not still  # the video is only in the interpreter
    budgets = (1,) if still else (0,) if blind else recipe.gating.frames or (given.get("overview_frames", 0),)
    crop = tools.get("crop_video") if turns else None
    return Attempt(
        talks=tuple(talk(frames, overview, turns + 1, main=True) for frames in budgets),
        sub=talk(crop["frames"][1], crop["pixels"], 1, main=False) if crop else None,
        turns=turns,
        calls=calls,
    )


def visual(tool: Mapping[str, Any], calls: int, turns: int, factor: int) -> int:
    """Visual tokens of the pictures that a tool shows to its caller in a turn: one per call, `most_frames` per call, or
    its share of a limit.

    A tool with frames shows them to a sub-agent, so none to its caller.
    """
    if "frames" in tool:
        return 0
    shown = calls * tool.get("most_frames", 1)
    if "max_images" in tool:
        shown = -(-tool["max_images"] // max(turns, 1))
    return shown * (int(tool["pixels"][1]) // factor**2)


def pictures(count: int, pixels: tuple[int, int], factor: int, video: tuple[int, int]) -> list[Picture]:
    """Frames of a video as an agent would show them: of at least and at most so many pixels."""
    width, height = fit(*video, factor, Budget(min_pixels=pixels[0], max_pixels=pixels[1]))
    return [Picture(path="", digest="", time=100.0 + at, width=width, height=height) for at in range(count)]


def counter(recipe: Recipe, sizes: Sizes) -> Tokens:
    """How prompts are counted: by the model's own tokenizer, or, where it has no folder, by `estimate`."""
    if recipe.model.path:
        renderer = load_renderer(recipe.model.path)
        return lambda messages, tools: len(Ledger(segments=(renderer.render(Ledger(), messages, tools=tools),)))
    family = plugins.load("chat.families", recipe.model.family)

    def count(piece: Piece) -> int:
        if isinstance(piece, Picture):
            return piece.width * piece.height // sizes.factor**2
        return estimate(piece.text if isinstance(piece, Scaffold | Spoken) else piece)

    return lambda messages, tools: sum(count(piece) for piece in (*family.start(messages, tools), family.reply))


def estimate(text: str) -> int:
    """About how many tokens a text has: one per word (of eight letters at most), digit, and run of signs.

    >>> estimate("<12.5 seconds>"), estimate("Which colour is shown?")
    (7, 5)
    """
    return len(_TOKEN.findall(text))
