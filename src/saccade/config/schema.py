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
    ValidationInfo,
    field_validator,
    model_validator,
)

from saccade.errors import ConfigError
from saccade.plugins import refuse_bool, suggest

MAX_EPISODES_IN_PROGRESS = 512  # if nothing else limits them; sub-agents not counted


def _check_range(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the minimum, {bounds[0]}, is greater than the maximum, {bounds[1]}")
    return bounds


def _check_cluster_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal() and "/" not in host):
        raise ValueError(f"{address!r} is not the address of a cluster: write local, auto or host:port")
    return address


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
SampleCount = Annotated[int, Field(ge=1, le=10_000)]  # of a task; each is planned before the first one starts
FileCount = Annotated[int, Field(ge=1, le=1_000_000)]  # of generated videos or images
StepCount = Annotated[int, Field(ge=1, le=1_000_000)]  # of a training
PromptCount = Annotated[int, Field(ge=1, le=1_000_000)]  # of a step
Ratio = Annotated[float, Field(ge=1, le=1000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DualClip = Annotated[float, Field(gt=1)]
IntRange = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_check_range)]  # minimum and maximum


class Section(BaseModel):
    """A part of a recipe; frozen, rejects unknown keys. Its validators raise ConfigError for contradicting values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: ValidationInfo) -> Any:
        # To Python, and so to pydantic, `true` is the number 1.
        return refuse_bool(value, cls.model_fields[info.field_name or ""].annotation)

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
STAGES = ("sft", "rl", "eval")  # of a run, in order


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

    # groups that a round collects per group that is missing. Above 1, filters may drop groups without another round
    oversample: Ratio = 1.0
    # number of groups that each round collects, whatever is missing; null = the missing groups times oversample
    round_size: PromptCount | None = None
    # groups that are started per group that a round collects. Above 1 the slowest groups are cancelled, so that a step
    # doesn't wait for them
    over_provision: Ratio = 1.0
    rank_by: Literal["none", "reward_std"] = "none"  # order in which groups are chosen; reward_std = largest first
    # largest number of rounds of a step; a round is sampled only while groups are missing. null = rounds end when no
    # group is missing, or when as many prompts were drawn as there are tasks
    max_sampling_rounds: PositiveInt | None = 1
    on_underfilled: Literal["continue", "stop"] = "continue"  # action if groups are still missing after the last round
    # largest fraction of a round's prompts whose tasks hold a video. Prompts above it are replaced by the next prompts
    # without a video, and count as surplus. null = no limit
    max_video_share: Fraction | None = None
    # what happens to the prompts of groups beyond the number needed and of videos above max_video_share. discard =
    # they are drawn again in the next epoch; requeue = they are drawn again next
    surplus: Literal["discard", "requeue"] = "discard"

    def compute_start_counts(self, num_missing: int) -> tuple[int, int]:
        """Return how many groups a round collects if `num_missing` are missing, and how many it starts.

        >>> SelectionConfig(oversample=1.5, over_provision=1.25).compute_start_counts(2)
        (3, 4)
        """
        num_collected = self.round_size or round(num_missing * self.oversample)
        return num_collected, self.compute_num_started(num_collected)

    def compute_num_started(self, num_collected: int) -> int:
        """Return how many groups are started if `num_collected` must end."""
        # Round up, or over-provisioning few groups would start no extra one; 10 * 1.1 is slightly more than 11.
        return math.ceil(round(num_collected * self.over_provision, 6))

    @model_validator(mode="after")
    def _check_round_size(self) -> "SelectionConfig":
        if self.round_size is not None and self.oversample != 1:
            raise ConfigError(
                f"rl.selection.round_size={self.round_size} and rl.selection.oversample={self.oversample:g} both set "
                "how many groups a round collects: set rl.selection.oversample=1 or rl.selection.round_size=null",
                key="rl.selection.round_size",
                value=self.round_size,
            )
        return self


VideoQuestion = Literal["at", "after", "before", "count", "order", "when", "at:choice", "after:choice", "before:choice"]
ImageQuestion = Literal["colour", "digit", "letter", "which", "count", "where"]


class SyntheticImageConfig(Section):
    """Parameters of synthetic images: objects with symbols too small to read in an overview.

    With `synthetic.media=image` only these keys, the split sizes, `demonstrations` and `tasks` have an effect, and for
    the tasks `map` also `needles`.
    """

    image_size: Annotated[int, Field(ge=1, le=8192)] = 320  # side of an image, pixels
    object_scale: Annotated[float, Field(gt=0, lt=1)] = 0.1  # side of an object, fraction of the image's side
    symbol_scale: Annotated[float, Field(gt=0, lt=1)] = 0.4  # height of a symbol, fraction of its object's side
    objects: IntRange = (2, 4)  # minimum and maximum number of objects per image
    distractors: NonNegativeInt = 0  # white discs with symbols that no question is about, per image
    tasks_per_image: PositiveInt = 8  # questions per image
    # grid images per training image. A grid image is an additional training image that a grid of objects fills; its
    # demonstrations are auxiliary ones
    grid_images: Annotated[float, Field(ge=0, le=100)] = 0.0
    # objects per side of a grid image. Choose it so that the overview shows an object as large as a zoom does
    grid_size: Annotated[int, Field(ge=1, le=20)] = 5
    # of `map`: the fraction of a grid image's entries that are white, as in the legend; the others are colored
    white_grid_entries: Fraction = 0.0
    questions: tuple[ImageQuestion, ...] = ("colour", "digit", "letter", "which", "count", "where")  # question types


class NeedlesConfig(Section):
    """Parameters of the tasks cue, search, cost and map, in which calls can't cover the media; tiling has none.

    The media are divided into `num_places` places, and the answer (the needle) is in one of them. `calls_per_turn` and
    `tool_turns` are the limits for which baselines are computed; a recipe's environment should have the same.
    """

    num_places: Annotated[int, Field(ge=2, le=60)] = 12  # parts of a clip, or entries of a map's legend
    window_seconds: PositiveFloat = 16.0  # length of the window that begins each place and holds the needle, seconds
    calls_per_turn: PositiveInt = 3  # calls of a turn
    tool_turns: PositiveInt = 1  # tool turns of an episode
    # of cue: what the overview shows. opening = a first event whose color and shape name the place, marker = an event
    # one place before the needle, counter = a counter that jumps at the needle
    cue: Literal["opening", "marker", "counter"] = "opening"
    # of search: what grows through the clip. It is half full at the needle
    gauge: Literal["bar", "brightness", "clock"] = "bar"
    shown_share: Fraction = 0.5  # of cost: fraction of the clips whose overview shows the needle
    # of cost: what each call costs, in units of accuracy. Baselines subtract it
    tool_call_penalty: NonNegativeFloat = 0.2
    # of map: shown = the overview shows the label, small = a call must read the label first
    label: Literal["shown", "small"] = "shown"

    @property
    def num_calls(self) -> int:
        """Return the number of calls of an episode."""
        return self.calls_per_turn * self.tool_turns


class SyntheticModelConfig(Section):
    """Size of the language model of the checkpoint with random weights that `saccade demo` and ablations make."""

    hidden_size: Annotated[int, Field(ge=64, le=4096, multiple_of=64)] = 128  # width; a multiple of 64 (two heads)
    num_layers: Annotated[int, Field(ge=1, le=100)] = 4  # layers


class SyntheticConfig(Section):
    """Parameters of the synthetic dataset (`saccade data synth`): events or symbols that an overview doesn't show."""

    media: Literal["video", "image"] = "video"  # kind of media
    # what a model must do. tiling = look everywhere. The others have it decide where to look: cue = read a cue, search
    # = search from coarse to fine, cost = look only if needed, map = find the entry of a legend (images)
    tasks: Literal["tiling", "cue", "search", "cost", "map"] = "tiling"
    needles: NeedlesConfig = NeedlesConfig()
    image: SyntheticImageConfig = SyntheticImageConfig()
    model: SyntheticModelConfig = SyntheticModelConfig()
    train: FileCount = 256  # videos or images in the training split
    validation: FileCount = 48  # videos or images in the validation split
    test: FileCount = 48  # videos or images in the test split
    clip_seconds: Annotated[float, Field(gt=0, le=86_400)] = 64.0  # length of a clip, seconds
    event_seconds: PositiveFloat = 2.0  # length of an event, seconds
    events: IntRange = (2, 4)  # minimum and maximum number of events per clip
    distractors: NonNegativeInt = 0  # events of other shapes that no question is about, per clip
    frame_size: Annotated[int, Field(ge=16, le=1024, multiple_of=2)] = 64  # side of a frame, pixels
    fps: Annotated[float, Field(gt=0, le=240)] = 4.0  # frame rate, frames per second
    tasks_per_video: PositiveInt = 8  # questions per video
    questions: tuple[VideoQuestion, ...] = ("at", "after", "before", "count", "order", "when")  # question types
    # how the demonstrations find the answer. tool_calls = with tools, python = with Python code, direct = in the frames
    # of the prompt
    demonstrations: Literal["tool_calls", "python", "direct"] = "tool_calls"
    haystack: str | None = None  # folder of background clips for the events; null = plain gray

    @property
    def num_files(self) -> int:
        """Return the number of videos or images in all splits."""
        return self.train + self.num_grid_images + self.validation + self.test

    @property
    def num_test_tasks(self) -> int:
        """Return the number of tasks of the test split."""
        return self.test * (self.tasks_per_video if self.tasks == "tiling" else 1)

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
        if self.tasks != "tiling" and (self.tasks == "map") != (self.media == "image"):
            message = f"synthetic.tasks={self.tasks} is for {'images' if self.tasks == 'map' else 'videos'}"
            raise ConfigError(f"{message}: change synthetic.media", key="synthetic.tasks", value=self.tasks)
        if self.tasks == "tiling" and self.needles != NeedlesConfig():
            message = "synthetic.needles has settings, but synthetic.tasks=tiling ignores them: set synthetic.tasks"
            raise ConfigError(message, key="synthetic.tasks", value=self.tasks)
        if self.tasks not in ("tiling", "map") and self.demonstrations != "tool_calls":
            message = (
                f"synthetic.demonstrations={self.demonstrations} is not available for synthetic.tasks={self.tasks}"
            )
            raise ConfigError(f"{message}: set tool_calls", key="synthetic.demonstrations", value=self.demonstrations)
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


