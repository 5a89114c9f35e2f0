"""Define recipes: every setting of a run, typed, frozen, and read from YAML.

A recipe is a YAML file that may extend another with `extends:`; dotted overrides (`rl.optim.lr=1e-6`) apply last. An
unknown key or a wrong type raises an error that names the nearest key. The classes below are the schema and hold the
defaults; the comment of a field (meaning, unit) is its entry in the generated documentation.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from saccade.errors import ConfigError
from saccade.plugins import suggest


def _check_range(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the minimum, {bounds[0]}, is greater than the maximum, {bounds[1]}")
    return bounds


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DualClip = Annotated[float, Field(gt=1)]
IntRange = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_check_range)]  # minimum and maximum


class Section(BaseModel):
    """A part of a recipe; frozen, rejects unknown keys. Its validators raise ConfigError for contradicting values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values, by dotted key; they are not validated.

        >>> Recipe().with_values({"model.path": "runs/a/model"}).model.path
        'runs/a/model'
        """
        copy = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            copy = copy.model_copy(update={name: getattr(copy, name).with_values({rest: value}) if rest else value})
        return copy


S = TypeVar("S", bound=Section)


def parse_section(section_type: type[S], values: Any, source: str) -> S:
    """Validate plain values as a section. Raises ConfigError with `source`, the dotted key, and the rejected value."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must be a mapping of keys", key=source, value=values)
    try:
        return section_type.model_validate(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}", key=error.key, value=error.value) from error
    except ValidationError as error:
        # A misspelled key also makes the right one missing: report the misspelling.
        first = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        key, value = ".".join(str(part) for part in first["loc"]), first["input"]
        match first["type"]:
            case "value_error":
                message = f"{key} can't be {value!r}: {first['ctx']['error']}"
            case "extra_forbidden":
                suggestion = f"; {suggest(key, section_type.model_fields)}" if len(first["loc"]) == 1 else ""
                message = f"there is no key {key!r}{suggestion}"
            case "missing":
                message, value = f"the key {key!r} is missing", None
            case _:
                expected = re.sub(r"a valid dictionary or .*", "a mapping of keys", first["msg"])
                message = f"{key} can't be {value!r}: {expected.replace('Input should be', 'it should be')}"
        raise ConfigError(f"{source}: {message}", key=key, value=value) from error


class SelectionConfig(Section):
    """How many groups are sampled for a step, and which of the groups that pass the filters are trained on."""

    oversample: Annotated[float, Field(ge=1)] = 1.0  # complete groups collected per group needed, ratio
    # groups started per group collected, ratio; the rest are cancelled
    over_provision: Annotated[float, Field(ge=1)] = 1.0
    rank_by: Literal["none", "reward_std"] = "none"  # order in which groups are chosen; reward_std = largest first
    max_sampling_rounds: PositiveInt = 1  # rounds of rollouts while groups are missing
    on_underfilled: Literal["continue", "stop"] = "continue"  # action if groups are still missing after the last round
    # groups beyond the number needed; requeue = their prompts come next
    surplus: Literal["discard", "requeue"] = "discard"

    def compute_launch_counts(self, num_missing: int) -> tuple[int, int]:
        """Return how many groups a round collects if `num_missing` are missing, and how many it starts.

        >>> SelectionConfig(oversample=1.5, over_provision=1.25).compute_launch_counts(2)
        (3, 4)
        """
        num_collected = round(num_missing * self.oversample)
        # Round up, or over-provisioning few groups would start no extra one; 10 * 1.1 is slightly more than 11.
        return num_collected, math.ceil(round(num_collected * self.over_provision, 6))


VideoQuestion = Literal["at", "after", "before", "count", "order", "when", "at:choice", "after:choice", "before:choice"]
ImageQuestion = Literal["colour", "digit", "letter", "which", "count", "where"]


