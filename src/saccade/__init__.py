"""Saccade: train vision-language models that decide where to look.

The names below are the public API. They are imported when they are first used, so `import saccade` stays fast and
brings no torch.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from saccade.chat.renderer import load_renderer as load_renderer
    from saccade.config.load import load_recipe as load_recipe
    from saccade.config.schema import Recipe as Recipe
    from saccade.data.dataset import load_tasks as load_tasks
    from saccade.data.source_row import SourceRow as SourceRow
    from saccade.environments.tool_environment import ToolEnvironment as ToolEnvironment
    from saccade.errors import AlarmError as AlarmError
    from saccade.errors import BrokenEngineError as BrokenEngineError
    from saccade.errors import ConfigError as ConfigError
    from saccade.errors import DataError as DataError
    from saccade.errors import EngineError as EngineError
    from saccade.errors import EnvironmentServerError as EnvironmentServerError
    from saccade.errors import MediaError as MediaError
    from saccade.errors import ModelError as ModelError
    from saccade.errors import RunError as RunError
    from saccade.errors import SaccadeError as SaccadeError
    from saccade.errors import SandboxError as SandboxError
    from saccade.errors import ToolError as ToolError
    from saccade.evaluation.benchmarks.base import Benchmark as Benchmark
    from saccade.evaluation.benchmarks.base import Grade as Grade
    from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow as BenchmarkRow
    from saccade.ledger import Ledger as Ledger
    from saccade.media.cache import CachingMediaLoader as CachingMediaLoader
    from saccade.metrics.statistics import Estimate as Estimate
    from saccade.metrics.statistics import estimate_clustered_mean as estimate_clustered_mean
    from saccade.protocols import ChatEngine as ChatEngine
    from saccade.protocols import Context as Context
    from saccade.protocols import Done as Done
    from saccade.protocols import Engine as Engine
    from saccade.protocols import Environment as Environment
    from saccade.protocols import Observation as Observation
    from saccade.protocols import PixelBudget as PixelBudget
    from saccade.protocols import WeightSource as WeightSource
    from saccade.rewards.answer_types.base import BaseAnswerType as BaseAnswerType
    from saccade.rollouts.collect import collect as collect
    from saccade.rollouts.components import TrainingComponents as TrainingComponents
    from saccade.runs.api import ask as ask
    from saccade.runs.api import evaluate as evaluate
    from saccade.runs.api import generate_data as generate_data
    from saccade.runs.api import make_tiny_model as make_tiny_model
    from saccade.runs.api import read_episodes as read_episodes
    from saccade.runs.api import rl as rl
    from saccade.runs.api import sft as sft
    from saccade.runs.api import train as train
    from saccade.runs.run_folder import Run as Run
    from saccade.tools.base import ToolContext as ToolContext
    from saccade.tools.base import tool as tool
    from saccade.training.episode_log import RolloutRecord as RolloutRecord
    from saccade.training.optimizer import Optimizer as Optimizer
    from saccade.training.packing import MicroBatch as MicroBatch
    from saccade.training.packing import pack as pack
    from saccade.training.train_step import train_step as train_step
    from saccade.training.training_samples import build_sample as build_sample
    from saccade.types import AnswerType as AnswerType
    from saccade.types import Block as Block
    from saccade.types import BlockKind as BlockKind
    from saccade.types import Call as Call
    from saccade.types import CallFormat as CallFormat
    from saccade.types import Completion as Completion
    from saccade.types import Credit as Credit
    from saccade.types import Demonstration as Demonstration
    from saccade.types import Episode as Episode
    from saccade.types import EpisodeStatus as EpisodeStatus
    from saccade.types import FinishReason as FinishReason
    from saccade.types import GenerationRequest as GenerationRequest
    from saccade.types import Group as Group
    from saccade.types import Media as Media
    from saccade.types import MediaKind as MediaKind
    from saccade.types import Message as Message
    from saccade.types import RecordedResult as RecordedResult
    from saccade.types import Reply as Reply
    from saccade.types import SamplingParams as SamplingParams
    from saccade.types import Score as Score
    from saccade.types import ScoredEpisode as ScoredEpisode
    from saccade.types import Span as Span
    from saccade.types import Task as Task
    from saccade.types import ToolResult as ToolResult
    from saccade.types import Turn as Turn
    from saccade.types import Ungraded as Ungraded
    from saccade.types import Usage as Usage

# The one list of the public names is the block above: type checkers read it as it is, `__getattr__` reads it here.
_MODULES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("saccade.")
    for alias in node.names
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
