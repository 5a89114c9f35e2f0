"""A recipe of six RL steps through servers that takes seconds."""

from saccade.config.load import load_recipe
from saccade.data.synthetic import generate_dataset
from saccade.runs import pipeline

# A reward that varies for a random model; the dataset's own rewards would all be equal, and no weight would change.
REWARD = """
def variety(episode):
    return sum(episode.ledger.sampled_tokens()) % 97 / 97
"""


def small_rl(folder, model, url, *overrides, engine="vllm"):
    """Build the recipe; generate its dataset in `folder/synthetic`. The run will be in `folder/run`."""
    (folder / "variety.py").write_text(REWARD)
    recipe = load_recipe(
        "tiny/para_grpo",
        [
            "seed=3",
            "model.num_threads=1",
            "synthetic={train: 3, validation: 1, test: 1}",
            "sampling.max_tokens=24",
            "rl={steps: 6, prompts_per_step: 2, group_size: 4, save_every: 6, optim: {lr: 1e-3, warmup_steps: 0}}",
            "rl.filters={reward_std: null, statuses: null}",
            f"rewards={{{folder / 'variety.py'}: {{weight: 1.0}}}}",
            f"engine.name={engine}",
            f"engine.settings.servers=[{url}]",
            *overrides,
        ],
    )
    generate_dataset(folder / "synthetic", recipe.synthetic, seed=0)
    return pipeline.with_paths(recipe, folder=folder / "run", model=model, data=folder / "synthetic")
