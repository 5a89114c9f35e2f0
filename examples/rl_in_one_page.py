"""GRPO with the parallel agent on one page: from nothing to a policy that earns more, in less than a minute.

    world ──> model ──> a short cold start ──> attempts ──> advantages ──> packed rows ──> loss ──> step ──┐
                                                  ▲                                                        │
                                                  └──────────────── the new weights ───────────────────────┘

Run it with `python examples/rl_in_one_page.py`. It is made of the same pieces as the real loop, `saccade train`
(src/saccade/training/rl.py), and differs from it in these ways:

- The ratio compares the trainer with the engine. The real loop compares with the trainer's own logprobs before the
  update, and lets the gap between trainer and engine weigh the tokens. It may make several updates per batch, take
  ratios of sequences, average by sequence, learn from older groups, and hold the policy to the weights it began with.
- Every group is learned from. The real loop drops groups whose rewards are all alike and attempts that broke, and can
  draw more prompts than it needs, in rounds.
- Prompts come in the order of the file with one frame budget. The real loop shuffles them anew each epoch and draws a
  budget for each prompt.
- Nothing is checked, kept or resumed. The real loop makes sure that each token it trains is the engine's own, writes
  checkpoints, goes on after a kill as if nothing had happened, and logs some sixty numbers a step.
- Model, world and cold start are far too small, and nothing is asked about videos that it has not seen: what it shows
  is the loop, not a result.
"""

import asyncio
import tempfile
from pathlib import Path

import torch

from saccade import stages
from saccade.algorithms.advantages import advantages
from saccade.config import Recipe, load_recipe
from saccade.data.rows import read_demos, read_tasks
from saccade.data.world import make_world, phrases
from saccade.model.tiny import make_tiny
from saccade.rollouts.collect import collect
from saccade.rollouts.stage import Stage
from saccade.training import sft
from saccade.training.credit import samples_of
from saccade.training.optim import Optimizer
from saccade.training.pack import Batch, pack
from saccade.training.step import step

PROMPTS, GROUP, FRAMES, CLIP = 8, 8, 4, 0.2
SMALL = (  # laid over the packaged recipe: its agent and its rewards stay
    "model.threads=1",
    "world={train: 8, validation: 1, test: 1, seconds: 16, events: [1, 2], pixels: 32, questions: [at]}",
    "world.tasks_per_video=2",
    "sampling.max_tokens=64",
    "sft={tokens_per_step: 1000, practice: 0.3, optim: {warmup: 10}}",
    "rl.optim={lr: 3e-4, warmup: 0, schedule: constant}",
)


def prepare(folder: Path) -> Recipe:
    """Make a world and a model that knows nothing; returns the recipe that names them."""
    recipe = load_recipe("tiny/para_grpo", SMALL)
    make_world(folder / "world", recipe.world, seed=0)
    recipe = stages.with_paths(recipe, world=folder / "world")
    demos = read_demos(recipe.data.traces)
    words = {text for demo in demos for turn in (demo.replies, *demo.children) for text in turn}
    words |= {demo.task.question for demo in demos}
    make_tiny(str(folder / "model"), hidden=64, layers=2, vocabulary_text=sorted(words), phrases=phrases.PIECES)
    return stages.with_paths(recipe, model=folder / "model")


async def cold_start(stage: Stage, steps: int) -> None:
    """Imitate demonstrations, until the model answers now and then: what never happens can't be reinforced."""
    settings, demos = stage.recipe.sft, read_demos(stage.recipe.data.traces)
    scenes = sft.scenes([demo for demo in demos if demo.frames in (1, FRAMES)])  # one frame: practice for sub-agents
    optimizer = Optimizer(stage.backbone.model, settings.optim, steps)
    for number in range(steps):
        optimizer.begin(number)
        samples = await sft.draw(stage, scenes, settings, seed=number, practice=settings.practice)
        report = sft.learn(stage, samples, settings, optimizer)
    print(f"cold start: {steps} steps, loss {report.loss:.2f}")


def loss(batch: Batch, logp_N: torch.Tensor, tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped policy loss of N tokens (PPO, arXiv 1707.06347), a mean over the `tokens` of all batches."""
    old_N, advantage_N = torch.from_numpy(batch.old_logp_N), torch.from_numpy(batch.advantage_N)
    ratio_N = (logp_N - old_N).exp()
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantage_N)
    return -gain_N.sum() / tokens, {"tokens": torch.tensor(float(len(logp_N)))}


async def reinforce(stage: Stage, steps: int) -> list[float]:
    """GRPO (arXiv 2402.03300); returns the mean reward of each step."""
    tasks, rewards = read_tasks(stage.recipe.data.train), []
    optimizer = Optimizer(stage.backbone.model, stage.recipe.rl.optim, steps)
    for number in range(steps):
        prompts = [tasks[(number * PROMPTS + place) % len(tasks)] for place in range(PROMPTS)]
        context = stage.context(seed=0, frames=FRAMES)
        groups = await collect(prompts, stage.agent, context, size=GROUP, score=stage.score, epoch=number)
        # How much better each attempt is than its group; sub-agents' replies bear their parent's advantage.
        credits = [advantages(group.rewards, "mean_std") for group in groups]
        samples = samples_of(groups, credits, children="shared")
        # What attempts have in common, their prompt, goes through the model once.
        batches = pack(samples, positions=stage.backbone.renderer.positions, row_tokens=1024, rows_per_pass=8)
        tokens = sum(len(batch.token_N) for batch in batches)
        optimizer.begin(number)
        step(stage.backbone, optimizer, batches, lambda *args, n=tokens: loss(*args, n), pixels=stage.media.pixels)
        await stage.engine.publish(None, number + 1)  # the engine shares the weights: it drops what it cached
        rewards.append(sum(sum(group.rewards) for group in groups) / (PROMPTS * GROUP))
        print(f"step {number + 1}: reward {rewards[-1]:.2f}, {tokens} tokens trained")
    return rewards


async def main(cold: int = 100, steps: int = 16) -> list[float]:
    """The whole of it, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage.of(prepare(Path(folder)))
        await cold_start(stage, cold)
        rewards = await reinforce(stage, steps)
        await stage.engine.close()
    return rewards


if __name__ == "__main__":
    asyncio.run(main())