class SyntheticImageConfig(Section):
    """Parameters of synthetic images: objects with symbols too small to read in an overview.

    With `synthetic.media=image` all other keys of `synthetic` but the split sizes and `demonstrations` are ignored.
    """

    image_size: PositiveInt = 320  # side of an image, pixels
    object_scale: Annotated[float, Field(gt=0, lt=1)] = 0.1  # side of an object, fraction of the image's side
    symbol_scale: Annotated[float, Field(gt=0, lt=1)] = 0.4  # height of a symbol, fraction of its object's side
    objects: IntRange = (2, 4)  # minimum and maximum number of objects per image
    distractors: NonNegativeInt = 0  # white discs with symbols that no question is about, per image
    tasks_per_image: PositiveInt = 8  # questions per image
    # additional training images filled with a grid of objects, for auxiliary demonstrations, per training image
    grid_images: NonNegativeFloat = 0.0
    # objects per side of a grid image; choose it so that the overview shows an object as large as a zoom does
    grid_size: Annotated[int, Field(ge=1, le=20)] = 5
    questions: tuple[ImageQuestion, ...] = ("colour", "digit", "letter", "which", "count", "where")  # question types


class SyntheticConfig(Section):
    """Parameters of the synthetic needle-in-a-haystack dataset (`saccade data synth`)."""

    media: Literal["video", "image"] = "video"  # kind of media
    image: SyntheticImageConfig = SyntheticImageConfig()
    train: PositiveInt = 256  # videos or images in the training split
    validation: PositiveInt = 48  # videos or images in the validation split
    test: PositiveInt = 48  # videos or images in the test split
    clip_seconds: PositiveFloat = 64.0  # length of a clip, seconds
    event_seconds: PositiveFloat = 2.0  # length of an event, seconds
    events: IntRange = (2, 4)  # minimum and maximum number of events per clip
    distractors: NonNegativeInt = 0  # events of other shapes that no question is about, per clip
    frame_size: Annotated[int, Field(ge=16, multiple_of=2)] = 64  # side of a frame, pixels
    fps: PositiveFloat = 4.0  # frame rate, frames per second
    tasks_per_video: PositiveInt = 8  # questions per video
    questions: tuple[VideoQuestion, ...] = ("at", "after", "before", "count", "order", "when")  # question types
    # how the demonstrations find the answer: with tools, with Python, or in the prompt's frames (direct)
    demonstrations: Literal["tool_calls", "python", "direct"] = "tool_calls"
    haystack: str | None = None  # folder of background clips for the events; null = plain gray

    @property
    def num_files(self) -> int:
        """Return the number of videos or images in all splits."""
        return self.train + self.num_grid_images + self.validation + self.test

    @property
    def num_grid_images(self) -> int:
        """Return the number of grid images."""
        return round(self.train * self.image.grid_images)

    @model_validator(mode="after")
    def _check_combinations(self) -> "SyntheticConfig":
        if self.media == "video" and self.image != SyntheticImageConfig():
            message = "synthetic.image has settings, but synthetic.media=video ignores them: set synthetic.media=image"
            raise ConfigError(message, key="synthetic.media", value=self.media)
        if self.media == "image" and self.haystack is not None:
            message = f"synthetic.haystack={self.haystack} is for videos: remove it, or set synthetic.media=video"
            raise ConfigError(message, key="synthetic.haystack", value=self.haystack)
        if self.media == "image" or self.demonstrations != "python":
            return self
        # The demonstrations' code assumes a frame at every whole second, and colors on gray.
        for name, value in (("fps", self.fps), ("event_seconds", self.event_seconds)):
            if value != int(value):
                raise ConfigError(
                    f"synthetic.{name}={value:g} must be a whole number, since synthetic.demonstrations=python reads "
                    "one frame per second: round it, or set synthetic.demonstrations=tool_calls",
                    key=f"synthetic.{name}",
                    value=value,
                )
        if self.haystack is not None:
            raise ConfigError(
                f"synthetic.haystack={self.haystack} has colors, and synthetic.demonstrations=python finds events by "
                "their color on gray: remove it, or set synthetic.demonstrations=tool_calls",
                key="synthetic.haystack",
                value=self.haystack,
            )
        return self