class ScenesConfig(Section):
    """How a video is cut into scenes, by how much its frames differ."""

    fps: PositiveFloat = 4.0  # frames that are compared, per second
    threshold: Fraction = 0.3  # smallest difference of two frames at a cut; see media/scenes.py
    min_seconds: PositiveFloat = 1.0  # shortest scene, seconds; a cut that would make a shorter one is dropped
    max_seconds: PositiveFloat = 30.0  # longest scene, seconds; a longer one is divided evenly


class CaptionsConfig(Section):
    """How the teacher describes the frames of a scene."""

    fps: PositiveFloat = 1.0  # frames that the teacher sees, per second
    frame_range: IntRange = (2, 16)  # minimum and maximum number of frames per scene
    frame_pixels: IntRange = (784, 200704)  # minimum and maximum pixels per frame
    temperature: NonNegativeFloat = 0.0  # sampling temperature; 0 = greedy
    max_tokens: PositiveInt = 2048  # longest reply, tokens


ConstructedAnswer = Literal["choice", "open", "number", "grounding"]


class QuestionsConfig(Section):
    """What the teacher asks about the captions of a scene, or of two scenes of one video."""

    answer_types: Annotated[tuple[ConstructedAnswer, ...], Field(min_length=1)] = (
        "choice",
        "open",
        "number",
        "grounding",
    )  # answer types, requested in turn from a random one on
    num_per_scene: NonNegativeInt = 2  # questions about each scene
    num_per_pair: NonNegativeInt = 2  # questions about each pair of scenes
    pairs_per_video: NonNegativeInt = 4  # pairs of scenes of a video, drawn at random
    num_options: Annotated[int, Field(ge=2, le=10)] = 4  # options of a choice question
    temperature: NonNegativeFloat = 0.7  # sampling temperature; 0 = greedy
    max_tokens: PositiveInt = 2048  # longest reply, tokens


