"""GRPO with parallel crops on one page: from random weights to a policy with a higher reward, in less than a minute.

    tasks ──> rollouts ──> rewards ──> advantages ──> packed rows ──> loss ──> step ──┐
                 ▲                                                                    │
                 └──────────────────────────── new weights ───────────────────────────┘

`python examples/rl_in_one_page.py`. `saccade.train` does more: it drops groups without a reward spread, oversamples and
shuffles prompts, measures the ratio against the trainer's own logprobs, checks that it trains the engine's own tokens,
writes checkpoints and resumes. Data, model and SFT are far too small here to generalize: this shows the loop.
"""

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import saccade

GROUP_SIZE, CLIP, UPDATES, STEPS = 8, 0.2, 4, 12
SMALL = [  # overrides of the packaged recipe; its environment and rewards remain
    "model.num_threads=1",
    "synthetic={train: 4, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32, questions: [at]}",
    "synthetic.tasks_per_video=2",  # eight tasks
    "frame_budgets=[4]",
    "sampling.max_tokens=64",
    "sft={steps: 36, save_every: 36, tokens_per_step: 1000, optim: {warmup_steps: 10}}",
    "rl.optim={lr: 2.5e-4, warmup_steps: 4, schedule: constant}",
]


def prepare(folder: Path) -> tuple[saccade.TrainingComponents, list[saccade.Task]]:
    """Make data and a model, and imitate demonstrations until some episodes succeed: RL can't reinforce what is never
    sampled.
    """
    recipe = saccade.load_recipe("tiny/para_grpo", SMALL)
    data = saccade.generate_data(recipe, folder / "data")
    model = saccade.make_tiny_model(recipe, folder / "model", data=data)
    checkpoint = saccade.sft(recipe, out=folder / "run", model=model, data=data)
    recipe = saccade.load_recipe("tiny/para_grpo", [*SMALL, f"model.path={checkpoint}"])
    return saccade.TrainingComponents.from_recipe(recipe), saccade.load_tasks(data / "train" / "tasks.jsonl")


def policy_loss(
    micro_batch: saccade.MicroBatch, logp_N: torch.Tensor, *, num_tokens: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the clipped policy loss of N tokens (PPO, arXiv 1707.06347), a mean over all micro-batches' tokens."""
    old_N, advantage_N = torch.from_numpy(micro_batch.engine_logp_N), torch.from_numpy(micro_batch.advantage_N)
    ratio_N = (logp_N - old_N).exp()
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantage_N)
    return -gain_N.sum() / num_tokens, {"tokens": torch.tensor(float(len(logp_N)))}


async def train(components: saccade.TrainingComponents, tasks: list[saccade.Task]) -> list[float]:
    """Run GRPO (arXiv 2402.03300); return the mean reward of each step."""
    optimizer, means = saccade.Optimizer(components.vlm.model, components.recipe.rl.optim, STEPS), []
    environments, score_fn = components.environments, components.score_fn
    compute_positions = components.vlm.renderer.compute_position_ids
    for step in range(STEPS):
        context = components.build_context(seed=0, frame_budget=4)
        groups = await saccade.collect(
            tasks, environments, context, group_size=GROUP_SIZE, score_fn=score_fn, seed_salts=step
        )
        samples = []
        for group in groups:
            rewards_G = np.array(group.score_values)
            advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6)
            for scored, advantage in zip(group.scored_episodes, advantages_G.tolist(), strict=True):
                # Sub-agents, which share the weights, get their parent's advantage.
                samples += [saccade.build_sample(episode, advantage) for episode in scored.episode.walk()]
        # Episodes of a group share their prompt, which goes through the model once.
        micro_batches = saccade.pack(samples, compute_positions=compute_positions, pack_length=1024, micro_batch_size=8)
        num_tokens = sum(len(micro_batch.token_N) for micro_batch in micro_batches)
        loss_fn = partial(policy_loss, num_tokens=num_tokens)
        optimizer.start_step(step)  # sets its learning rate
        for _ in range(UPDATES):
            saccade.train_step(
                components.vlm,
                optimizer,
                micro_batches,
                loss_fn,
                load_all_pixels=components.media.load_all_pixels,
            )
        await components.engine.sync_weights(components.vlm, step + 1)  # shared: it only drops its caches
        means.append(float(np.mean([group.score_values for group in groups])))
        print(f"step {step + 1}: reward {means[-1]:.2f}, {num_tokens} tokens trained", flush=True)
    await components.engine.close()
    return means


def main(folder: Path) -> list[float]:
    """Prepare and train in `folder`; return the mean reward of each step."""
    return asyncio.run(train(*prepare(folder)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
