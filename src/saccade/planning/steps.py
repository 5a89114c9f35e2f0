"""A step of RL or SFT as numbers: what is rolled out, what is trained of it, what that takes of a GPU's memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.config import Kl, Optim, Recipe
from saccade.model.backbone import QUERIES, VISUAL_TOKENS
from saccade.model.sizes import Sizes
from saccade.planning.talks import Attempt, Talk
from saccade.training.pack import Tree, fill
from saccade.training.step import LOGITS

_COPIES = 5  # of a piece of logits, at the peak
_FLOAT = 4  # bytes
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What a step rolls out: groups, attempts, pictures that are looked at, tokens that are sampled.

    `tokens` are those of all conversations at their longest, nothing shared: what caches would hold of them.
    """

    groups: int
    attempts: int
    pictures: int
    sampled: int
    sub_sampled: int
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a step trains: tokens with one row per conversation (`apart`), and packed with shared prefixes.

    Of the packed ones: visual tokens, rows, rows of a pass, passes, and tokens of the longest row.
    """

    apart: int
    packed: int
    visual: int
    rows: int
    at_once: int
    passes: int
    row: int

    @property
    def row_visual(self) -> int:
        """Visual tokens in a row."""
        return math.ceil(self.row * self.visual / self.packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on each GPU: what stays, and what one pass keeps for its gradients.

    `kept` is everything that autograd saves; `checkpointed` is what it saves where layers are computed again.
    """

    weights: int
    gradients: int
    moments: int
    copies: int
    reference: int
    kept: int
    checkpointed: int
    logits: int

    def peak(self, *, checkpointing: bool) -> int:
        """All of it at once, as in the last backward pass of a step."""
        steady = self.weights + self.gradients + self.moments + self.copies + self.reference
        return steady + self.logits + (self.checkpointed if checkpointing else self.kept)


# ---- tokens --------------------------------------------------------------------------------------------------------


def rollouts(recipe: Recipe, attempt: Attempt) -> Rollouts:
    """What a step of RL begins to roll out; with oversampling and overlaunching more prompts than it trains."""
    group, sub, select = recipe.rl.group, attempt.sub, recipe.rl.select
    talks = attempt.dealt(select.launched(recipe.rl.prompts)[1])
    asked = len(talks) * group * attempt.subs
    return Rollouts(
        groups=len(talks),
        attempts=len(talks) * group,
        pictures=sum(talk.frames for talk in talks) + (asked * sub.frames if sub else 0),
        sampled=sum(talk.sampled for talk in talks) * group,
        sub_sampled=asked * sub.sampled if sub else 0,
        tokens=sum(talk.length for talk in talks) * group + (asked * sub.length if sub else 0),
        longest=attempt.largest.length,
    )


def rl_training(recipe: Recipe, attempt: Attempt) -> Training:
    """What a step of RL trains: whole groups, and their sub-agents where those are trained."""
    settings, sub = recipe.rl, attempt.sub
    talks = attempt.dealt(settings.prompts)
    shared = settings.advantage.children == "shared"
    children = [sub] * (settings.prompts * settings.group * attempt.subs) if sub and shared else []
    planted = [(size, talk) for talk in talks for size in trees(talk, settings.group, settings.row_tokens)]
    planted += [(child.length, child) for child in children]
    return _training(
        apart=sum(talk.length for talk in talks) * settings.group + sum(child.length for child in children),
        sizes=[size for size, _ in planted],
        visual=sum(talk.visual for _, talk in planted),
        row_tokens=settings.row_tokens,
        rows_per_pass=settings.rows_per_pass,
    )


def sft_training(recipe: Recipe, attempt: Attempt) -> Training:
    """What a step of SFT trains: full rows, as rich in pictures as the largest prompt."""
    settings, talk = recipe.sft, attempt.largest
    return _training(
        apart=settings.tokens_per_step,
        sizes=[settings.row_tokens] * math.ceil(settings.tokens_per_step / settings.row_tokens),
        visual=math.ceil(settings.tokens_per_step * talk.visual / talk.prompt),
        row_tokens=settings.row_tokens,
        rows_per_pass=settings.rows_per_pass,
    )


def _training(*, apart: int, sizes: Sequence[int], visual: int, row_tokens: int, rows_per_pass: int) -> Training:
    rows = fill([Tree(length=0, members=(), tokens=size) for size in sizes], row_tokens)
    return Training(
        apart=apart,
        packed=sum(sizes),
        visual=visual,
        rows=len(rows),
        at_once=min(len(rows), rows_per_pass),
        passes=math.ceil(len(rows) / rows_per_pass),
        row=max(sum(tree.tokens for tree in row) for row in rows),
    )


def trees(talk: Talk, count: int, row_tokens: int) -> list[int]:
    """Tokens of each tree that `count` attempts with one prompt make: a tree longer than a row repeats its prompt.

    >>> trees(Talk(frames=4, prompt=100, visual=4, sampled=50, length=150), 8, 300)
    [300, 300]
    """
    most = max(1, (row_tokens - talk.prompt) // talk.rest)
    return [talk.prompt + min(most, count - start) * talk.rest for start in range(0, count, most)]


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(
    recipe: Recipe, sizes: Sizes, optim: Optim, training: Training, *, gpus: int = 1, kl: Kl | None = None
) -> Memory:
    """What training takes of each of `gpus` GPUs: each makes passes of its own, and holds its share of the rest.

    `kl` holds RL to its first weights, which may wait beside the present ones.
    """
    size, rank = BYTES[recipe.model.dtype], recipe.model.lora_rank
    trained = sizes.adapters(rank) if rank else sizes.parameters
    # AdamW remembers two moments of a parameter, Muon one; all adapters are matrices of layers.
    single = (trained if rank else sizes.matrices) if optim.name == "muon" else 0
    B, T = training.at_once, training.row
    keeps = sizes.saved_text(size, repeated=recipe.model.device != "cpu") * B * T + size * B * _pairs(T)
    kept, checkpointed = sizes.layers * keeps, sizes.layers * size * sizes.hidden * B * T + keeps
    if not rank:  # a frozen vision tower keeps nothing
        patches, block = B * training.row_visual * sizes.merge**2, sizes.saved_vision(size)
        kept += sizes.depth * block * patches
        checkpointed += sizes.depth * size * sizes.vision_hidden * patches
        checkpointed += block * min(patches, VISUAL_TOKENS * sizes.merge**2)
    mask = B * T * T
    return Memory(
        weights=(sizes.parameters + (trained if rank else 0)) * size // gpus,
        gradients=trained * _FLOAT // gpus,
        moments=(2 * trained - single) * _FLOAT // gpus,
        copies=(trained * _FLOAT if size < _FLOAT else 0) // gpus,
        reference=(trained * size if kl and kl.keep == "device" and (kl.loss or kl.reward) else 0) // gpus,
        kept=kept + mask,
        checkpointed=checkpointed + mask,
        logits=_COPIES * _FLOAT * min(B * T * sizes.vocabulary, LOGITS),
    )


def _pairs(T: int) -> int:
    """Pairs of query and key that the masks of a layer speak of: each call of attention has its own."""
    return sum(min(QUERIES, T - start) * min(start + QUERIES, T) for start in range(0, T, QUERIES))