class ModelConfig(Section):
    """The checkpoint and how it is loaded."""

    path: str = ""  # checkpoint folder
    base_model: str = ""  # published model these settings are written for, such as Qwen3-VL-8B-Instruct
    family: str = "qwen3_vl"  # family of a generated tiny model and of the memory plan; a checkpoint names its own
    device: str = "cpu"  # torch device of the trainer
    dtype: Literal["float32", "bfloat16"] = "float32"  # type of the weights and activations
    num_threads: PositiveInt = 2  # CPU threads of torch
    activation_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    lora_rank: NonNegativeInt = 0  # rank of LoRA adapters on the text model's linear layers; 0 = train all weights


# A file, or files with their sampling weights; pydantic puts the tags into the location of an error.
DataMixture = Annotated[
    Annotated[str, Tag("file")] | Annotated[dict[str, PositiveFloat], Tag("weight")],
    Discriminator(lambda value: "weight" if isinstance(value, Mapping) else "file"),
]


class DataConfig(Section):
    """Files of tasks and demonstrations (JSONL or Parquet); relative paths start at the run folder."""

    train: DataMixture = ""  # file of tasks for RL, or a mapping of files to sampling weights
    validation: str = ""  # file of tasks; no stage reads it, `saccade eval RUN --tasks FILE` evaluates on it
    test: str = ""  # file of tasks for the final evaluation
    demonstrations: str = ""  # file of demonstrations for SFT
    media_root: str = ""  # folder of relative media paths in these files; "" = each file's own folder


class PluginConfig(Section):
    """A plugin and its settings, which the plugin's signature types."""

    name: str  # name of the plugin, or path of its file, such as ./mine.py
    settings: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the plugin


class RewardTerm(Section):
    """One term of the reward."""

    weight: float = 1.0  # factor of the term in the score
    correct: bool = False  # this term measures whether an episode is correct; at most one does
    settings: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the reward


class EnvironmentConfig(PluginConfig):
    """An environment that tasks select by name, with rewards of its own."""

    rewards: dict[str, RewardTerm] = Field(default_factory=dict)  # reward terms by plugin name; empty = the recipe's


class SamplingConfig(Section):
    """How replies are sampled during training."""

    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0 = greedy
    max_tokens: PositiveInt = 256  # longest reply, tokens per turn
    episode_timeout: NonNegativeFloat = 0.0  # time after which an episode is aborted, seconds; 0 = no limit


class OptimizerConfig(Section):
    """An optimizer and its learning rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # optimizer
    lr: PositiveFloat = 1e-4  # peak learning rate
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # decay of the first and second moment
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients are clipped to this norm
    warmup_steps: NonNegativeInt = 0  # linear warm-up, steps
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # decay of the learning rate
    decay_start: Fraction = 0.0  # when cosine or linear decay begins, fraction of the steps


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations."""

    steps: PositiveInt = 400  # optimizer steps
    tokens_per_step: PositiveInt = 4096  # batch size, packed tokens
    pack_length: PositiveInt = 1024  # length of a packed row, tokens
    micro_batch_size: PositiveInt = 8  # packed rows per forward pass
    optim: OptimizerConfig = OptimizerConfig()  # optimizer
    save_every: PositiveInt = 100  # checkpoint interval, steps
    # maximum number of demonstrations with the same media and frame budget that are packed together
    samples_per_context: PositiveInt = 4
    # fraction of the contexts that are drawn from auxiliary demonstrations (sub-agents, grid images), if there are any
    auxiliary_fraction: Fraction = 0.5
    auxiliary_warmup: Fraction = 0.0  # initial steps on auxiliary demonstrations only, fraction of the steps