class QuestionFiltersConfig(Section):
    """Which questions are dropped. A vote is one answer of the teacher in one reply, without tools."""

    no_video_votes: NonNegativeInt = 4  # votes without the video; 0 = no such filter
    max_no_video_correct: NonNegativeInt = 1  # largest number of right votes without the video
    few_frames: PositiveInt = 4  # frames of the whole video that the votes on easy questions see
    few_frames_votes: NonNegativeInt = 2  # votes on few frames; all right = too easy; 0 = no such filter
    agreement_votes: NonNegativeInt = 3  # votes on the question's scenes, which must all be right; 0 = no such filter
    temperature: NonNegativeFloat = 0.7  # sampling temperature of the votes
    max_tokens: PositiveInt = 1024  # longest vote, tokens


class TeacherEpisodesConfig(Section):
    """Which episodes of the teacher in the recipe's environment become demonstrations."""

    attempts: NonNegativeInt = 2  # episodes per task, until one is right and well formed; 0 = no demonstrations
    require_call: bool = True  # drop episodes that answer without a tool
    merge_turns: bool = True  # merge calls of consecutive turns that don't depend on each other into one turn


class PriceConfig(Section):
    """What the teacher costs; null = unknown, and only requests and tokens are shown."""

    prompt: NonNegativeFloat | None = None  # per million prompt tokens
    completion: NonNegativeFloat | None = None  # per million sampled tokens


class DataBuildConfig(Section):
    """Tasks and demonstrations that a teacher makes from videos; only `saccade data build` reads this section."""

    scenes: ScenesConfig = ScenesConfig()
    captions: CaptionsConfig = CaptionsConfig()
    questions: QuestionsConfig = QuestionsConfig()
    filters: QuestionFiltersConfig = QuestionFiltersConfig()
    demonstrations: TeacherEpisodesConfig = TeacherEpisodesConfig()
    price: PriceConfig = PriceConfig()
    max_concurrency: PositiveInt = 8  # videos, scenes or questions in progress; engine.settings has that of requests
    max_failures: PositiveInt = 20  # requests that fail one after another before the build stops


class ModelConfig(Section):
    """The checkpoint and how it is loaded."""

    path: str = ""  # checkpoint folder
    # published model, such as Qwen3-VL-8B-Instruct, for whose sizes tokens and memory are planned while model.path is
    # empty. Nothing is loaded
    memory_plan_model: str = ""
    # family of a generated tiny model, and of the memory plan. A checkpoint names its own family
    family: str = "qwen3_vl"
    device: str = "cpu"  # torch device of the trainer
    dtype: Literal["float32", "bfloat16"] = "float32"  # type of the weights and activations
    num_threads: Annotated[int, Field(ge=1, le=1024)] = 2  # CPU threads of torch
    # training in several processes: seconds that a rank waits for the others in one collective operation (such as an
    # all-reduce) before it fails
    collective_timeout: PositiveFloat = 600.0
    # how training computes the attention of packed rows. branchwise = one call per branch, on any device; varlen = one
    # call of FlashAttention per micro-batch, on CUDA in bfloat16. Both are exact and build no mask
    attention: Literal["branchwise", "varlen"] = "branchwise"
    # bytes of image features that stay on the device during a policy update, if the vision tower is frozen
    vision_cache_bytes: NonNegativeInt = 2**31
    activation_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    # the optimizer's state and its float32 weights are in the CPU's memory, which also computes the update. In several
    # processes the sharded weights and gradients are there, too
    cpu_offload: bool = False
    lora_rank: NonNegativeInt = 0  # rank of LoRA adapters on the text model's linear layers; 0 = no adapters
    # weights that training changes. language_model = all but the vision tower and its projector. It has no effect with
    # LoRA, whose adapters are in the text model
    trained_weights: Literal["all", "language_model"] = "all"


