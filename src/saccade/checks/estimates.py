"""A plan as tables: what a recipe is made of, a step of each of its stages, and the memory of a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from saccade.config import Recipe
from saccade.evaluation.report import Grid
from saccade.model.sizes import Sizes
from saccade.planning.steps import BYTES, Memory, Rollouts, Training, memory, rl_training, rollouts, sft_training
from saccade.planning.talks import Assumed, Attempt, attempt_of, settings_of, sizes_of

NOTE = (
    "Counts are the most that can happen: every reply and result at its longest; of several frame budgets each is as "
    "frequent as any other. --reply and --calls plan for a usual step instead. A video has the size shown and at least "
    "as many frames as the budget; a question has {question} tokens. Text is counted with the model's tokenizer where "
    "its folder is there, else as one token per word, digit and run of signs.\n"
    "Weights, gradients, moments and copies are divided evenly over the GPUs; gradients are float32 while a step is "
    "taken. Activations are what autograd keeps of one pass where attention keeps no scores; logits are five float32 "
    "copies of one piece. Fragmentation and what libraries take for themselves come on top."
)


def plan(name: str, recipe: Recipe, assumed: Assumed, *, gpus: int = 1, root: Path = Path()) -> list[Grid]:
    """The plan of a recipe: its essentials, and a step of each stage for which it sets anything.

    `root` is the folder that a relative path of its model may start at. Raises SaccadeError with one sentence for a
    recipe that can't be planned.
    """
    recipe, assumed = settled(recipe, assumed, root)
    sizes = sizes_of(recipe)
    attempt = attempt_of(recipe, sizes, assumed)
    grids, needs = [essentials(name, recipe, sizes, attempt, assumed)], dict[str, Memory]()
    if "rl" in recipe.model_fields_set:
        rolled, trained = rollouts(recipe, attempt), rl_training(recipe, attempt)
        rows = [*_rolled(recipe, attempt, rolled), *_trained(trained), *_cached(recipe, sizes, rolled)]
        grids.append(Grid(title="One step of RL, at most", header=("", "", ""), rows=tuple(rows)))
        needs["RL"] = memory(recipe, sizes, recipe.rl.optim, trained, gpus=gpus, kl=recipe.rl.kl)
    if "sft" in recipe.model_fields_set:
        trained = sft_training(recipe, attempt)
        grids.append(Grid(title="One step of SFT", header=("", "", ""), rows=tuple(_trained(trained))))
        needs["SFT"] = memory(recipe, sizes, recipe.sft.optim, trained, gpus=gpus)
    return [*grids, _memory(recipe, needs, gpus)] if needs else grids


def settled(recipe: Recipe, assumed: Assumed, root: Path) -> tuple[Recipe, Assumed]:
    """The recipe with its model's path as seen from here, and with what sizes of videos it is planned."""
    if recipe.model.path and (root / recipe.model.path).exists():
        model = recipe.model.model_copy(update={"path": str(root / recipe.model.path)})
        recipe = recipe.model_copy(update={"model": model})
    if not recipe.model.published:  # then it is about the world's own videos or pictures
        side = recipe.world.image.pixels if recipe.world.media == "image" else recipe.world.pixels
        assumed = replace(assumed, video=(side, side))
    return recipe, assumed


def essentials(name: str, recipe: Recipe, sizes: Sizes, attempt: Attempt, assumed: Assumed) -> Grid:
    """What a recipe is made of."""
    model, rl, sft = recipe.model, recipe.rl, recipe.sft
    weights = f"adapters of rank {model.lora_rank}" if model.lora_rank else "all weights"
    shown = " ".join(f"{talk.frames}: {talk.prompt:,} ({talk.visual:,})" for talk in attempt.talks)
    rewards = ", ".join(f"{term.weight:g} × {reward}" for reward, term in recipe.rewards.items())
    whiten = ", whitened" if rl.advantage.whiten else ""
    distances = {"loss": rl.kl.loss, "reward": rl.kl.reward}
    held = "".join(f"; KL {value:g} in the {where}" for where, value in distances.items() if value)
    what, counted = ("picture", "pictures") if recipe.world.media == "image" else ("video", "frames")
    lines = {
        "model": f"{sizes.name}: {sizes.parameters / 1e9:.3g} B parameters, {weights}, {model.dtype}, {model.device}",
        "agent": f"{recipe.agent.name}: {attempt.turns} tool turns of {attempt.calls} calls",
        "prompt": f"{counted}: tokens (visual): {shown}; {what} {assumed.video[0]}x{assumed.video[1]}",
        "sub-agent": f"{attempt.sub.frames}: {attempt.sub.prompt:,} ({attempt.sub.visual:,})" if attempt.sub else "",
        "replies": f"{recipe.sampling.max_tokens:,} tokens a turn, temperature {recipe.sampling.temperature:g}",
    }
    if "rl" in recipe.model_fields_set:
        lines["rewards"] = rewards
        lines["RL"] = (
            f"{rl.steps:,} steps, {rl.optim.name}, learning rate {rl.optim.lr:g} {rl.optim.schedule}; "
            f"{rl.advantage.estimator}{whiten}; clip {rl.loss.clip_low:g}/{rl.loss.clip_high:g}; ranked by "
            f"{rl.select.rank}{held}"
        )
    if "sft" in recipe.model_fields_set:
        lines["SFT"] = f"{sft.steps:,} steps, {sft.optim.name}, learning rate {sft.optim.lr:g} {sft.optim.schedule}"
    return Grid(title=name, header=("", ""), rows=tuple((key, value) for key, value in lines.items() if value))


