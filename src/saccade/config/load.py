"""Recipes: every setting of a run, typed, frozen, and read from YAML.

A recipe is a YAML file that may `extends:` another; dotted overrides (`rl.optim.lr=1e-6`) come last. Unknown keys and
wrong types are errors that name the nearest key. The classes below are the schema and hold the defaults.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from saccade.errors import ConfigError
from saccade.plugins import nearest
from saccade.sections import Count as Count
from saccade.sections import Decay, NotNegative, Positive
from saccade.sections import Section as Section
from saccade.sections import Select as Select
from saccade.sections import Share as Share
from saccade.sections import Whole as Whole
from saccade.sections import World as World

PACKAGED = Path(__file__).parent / "recipes"


class Model(Section):
    """The checkpoint and where it lives."""

    path: str = ""
    published: str = ""  # the published model that these settings are for, such as Qwen3-VL-8B-Instruct
    family: str = "qwen3_vl"  # of what a demo makes and what is planned; a checkpoint names its own
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count = 2
    activation_checkpointing: bool = False
    lora_rank: Whole = 0  # of adapters on the text model's linear layers; 0 = train all weights


# A file, or files with the weights that they are mixed by; the tags are named in errors.
Mixed = Annotated[
    Annotated[str, Tag("file")] | Annotated[dict[str, Positive], Tag("weight")],
    Discriminator(lambda value: "weight" if isinstance(value, Mapping) else "file"),
]


class Data(Section):
    """Files of tasks and traces (JSONL or Parquet); relative paths start at the recipe's run folder, as the model's."""

    train: Mixed = ""
    validation: str = ""
    test: str = ""
    traces: str = ""


class Plugin(Section):
    """A plugin by name (or a path `./mine.py`) and its settings, typed by its own signature."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)


class Term(Section):
    """One term of the reward: its weight and its settings."""

    weight: float = 1.0
    settings: dict[str, Any] = Field(default_factory=dict)


class Sampling(Section):
    """How replies are sampled."""

    temperature: NotNegative = 1.0
    max_tokens: Count = 256  # per turn
    episode_seconds: NotNegative = 0.0  # after which an attempt is aborted; 0 = it may take as long as it likes


class Gating(Section):
    """Frame budgets K that are drawn per prompt and epoch; empty = the agent's own budget."""

    frames: tuple[Count, ...] = ()


class Optim(Section):
    """An optimiser and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    clip_norm: Positive = 1.0
    warmup: Whole = 0  # steps of linear warm-up
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    decay_from: Share = 0.0  # of the steps, after which cosine or linear decay begins


class Sft(Section):
    """Supervised fine-tuning on traces."""

    steps: Count = 400
    tokens_per_step: Count = 4096  # expanded tokens, packed
    row_tokens: Count = 1024
    rows_per_pass: Count = 8  # rows of a micro-batch
    optim: Optim = Optim()
    save_every: Count = 100
    per_scene: Count = 4  # demonstrations of one scene (media and frame budget) that are learned together
    practice: Share = 0.5  # share of scenes that are practice (of sub-agents, on charts), where the data has any
    practice_first: Share = 0.0  # of the steps: so many are of practice alone, before all others


class Advantage(Section):
    """Credit."""

    estimator: Literal["mean", "mean_std", "leave_one_out"] = "mean_std"
    whiten: bool = False
    children: Literal["none", "shared"] = "shared"
    reward_scale: Positive = 1.0
    reward_bias: float = 0.0
    reward_clip: Positive = 20.0


class Loss(Section):
    """The clipped policy loss. A token's weight is its importance (trainer before the update / engine), truncated."""

    ratio: Literal["token", "sequence"] = "token"  # sequence = GSPO; published with clips of 3e-4 and 4e-4
    against: Literal["proximal", "behaviour"] = "proximal"  # the ratio's old policy: the trainer's, or the engine's
    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    sum_norm: Positive = 256.0  # the constant divisor of seq_mean_token_sum_norm
    importance_cap: Positive | None = 2.0  # of tokens from the present weights: engine mismatch alone; None = off
    behaviour_cap: Positive | None = 5.0  # of tokens from older weights: mismatch and staleness; None = off

    @model_validator(mode="after")
    def _count_once(self) -> "Loss":
        if self.against == "behaviour" and (self.importance_cap is not None or self.behaviour_cap is not None):
            raise ValueError(
                "rl.loss.against=behaviour puts the engine's gap into the ratio, and a cap would count it twice: set "
                "rl.loss.importance_cap and rl.loss.behaviour_cap to null, or against=proximal"
            )
        return self