# A file, or files with their sampling weights; pydantic puts the tags into the location of an error.
DataMixture = Annotated[
    Annotated[str, Tag("file")] | Annotated[dict[str, PositiveFloat], Tag("weight")],
    Discriminator(lambda value: "weight" if isinstance(value, Mapping) else "file"),
]


class DataConfig(Section):
    """Files of tasks and demonstrations (JSONL or Parquet); relative paths start at the recipe's folder."""

    train: DataMixture = ""  # file of tasks for RL, or a mapping of files to sampling weights
    validation: str = ""  # file of tasks for the validation during SFT and RL (section `validation`)
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
    is_accuracy: bool = False  # this term measures whether an episode is correct; at most one does
    settings: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the reward


class EnvironmentConfig(PluginConfig):
    """An environment that tasks select by name, with rewards of its own."""

    rewards: dict[str, RewardTerm] = Field(default_factory=dict)  # reward terms by plugin name; empty = the recipe's


class SamplingConfig(Section):
    """How replies are sampled. `max_tokens` and `episode_timeout` hold in evaluations and `saccade ask`, too."""

    temperature: NonNegativeFloat = 1.0  # sampling temperature of RL; 0 = greedy. Evaluations have their own
    max_tokens: PositiveInt = 256  # longest reply, tokens per turn
    episode_timeout: NonNegativeFloat = 0.0  # time after which an episode is aborted, seconds; 0 = no limit


class MediaConfig(Section):
    """How videos and images are decoded, and where their scaled pixels are stored, so that each is decoded once."""

    memory_bytes: NonNegativeInt = 2**31  # bytes of pixels that a process keeps in memory
    # folder of a store of decoded pixels, which processes and runs share; it may be on a shared file system. "" = no
    # store. null = no store either, except with rollouts.executor=ray: each node then has the store saccade-media-UID
    # in its folder of temporary files, which fills at most half of the free space. There is no other default, because
    # the pixels of a long video take more space than the video
    folder: str | None = None
    disk_bytes: PositiveInt = 2**36  # bytes of that store. The pixels unused for longest are deleted first
    # threads that decode; 0 = decode in the event loop. null = one thread per CPU (in a Ray worker, per CPU of
    # rollouts.ray.cpus_per_worker). But with the local engine on a CPU null means 0: with threads the order of its
    # requests, and with it their rounding, would depend on time
    decode_threads: NonNegativeInt | None = None
    # show the frames of videos in pairs, as the model's video input: two consecutive frames share one set of visual
    # tokens, so the same frames take half of them. The text before a pair is the mean of its times; the last of an odd
    # number of frames is paired with itself. Needs engine.name=local: servers receive single images
    frame_pairs: bool = False


class RayConfig(Section):
    """Rollout workers on a Ray cluster. A worker is a process with its own sandboxes, media cache and engine client."""

    # the cluster. local = start one on this machine for this run; auto = use the running one (of RAY_ADDRESS, or on
    # this machine); host:port = use the one with this head
    address: Annotated[str, AfterValidator(_check_cluster_address)] = "local"
    workers: PositiveInt = 2  # rollout workers. A worker for which the cluster has no room waits for it
    # CPUs that Ray reserves for a worker. The worker decodes on as many threads, and its sandboxes run as many calls as
    # fit on them. 0 = Ray reserves none, and the worker uses all CPUs of its node
    cpus_per_worker: NonNegativeFloat = 1.0
    # restrict a worker and its sandboxes to cpus_per_worker CPUs of its node that no other worker has. false = Ray only
    # counts the CPUs, and the operating system shares them
    pin_cpus: bool = False
    # custom resources that Ray reserves for a worker, to place workers on some nodes only, such as {rollouts: 1}
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    # largest number of episodes in progress in a worker. A group of more episodes runs alone in one
    max_episodes: PositiveInt = 128
    # where the rewards of single episodes run, judges included. Rewards of groups always run in the trainer
    scoring: Literal["workers", "trainer"] = "workers"
    # a worker that sends no heartbeat for so long is restarted, and its groups run on others, seconds
    lease_timeout: PositiveFloat = 60.0
    max_attempts: PositiveInt = 3  # workers that a group may lose before the run stops
    down_timeout: PositiveFloat = 900.0  # the run stops if no worker is up for this long, seconds


class RolloutsConfig(Section):
    """Where episodes run."""

    # local = in the process of the trainer or the evaluation; processes = in processes of this machine, each with a
    # copy of the model on model.device, for the engine local; ray = in workers of a Ray cluster, for engines with
    # servers
    executor: Literal["local", "processes", "ray"] = "local"
    # number of processes of the executor processes; model.num_threads is divided among them
    num_processes: PositiveInt = 2
    ray: RayConfig = RayConfig()  # settings of the executor ray


class OptimizerConfig(Section):
    """An optimizer and its learning rate schedule."""

    # optimizer. adamw_8bit = AdamW whose moments take 8 bits, through torchao; muon = Muon for the layers' matrices
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    lr: PositiveFloat = 1e-4  # peak learning rate
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # decay of the first and second moment
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients are clipped to this norm
    warmup_steps: NonNegativeInt = 0  # linear warm-up, steps
    schedule: Literal["constant", "cosine", "linear"] = "constant"  # decay of the learning rate
    decay_start: Fraction = 0.0  # when cosine or linear decay begins, fraction of the steps


