"""Every file of a plugin folder keeps its contract; a new file is tested the moment it exists."""

import asyncio
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from published_rows import EXAMPLES

from saccade import plugins
from saccade.agents.direct import direct
from saccade.chat.render import load_renderer
from saccade.config import Model
from saccade.engines.scripted import scripted
from saccade.errors import EngineError
from saccade.evaluation.benchmarks._benchmark import Mark
from saccade.ledger import Ledger
from saccade.model.backbone import Backbone
from saccade.model.tiny import make_tiny
from saccade.rewards._compose import bind
from saccade.testing import (
    PaintedMedia,
    check_agent,
    check_benchmark,
    check_engine,
    check_family,
    check_reward,
    check_source,
    check_syntax,
    check_tool,
    example_episodes,
)
from saccade.types import Block, BlockKind, Call, Completion, End, Form, Kind, Reply, Score, Stop, Task, Ungraded

sys.path.insert(0, str(Path(__file__).parent / "evaluation" / "benchmarks"))
from toy_rows import MAKERS, write_copy

UNKNOWN = Block(kind=BlockKind.CALL, body="", closed=True, call=Call(name="", arguments={}, form=Form.FOREIGN))
KINDS = {
    **{"choice": (Kind.CHOICE,), "open": (Kind.OPEN,), "grounding": (Kind.GROUNDING,), "number": (Kind.NUMBER,)},
    **{"math": (Kind.MATH,), "box": (Kind.BOX, Kind.POINT)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.names("tools"))
def test_tool(name, renderer):
    asyncio.run(check_tool(plugins.load("tools", name), renderer))


@pytest.mark.parametrize("name", plugins.names("chat.syntaxes"))
def test_syntax(name):
    check_syntax(plugins.load("chat.syntaxes", name))


@pytest.mark.parametrize("name", plugins.names("agents"))
def test_agent(name, renderer):
    asyncio.run(check_agent(plugins.bind("agents", name, {}), renderer))


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.names("rewards"))
def test_reward(name):
    if name in ("accuracy", "math"):
        pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'saccade[math]'")
    # nobody listens at port 9: what must be judged is ungraded, the rest has its reward
    away = {"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0, "timeout": 5, "cache": None}
    asyncio.run(check_reward(bind(name, {"judge": away}.get(name, {})), KINDS.get(name, tuple(Kind))))


@pytest.mark.parametrize("name", plugins.names("engines"))
def test_engine(name, renderer, tiny_folder):
    given = {
        "scripted": lambda: {"renderer": renderer, "replies": lambda ledger: f"it is {len(ledger)}"},
        "local": lambda: {"backbone": Backbone(Model(path=tiny_folder, threads=1)), "media": PaintedMedia()},
    }
    if name in ("vllm", "sglang", "openai"):
        pytest.skip(f"it needs a server, see tests/engines/test_{name}.py")
    if name not in given:
        pytest.skip(f"nothing is said here of how a test makes the engine {name}")

    async def body():
        settings = given[name]()
        await check_engine(plugins.load("engines", name)(**settings), renderer)

    asyncio.run(body())


@pytest.mark.parametrize("name", plugins.names("chat.families"))
def test_family(name, tmp_path):
    make_tiny(tmp_path / "model", family=name)
    check_family(load_renderer(str(tmp_path / "model")))


@pytest.mark.parametrize("name", plugins.names("data.sources"))
def test_source(name):
    assert name in EXAMPLES, f"add a row of the source {name} to tests/published_rows.py"
    check_source(plugins.bind("data.sources", name, {}), EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.names("evaluation.benchmarks"))
def test_benchmark(name, tmp_path):
    benchmark = plugins.bind("evaluation.benchmarks", name, {})()
    rows = list(itertools.islice(MAKERS[name](), 0, None, 97))[:40]
    check_benchmark(benchmark, benchmark.tasks(write_copy(name, tmp_path, rows), subset=True)[:40])


# ---- the checks themselves catch what they are for -----------------------------------------------------------------


class Careless(scripted):
    """Samples right, reports wrong."""

    def __init__(self, renderer, change):
        super().__init__(renderer, replies=lambda ledger: "it is red")
        self._change = change

    async def generate(self, ledger, sampling):
        completion = await super().generate(ledger, sampling)
        fields = {name: getattr(completion, name) for name in ("tokens", "logprobs", "version", "stop")}
        return Completion(**{**fields, **self._change(completion)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: {"logprobs": c.logprobs[1:]}, "one logprob per token"),
        (lambda c: {"stop": Stop.LENGTH}, "its last id says otherwise"),
        (lambda c: {"version": 0}, "version that was published"),
        (lambda c: {"logprobs": (float("nan"),) * len(c.tokens)}, "finite"),
    ],
)
def test_a_careless_engine_is_caught(renderer, change, sentence):
    with pytest.raises(AssertionError, match=sentence):
        asyncio.run(check_engine(Careless(renderer, change), renderer))


