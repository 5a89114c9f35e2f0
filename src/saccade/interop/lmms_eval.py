"""Provide a Saccade environment as a model of lmms-eval, registered through the entry point `lmms_eval.models`.

lmms-eval formulates the questions and grades the answers; the environment runs as in `saccade eval`. Both packages must
be installed in one Python environment.
"""

import asyncio
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, RunError
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import extract_answer
from saccade.evaluation.runner import disable_tools
from saccade.evaluation.subset import assign_frame_budgets
from saccade.interop.messages import build_task
from saccade.metrics.episode_metrics import has_failed
from saccade.protocols import SelectEnvironment
from saccade.rollouts.runner import run_episode
from saccade.runs import pipeline
from saccade.types import Episode, Task
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.files import convert_file_errors
from saccade.utils.hashing import derive_seed
from saccade.utils.jsonl import append_jsonl


def build_manifest() -> Any:
    """Return lmms-eval's model manifest, for the entry point. Raises ConfigError if lmms-eval isn't installed."""
    _require_lmms_eval()
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="saccade", chat_class_path=f"{__name__}.Model")


def __getattr__(name: str) -> Any:
    # Created on demand: its base class is defined in lmms-eval.
    if name == "Model":
        return _build_model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require_lmms_eval() -> None:
    try:
        import lmms_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "lmms-eval is not installed; run `pip install lmms-eval` in the environment of saccade", key="lmms-eval"
        ) from error


def format_response(episode: Episode, *, full_reply: bool) -> str:
    """Return the text lmms-eval grades: the final answer, or the last reply if `full_reply`; "" after a failure."""
    # lmms-eval's parsers don't strip tags: in a full reply they take the first letter.
    text = extract_answer(episode).text
    return text if full_reply else extract_final_answer(text)


class SaccadeModel:
    """Implement lmms-eval's model interface; `--model_args` are the parameters, and any others are recipe settings.

    lmms-eval grades the final answer; with `full_reply=true` the last reply. Without `episode_dir` the episodes are
    discarded.
    """

    is_simple = False  # questions come as chat messages
    task_dict: dict[str, Any]

    def __init__(
        self,
        model: str,
        recipe: str = "",
        episode_dir: str = "",
        full_reply: bool = False,
        max_concurrency: int = 64,
        device: str | None = None,
        batch_size: Any = 1,  # set by lmms-eval, ignored: the engine batches concurrent requests
        max_batch_size: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        overrides = {**({"model.device": device} if device else {}), **settings}
        arguments = [f"{key}={value}" for key, value in overrides.items()]
        self._temporary_dir = tempfile.TemporaryDirectory(prefix="saccade-")
        self.folder = Path(episode_dir or self._temporary_dir.name).resolve()
        self.components = pipeline.load_for_inference(Path(model), recipe=recipe, settings=arguments)
        self.components.media.generated_dir = str(self.folder / pipeline.IMAGES_FOLDER)
        self._max_concurrency = max_concurrency
        self._num_runs = Counter[str]()  # by the task's digest
        # lmms-eval calls from its own thread and blocks: one event loop and one engine for the model's lifetime.
        self._event_loop = asyncio.Runner()
        self._full_reply = full_reply

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Return an answer to each request; sampling follows the recipe, not the request's own settings."""
        from lmms_eval.api.instance import GenerationResult, TokenCounts

        tasks = []
        for _, doc_to_messages, _, doc_id, task, split in (episode.args for episode in requests):
            messages = doc_to_messages(self.task_dict[task][split][doc_id])
            tasks.append(build_task(f"{task}/{split}/{doc_id}", messages, self.folder / pipeline.IMAGES_FOLDER))
        return [
            GenerationResult(
                text=format_response(episode, full_reply=self._full_reply),
                token_counts=TokenCounts(
                    input_tokens=episode.usage.unsampled_tokens, output_tokens=episode.usage.sampled_tokens
                ),
            )
            for episode in self.run_episodes(tasks)
        ]

    def run_episodes(self, tasks: Sequence[Task]) -> list[Episode]:
        """Return an episode per task, in order; a repeated task gets another seed. Raises RunError if all failed."""
        with convert_file_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        episodes = self._event_loop.run(self._run_all(tasks))
        failed = [episode for episode in episodes if has_failed(episode)]
        if len(failed) == len(episodes) > 1:
            raise RunError(
                f"all {len(failed)} episodes failed, the first with: {failed[0].error}; fix the cause and run again",
                key="episodes",
                value=len(failed),
            )
        if failed:  # the other system can't represent a failure and scores it as a wrong answer
            warnings.warn(
                f"{len(failed)} of {len(episodes)} episodes failed, the first with: {failed[0].error}", stacklevel=2
            )
        return episodes

    async def _run_all(self, tasks: Sequence[Task]) -> list[Episode]:
        settings = self.components.recipe.evaluation
        environments: SelectEnvironment = self.components.environments
        environments = environments if settings.use_tools else disable_tools(environments)
        base = self.components.build_context(seed=self.components.recipe.seed, temperature=settings.temperature)
        budgets = assign_frame_budgets(tasks, settings.frame_budgets)
        semaphore = asyncio.Semaphore(self._max_concurrency)

        async def run_one(task: Task) -> Episode:
            index = self._num_runs[task.digest]
            self._num_runs[task.digest] += 1
            seed = derive_seed(base.seed, 0, task.digest, index)  # the seed of the same sample in `saccade eval`
            async with semaphore:
                context = replace(base, seed=seed, frame_budget=budgets[task.id])
                episode = await run_episode(task, environments(task), context)
            file = self.folder / "episodes.jsonl"
            with convert_file_errors(file):
                append_jsonl(file, episode)
            return episode

        return await gather_or_cancel([run_one(task) for task in tasks])

    def loglikelihood(self, requests: Sequence[Any]) -> Any:
        """Raise ConfigError."""
        problem = "log-likelihood requests, which are not supported: an environment returns one answer"
        raise _build_request_error(requests, f"{problem}; choose a generative task")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> Any:
        """Raise ConfigError."""
        problem = "multi-round requests, which are not supported: an environment calls its own tools"
        raise _build_request_error(requests, f"{problem}; choose a single-round task")

    def clean(self) -> None:
        """Close the engine and the event loop, and discard the episodes that have no folder of their own."""
        self._event_loop.run(self.components.engine.close())
        self._event_loop.close()
        self._temporary_dir.cleanup()
        del self.components


def _build_request_error(requests: Sequence[Any], problem: str) -> ConfigError:
    name = requests[0].task_name
    return ConfigError(f"{name} needs {problem}", key="tasks", value=name)


@cache
def _build_model_class() -> type:
    _require_lmms_eval()
    from lmms_eval.api.model import lmms

    class Model(SaccadeModel, lmms):
        """Combine SaccadeModel with the base class that lmms-eval's registry requires."""

    return Model
