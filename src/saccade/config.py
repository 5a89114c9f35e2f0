"""Recipes: every setting of a run, typed, frozen, and read from YAML.

A recipe is a YAML file that may `extends:` another; dotted overrides (`rl.optim.lr=1e-6`) come last. Unknown keys and
wrong types are errors that name the nearest key. The classes below are the schema and hold the defaults.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A part of a recipe: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    """The checkpoint and where it lives. `tiny` settings are used when the demo makes one from scratch."""

    path: str = ""
    family: str = "qwen3_vl"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 2
    activation_checkpointing: bool = False
    lora_rank: int = 0


class World(Section):
    """A needle world (`saccade data world`): the dials of difficulty."""

    train: Count = 256  # videos per split
    validation: Count = 48
    test: Count = 48
    seconds: Positive = 64.0  # length of a clip
    event_seconds: Positive = 2.0
    events: tuple[int, int] = (2, 4)  # least and most needles per clip
    distractors: int = 0  # needles of another shape family that no question asks for
    pixels: Count = 64  # sides of the video
    fps: Positive = 4.0
    tasks_per_video: Count = 8
    questions: tuple[str, ...] = ("at", "after", "before", "count", "order", "when")
    haystack: str | None = None  # a folder of clips to hide the needles in


class Data(Section):
    """Files of tasks and traces (JSONL); relative paths start at the recipe's run folder."""

    train: str = ""
    validation: str = ""
    test: str = ""
    traces: str = ""


class Plugin(Section):
    """A plugin by name (or a path `./mine.py`) and its settings, typed by its own signature."""

    name: str
    settings: dict[str, Any] = {}


class Term(Section):
    """One term of the reward: its weight and its settings."""

    weight: float = 1.0
    settings: dict[str, Any] = {}


class Sampling(Section):
    """How replies are sampled."""

    temperature: NotNegative = 1.0
    max_tokens: Count = 256  # per turn


class Gating(Section):
    """Frame budgets K that are drawn per prompt and epoch (methods section 4); empty = the agent's own budget."""

    frames: tuple[int, ...] = ()


class Optim(Section):
    """An optimiser and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    clip_norm: Positive = 1.0
    warmup: int = 0  # steps of linear warm-up
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    decay_from: float = 0.0  # share of the steps after which cosine or linear decay begins


class Sft(Section):
    """Supervised fine-tuning on traces."""

    steps: Count = 400
    tokens_per_step: Count = 4096  # expanded tokens, packed
    row_tokens: Count = 1024
    optim: Optim = Optim()
    save_every: Count = 100
    child_share: float = 0.6  # share of a step's tokens that come from sub-agent traces


class Advantage(Section):
    """Credit (methods section 5)."""

    estimator: Literal["mean", "mean_std", "leave_one_out"] = "mean_std"
    whiten: bool = False
    children: Literal["none", "shared"] = "shared"
    reward_scale: float = 1.0
    reward_bias: float = 0.0
    reward_clip: Positive = 20.0


class Select(Section):
    """Which groups are learned from (methods section 5)."""

    oversample: Annotated[float, Field(ge=1)] = 1.0
    drop_ends: tuple[str, ...] = ("tool_broken", "aborted")
    min_spread: float = 1e-6
    rank: Literal["none", "std"] = "none"
    max_rounds: Count = 1


class Loss(Section):
    """The clipped policy loss (methods section 6)."""

    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: float | None = None
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    sum_norm: Positive = 256.0  # the constant divisor of seq_mean_token_sum_norm
    kl_reward: NotNegative = 0.0
    kl_loss: NotNegative = 0.0
    importance_cap: float | None = 2.0  # truncated importance sampling for the trainer-engine gap; None = off


class Rl(Section):
    """Reinforcement learning."""

    steps: Count = 100
    prompts: Count = 8  # groups per step
    group: Count = 8  # attempts per group
    updates: Count = 1  # optimiser steps per batch
    row_tokens: Count = 1024
    rows_per_pass: Count = 8  # rows of a micro-batch
    optim: Optim = Optim()
    advantage: Advantage = Advantage()
    select: Select = Select()
    loss: Loss = Loss()
    save_every: Count = 20
    eval_every: int = 0  # 0 = only at the end


class Evaluation(Section):
    """How a model is evaluated."""

    limit: int = 0  # tasks; 0 = all
    repeat: Count = 1
    temperature: NotNegative = 0.0
    frames: tuple[int, ...] = ()  # budgets K, dealt over the tasks; empty = the agent's own
    tools: bool = True


class Recipe(Section):
    """Every setting of a run."""

    seed: int = 0
    model: Model = Model()
    world: World = World()
    data: Data = Data()
    agent: Plugin = Plugin(name="parallel")
    engine: Plugin = Plugin(name="local")
    sampling: Sampling = Sampling()
    gating: Gating = Gating()
    rewards: dict[str, Term] = {"accuracy": Term()}
    sft: Sft = Sft()
    rl: Rl = Rl()
    evaluation: Evaluation = Evaluation()
