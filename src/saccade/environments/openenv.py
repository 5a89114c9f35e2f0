"""Attach a server of OpenEnv (github.com/meta-pytorch/OpenEnv): its games and tasks become environments.

    reset ── {"type": "reset", "data": {"seed": 7}} ────> {"observation": {...}, "reward": null, "done": false}
    step  ── {"type": "step", "data": {"move": "up"}} ──> {"observation": {...}, "reward": 0.5, "done": true}

Each episode has a WebSocket (`/ws`) and with it a session of the server. The server's HTTP routes `/reset` and `/step`
create a new environment for every request, so they can't serve an episode.
"""

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from saccade.config.schema import IntRange, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from saccade.environments.base import ConfiguredEnvironment, EnvironmentSettings
from saccade.environments.prompt import with_system
from saccade.errors import ConfigError, DataError, EnvironmentServerError, ToolError, convert_errors
from saccade.ledger import ImageRef
from saccade.media.image import decode_image
from saccade.protocols import Context, Done, Observation, PixelBudget
from saccade.types import BlockKind, EpisodeStatus, Message, Reply, Task
from saccade.utils.hashing import derive_seed

MAX_MESSAGE_BYTES = 100 * 2**20  # as in OpenEnv's own client
KEY = "environment.settings"


class OpenEnvSettings(EnvironmentSettings):
    """Settings of `openenv`."""

    url: Annotated[str, Field(pattern=r"^(http|ws)s?://")]  # address of the server, such as http://127.0.0.1:8000
    action_field: str = ""  # field of the action that holds the reply; empty = the reply is the action, as JSON
    action: Mapping[str, Any] = {}  # further fields of every action
    reset: Mapping[str, Any] = {}  # arguments of every reset; a task's `extras.reset` takes precedence
    text_fields: tuple[str, ...] = ()  # fields of an observation that the model reads, in order; empty = all but images
    image_fields: tuple[str, ...] = ()  # fields of an observation that hold images
    system_prompt: str = ""  # system prompt; empty = none
    max_replies: PositiveInt = 32  # replies per episode, each of which is an action
    timeout: PositiveFloat = 60.0  # longest wait for a response of the server, seconds
    max_wait: NonNegativeFloat = 600.0  # longest wait for a session while the server is at capacity, seconds
    image_pixels: IntRange = (3136, 2000000)  # minimum and maximum pixels per image


class StepResult(Section):
    """The server's answer to `reset` and `step`."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class ActionProblem(BaseModel):
    """Why the server rejects an action."""

    loc: tuple[str | int, ...] = ()
    msg: str


class ErrorDetails(BaseModel):
    """The server's answer to a message that failed."""

    code: str | None = None
    message: str | None = None
    errors: tuple[ActionProblem, ...] = ()


