"""How many functions lie between `rl.train` and `Engine.generate`."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from test_collect import Quick, task

import saccade
from saccade.config.load import load_recipe
from saccade.engines.scripted import Scripted
from saccade.rewards.compose import score_each
from saccade.rollouts.components import TrainingComponents
from saccade.training import rl
from saccade.types import Score

PACKAGE = str(Path(saccade.__file__).parent)


def list_functions(frame):
    """Return the names of the package's functions on the stack, outermost first."""
    names = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):  # such as <listcomp>
            names.insert(0, code.co_name)
        frame = frame.f_back
    return names


class Watched(Scripted):
    """Records the functions that lead to its requests: those of the request's task, and of where it was created."""

    async def generate(self, request):
        current, names = asyncio.current_task(), [*list_functions(sys._getframe()), "generate"]
        while current in self.creators:
            current, outer = self.creators[current]
            names = [*outer, *names]
        self.paths.append(names)
        return await super().generate(request)


def test_at_most_eight_functions_from_train_to_generate(tiny_folder, tmp_path):
    settings = "rl={group_size: 2, steps: 1, prompts_per_step: 1, pack_length: 512}"
    components = TrainingComponents.from_recipe(load_recipe("tiny/para_grpo", [f"model.path={tiny_folder}", settings]))
    engine = Watched(components.renderer, replies=lambda ledger: "<answer>red</answer>")
    engine.creators, engine.paths = {}, []
    score = score_each(lambda episode: Score(value=1.0, parts={}))
    components = replace(components, engine=engine, environments=lambda task: Quick, score_fn=score)

    def create_task(loop, coroutine, **options):
        created = asyncio.Task(coroutine, loop=loop, **options)
        engine.creators[created] = asyncio.current_task(loop), list_functions(sys._getframe())
        return created

    async def body():
        asyncio.get_running_loop().set_task_factory(create_task)
        await rl.train(components, [task("a")], folder=tmp_path, log_step=lambda row: None)

    asyncio.run(body())
    assert engine.paths
    for path in engine.paths:
        assert (path[0], path[-1]) == ("train", "generate")
        assert len(path) <= 8, " -> ".join(path)
