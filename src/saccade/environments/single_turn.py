"""The environment of one reply: a baseline, and the control without tools."""

from saccade.environments.base import THINK_PREFILL, ConfiguredEnvironment, PromptSettings
from saccade.environments.prompt import build_prompt, collect_images, count_frames
from saccade.protocols import Context, Done, Observation
from saccade.types import EpisodeStatus, Reply, Task

SYSTEM_PROMPT = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Give "
    "only the answer, inside <answer></answer>."
)
THINK_SYSTEM_PROMPT = (
    "You answer questions about a video or about pictures. Of a video you see a few frames, each after its time. Think "
    "first, inside <think></think>, then give the answer inside <answer></answer>."
)


class SingleTurnSettings(PromptSettings):
    """Settings of `single_turn`."""

    force_think: bool = False  # start the reply with <think>
    system_prompt: str | None = None  # system prompt; empty = none, null = the packaged one, with or without thinking


class SingleTurn(ConfiguredEnvironment):
    """Show the media and the question; the first reply ends the episode."""

    settings: SingleTurnSettings

    async def reset(self, task: Task, ctx: Context) -> Observation:
        """Return the prompt. Raises MediaError if the task's media can't be shown."""
        self.task = task
        system_prompt = self.settings.system_prompt
        if system_prompt is None:
            system_prompt = THINK_SYSTEM_PROMPT if self.settings.force_think else SYSTEM_PROMPT
        messages = await build_prompt(task, ctx, self.settings, system_prompt=system_prompt)
        prefill = THINK_PREFILL if self.settings.force_think else ""
        return Observation(messages=messages, prefill=prefill, num_frames=count_frames(collect_images(messages)))

    async def step(self, reply: Reply, ctx: Context) -> Done:
        """End the episode."""
        assert self.task is not None, "reset the environment before step"
        if reply.answer is not None:
            return Done(status=EpisodeStatus.ANSWERED)
        return Done(status=EpisodeStatus.MAX_TURNS if reply.calls else EpisodeStatus.NO_ANSWER)


single_turn = SingleTurn