class AdvantageConfig(Section):
    """How advantages are computed from the rewards of a group."""

    # name or file of the estimator; grpo = divided by the group's standard deviation, dr_grpo = mean subtracted only,
    # rloo = leave-one-out mean
    estimator: str = "grpo"
    settings: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the estimator
    whiten: bool = False  # normalize advantages over the batch's episodes to mean 0 and standard deviation 1
    sub_agent_credit: Literal["none", "shared"] = "shared"  # advantage of sub-agent episodes; shared = their parent's
    reward_scale: PositiveFloat = 1.0  # factor of the reward, applied after reward_bias
    reward_bias: float = 0.0  # added to the reward, applied first
    reward_clip: PositiveFloat = 20.0  # maximum absolute value of the reward, applied last


class LossConfig(Section):
    """The policy loss, weighted per token by the truncated ratio of trainer to engine probability (TIS)."""

    name: str = "clipped"  # name or file of the loss; clipped = PPO's ratio of tokens, gspo = ratio of sequences
    # keyword arguments of the loss; clip_low, clip_high and dual_clip have no effect where the ratio is 1
    settings: dict[str, Any] = Field(default_factory=dict)
    # old logprobs of the ratio; trainer = before the update, so the ratio is exactly 1 with one update per batch
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    # how token losses are averaged over a batch
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    sum_norm: PositiveFloat = 256.0  # constant divisor of seq_mean_token_sum_norm, tokens
    tis_cap: PositiveFloat | None = 2.0  # cap of the weight of tokens sampled with the current weights; null = off
    stale_tis_cap: PositiveFloat | None = 5.0  # cap of the weight of tokens sampled with older weights; null = off

    @model_validator(mode="after")
    def _check_caps(self) -> "LossConfig":
        if self.old_logprobs == "engine" and (self.tis_cap is not None or self.stale_tis_cap is not None):
            raise ConfigError(
                "rl.loss.old_logprobs=engine includes the engine's deviation in the ratio, so a cap would count "
                "it twice: set rl.loss.tis_cap and rl.loss.stale_tis_cap to null, or rl.loss.old_logprobs=trainer",
                key="rl.loss.old_logprobs",
                value=self.old_logprobs,
            )
        return self


class KlConfig(Section):
    """KL penalty against the reference weights, which are kept only if a coefficient is above 0."""

    loss_coef: NonNegativeFloat = 0.0  # coefficient of the k3 estimate in the loss
    reward_coef: NonNegativeFloat = 0.0  # coefficient of the per-token penalty in the reward; ParaVT has 0.01
    estimator: Literal["k1", "k3"] = "k1"  # estimator of the penalty in the reward
    reference_device: Literal["device", "cpu"] = "device"  # where the reference weights are stored between uses

    @model_validator(mode="after")
    def _check_single_coefficient(self) -> "KlConfig":
        if self.loss_coef and self.reward_coef:
            raise ConfigError(
                f"rl.kl.loss_coef={self.loss_coef:g} and rl.kl.reward_coef={self.reward_coef:g} would count the KL "
                "divergence twice: set one of them to 0",
                key="rl.kl.loss_coef",
                value=self.loss_coef,
            )
        return self