class Openenv(ConfiguredEnvironment):
    """Play an episode in a session of an OpenEnv server; its rewards become the rewards of the turns.

    A reply is the action: its answer, or else its text outside of tags. The model reads why an action is invalid. The
    seed of `reset` is the task's, so that the episodes of a group start alike.
    """

    settings: OpenEnvSettings
    connection: ClientConnection | None = None
    num_turns = 0

    async def reset(self, task: Task, ctx: Context) -> Observation:
        """Open a session and return its first observation after the task's question."""
        self.task = task
        seed = derive_seed(0, task.digest) % 2**31
        own = task.extras.get("reset", {})
        if not isinstance(own, Mapping):
            problem = f"task {task.id}: extras.reset must be a mapping of the reset's arguments, not {own!r:.60}"
            raise DataError(f"{problem}; correct the row", key="extras.reset", value=own)
        arguments = {"seed": seed, **self.settings.reset, **own}
        result = await self.open_session(arguments)
        if result.done:
            raise self.build_error(f"ended task {task.id} at its reset")
        parts = await self.build_parts(result.observation, ctx)
        user = Message(role="user", parts=((f"{task.question}\n", *parts) if task.question else parts))
        return Observation(messages=with_system(self.settings.system_prompt, user))

    async def step(self, reply: Reply, ctx: Context) -> Observation | Done:
        """Send the reply's action. Raises EnvironmentServerError if the server fails."""
        assert self.task is not None, "reset the environment before step"
        self.num_turns += 1
        reward: float | None = None
        try:
            result = await self.request("step", self.parse_action(reply))
        except ToolError as error:
            parts: tuple[str | ImageRef, ...] = (f"Error: {error}",)
        else:
            reward = result.reward
            if result.done:
                return Done(status=EpisodeStatus.ANSWERED, reward=reward)
            parts = await self.build_parts(result.observation, ctx)
        if self.num_turns >= self.settings.max_replies:
            return Done(status=EpisodeStatus.MAX_TURNS, reward=reward)
        return Observation(messages=(Message(role="user", parts=parts),), reward=reward)

    async def close(self) -> None:
        """Close the connection, which ends the session."""
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()

    # ---- the server ------------------------------------------------------------------------------------------------

    async def open_session(self, arguments: Mapping[str, Any]) -> StepResult:
        """Return the answer to `reset`, once the server has a free session."""
        deadline, pause = time.monotonic() + self.settings.max_wait, 0.05
        while True:
            try:
                return await self.request("reset", arguments)
            except ServerFull:
                if time.monotonic() > deadline:
                    raise
            await self.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def request(self, message_type: str, data: Mapping[str, Any]) -> StepResult:
        """Send a message and return the answer. Raises EnvironmentServerError, or ToolError for an invalid action."""
        try:
            async with asyncio.timeout(self.settings.timeout):
                if self.connection is None:
                    url = re.sub("^http", "ws", self.settings.url).rstrip("/") + "/ws"
                    self.connection = await connect(
                        url, proxy=None, max_size=MAX_MESSAGE_BYTES, open_timeout=None, close_timeout=1
                    )
                with contextlib.suppress(ConnectionClosed):  # a server at capacity reports that, and closes
                    await self.connection.send(json.dumps({"type": message_type, "data": data}))
                answer = json.loads(await self.connection.recv())
            if answer["type"] != "error":
                return StepResult.model_validate(answer["data"])
            details = ErrorDetails.model_validate(answer["data"])
        except TimeoutError as error:
            raise self.build_error(f"did not answer within {self.settings.timeout:g} seconds") from error
        except (OSError, WebSocketException, OverflowError) as error:  # a port beyond 65535
            raise self.build_error(f"can't be reached: {error}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self.build_error(f"sent no OpenEnv message: {error}") from error
        if details.code == "CAPACITY_REACHED":
            raise ServerFull(f"the OpenEnv server {self.settings.url} has no free session", key=f"{KEY}.url")
        if details.code == "VALIDATION_ERROR" and message_type == "step":
            reasons = [f"{'.'.join(map(str, problem.loc))}: {problem.msg}" for problem in details.errors]
            raise ToolError("; ".join(reasons) or str(details.message))
        raise self.build_error(f"failed: {details.message}")

    def build_error(self, problem: str) -> EnvironmentServerError:
        """Return an error of one sentence."""
        text = " ".join(f"the OpenEnv server {self.settings.url} {problem}".split())
        return EnvironmentServerError(text, key=f"{KEY}.url", value=self.settings.url)

    # ---- actions and observations ----------------------------------------------------------------------------------

    def parse_action(self, reply: Reply) -> dict[str, Any]:
        """Return the action of a reply. Raises ToolError if it has none."""
        text = reply.answer
        if text is None:
            text = "".join(block.body for block in reply.find_blocks(BlockKind.TEXT)).strip()
        if self.settings.action_field:
            return {**self.settings.action, self.settings.action_field: text}
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ToolError("the reply must be one JSON object, the action")
        return {**self.settings.action, **fields}

    async def build_parts(self, observation: Mapping[str, Any], ctx: Context) -> tuple[str | ImageRef, ...]:
        """Return the images of an observation and its text: of one field its value, of several a line for each."""
        shown = {*self.settings.image_fields, *self.settings.text_fields}
        missing = sorted(shown - observation.keys())
        if missing and self.num_turns:  # the observation of `reset` had them
            raise self.build_error(f"sent an observation without {missing[0]!r}")
        if missing:
            setting = "image_fields" if missing[0] in self.settings.image_fields else "text_fields"
            raise ConfigError(
                f"{setting}: the server's observations have no {missing[0]!r}; found: {', '.join(observation)}",
                key=f"{KEY}.{setting}",
                value=missing[0],
            )
        images = []
        budget = PixelBudget(*self.settings.image_pixels)
        for name in self.settings.image_fields:
            if observation[name]:
                with convert_errors(
                    EnvironmentServerError, f"the field {name!r} of an observation holds no image", key=name
                ):
                    pixels = decode_pixels(observation[name], observation.get(f"{name}_shape"))
                images.append(await ctx.media.save_image(pixels, factor=ctx.renderer.factor, budget=budget))
        hidden = {text for name in self.settings.image_fields for text in (name, f"{name}_shape")}
        names = self.settings.text_fields or [name for name in observation if name not in hidden]
        values = {name: observation[name] for name in names if observation[name] not in (None, "")}
        with convert_errors(
            EnvironmentServerError, f"the OpenEnv server {self.settings.url} sent an unreadable observation", key=KEY
        ):
            texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        lines = texts.values() if len(names) == 1 else [f"{name}: {text}" for name, text in texts.items()]
        return *images, "\n".join(lines)


class ServerFull(EnvironmentServerError):
    """Every session of the server is in use."""


def decode_pixels(value: Any, shape: list[int] | None) -> NDArray[np.uint8]:
    """Return uint8 [height, width, 3] of an image file in base64 or a data URL, of nested lists, or of a flat list."""
    if isinstance(value, str):
        return decode_image(base64.b64decode(value.rpartition(",")[2], validate=True))
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or (array.size and (array.min() < 0 or array.max() > 255)):
        raise ValueError(f"pixels must be whole numbers from 0 to 255, not {array.dtype} of other values")
    pixels = array.astype(np.uint8)
    pixels = pixels.reshape(shape) if shape is not None and pixels.ndim == 1 else pixels
    if pixels.ndim == 2:
        pixels = pixels[..., None].repeat(3, axis=2)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise ValueError(f"an array of the shape {pixels.shape}")
    return pixels[..., :3]


openenv = Openenv