class CheckpointConfig(Section):
    """Which checkpoints of a stage stay on disk; the others are deleted after a newer one is written.

    A checkpoint is kept if any of these keys selects it, or if its folder contains a file named `keep`, which RL writes
    into the checkpoint that it starts from.
    """

    last: PositiveInt = 2  # number of newest checkpoints that are kept
    # number of checkpoints with the best validation that are kept. Above 0 every validated step is saved, and the link
    # `best` beside the checkpoints names the best one
    best: NonNegativeInt = 0
    metric: str = "greedy/accuracy"  # metric of the validation that `best` compares
    mode: Literal["max", "min"] = "max"  # whether the largest or the smallest value of `metric` is the best
    keep_every: NonNegativeInt = 0  # a checkpoint of every so many steps is saved and kept; 0 = off
    keep_steps: tuple[PositiveInt, ...] = ()  # steps whose checkpoints are saved and kept
    # write a checkpoint while the training continues, from a copy of weights and optimizer in the memory of the CPU.
    # false = the training waits until the checkpoint is written, and needs no copy
    background: bool = True


class StageConfig(Section):
    """What SFT and RL have in common."""

    steps: StepCount  # training steps
    pack_length: PositiveInt = 1024  # length of a packed row, tokens
    micro_batch_size: PositiveInt = 8  # packed rows per forward pass
    optim: OptimizerConfig = OptimizerConfig()  # optimizer
    save_every: PositiveInt  # checkpoint interval, steps
    checkpoints: CheckpointConfig = CheckpointConfig()  # which checkpoints are kept