class Kl(Section):
    """How the policy is held to the weights that RL began with; they are kept where a coefficient is above 0."""

    loss: NotNegative = 0.0  # coefficient of k3 in the loss
    reward: NotNegative = 0.0  # coefficient of a penalty per token in the reward; 0.01 = ParaVT's
    estimator: Literal["k1", "k3"] = "k1"  # of the penalty in the reward
    keep: Literal["device", "cpu"] = "device"  # where the first weights wait

    @model_validator(mode="after")
    def _count_once(self) -> "Kl":
        if self.loss and self.reward:
            raise ValueError("rl.kl.loss and rl.kl.reward would count one distance twice: set one of them to 0")
        return self


class Rl(Section):
    """Reinforcement learning."""

    steps: Count = 100
    prompts: Count = 8  # groups per step
    group: Annotated[int, Field(ge=2)] = 8  # attempts per group; one alone has nothing to be compared with
    updates: Count = 1  # optimiser steps per batch
    max_staleness: Whole = 0  # versions that rolling out may be ahead, going on while the trainer learns; 0: in turns
    max_waiting_tokens: Whole = 0  # of conversations that wait to be learned from, before more are begun; 0: no bound
    on_update: Literal["continue", "restart"] = "continue"  # attempts under way when new weights come; restart: anew
    staleness: Whole = 0  # how many versions ago a step's groups are sampled, to try what lateness does
    row_tokens: Count = 1024
    rows_per_pass: Count = 8  # rows of a micro-batch
    optim: Optim = Optim()
    advantage: Advantage = Advantage()
    select: Select = Select()
    loss: Loss = Loss()
    kl: Kl = Kl()
    save_every: Count = 20

    @model_validator(mode="after")
    def _late_in_one_way(self) -> "Rl":
        if self.staleness and self.max_staleness:
            raise ValueError("rl.staleness is for trying lateness out, rl.max_staleness bounds it: set one of them")
        return self


class Evaluation(Section):
    """How a model is evaluated."""

    limit: Whole = 0  # tasks; 0 = all
    repeat: Count = 1
    temperature: NotNegative = 0.0
    frames: tuple[Count, ...] = ()  # budgets K, dealt over the tasks; empty = the agent's own
    tools: bool = True
    shuffle_options: bool = False  # of choices, drawn for each attempt
    agent: dict[str, Any] = Field(default_factory=dict)  # settings that the agent has otherwise, such as more turns
    judge: dict[str, Any] = Field(default_factory=dict)  # rewards/judge, for what a benchmark's rule leaves open


class Recipe(Section):
    """Every setting of a run."""

    seed: int = 0
    track: tuple[str, ...] = ()  # who is told of each step beside metrics.jsonl, such as tensorboard and wandb
    model: Model = Model()
    world: World = World()
    data: Data = Data()
    agent: Plugin = Plugin(name="parallel")
    engine: Plugin = Plugin(name="local")
    sampling: Sampling = Sampling()
    gating: Gating = Gating()
    rewards: dict[str, Term] = Field(default={"accuracy": Term()})
    sft: Sft = Sft()
    rl: Rl = Rl()
    evaluation: Evaluation = Evaluation()


# ---- reading and writing -------------------------------------------------------------------------------------------


def recipe_names() -> tuple[str, ...]:
    """The packaged recipes, such as "tiny/para_grpo", sorted."""
    return tuple(sorted(path.relative_to(PACKAGED).with_suffix("").as_posix() for path in PACKAGED.rglob("*.yaml")))


