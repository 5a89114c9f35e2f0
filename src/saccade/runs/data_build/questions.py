"""The stage of questions: the teacher asks about the captions of one scene, or of two scenes of one video."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, isqrt
from typing import Any, cast

from saccade.config.schema import QuestionsConfig
from saccade.data.dataset import find_task_problem
from saccade.data.option_shuffle import shuffle_options
from saccade.data.task_builder import find_option_letter, strip_option_label
from saccade.media.video import END_TOLERANCE
from saccade.rewards.answer_types.base import get_answer_type
from saccade.runs.data_build.captions import CaptionedScene
from saccade.runs.data_build.clips import Clip
from saccade.runs.data_build.journal import Teacher
from saccade.runs.data_build.replies import InvalidReply, Rejection, parse_json, validate
from saccade.types import AnswerType, Media, Message, Task
from saccade.utils.hashing import derive_seed

STAGE = "questions"
PROMPT = """Below are descriptions of {scenes} of a video that lasts {duration:.1f} seconds.

{captions}

Write {count} questions, of these types in this order: {types}. A viewer of the whole video answers them, who doesn't \
have these descriptions: name what is shown, and never mention a caption, a description, or the number of a scene or \
frame. {relation}Each question has exactly one right answer, which neither the question nor general knowledge gives \
away.
The types:
{rules}
Reply with JSON alone: a list of {{"question": "...", "answer_type": "...", "options": [], "answer": ...}}."""
RELATION = "Each question needs both scenes. "
RULES = {
    AnswerType.CHOICE: "- choice: {num_options} short, different options of which one is right; the answer is the text "
    "of the right one",
    AnswerType.OPEN: "- open: the answer is a text of one to five words",
    AnswerType.NUMBER: "- number: the answer is a number",
    AnswerType.GROUNDING: "- grounding: the question asks when something is shown; the answer is [start, end] in "
    "seconds of the video",
}
MAX_QUESTION_CHARS = 500
MAX_OPTION_CHARS = 200
MAX_ANSWER_WORDS = 10  # of an open answer
PROVENANCE = "provenance"  # the key of a task's extras that holds where it comes from
_CAPTION_REFERENCE = re.compile(
    r"\b(?:captions?|the descriptions?|(?:scenes?|frames?) (?:number )?(?:\d|one\b|two\b)"
    r"|(?:first|second|two|both) scenes?)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WrittenQuestion:
    """A question as the teacher writes it."""

    question: str
    answer_type: str
    answer: Any
    options: tuple[Any, ...] | None = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionUnit:
    """One request: one or two scenes of a clip, and the types of the questions about them."""

    scenes: tuple[CaptionedScene, ...]
    answer_types: tuple[str, ...]

    @property
    def clip(self) -> Clip:
        """The clip of all scenes."""
        return self.scenes[0].clip

    @property
    def name(self) -> str:
        """The start of the ids of its questions."""
        return "-".join((self.clip.name, *(f"s{scene.index}" for scene in self.scenes)))


def plan_units(scenes: Sequence[CaptionedScene], settings: QuestionsConfig, *, seed: int) -> list[QuestionUnit]:
    """Return the requests about captioned scenes.

    `answer_types` take turns within a request, from a start that is drawn per request, and pairs are drawn from all
    scenes of a clip. So a scene whose caption failed changes no other request.
    """
    by_clip: dict[str, list[CaptionedScene]] = {}
    for scene in scenes:
        by_clip.setdefault(scene.clip.record.digest, []).append(scene)
    units = []
    for digest, captioned in by_clip.items():
        by_index = {scene.index: scene for scene in captioned}
        pairs = draw_pairs(len(captioned[0].clip.record.scenes), settings.pairs_per_video, seed=seed, digest=digest)
        groups: list[tuple[tuple[int, ...], int]] = [((index,), settings.num_per_scene) for index in by_index]
        groups += [(pair, settings.num_per_pair) for pair in pairs if by_index.keys() >= {*pair}]
        for indices, count in groups:
            start = derive_seed(seed, "answer_types", digest, indices) % len(settings.answer_types)
            types = itertools.islice(itertools.cycle(settings.answer_types), start, start + count)
            unit = QuestionUnit(scenes=tuple(by_index[index] for index in indices), answer_types=tuple(types))
            units += [unit] if count else []
    return units


def draw_pairs(num_scenes: int, count: int, *, seed: int, digest: str) -> list[tuple[int, ...]]:
    """Draw `count` different pairs of scenes of a clip, all if there are fewer; a larger count keeps the first ones."""
    num_pairs = comb(num_scenes, 2)
    swapped: dict[int, int] = {}  # the positions that a Fisher-Yates shuffle of all pairs has changed so far
    pairs: list[tuple[int, ...]] = []
    for position in range(min(count, num_pairs)):
        other = position + derive_seed(seed, "pairs", digest, position) % (num_pairs - position)
        number, swapped[other] = swapped.get(other, other), swapped.get(position, position)
        # Pair number n(n - 1) / 2 + m consists of the scenes m < n.
        later = (1 + isqrt(1 + 8 * number)) // 2
        pairs.append((number - comb(later, 2), later))
    return pairs


async def write_questions(
    unit: QuestionUnit, settings: QuestionsConfig, *, teacher: Teacher, seed: int, provenance: Mapping[str, Any]
) -> list[Task | Rejection]:
    """Return the questions of a unit as tasks, unusable ones as rejections. Raises InvalidReply or EngineError."""
    message = Message(role="user", parts=(format_prompt(unit, settings),))
    completion = await teacher.ask((message,), settings, seed=derive_seed(seed, STAGE, unit.name))
    return read_questions(parse_json(completion), unit, settings, seed=seed, provenance=provenance)


def format_prompt(unit: QuestionUnit, settings: QuestionsConfig) -> str:
    """Return the request for a unit's questions."""
    captions = []
    for number, item in enumerate(unit.scenes, start=1):
        lines = [f"Scene {number}, from {item.scene.start:.1f} to {item.scene.end:.1f} seconds: {item.text.summary}"]
        lines += [f"- at {frame.time:.1f} seconds: {frame.caption}" for frame in item.text.frames]
        captions.append("\n".join(lines))
    is_pair = len(unit.scenes) > 1
    rules = [
        RULES[AnswerType(name)].format(num_options=settings.num_options) for name in dict.fromkeys(unit.answer_types)
    ]
    return PROMPT.format(
        scenes="two scenes" if is_pair else "one scene",
        duration=unit.clip.record.duration,
        captions="\n\n".join(captions),
        count=len(unit.answer_types),
        types=", ".join(unit.answer_types),
        relation=RELATION if is_pair else "",
        rules="\n".join(rules),
    )


