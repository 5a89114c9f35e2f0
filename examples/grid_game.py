"""A game as an environment: the model sees a grid as an image, moves, sees the new state, and learns to reach the goal.

    reset ──image──> "right" ──step──> image ──> "down" ──step──> image ──> ... ──> goal, hole, or no moves left

`python examples/grid_game.py` teaches a tiny model to write legal moves, trains it with RL on the game's reward, and
prints its success rate before and after, in about a minute on two CPU cores.
"""

import json
import random
import tempfile
from pathlib import Path

import numpy as np

import saccade

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SIDE, CELL, MAX_MOVES, GOAL = 3, 16, 6, (2, 2)
BUDGET = saccade.PixelBudget(min_pixels=1, max_pixels=SIDE * CELL * SIDE * CELL)
RECIPE = [
    f"environment={{name: {__file__}, settings: null}}",
    "rewards={accuracy: null, environment_return: {is_accuracy: true}}",
    "sampling.max_tokens=4",
    "frame_budgets=[]",
    "sft={steps: 40, tokens_per_step: 1500, auxiliary_fraction: 0, optim: {warmup_steps: 10}}",
    "rl={steps: 18, prompts_per_step: 12, group_size: 8, optim: {lr: 1.5e-3, warmup_steps: 3}}",
    "evaluation={frame_budgets: [], temperature: 1.0}",
]


class GridGame(saccade.Environment):
    """Walk on a frozen lake of 3 x 3 cells: reach the goal within six moves, and don't step into the hole."""

    max_context_tokens = 512

    async def reset(self, task: saccade.Task, ctx: saccade.Context) -> saccade.Observation:
        """Show the first position and the rules."""
        self.hole, self.position, self.num_moves = tuple(task.extras["hole"]), tuple(task.extras["start"]), 0
        return await self.show(ctx, "Move the red cell to the green cell: up, down, left or right.")

    async def step(self, reply: saccade.Reply, ctx: saccade.Context) -> saccade.Observation | saccade.Done:
        """Make a move, and show where it leads."""
        self.num_moves += 1
        self.position = move(self.position, reply.text.strip())
        if self.position == GOAL:
            return saccade.Done(status=saccade.EpisodeStatus.ANSWERED, reward=1.0)
        if self.position in (None, self.hole) or self.num_moves == MAX_MOVES:
            return saccade.Done(status=saccade.EpisodeStatus.NO_ANSWER, reward=0.0)
        return await self.show(ctx)

    async def show(self, ctx: saccade.Context, *texts: str) -> saccade.Observation:
        """Draw the grid, one visual token per cell."""
        cells = np.full((SIDE, SIDE, 3), (200, 220, 255), np.uint8)
        cells[self.hole], cells[GOAL], cells[self.position] = (0, 0, 60), (0, 200, 0), (220, 0, 0)
        pixels = cells.repeat(CELL, axis=0).repeat(CELL, axis=1)
        image = await ctx.media.save_image(pixels, factor=ctx.renderer.factor, budget=BUDGET)
        return saccade.Observation(messages=(saccade.Message(role="user", parts=(image, *texts)),))


def move(position: tuple[int, int], name: str) -> tuple[int, int] | None:
    """Return the next position: a wall stops a move; None for an unknown move."""
    by = MOVES.get(name)
    return by and tuple(min(max(at + change, 0), SIDE - 1) for at, change in zip(position, by, strict=True))


def write_data(folder: Path) -> None:
    """Write tasks of random starts and holes, and demonstrations of random moves."""
    generator = random.Random(0)
    cells = [(row, column) for row in range(SIDE) for column in range(SIDE) if (row, column) != GOAL]
    for split, count in (("train", 64), ("validation", 8), ("test", 384)):
        rows: dict[str, list[dict]] = {"tasks": [], "demonstrations": []}
        for index in range(count):
            start, hole = generator.sample(cells, 2)
            task = {"id": f"{split}-{index}", "question": "", "media": [], "answer_type": "open", "ground_truth": ""}
            rows["tasks"].append({**task, "extras": {"start": start, "hole": hole}})
            position, moves = start, []
            while len(moves) < MAX_MOVES and position not in (GOAL, hole):
                moves.append(generator.choice(list(MOVES)))
                position = move(position, moves[-1])
            rows["demonstrations"].append({"task": rows["tasks"][-1], "frame_budget": None, "replies": moves})
        (folder / split).mkdir(parents=True)
        for name, lines in rows.items():
            (folder / split / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))


def main(folder: Path) -> list[float]:
    """Train the game's policy from nothing; return its success rates on the test tasks before and after RL."""
    write_data(folder / "data")
    recipe = saccade.load_recipe("tiny/base", RECIPE)
    model = saccade.make_tiny_model(recipe, folder / "model", data=folder / "data")
    rates = []
    for name, stage in (("before RL", saccade.sft), ("after RL", saccade.train)):
        stage(recipe, out=folder / "run", model=model, data=folder / "data", resume=bool(rates))
        values = [scored.score.value for scored in saccade.evaluate(folder / "run", name=name.replace(" ", "_"))]
        rates.append(float(np.mean(values)))
        margin = 1.96 * np.std(values) / len(values) ** 0.5
        print(f"{name}: {rates[-1]:.0%} ± {margin:.0%} of {len(values)} games won", flush=True)
    return rates


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
