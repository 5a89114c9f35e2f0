"""Every plugin fulfills its contract, and each check catches plugins that don't."""

import asyncio
import itertools
import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from error_cases import raises
from published_rows import EXAMPLES
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade import testing as contracts
from saccade.chat.renderer import load_renderer
from saccade.config.schema import ModelConfig
from saccade.engines.scripted import Scripted
from saccade.environments.single_turn import SingleTurn
from saccade.errors import EngineError
from saccade.evaluation.benchmarks.base import Grade
from saccade.ledger import Ledger
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import Done
from saccade.rewards.compose import resolve_reward
from saccade.testing import (
    FakeMediaLoader,
    build_example_episodes,
    check_answer_type,
    check_benchmark,
    check_engine,
    check_environment,
    check_estimator,
    check_family,
    check_importer,
    check_loss,
    check_reward,
    check_tool,
    check_tool_format,
    data_contracts,
)
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Completion,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    Reply,
    Score,
    Task,
    Ungraded,
)

CALL_WITHOUT_NAME = Block(
    kind=BlockKind.CALL, body="", is_closed=True, call=Call(name="", arguments={}, call_format=CallFormat.THIRD_PARTY)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.list_plugins("tools"))
def test_tool(name, renderer):
    asyncio.run(check_tool(plugins.load("tools", name), renderer))


@pytest.mark.parametrize("name", plugins.list_plugins("chat.tool_formats"))
def test_tool_format(name):
    check_tool_format(plugins.load("chat.tool_formats", name))


# `openenv` needs a server, and is checked in tests/environments/test_openenv.py.
@pytest.mark.parametrize("name", [name for name in plugins.list_plugins("environments") if name != "openenv"])
def test_environment(name, renderer):
    asyncio.run(check_environment(plugins.resolve("environments", name, {}), renderer))


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.list_plugins("rewards"))
def test_reward(name):
    if name == "accuracy":
        pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'saccade[math]'")
    # No server listens at port 9: episodes that need the judge are ungraded.
    unreachable = {"url": "http://127.0.0.1:9/v1", "model": "m", "max_retries": 0, "timeout": 5, "cache_dir": None}
    settings = {"judge": unreachable}.get(name, {})
    asyncio.run(check_reward(resolve_reward(name, settings)))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(AnswerType))
