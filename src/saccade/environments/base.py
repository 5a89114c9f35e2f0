"""Environments whose settings are one typed class, checked like a function's keyword arguments.

class SingleTurn(ConfiguredEnvironment):
    settings: SingleTurnSettings    # a Section; a recipe's `environment.settings` are its fields
"""

import inspect
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from saccade.config.schema import IntRange, NonNegativeInt, PositiveFloat, PositiveInt, Section
from saccade.protocols import Environment
from saccade.types import Task

THINK_PREFILL = "<think>\n"


def _require_question(template: str) -> str:
    if "{question}" not in template:
        raise ValueError("it has no {question}")
    return template


QuestionTemplate = Annotated[str, AfterValidator(_require_question)]


class EnvironmentSettings(Section):
    """Settings of every environment with a settings class."""

    max_context_tokens: PositiveInt = 32768  # longest conversation, tokens, replies included


class PromptSettings(EnvironmentSettings):
    """What the prompt shows of a task's media."""

    num_frames: PositiveInt = 64  # frames of all videos together, unless the task has a frame budget
    # frame rate of the overview, frames per second, up to num_frames or the budget; null = that many at any length
    overview_fps: PositiveFloat | None = None
    frame_pixels: IntRange = (784, 50176)  # minimum and maximum pixels per frame
    image_pixels: IntRange = (3136, 2000000)  # minimum and maximum pixels per image
    max_subtitle_tokens: NonNegativeInt = 2048  # maximum tokens of the subtitles beside the frames
    # user's text, with {question}, and {width}, {height}, {num_frames}, {fps}, {duration} (seconds) and {file} (name)
    # of the task's first image or video
    question_template: QuestionTemplate = "{question}"
    # row = the system turn of the task's row, if it has one, and its question without the template; environment = the
    # environment's own
    system_prompt_source: Literal["environment", "row"] = "environment"


class ConfiguredEnvironment(Environment):
    """An environment with the settings class that its annotation of `settings` names."""

    settings: EnvironmentSettings  # the recipe's `environment.settings`
    settings_type: ClassVar[type[Section]] = EnvironmentSettings  # the class of `settings`
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        """Take the settings class from the annotation, and its fields as the constructor's signature."""
        super().__init_subclass__()
        cls.settings_type = inspect.get_annotations(cls, eval_str=True).get("settings", cls.settings_type)
        # Recipes, checks and docs read a plugin's settings from its signature.
        cls.__signature__ = inspect.signature(cls.settings_type)

    def __init__(self, **settings: Any) -> None:
        self.task: Task | None = None  # set by reset
        self.settings = self.settings_type.model_validate(settings)  # type: ignore[assignment]

    @property
    def max_context_tokens(self) -> int:
        """See Environment."""
        return self.settings.max_context_tokens
