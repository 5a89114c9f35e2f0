"""A reward of your own: shorter episodes are worth more.

`python examples/own_reward.py` trains a tiny model with it for a few steps, evaluates it and prints what each term of
the reward gave. A recipe names the reward by the path of this file; its keyword-only parameters are settings.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import fmean

import saccade
from saccade import testing

RECIPE = [
    f"rewards={{'{__file__}:brevity': {{weight: 0.2, settings: {{tokens: 128}}}}}}",
    "synthetic={train: 4, validation: 1, test: 2, tasks_per_video: 2}",
    "sampling.max_tokens=32",
    "sft={steps: 10, save_every: 10, tokens_per_step: 600, optim: {warmup_steps: 1}}",
    "rl={steps: 2, prompts_per_step: 4, group_size: 4, filters: {reward_std: null}}",
    "evaluation={frame_budgets: [8]}",
]


def brevity(episode: saccade.Episode, *, tokens: int = 256) -> float:
    """Return 1.0 for no sampled token, falling to 0.0 at `tokens`."""
    return max(0.0, 1.0 - episode.usage.sampled_tokens / tokens)


def main(folder: Path) -> Path:
    """Train and evaluate with the reward in `folder`; return the run."""
    asyncio.run(testing.check_reward(brevity))  # finite and the same twice, for every way an episode can end
    recipe = saccade.load_recipe("tiny/para_grpo", RECIPE)
    data = saccade.generate_data(recipe, folder / "data")
    model = saccade.make_tiny_model(recipe, folder / "model", data=data)
    run = folder / "run"
    saccade.sft(recipe, out=run, model=model, data=data)
    saccade.rl(recipe, out=run, model=model, data=data, resume=True)
    scores = [scored.score for scored in saccade.evaluate(run)]
    for term in recipe.rewards:
        name = term.rpartition(":")[2]
        print(f"{name}: {fmean(score.parts[name] for score in scores):.2f} × {recipe.rewards[term].weight}")
    print(f"reward: {fmean(score.value for score in scores):.2f}, mean of {len(scores)} episodes")
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