class RlConfig(Section):
    """Reinforcement learning."""

    steps: PositiveInt = 100  # training steps, one rollout batch each
    prompts_per_step: PositiveInt = 8  # prompts, and thus groups, per step
    group_size: Annotated[int, Field(ge=2)] = 8  # episodes per group; advantages compare them, so at least 2
    # optimizer steps per rollout batch, each on the whole batch (PPO epochs); with 1 and rl.loss.old_logprobs=trainer
    # the ratio is exactly 1, so clipping has no effect
    updates_per_batch: PositiveInt = 1
    # weight versions that rollouts may be older than the trainer; above 0 both run concurrently, with 0 in turns
    max_staleness: NonNegativeInt = 0
    # rollouts pause while the collected but untrained conversations have more tokens than this; 0 = no limit
    max_queued_tokens: NonNegativeInt = 0
    # what happens to episodes in progress at a weight sync: they continue with the new weights, or restart
    on_weight_update: Literal["continue", "restart"] = "continue"
    # weight versions between sampling and training that a synchronous run simulates, for ablations
    simulated_staleness: NonNegativeInt = 0
    pack_length: PositiveInt = 1024  # length of a packed row, tokens
    micro_batch_size: PositiveInt = 8  # packed rows per forward pass
    optim: OptimizerConfig = OptimizerConfig()  # optimizer
    advantage: AdvantageConfig = AdvantageConfig()  # advantages
    # filters by name or file, each with its settings, added to the default ones; null turns a filter off
    filters: dict[str, dict[str, Any] | None] = Field(default={"statuses": {}, "reward_std": {}})
    selection: SelectionConfig = SelectionConfig()  # how many groups are collected, and which are kept
    loss: LossConfig = LossConfig()  # policy loss
    kl: KlConfig = KlConfig()  # KL penalty
    save_every: PositiveInt = 20  # checkpoint interval, steps

    @field_validator("filters", mode="before")
    @classmethod
    def _add_default_filters(cls, filters: Any) -> Any:
        # Else a recipe that adds a filter would train on the episodes that the default ones drop.
        return {**cls.model_fields["filters"].default, **filters} if isinstance(filters, Mapping) else filters

    @property
    def active_filters(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the filters that are not turned off, by name."""
        return {name: settings for name, settings in self.filters.items() if settings is not None}

    @model_validator(mode="after")
    def _check_staleness_keys(self) -> "RlConfig":
        if self.simulated_staleness and self.max_staleness:
            raise ConfigError(
                f"rl.simulated_staleness={self.simulated_staleness} needs synchronous rollouts, but "
                f"rl.max_staleness={self.max_staleness} makes them asynchronous: set one of them to 0",
                key="rl.simulated_staleness",
                value=self.simulated_staleness,
            )
        return self


class EvaluationConfig(Section):
    """How a model is evaluated."""

    limit: NonNegativeInt = 0  # number of tasks; 0 = all
    num_samples: PositiveInt = 1  # episodes per task
    temperature: NonNegativeFloat = 0.0  # sampling temperature; 0 = greedy
    # frame budgets, assigned to tasks in turn; empty = the environment's num_frames
    frame_budgets: tuple[PositiveInt, ...] = ()
    use_tools: bool = True  # offer the environment's tools
    shuffle_options: bool = False  # shuffle the options of choice tasks, per episode
    # environment settings that replace those of training, such as more turns
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    # settings of the reward `judge`, for answers that no rule can grade
    judge: dict[str, Any] = Field(default_factory=dict)


class Recipe(Section):
    """Every setting of a run."""

    seed: int = 0  # seed of all random draws
    loggers: tuple[str, ...] = ()  # metric loggers besides metrics.jsonl, such as tensorboard and wandb
    model: ModelConfig = ModelConfig()  # checkpoint
    synthetic: SyntheticConfig = SyntheticConfig()  # synthetic dataset
    data: DataConfig = DataConfig()  # files of tasks and demonstrations
    environment: PluginConfig = PluginConfig(name="parallel_crop")  # default environment
    # environments by the name that tasks select with their `environment`; all other tasks use `environment`
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    engine: PluginConfig = PluginConfig(name="local")  # inference engine
    sampling: SamplingConfig = SamplingConfig()  # sampling of replies during training
    # frame budgets: numbers of frames in a prompt, one drawn per prompt and epoch; empty = the environment's num_frames
    frame_budgets: tuple[PositiveInt, ...] = ()
    # reward terms by plugin name
    rewards: dict[str, RewardTerm] = Field(default={"accuracy": RewardTerm(correct=True)})
    sft: SftConfig = SftConfig()  # supervised fine-tuning
    rl: RlConfig = RlConfig()  # reinforcement learning
    evaluation: EvaluationConfig = EvaluationConfig()  # evaluation
