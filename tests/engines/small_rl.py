"""Six steps of RL through servers, so small that they take seconds."""

from saccade import stages
from saccade.config import load_recipe
from saccade.data.world import make_world

# Something to learn from whatever a random model says: with the world's own rewards no weight would ever move.
REWARD = """
def variety(episode, task):
    return sum(episode.ledger.sampled_tokens()) % 97 / 97
"""


def small_rl(folder, model, url, *overrides, engine="vllm"):
    """The recipe, with its world in `folder` and its run to be in `folder/run`."""
    (folder / "variety.py").write_text(REWARD)
    recipe = load_recipe(
        "tiny/para_grpo",
        [
            "seed=3",
            "model.threads=1",
            "world={train: 3, validation: 1, test: 1}",
            "sampling.max_tokens=24",
            "rl={steps: 6, prompts: 2, group: 4, save_every: 6, optim: {lr: 1e-3, warmup: 0}}",
            "rl.select={min_spread: -1, drop_ends: []}",
            f"rewards={{{folder / 'variety.py'}: {{weight: 1.0}}}}",
            f"engine.name={engine}",
            f"engine.settings.servers=[{url}]",
            *overrides,
        ],
    )
    make_world(folder / "world", recipe.world, seed=0)
    return stages.with_paths(recipe, folder=folder / "run", model=model, world=folder / "world")