# ---- rows of a step: what, how much, made of what ------------------------------------------------------------------

Line = tuple[str, str, str]


def _rolled(recipe: Recipe, attempt: Attempt, rolled: Rollouts) -> list[Line]:
    group, sub = recipe.rl.group, attempt.sub
    rounds = recipe.rl.select.max_rounds
    again = f", and again in up to {rounds} rounds" if rounds > 1 else ""
    trained = f"{recipe.rl.prompts} of {rolled.groups} prompts are trained, {group} attempts at each{again}"
    lines = [
        ("attempts", f"{rolled.attempts:,}", trained),
        ("pictures", f"{rolled.pictures:,}", "overviews once per prompt, windows once per sub-agent"),
        ("sampled tokens", f"{rolled.sampled:,}", f"{attempt.turns + 1} replies an attempt"),
    ]
    if sub:
        asked = f"{rolled.attempts * attempt.subs:,} sub-agents with {sub.sampled:,} each"
        lines.append(("sampled by sub-agents", f"{rolled.sub_sampled:,}", asked))
    return lines


def _trained(training: Training) -> list[Line]:
    rows = f"passes: {training.passes:,}, of {training.at_once} of {training.rows:,} rows; {training.row:,} tokens each"
    lines = [("trained tokens, packed", f"{training.packed:,}", rows)]
    if training.apart > training.packed:
        saved = f"without shared prefixes: {training.apart / training.packed:.2f} times as many"
        lines.append(("trained tokens, apart", f"{training.apart:,}", saved))
    return lines


def _cached(recipe: Recipe, sizes: Sizes, rolled: Rollouts) -> list[Line]:
    each = sizes.key_values(BYTES[recipe.model.dtype])
    given = settings_of("engines", recipe.engine)
    lines = [
        ("keys and values", f"{amount(each)} a token", f"the longest conversation: {amount(each * rolled.longest)}"),
        ("all of them at once", amount(each * rolled.tokens), f"{rolled.tokens:,} tokens, nothing shared"),
    ]
    if "flight_tokens" in given:
        held = given["flight_tokens"] + given["kept_tokens"]
        lines.append(("the engine's bound", amount(each * held), f"{held:,} tokens in flight and kept"))
    return lines


def _memory(recipe: Recipe, needs: Mapping[str, Memory], gpus: int) -> Grid:
    chosen = recipe.model.activation_checkpointing
    used = {True: "activations, layers computed again", False: "activations, all kept"}
    rows = [
        ("weights", *(amount(each.weights) for each in needs.values())),
        ("gradients", *(amount(each.gradients) for each in needs.values())),
        ("moments", *(amount(each.moments) for each in needs.values())),
        ("float32 copies", *(amount(each.copies) for each in needs.values())),
        ("the first weights (KL)", *(amount(each.reference) for each in needs.values())),
        (_marked(used[True], chosen), *(amount(each.checkpointed) for each in needs.values())),
        (_marked(used[False], not chosen), *(amount(each.kept) for each in needs.values())),
        ("logits", *(amount(each.logits) for each in needs.values())),
        ("in all", *(amount(each.peak(checkpointing=chosen)) for each in needs.values())),
    ]
    where = f"each of {gpus} GPUs" if gpus > 1 else f"one {'process' if recipe.model.device == 'cpu' else 'GPU'}"
    return Grid(title=f"Memory of {where} in training, about", header=("", *needs), rows=tuple(rows))


def _marked(text: str, chosen: bool) -> str:
    return text if chosen else f"({text})"


def amount(count: float) -> str:
    """Bytes for people.

    >>> amount(147456), amount(17 * 2**30)
    ('144 KiB', '17.0 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.0f} {unit}" if count >= 100 * size else f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