def recipe_path(name_or_path: str, *, beside: Path | None = None) -> Path:
    """The file of a recipe: a packaged name, or a path (ending in .yaml) relative to the folder `beside`."""
    if name_or_path.endswith((".yaml", ".yml")):
        path = (beside or Path()) / Path(name_or_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {path}")
        return path
    if name_or_path not in recipe_names():
        raise ConfigError(f"there is no recipe {name_or_path!r}; {nearest(name_or_path, recipe_names())}")
    return PACKAGED / f"{name_or_path}.yaml"


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by packaged name or path, with dotted overrides (`rl.optim.lr=1e-6`, values in YAML) laid over it.

    A mapping is merged key by key; anything else is replaced; `null` in place of a mapping removes it, which is how a
    recipe drops a reward term of its base. Another plugin's name drops the settings of the one before. Raises
    ConfigError with one sentence for whatever can't be used.

    >>> load_recipe("tiny/base", ["rl.optim.lr=1e-6"]).rl.optim.lr
    1e-06
    """
    merged = _resolved(recipe_path(name_or_path), ())
    for override in _names_first(overrides):
        merged = _merged(merged, _override(override))
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # a rule between keys, which says all that there is to say
            raise ConfigError(f"{name_or_path}: {first['ctx']['error']}") from error
        key = ".".join(str(part) for part in first["loc"])
        expected = re.sub(r"a valid dictionary or .*", "a mapping of keys", first["msg"])
        expected = expected.replace("Input should be", "it should be")
        raise ConfigError(f"{name_or_path}: {key} can't be {first['input']!r}: {expected}") from error


def dump(recipe: Recipe) -> str:
    """The whole recipe as YAML, every default written out; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(problem=f"the key {key!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def parsed(text: str, place: str) -> Any:
    """A text of YAML as plain values; ConfigError, naming `place`, where it is none."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} isn't valid YAML: {' '.join(str(error).split())}") from error


def _resolved(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The file with everything it extends beneath it; `below` are the files that led here."""
    path = path.resolve()
    if path in below:
        chain = " -> ".join(each.name for each in (*below, path))
        raise ConfigError(f"the recipe {path} extends itself: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} can't be read: {error}") from error
    own = parsed(text, str(path)) or {}
    if not isinstance(own, dict):
        raise ConfigError(f"the recipe {path} must be a mapping of keys")
    extends = own.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: extends can't be {extends!r}: it should be a recipe's name or path, or a list of them"
        )
    _check_keys(own, str(path))
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merged(merged, _resolved(recipe_path(base, beside=path.parent), (*below, path)))
    return _merged(merged, own)


def _names_first(overrides: Sequence[str]) -> list[str]:
    """The overrides, but a plugin's name before settings that were written ahead of it, which are meant for it.

    >>> _names_first(["engine.settings.seconds=9", "seed=1", "engine.name=vllm"])
    ['engine.name=vllm', 'engine.settings.seconds=9', 'seed=1']
    """
    ordered: list[str] = []
    for text in overrides:
        owner, _, last = text.partition("=")[0].rpartition(".")
        settings, others = (f"{owner}.settings.", f"{owner}.settings="), (f"{owner}.name=", f"{owner}=")
        at = len(ordered)
        if last == "name" and not any(each.startswith(others) for each in ordered):
            at = next((place for place, each in enumerate(ordered) if each.startswith(settings)), at)
        ordered.insert(at, text)
    return ordered


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"the override {text!r} must be written as key=value, such as rl.optim.lr=1e-6")
    nested: Any = parsed(value, f"the override {text!r}")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    _check_keys(nested, f"the override {text!r}")
    return nested


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and value is None:
            del result[key]
        elif isinstance(old, dict) and isinstance(value, dict):
            # Settings are those of the plugin that they were written for.
            other = "settings" in old and value.get("name", old.get("name")) != old.get("name")
            result[key] = _merged({"settings": {}} if other else old, value)
        else:
            result[key] = value
    return result


def _check_keys(data: Mapping[str, Any], place: str) -> None:
    for key, siblings in _unknown(data, Recipe, ""):
        prefix = key[: len(key) - len(key.split(".")[-1])]
        close = [prefix + near for near in difflib.get_close_matches(key.removeprefix(prefix), siblings, n=1)]
        close = close or difflib.get_close_matches(key, list(_keys(Recipe, "")), n=2)
        mend = f"did you mean {' or '.join(close)}? The keys there are" if close else "the keys there are"
        raise ConfigError(f"{place}: there is no key {key!r}; {mend} {', '.join(siblings)}")


def _unknown(data: Any, kind: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """The dotted keys of `data` that the schema `kind` doesn't know, each with the keys that could stand there."""
    if get_origin(kind) is dict and isinstance(data, Mapping):
        inner = get_args(kind)[1]
        yield from (key for name, value in data.items() for key in _unknown(value, inner, f"{prefix}{name}."))
    if not (isinstance(kind, type) and issubclass(kind, Section) and isinstance(data, Mapping)):
        return
    for key, value in data.items():
        if key in kind.model_fields:
            yield from _unknown(value, kind.model_fields[key].annotation, f"{prefix}{key}.")
        else:
            yield f"{prefix}{_leaf(key, value)}", list(kind.model_fields)


def _leaf(key: Any, value: Any) -> str:
    if isinstance(value, Mapping) and value:
        below, inner = next(iter(value.items()))
        return f"{key}.{_leaf(below, inner)}"
    return str(key)


def _keys(kind: type[Section], prefix: str) -> Iterable[str]:
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