def test_an_engine_that_depends_on_company_is_caught(renderer):
    class Crowded(scripted):
        def _next(self, ledger):
            self._asked += 1
            return f"it is {self._asked}"

    with pytest.raises(AssertionError, match="in company"):
        asyncio.run(check_engine(Crowded(renderer), renderer))


def test_an_unsteady_reward_is_caught():
    values = iter(range(1000))
    with pytest.raises(AssertionError, match="two rewards"):
        asyncio.run(check_reward(lambda episode, task: next(values)))
    with pytest.raises(AssertionError, match="nan"):
        asyncio.run(check_reward(lambda episode, task: float("nan")))
    with pytest.raises(AssertionError, match="inf"):
        asyncio.run(check_reward(lambda episode, task: Score(value=1.0, parts={"mine": float("inf")})))
    with pytest.raises(AssertionError, match="nan"):
        asyncio.run(check_reward(lambda episode, task, *, accuracy: float("nan") if accuracy == 0.5 else 0.0))


def test_a_reward_may_wait_and_may_not_know():
    async def waits(episode, task):
        await asyncio.sleep(0)
        return Ungraded(reason="nobody knows") if episode.answer is None else 1.0

    asyncio.run(check_reward(waits))


def test_an_agent_that_alters_the_past_is_caught(renderer):
    async def forgetful(task, ctx):
        episode = await direct(task, ctx)
        first, *rest = episode.ledger.segments
        return replace(episode, ledger=Ledger(segments=(replace(first, tokens=(*first.tokens, 5)), *rest)))

    with pytest.raises(AssertionError, match="not what the engine was given"):
        asyncio.run(check_agent(forgetful, renderer))


def test_examples_cover_every_end():
    assert {episode.end for episode in example_episodes()} == set(End)


def test_scripted_runs_out(renderer):
    engine = scripted(renderer, replies=("red",))
    with pytest.raises(EngineError, match="all of them are said"):
        asyncio.run(check_engine(engine, renderer))


@pytest.mark.parametrize(
    ("careless", "words"),
    [
        (lambda text, forced: Reply(text=text.strip("{}"), forced=text[:forced]), "was read as"),
        (lambda text, forced: Reply(text=text), "was read as"),
        (lambda text, forced: Reply(text=text, blocks=(UNKNOWN,), forced=text[:forced]), "neither a name nor an error"),
    ],
)
def test_a_careless_syntax_is_caught(careless, words):
    with pytest.raises(AssertionError, match=words):
        check_syntax(careless)


def test_a_careless_source_is_caught():
    with pytest.raises(KeyError):
        check_source(lambda row: iter([row.values["nothing"]]), {"a": 1})
    task = Task(id="one", question="?", media=(), kind=Kind.OPEN, gold="x")
    with pytest.raises(AssertionError, match="one id"):
        check_source(lambda row: iter([task]), {"a": 1})
    with pytest.raises(AssertionError, match="gave nothing"):
        check_source(lambda row: iter(()), {"a": 1})
    bad = replace(task, kind=Kind.NUMBER)
    with pytest.raises(AssertionError, match="not a number"):
        check_source(lambda row: iter([replace(bad, id=row.id)]), {"a": 1})


def test_a_benchmark_that_marks_failures_is_caught(tmp_path):
    fair = plugins.bind("evaluation.benchmarks", "mlvu", {})()
    tasks = fair.tasks(write_copy("mlvu", tmp_path), subset=True)[:4]
    blind = replace(fair, tolerant=lambda text, task: Mark(read=text, value=0.0))
    with pytest.raises(AssertionError, match="doesn't know the gold"):
        check_benchmark(blind, tasks)
    with pytest.raises(AssertionError, match="not within 0 and 1"):
        check_benchmark(replace(fair, official=lambda text, task: Mark(read=text, value=2.0)), tasks)
    values = itertools.count()
    with pytest.raises(AssertionError, match="now so"):
        check_benchmark(replace(fair, official=lambda text, task: Mark(read=str(next(values)), value=0.0)), tasks)
    with pytest.raises(AssertionError, match="two tasks have one id"):
        check_benchmark(fair, [tasks[0], tasks[0]])
    with pytest.raises(AssertionError, match="'m_avg' must count results by their weight"):
        check_benchmark(replace(fair, metrics=lambda some: {"m_avg": fmean(each.value for each in some)}), tasks)