def read_questions(
    values: Sequence[Any], unit: QuestionUnit, settings: QuestionsConfig, *, seed: int, provenance: Mapping[str, Any]
) -> list[Task | Rejection]:
    """Return the questions in the JSON of a reply as tasks, unusable ones as rejections.

    They are in lists of objects, under `questions`, or objects one after another. Raises InvalidReply for none.
    """
    items: list[Any] = []
    for value in values:
        if isinstance(value, Mapping):
            value = value.get("questions", [value])
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            items += value
    if not any("question" in item for item in items if isinstance(item, Mapping)):
        raise InvalidReply("the reply holds no questions", values)
    results: list[Task | Rejection] = []
    for index, item in enumerate(items):
        name = f"{unit.name}-{index}"
        try:
            if index >= len(unit.answer_types):
                raise InvalidReply("more questions than requested", item)
            written = validate(item, WrittenQuestion, "a field is missing or has the wrong type")
            results.append(build_task(written, unit, settings, id=name, seed=seed, provenance=provenance))
        except InvalidReply as error:
            results.append(Rejection(stage=STAGE, item=name, reason=error.reason, detail=error.detail))
    return results


def build_task(
    written: WrittenQuestion,
    unit: QuestionUnit,
    settings: QuestionsConfig,
    *,
    id: str,
    seed: int,
    provenance: Mapping[str, Any],
) -> Task:
    """Return a written question as a task whose options are shuffled. Raises InvalidReply for an unusable one."""
    question, answer_type = " ".join(written.question.split()), written.answer_type.strip().lower()
    if not question or len(question) > MAX_QUESTION_CHARS:
        raise InvalidReply("the question is blank or too long", question)
    if answer_type not in unit.answer_types:
        raise InvalidReply("the answer type was not requested", written.answer_type)
    if match := _CAPTION_REFERENCE.search(" ".join([question, *map(str, written.options or ())])):
        raise InvalidReply("the question refers to captions or scenes", f"{match[0]!r} in: {question}")
    options = tuple(strip_option_label(str(option)) for option in written.options or ())
    ground_truth: Any
    if answer_type == AnswerType.CHOICE:
        if (
            len(options) != settings.num_options
            or not all(options)
            or len({_fold(text) for text in options}) < len(options)
        ):
            raise InvalidReply("the options are too few, too many, blank or the same", options)
        if max(map(len, options)) > MAX_OPTION_CHARS:
            raise InvalidReply("an option is too long", max(options, key=len))
        ground_truth = find_option_letter(written.answer, options)
    else:
        options = ()
        answer = None if isinstance(written.answer, bool) else written.answer
        ground_truth = get_answer_type(answer_type).parse_ground_truth(answer)
    if ground_truth is None:
        raise InvalidReply("the answer doesn't fit its type", f"{written.answer!r} for {answer_type}")
    if answer_type == AnswerType.OPEN:
        if len(ground_truth.split()) > MAX_ANSWER_WORDS:
            raise InvalidReply("the answer is too long", ground_truth)
        if re.search(rf"(?<!\w){re.escape(_fold(ground_truth))}(?!\w)", _fold(question)):
            raise InvalidReply("the question names its answer", f"{ground_truth!r} in: {question}")
    if answer_type == AnswerType.GROUNDING:
        _check_window(cast(tuple[float, float], ground_truth), unit)
    task = Task(
        id=id,
        question=question,
        media=(Media(path=unit.clip.path),),
        answer_type=answer_type,
        ground_truth=ground_truth,
        options=options,
        extras={
            PROVENANCE: {
                "digest": unit.clip.record.digest,
                "scenes": [[item.scene.start, item.scene.end] for item in unit.scenes],
                **provenance,
            }
        },
    )
    if problem := find_task_problem(task):
        raise InvalidReply("the answer doesn't fit its type", problem[1])
    # Teachers prefer some letters for the right answer.
    shuffled = shuffle_options(task, seed=seed, sample_index=0)
    return replace(task, options=shuffled.options, ground_truth=shuffled.ground_truth)


def _check_window(window: tuple[float, float], unit: QuestionUnit) -> None:
    """Raise InvalidReply unless a window (seconds) is within the scenes and is shorter than the video."""
    start = min(item.scene.start for item in unit.scenes) - END_TOLERANCE
    end = max(item.scene.end for item in unit.scenes) + END_TOLERANCE
    if not start <= window[0] < window[1] <= end:
        raise InvalidReply("the window is outside its scenes", f"{window} is not in {start:g} to {end:g}")


def drop_repeated(tasks: Iterable[Task]) -> tuple[list[Task], list[Rejection]]:
    """Return the tasks without those that repeat an earlier question about the same video, and rejections of these."""
    unique: dict[tuple[str, str], Task] = {}
    rejections = []
    for task in tasks:
        first = unique.setdefault((task.extras[PROVENANCE]["digest"], _fold(task.question)), task)
        if first is not task:
            rejections.append(
                Rejection(stage=STAGE, item=task.id, reason="the question is repeated", detail=task.question)
            )
    return list(unique.values()), rejections


def _fold(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".?!")