def test_answer_type(name):
    if name == AnswerType.MATH:
        pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'saccade[math]'")
    asyncio.run(check_answer_type(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.list_plugins("engines"))
def test_engine(name, renderer, tiny_folder):
    settings_by_engine = {
        "scripted": lambda: {"renderer": renderer, "replies": lambda ledger: f"it is {len(ledger)}"},
        "local": lambda: {
            "vlm": VisionLanguageModel(ModelConfig(path=tiny_folder, num_threads=1)),
            "media": FakeMediaLoader(),
        },
    }
    if name in ("vllm", "sglang", "chat_completions"):
        pytest.skip("needs a server, see tests/engines")
    if name not in settings_by_engine:
        pytest.skip(f"this test has no settings for the engine {name}")

    async def body():
        settings = settings_by_engine[name]()
        await check_engine(plugins.load("engines", name)(**settings), renderer, settings.get("vlm"))

    asyncio.run(body())


@pytest.mark.parametrize("name", plugins.list_plugins("chat.families"))
def test_family(name, tmp_path):
    make_tiny_model(tmp_path / "model", family=name)
    check_family(load_renderer(str(tmp_path / "model")))


@pytest.mark.parametrize("name", plugins.list_plugins("data.importers"))
def test_importer(name):
    assert name in EXAMPLES, f"add a row for the importer {name} to tests/published_rows.py"
    check_importer(plugins.resolve("data.importers", name, {}), EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.list_plugins("evaluation.benchmarks"))
def test_benchmark(name, tmp_path):
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    rows = list(itertools.islice(MAKERS[name](), 0, None, 97))[:40]
    check_benchmark(benchmark, benchmark.load_tasks(write_copy(name, tmp_path, rows), allow_incomplete=True)[:40])


# ---- the checks catch plugins that break a contract ----------------------------------------------------------------


class MisreportingEngine(Scripted):
    """Samples correctly but returns changed completions."""

    def __init__(self, renderer, change):
        super().__init__(renderer, replies=lambda ledger: "it is red")
        self._change = change

    async def generate(self, request):
        completion = await super().generate(request)
        fields = {name: getattr(completion, name) for name in ("tokens", "logprobs", "version", "finish_reason")}
        return Completion(**{**fields, **self._change(completion)})


@pytest.mark.parametrize(
    ("change", "by"),
    [
        (lambda c: {"logprobs": c.logprobs[1:]}, contracts._generate_and_check),
        (lambda c: {"finish_reason": FinishReason.LENGTH}, contracts._generate_and_check),
        (lambda c: {"version": 0}, check_engine),
        (lambda c: {"logprobs": (float("nan"),) * len(c.tokens)}, contracts._generate_and_check),
    ],
)
def test_check_engine_catches_wrong_completions(renderer, change, by):
    with raises(AssertionError, by=by):
        asyncio.run(check_engine(MisreportingEngine(renderer, change), renderer))


def test_check_engine_catches_dependence_on_other_requests(renderer):
    class CountingEngine(Scripted):
        def _take_next_reply(self, ledger):
            self._num_replies_used += 1
            return f"it is {self._num_replies_used}"

    with raises(AssertionError, by=check_engine):
        asyncio.run(check_engine(CountingEngine(renderer), renderer))


def test_check_reward_catches_unstable_and_infinite_values():
    values = iter(range(1000))
    with raises(AssertionError, by=contracts._call_twice):
        asyncio.run(check_reward(lambda episode: next(values)))
    with raises(AssertionError, by=contracts._call_twice):
        asyncio.run(check_reward(lambda episode: float("nan")))
    with raises(AssertionError, by=check_reward):
        asyncio.run(check_reward(lambda episode: math.inf))
    with raises(AssertionError, by=check_reward):
        asyncio.run(check_reward(lambda episode: Score(value=1.0, parts={"mine": math.inf})))
    with raises(AssertionError, by=check_reward):
        asyncio.run(check_reward(lambda episode, *, correct: math.inf if correct == 0.5 else 0.0))


@pytest.mark.parametrize("name", plugins.list_plugins("algorithms.advantages"))
def test_estimator(name):
    check_estimator(plugins.load("algorithms.advantages", name))


@pytest.mark.parametrize(
    "estimator",
    [
        lambda rewards_G, total_G: rewards_G.mean(),
        lambda rewards_G, total_G: (rewards_G - rewards_G.mean()) / rewards_G.std(),
        lambda rewards_G, total_G: -rewards_G,
        lambda rewards_G, total_G: rewards_G * np.arange(1, len(rewards_G) + 1),
        lambda rewards_G, total_G: np.subtract(rewards_G, rewards_G.mean(), out=rewards_G),
    ],
    ids=["one number", "divided by zero", "more reward, less advantage", "depends on the order", "changes its input"],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_check_estimator_catches(estimator):
    with pytest.raises(AssertionError):
        check_estimator(estimator)


@pytest.mark.parametrize("name", plugins.list_plugins("algorithms.losses"))
def test_loss(name):
    check_loss(plugins.load("algorithms.losses", name))


@pytest.mark.parametrize(
    "loss",
    [
        lambda logp, old, adv, seq: ((-adv * logp).mean(), {}),
        lambda logp, old, adv, seq: (adv * logp, {}),
        lambda logp, old, adv, seq: (-adv * (logp - old).exp().pow(4), {}),
        lambda logp, old, adv, seq: (-(adv - adv.mean()) * logp, {}),
        lambda logp, old, adv, seq: (-adv * logp.detach() + 0 * logp, {}),
        lambda logp, old, adv, seq: (-adv * logp, {"mean": logp.mean()}),
    ],
    ids=["one number", "wrong sign", "overflows", "mixes sequences", "no gradient", "a scalar statistic"],
)
def test_check_loss_catches(loss):
    with pytest.raises(AssertionError):
        check_loss(loss)


def test_check_reward_accepts_coroutines_and_ungraded():
    async def reward(episode):
        await asyncio.sleep(0)
        return Ungraded(reason="no answer") if episode.answer is None else 1.0

    asyncio.run(check_reward(reward))


class Sampling(SingleTurn):
    async def step(self, reply, ctx):
        await ctx.engine.generate(GenerationRequest(Ledger(), ctx.sampling))
        return await super().step(reply, ctx)


class Stateless(SingleTurn):
    async def step(self, reply, ctx):
        return Done(status=EpisodeStatus.NO_ANSWER)


class ClosedOnce(SingleTurn):
    async def close(self):
        assert self.task is not None, "closed twice"
        self.task = None


class Random(SingleTurn):
    async def reset(self, task, ctx):
        return await super().reset(replace(task, question=str(id(self))), ctx)


class Leaking(SingleTurn):
    async def reset(self, task, ctx):
        self.background = asyncio.ensure_future(asyncio.sleep(3))
        return await super().reset(task, ctx)


@pytest.mark.parametrize("environment", [Sampling, Stateless, ClosedOnce, Random, Leaking])
def test_a_faulty_environment_is_caught(renderer, environment):
    with pytest.raises(AssertionError):
        asyncio.run(check_environment(environment, renderer))


def test_an_environment_shared_by_episodes_is_caught(renderer):
    shared = SingleTurn()
    with pytest.raises(AssertionError):
        asyncio.run(check_environment(lambda: shared, renderer))


def test_example_episodes_cover_every_status():
    assert {episode.status for episode in build_example_episodes()} == set(EpisodeStatus)


def test_scripted_runs_out(renderer):
    engine = Scripted(renderer, replies=("red",))
    with pytest.raises(EngineError):
        asyncio.run(check_engine(engine, renderer))


@pytest.mark.parametrize(
    "parse",
    [
        lambda text, length: Reply(text=text.strip("{}"), prefill=text[:length]),
        lambda text, length: Reply(text=text),
        lambda text, length: Reply(text=text, blocks=(CALL_WITHOUT_NAME,), prefill=text[:length]),
    ],
)
def test_check_tool_format_catches_wrong_replies(parse):
    with raises(AssertionError, by=check_tool_format):
        check_tool_format(parse)


def test_check_importer_catches_wrong_items():
    with pytest.raises(KeyError):
        check_importer(lambda row: iter([row.values["nothing"]]), {"a": 1})
    task = Task(id="one", question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="x")
    with raises(AssertionError, by=check_importer):
        check_importer(lambda row: iter([task]), {"a": 1})
    with raises(AssertionError, by=check_importer):
        check_importer(lambda row: iter(()), {"a": 1})
    invalid = replace(task, answer_type=AnswerType.NUMBER)
    with raises(AssertionError, by=check_importer):
        check_importer(lambda row: iter([replace(invalid, id=row.id)]), {"a": 1})


@pytest.mark.slow
def test_check_benchmark_catches_wrong_grades_and_metrics(tmp_path):
    valid = plugins.resolve("evaluation.benchmarks", "mlvu", {})()
    tasks = valid.load_tasks(write_copy("mlvu", tmp_path), allow_incomplete=True)[:4]
    always_wrong = replace(valid, grade_lenient=lambda text, task: Grade(extracted=text, value=0.0))
    with raises(AssertionError, by=check_benchmark):
        check_benchmark(always_wrong, tasks)
    with raises(AssertionError, by=check_benchmark):
        check_benchmark(replace(valid, grade_strict=lambda text, task: Grade(extracted=text, value=2.0)), tasks)
    values = itertools.count()
    with raises(AssertionError, by=check_benchmark):
        check_benchmark(
            replace(valid, grade_strict=lambda text, task: Grade(extracted=str(next(values)), value=0.0)), tasks
        )
    with raises(AssertionError, by=check_benchmark):
        check_benchmark(valid, [tasks[0], tasks[0]])
    with raises(AssertionError, by=data_contracts._check_weights):
        check_benchmark(
            replace(valid, compute_metrics=lambda results: {"m_avg": fmean(r.value for r in results)}), tasks
        )
