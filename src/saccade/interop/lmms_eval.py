"""A Saccade agent as a model of lmms-eval, found by it through the entry point `lmms_eval.models`.

    lmms-eval --model saccade --model_args model=runs/demo,keep=asked --tasks videomme --log_samples --output_path logs

lmms-eval asks the questions, in its own words, and marks the answers; the agent looks and answers as in `saccade eval`.
Both must be installed in one environment.
"""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._episodes import answer_of
from saccade.interop.attempts import Attempts, task_of
from saccade.stages import PICTURES
from saccade.types import Episode

NAME = "saccade"


def manifest() -> Any:
    """What the entry point gives to lmms-eval. Raises ConfigError where lmms-eval isn't installed."""
    _needed()
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=NAME, chat_class_path=f"{__name__}.Model")


def __getattr__(name: str) -> Any:
    # The class is made when lmms-eval asks for it by name: its base class lives there.
    if name == "Model":
        return _model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _needed() -> None:
    try:
        import lmms_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError("lmms-eval is not installed here; `pip install lmms-eval` where saccade is") from error


def text_of(episode: Episode, *, whole: bool) -> str:
    """What lmms-eval marks: the final answer or, if `whole`, the last reply untouched; "" where the episode broke."""
    # No reader of lmms-eval's knows of tags: of a whole transcript it takes the first letter that it finds.
    text = answer_of(episode).text
    return text if whole else final_answer(text)


class Asked:
    """What lmms-eval asks of a model; `--model_args` are the parameters, and all others settings of the recipe.

    `model` is a run or a checkpoint, `recipe` says how to use one that belongs to no run. `keep` is a folder for the
    episodes (by default they are thrown away). What is marked is the final answer; with `whole=true` the last reply.
    """

    is_simple = False  # questions come as chat messages
    task_dict: dict[str, Any]

    def __init__(
        self,
        model: str,
        recipe: str = "",
        keep: str = "",
        whole: bool = False,
        at_once: int = 64,
        device: str | None = None,
        batch_size: Any = 1,  # lmms-eval's own; here whatever is asked at once is batched as it comes
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        given = {**({"model.device": device} if device else {}), **settings}
        words = [f"{key}={value}" for key, value in given.items()]
        self._thrown_away = tempfile.TemporaryDirectory(prefix="saccade-")
        folder = Path(keep or self._thrown_away.name)
        self._attempts = Attempts(Path(model), folder=folder, recipe=recipe, settings=words, at_once=at_once)
        self._whole = whole

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """An answer to each request; the recipe says how to sample, whatever the task asks for."""
        from lmms_eval.api.instance import GenerationResult, TokenCounts

        asked = []
        for _, doc_to_messages, _, doc_id, task, split in (each.args for each in requests):
            messages = doc_to_messages(self.task_dict[task][split][doc_id])
            asked.append(task_of(f"{task}/{split}/{doc_id}", messages, self._attempts.folder / PICTURES))
        found = []
        for each in self._attempts.episodes(asked):
            spent = TokenCounts(input_tokens=each.usage.prompt_tokens, output_tokens=each.usage.sampled_tokens)
            found.append(GenerationResult(text=text_of(each, whole=self._whole), token_counts=spent))
        return found

    def loglikelihood(self, requests: Sequence[Any]) -> Any:
        """Not to be had of an agent."""
        raise ConfigError(f"{requests[0].task_name} asks how likely answers are; an agent only gives one")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> Any:
        """Not to be had of an agent."""
        raise ConfigError(f"{requests[0].task_name} asks in several rounds; an agent is asked once, and looks itself")

    def clean(self) -> None:
        """Give back what the model holds."""
        self._attempts.close()
        del self._attempts


@cache
def _model_class() -> type:
    _needed()
    from lmms_eval.api.model import lmms

    class Model(Asked, lmms):
        """A Saccade agent, as lmms-eval's registry wants it."""

    return Model