class SftConfig(StageConfig):
    """Supervised fine-tuning on demonstrations."""

    steps: StepCount = 400  # optimizer steps
    save_every: PositiveInt = 100
    tokens_per_step: Annotated[int, Field(ge=1, le=2**24)] = 4096  # batch size, packed tokens
    # order of the demonstrations. with_replacement = prefix groups are drawn at random (demonstrations with the same
    # media and frame budget, whose prompts share a prefix); shuffled_epochs = each demonstration once per epoch, in a
    # new order for each epoch
    order: Literal["with_replacement", "shuffled_epochs"] = "with_replacement"
    # largest number of demonstrations of one prefix group that are packed together
    demonstrations_per_prefix: PositiveInt = 4
    # fraction of the prefix groups that are drawn from auxiliary demonstrations (of sub-agents, of grid images), if
    # there are any. This key and auxiliary_warmup need order=with_replacement
    auxiliary_fraction: Fraction = 0.5
    auxiliary_warmup: Fraction = 0.0  # initial steps on auxiliary demonstrations only, fraction of the steps
    # environment settings that replace those of RL; a named environment uses those that it has. A demonstration of more
    # tool turns than max_tool_turns can't be trained on, so raise it here if there are any
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    # action for a demonstration that can't be replayed completely. refuse = stop before the first step; skip = leave it
    # out
    on_bad_demonstration: Literal["refuse", "skip"] = "refuse"
    # number of demonstrations that are replayed before the first step, spread evenly over the file; 0 = all. The others
    # are replayed when they are drawn
    num_checked: NonNegativeInt = 0
    # train on demonstrations whose recorded tool results are errors, as some published data sets do. false = they can't
    # be trained on (on_bad_demonstration)
    accept_recorded_errors: bool = False

    @model_validator(mode="after")
    def _check_order(self) -> "SftConfig":
        for key in ("auxiliary_fraction", "auxiliary_warmup"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.order == "shuffled_epochs" and value != default:
                raise ConfigError(
                    f"sft.{key}={value:g} has no effect with sft.order=shuffled_epochs, which takes each demonstration "
                    f"once per epoch: set sft.{key}={default:g}, its default, or sft.order=with_replacement",
                    key=f"sft.{key}",
                    value=value,
                )
        return self


SubAgentAdvantage = Literal["none", "shared", "supporting"]


class AdvantageConfig(Section):
    """How advantages are computed from the rewards of a group."""

    # name or file of the estimator, which subtracts a baseline from each reward. dr_grpo = the mean of the group; grpo
    # = the same, divided by the group's standard deviation; rloo = the mean of the other episodes; accuracy_baseline =
    # the mean correctness; remax = the reward of a greedy episode; reinforce_plus_plus = none, or the mean of the
    # group, to be normalized over the batch (whiten)
    estimator: str = "grpo"
    settings: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the estimator
    # normalize advantages to mean 0 and standard deviation 1. episodes = over the episodes of the batch, before filters
    # read them; tokens = over the trained tokens of the batch, after filters have read them and after the KL penalty
    # (rl.kl.advantage_coef) is subtracted
    whiten: Literal["none", "episodes", "tokens"] = "none"
    # advantage of sub-agents, which are not trained without one. shared = their parent's; supporting = their parent's,
    # for those whose reply contains its answer
    sub_agent_advantage: SubAgentAdvantage = "shared"
    reward_scale: PositiveFloat = 1.0  # factor of the reward, applied after reward_bias
    reward_bias: float = 0.0  # added to the reward, applied first
    reward_clip: PositiveFloat = 20.0  # maximum absolute value of the reward, applied last


class LossConfig(Section):
    """The policy loss, weighted per token by the truncated ratio of trainer to engine probability (TIS)."""

    name: str = "ppo_clip"  # name or file of the loss; ppo_clip = PPO's ratio of tokens, gspo = ratio of sequences
    # keyword arguments of the loss. clip_low, clip_high and dual_clip have no effect where the ratio is 1
    settings: dict[str, Any] = Field(default_factory=dict)
    # whose logprobs are the old ones of the ratio. trainer = the trainer's before the update, so with one update per
    # batch the ratio is exactly 1; engine = those that the engine reported; then both caps below are null
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    # how token losses are averaged over a mini-batch. token_mean = every token counts the same; seq_mean_token_mean =
    # every sequence counts the same; seq_mean_token_sum_norm = the sum of a sequence divided by token_sum_divisor,
    # averaged over sequences
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    token_sum_divisor: PositiveFloat = 256.0  # constant divisor of seq_mean_token_sum_norm, tokens
    # coefficient of the entropy bonus: a token's loss is lowered by it times the entropy (nats) of the distribution
    # that the token was sampled from, over the whole vocabulary
    entropy_coef: NonNegativeFloat = 0.0
    tis_cap: PositiveFloat | None = 2.0  # cap of the weight of tokens sampled with the current weights; null = off
    stale_tis_cap: PositiveFloat | None = 5.0  # cap of the weight of tokens sampled with older weights; null = off
    # weight of a token whose weight exceeds tis_cap. truncate = the cap; mask = 0, so the token has no loss but still
    # counts in the average
    above_tis_cap: Literal["truncate", "mask"] = "truncate"
    # weight of a token of older weights whose weight exceeds stale_tis_cap; truncate and mask as in above_tis_cap
    above_stale_tis_cap: Literal["truncate", "mask"] = "truncate"

    @model_validator(mode="after")
    def _check_caps(self) -> "LossConfig":
        if self.old_logprobs == "engine" and (self.tis_cap is not None or self.stale_tis_cap is not None):
            raise ConfigError(
                "rl.loss.old_logprobs=engine includes the engine's deviation in the ratio, so a cap would count "
                "it twice: set rl.loss.tis_cap and rl.loss.stale_tis_cap to null, or rl.loss.old_logprobs=trainer",
                key="rl.loss.old_logprobs",
                value=self.old_logprobs,
            )
        for cap in ("tis_cap", "stale_tis_cap"):
            if getattr(self, cap) is None and getattr(self, f"above_{cap}") == "mask":
                raise ConfigError(
                    f"rl.loss.above_{cap}=mask needs a cap, and rl.loss.{cap} is null: set one",
                    key=f"rl.loss.above_{cap}",
                    value="mask",
                )
        return self


class KlConfig(Section):
    """KL penalty against the reference weights, which are kept only if a coefficient is above 0."""

    loss_coef: NonNegativeFloat = 0.0  # coefficient of the k3 estimate in the loss
    # coefficient of the penalty per token, subtracted from advantages after these are normalized within groups. ParaVT
    # has 0.01
    advantage_coef: NonNegativeFloat = 0.0
    # estimator of the KL divergence in this penalty; it needs advantage_coef above 0. The loss always has k3
    penalty_estimator: Literal["k1", "k3"] = "k1"
    reference_device: Literal["device", "cpu"] = "device"  # where the reference weights are stored between uses

    @model_validator(mode="after")
    def _check_coefficients(self) -> "KlConfig":
        if self.penalty_estimator != "k1" and not self.advantage_coef:
            raise ConfigError(
                f"rl.kl.penalty_estimator={self.penalty_estimator} has no effect with rl.kl.advantage_coef=0: set "
                "rl.kl.advantage_coef above 0, or rl.kl.penalty_estimator=k1, its default",
                key="rl.kl.penalty_estimator",
                value=self.penalty_estimator,
            )
        if self.loss_coef and self.advantage_coef:
            raise ConfigError(
                f"rl.kl.loss_coef={self.loss_coef:g} and rl.kl.advantage_coef={self.advantage_coef:g} would count the "
                "KL divergence twice: set one of them to 0",
                key="rl.kl.loss_coef",
                value=self.loss_coef,
            )
        return self


class RlConfig(StageConfig):
    """Reinforcement learning."""

    steps: StepCount = 100  # training steps, one rollout batch each
    save_every: PositiveInt = 20
    prompts_per_step: PromptCount = 8  # prompts, and thus groups, per step
    group_size: Annotated[int, Field(ge=2, le=10_000)] = 8  # episodes per group; advantages compare them, so at least 2
    # passes over a rollout batch (PPO epochs). Each pass takes one optimizer step per mini-batch. With one pass, one
    # mini-batch and rl.loss.old_logprobs=trainer the ratio is exactly 1, so clipping has no effect
    epochs_per_batch: PositiveInt = 1
    # number of mini-batches of whole groups that a rollout batch is divided into. Each has an optimizer step of its
    # own, whose loss rl.loss.aggregation averages. Group i is in mini-batch i modulo this number
    num_mini_batches: PositiveInt = 1
    # number of weight versions that rollouts may be older than the trainer. 0 = rollouts and training take turns; above
    # 0 they run concurrently
    max_staleness: NonNegativeInt = 0
    # start each group on its own, and train on the groups that end first. It needs max_staleness above 0. false = the
    # groups of a step start together, when those of the step before have ended
    streaming: bool = False
    # with streaming: what happens to a group that is still in progress at the last step that may train on it. wait =
    # this step waits for it; drop = it is cancelled after this step, and its prompt is drawn again; mask = it
    # continues, and a later step leaves its tokens that are staler than max_staleness out of the loss
    on_stale_group: Literal["wait", "drop", "mask"] = "wait"
    # largest number of groups in progress; 0 = as many as have 512 episodes
    max_groups_in_progress: NonNegativeInt = 0
    # rollouts pause while the collected but untrained conversations have more tokens than this; 0 = no limit
    max_queued_tokens: NonNegativeInt = 0
    # what happens to episodes in progress at a weight sync. continue = they continue with the new weights; restart =
    # they start again
    episodes_on_sync: Literal["continue", "restart"] = "continue"
    # for ablations: number of weight versions between sampling and training that a synchronous run simulates
    simulated_staleness: NonNegativeInt = 0
    advantage: AdvantageConfig = AdvantageConfig()  # advantages
    # filters by name or file, each with its settings, added to the default ones; null turns a filter off. The default
    # ones drop failed and truncated episodes (statuses), and groups with equal rewards (reward_std)
    filters: dict[str, dict[str, Any] | None] = Field(default={"statuses": {}, "reward_std": {}})
    selection: SelectionConfig = SelectionConfig()  # how many groups are collected, and which are kept
    loss: LossConfig = LossConfig()  # policy loss
    kl: KlConfig = KlConfig()  # KL penalty

    @field_validator("filters", mode="before")
    @classmethod
    def _add_default_filters(cls, filters: Any) -> Any:
        # Else a recipe that adds a filter would train on the episodes that the default ones drop.
        return {**cls.model_fields["filters"].default, **filters} if isinstance(filters, Mapping) else filters

    @property
    def max_running_groups(self) -> int:
        """Return `max_groups_in_progress`, or if it is 0 as many groups as have MAX_EPISODES_IN_PROGRESS episodes."""
        return self.max_groups_in_progress or max(MAX_EPISODES_IN_PROGRESS // self.group_size, 1)

    @property
    def active_filters(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the filters that are not turned off, by name."""
        return {name: settings for name, settings in self.filters.items() if settings is not None}

    @model_validator(mode="after")
    def _check_combinations(self) -> "RlConfig":
        if self.num_mini_batches > self.prompts_per_step:
            raise ConfigError(
                f"rl.num_mini_batches={self.num_mini_batches} divides the groups of a step, of which there are "
                f"rl.prompts_per_step={self.prompts_per_step}: set it to at most that",
                key="rl.num_mini_batches",
                value=self.num_mini_batches,
            )
        size, rounds = self.selection.round_size, self.selection.max_sampling_rounds
        if size is not None and rounds is not None and size * rounds < self.prompts_per_step:
            raise ConfigError(
                f"rl.selection.round_size={size} collects at most {size * rounds} groups with "
                f"rl.selection.max_sampling_rounds={rounds}, and rl.prompts_per_step={self.prompts_per_step} needs "
                "more: raise one of them, or set rl.selection.max_sampling_rounds=null",
                key="rl.selection.round_size",
                value=size,
            )
        if self.simulated_staleness and self.max_staleness:
            raise ConfigError(
                f"rl.simulated_staleness={self.simulated_staleness} needs synchronous rollouts, but "
                f"rl.max_staleness={self.max_staleness} makes them asynchronous: set one of them to 0",
                key="rl.simulated_staleness",
                value=self.simulated_staleness,
            )
        if self.streaming and not self.max_staleness:
            raise ConfigError(
                "rl.streaming=true trains on groups that were started some steps before, but rl.max_staleness=0 allows "
                "none: set rl.max_staleness to 1 or more, or rl.streaming=false",
                key="rl.streaming",
                value=True,
            )
        if self.streaming and self.selection.over_provision > 1:
            raise ConfigError(
                f"rl.selection.over_provision={self.selection.over_provision:g} cancels the slowest groups of a step, "
                "but with rl.streaming=true a step has none of its own: set it to 1, and rl.on_stale_group=drop to "
                "cancel groups that are too slow",
                key="rl.selection.over_provision",
                value=self.selection.over_provision,
            )
        if self.on_stale_group != "wait" and not self.streaming:
            raise ConfigError(
                f"rl.on_stale_group={self.on_stale_group} needs rl.streaming=true: without it each step waits for its "
                "own groups, and rl.selection.over_provision cancels the slowest ones",
                key="rl.on_stale_group",
                value=self.on_stale_group,
            )
        return self


class EvaluationConfig(Section):
    """How a model is evaluated."""

    num_tasks: NonNegativeInt = 0  # number of tasks; 0 = all
    num_samples: SampleCount = 1  # episodes per task
    temperature: NonNegativeFloat = 0.0  # sampling temperature; 0 = greedy
    # frame budgets, assigned to tasks in turn; empty = the environment's num_frames
    frame_budgets: tuple[PositiveInt, ...] = ()
    use_tools: bool = True  # offer the environment's tools
    shuffle_options: bool = False  # shuffle the options of choice tasks, per episode
    # environment settings that replace those of training, such as more turns; a named environment uses those that it
    # has
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    # settings of the reward `judge`, for answers that no rule can grade
    judge: dict[str, Any] = Field(default_factory=dict)
    # overrides for one benchmark, by its name, as on the command line: {vstar: [evaluation.num_samples=32]}
    benchmarks: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class ValidationConfig(Section):
    """Validation during SFT and RL, with the environments and rewards of RL, on tasks of `data.validation`."""

    every: NonNegativeInt = 0  # interval, steps; the first validation precedes the first step; 0 = no validation
    num_tasks: NonNegativeInt = 64  # number of tasks, the same ones at every validation; 0 = all
    # how episodes are sampled: greedy = at temperature 0, once per task; sampled = at `temperature`
    modes: Annotated[tuple[Literal["greedy", "sampled"], ...], Field(min_length=1)] = ("greedy", "sampled")
    temperature: PositiveFloat | None = None  # temperature of the mode sampled; null = sampling.temperature
    num_samples: SampleCount = 1  # episodes per task in the mode sampled
    # frame budgets, assigned to tasks in turn; empty = the environment's num_frames
    frame_budgets: tuple[PositiveInt, ...] = ()
    max_concurrency: PositiveInt = MAX_EPISODES_IN_PROGRESS  # maximum number of episodes in progress
    # environment settings that replace those of RL, such as more turns; a named environment uses those that it has
    environment_settings: dict[str, Any] = Field(default_factory=dict)


class EpisodesConfig(Section):
    """The episodes of RL and of validations, written to the folder `episodes` of the run."""

    # largest disk space of the episodes and of their tokens' values, GiB. The oldest steps are deleted first. 0 = no
    # episode is written
    max_gib: NonNegativeFloat = 2.0

    @property
    def max_bytes(self) -> int:
        """Return the disk space in bytes."""
        return round(self.max_gib * 2**30)


class AlarmConfig(Section):
    """A rule on a metric of a training, by its mean over the newest steps that logged it."""

    metric: str  # metric of the log; those of the validation have the prefix validation/
    above: float | None = None  # the alarm is active while the mean is above this
    below: float | None = None  # the alarm is active while the mean is below this
    # the alarm is active while the mean is more than this below the highest mean so far, in units of the metric
    drop: PositiveFloat | None = None
    window: PositiveInt = 10  # number of logged values in the mean
    action: Literal["warn", "stop"] = "warn"  # stop = save a checkpoint and end the training with exit code 3

    @model_validator(mode="after")
    def _check_single_bound(self) -> "AlarmConfig":
        bounds = {name: value for name in ("above", "below", "drop") if (value := getattr(self, name)) is not None}
        if len(bounds) != 1:
            raise ConfigError(
                f"an alarm on {self.metric} needs exactly one of above, below and drop, not {len(bounds)}",
                key="alarms",
                value=tuple(bounds),
            )
        return self


class Recipe(Section):
    """Every setting of a run."""

    seed: int = 0  # seed of all random draws
    loggers: tuple[str, ...] = ()  # metric loggers besides metrics.jsonl, such as tensorboard, wandb and swanlab
    model: ModelConfig = ModelConfig()  # checkpoint
    synthetic: SyntheticConfig = SyntheticConfig()  # synthetic dataset
    data: DataConfig = DataConfig()  # files of tasks and demonstrations
    media: MediaConfig = MediaConfig()  # decoding and storing videos and images
    environment: PluginConfig = PluginConfig(name="tool_calling")  # default environment
    # environments by the name that tasks select with their `environment`; all other tasks use `environment`
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    engine: PluginConfig = PluginConfig(name="local")  # inference engine
    rollouts: RolloutsConfig = RolloutsConfig()  # where episodes run
    sampling: SamplingConfig = SamplingConfig()  # sampling of replies
    # numbers of frames in a prompt (frame budgets), of which one is drawn per prompt and epoch; empty = the
    # environment's num_frames
    frame_budgets: tuple[PositiveInt, ...] = ()
    # reward terms by plugin name
    rewards: dict[str, RewardTerm] = Field(default={"accuracy": RewardTerm(is_accuracy=True)})
    sft: SftConfig = SftConfig()  # supervised fine-tuning
    rl: RlConfig = RlConfig()  # reinforcement learning
    validation: ValidationConfig = ValidationConfig()  # validation during training
    episodes: EpisodesConfig = EpisodesConfig()  # episodes that a training writes
    alarms: dict[str, AlarmConfig] = Field(default_factory=dict)  # rules that warn or stop, by a name of your choice
    evaluation: EvaluationConfig = EvaluationConfig()  # evaluation

    @property
    def reward_sections(self) -> dict[str, dict[str, RewardTerm]]:
        """Return the reward terms by their key in the recipe: those of `rewards`, and each environment's own."""
        own = {f"environments.{name}.rewards": config.rewards for name, config in self.environments.items()}
        return {"rewards": self.rewards, **own}

    @model_validator(mode="after")
    def _check_validation_is_on(self) -> "Recipe":
        for name, alarm in self.alarms.items():
            if alarm.metric.startswith("validation/") and not self.validation.every:
                raise ConfigError(
                    f"alarms.{name}.metric={alarm.metric} needs a validation: set validation.every or drop the alarm",
                    key=f"alarms.{name}.metric",
                    value=alarm.metric,
                )
        for stage, settings in (("sft", self.sft), ("rl", self.rl)):
            if settings.checkpoints.best and not self.validation.every:
                raise ConfigError(
                    f"{stage}.checkpoints.best={settings.checkpoints.best} needs a validation: set validation.every, "
                    f"or {stage}.checkpoints.best=0",
                    key=f"{stage}.checkpoints.best",
                    value=settings.checkpoints.best,
                )
        return self


class DataBuildRecipe(Recipe):
    """A recipe of `saccade data build`: one of a training, whose environment and rewards it uses, and the stages."""

    data_build: DataBuildConfig = DataBuildConfig()  # stages of a dataset made from videos by a teacher
