"""Bookkeeping of a turn as a conversation grows: the ledger beside tokenizing the whole history again each turn.

    python benchmarks/bookkeeping.py --threads 1

An episode in the environment `tool_calling`: each reply thinks and calls `show_frames`, whose result shows frames with
their times. The replies are ready, so that what Saccade does between a reply and the next request is measured: parse
the reply, append it, run the tool (its frames aren't decoded), render the result, append it, and derive the ids that an
engine reads. The baseline does one of these, as trainers do that keep messages: it applies the tokenizer's template to
all messages, repeats the placeholder of each image once per visual token, and encodes the text. Its ids are compared
with the ledger's. Rewards are computed once per episode and shown by turn. The bar is 1 ms of CPU time for a turn at
8,000 tokens, and a cost that grows with the new tokens alone.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from _common import Seconds, alternate_sides, build_comparison_row, describe_machine, measure, parser, show
from _fake_components import NoiseMediaLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from saccade.chat.renderer import ChatRenderer, load_renderer
from saccade.config.load import load_recipe
from saccade.environments.tool_calling import ToolCalling
from saccade.ledger import ImageRef, Ledger
from saccade.models.tiny import make_tiny_model
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards
from saccade.rollouts.runner import run_episode
from saccade.tools.base import load_tool
from saccade.types import (
    AnswerType,
    Completion,
    Episode,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    Media,
    MediaKind,
    Message,
    SamplingParams,
    Task,
    ToolResult,
)

THOUGHT = (
    "The man in the coat turns left and, as far as I can see, opens the next door; I look at the following seconds. "
)
IMAGE_TOKEN = "<|image_pad|>"
NUM_NEAR = 5  # turns before a length whose median counts
TASK = Task(
    id="doors",
    question="Which door does the man open last?",
    media=(Media(path="clip.mp4", kind=MediaKind.VIDEO),),
    answer_type=AnswerType.OPEN,
    ground_truth="the second",
)


class RecordingEnvironment(ToolCalling):
    """Records the messages that it shows, for the baseline: the prompt's, and the results of each turn."""

    def __init__(self, shown: list[tuple[Message, ...]], **settings: Any) -> None:
        super().__init__(**settings)
        self._shown = shown

    async def build_prompt(self, task: Task, ctx: Context) -> tuple[Message, ...]:
        """See ToolEnvironment."""
        self._shown.append(await super().build_prompt(task, ctx))
        return self._shown[-1]

    def build_result_messages(self, results: Sequence[ToolResult]) -> tuple[Message, ...]:
        """See ToolEnvironment."""
        self._shown.append(super().build_result_messages(results))
        return self._shown[-1]


class ReadyEngine:
    """Returns completions that were made before; records when requests came and replies went."""

    has_separate_weights = True
    version = 0

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self.ledgers: list[Ledger] = []
        self.times: list[tuple[Seconds, Seconds]] = []  # of a request and of its reply: wall and CPU time
        self.id_seconds: list[Seconds] = []  # of deriving the ids of a request

    async def generate(self, request: GenerationRequest) -> Completion:
        """Derive the ids, and return the next completion."""
        arrived = time.perf_counter(), time.process_time()
        self.id_seconds.append(measure(request.ledger.input_ids))
        self.ledgers.append(request.ledger)
        completion = self._completions[len(self.times)]
        self.times.append((arrived, (time.perf_counter(), time.process_time())))
        return completion

    def compute_turn_seconds(self) -> list[Seconds]:
        """Return the seconds between each reply and the next request."""
        pairs = pairwise(self.times)
        return [(after[0] - before[0], after[1] - before[1]) for (_, before), (after, _) in pairs]

    def compute_total_seconds(self) -> list[Seconds]:
        """Return the same, with deriving the ids of the next request."""
        pairs = zip(self.compute_turn_seconds(), self.id_seconds[1:], strict=True)
        return [(turn[0] + ids[0], turn[1] + ids[1]) for turn, ids in pairs]


def build_completions(renderer: ChatRenderer, turns: int) -> list[Completion]:
    """Return one completion per turn, each with a call, and a last one with the answer."""
    call = '<tool_call>\n{"name": "show_frames", "arguments": {"start_time": %d, "end_time": %d}}\n</tool_call>'
    texts = [f"<think>{THOUGHT * 2}</think>{call % (at, at + 4)}" for at in range(turns)]
    encoded = [renderer.encode(text) + renderer.stop_ids[:1] for text in (*texts, "<answer>the second</answer>")]
    return [
        Completion(tokens=ids, logprobs=(-1.0,) * len(ids), version=0, finish_reason=FinishReason.STOP)
        for ids in encoded
    ]


class Conversation:
    """One episode, and what the baseline needs to tokenize it again."""

    def __init__(self, folder: str, turns: int) -> None:
        self._renderer, self._turns = load_renderer(folder), turns
        self._schemas = [dict(load_tool("show_frames").schema)]
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self._completions = build_completions(self._renderer, turns)
        self._score = compose_rewards(load_recipe("tiny/para_grpo").rewards)
        self._run()  # records the messages and the ledgers
        self.lengths = [len(ledger) for ledger in self._engine.ledgers]

    def _run(self) -> Episode:
        self._shown: list[tuple[Message, ...]] = []
        self._engine = ReadyEngine(self._completions)
        settings = {
            "tools": {"show_frames": {"frame_pixels": [784, 12544]}},
            "max_tool_turns": self._turns + 1,
            "max_context_tokens": 2**20,
            "num_frames": 8,
            "frame_pixels": [784, 12544],
            "force_think": False,
            # The usual prompts spell tags, which the ledger encodes as text, and a tokenizer as their special tokens.
            "system_prompt": "You answer questions about a video. Of it you see a few frames, each after its time.",
            "final_answer_prompt": "",
        }
        context = Context(
            engine=self._engine,
            renderer=self._renderer,
            media=NoiseMediaLoader(),
            sampling=SamplingParams(max_tokens=4096),
            seed=0,
        )
        make_environment = partial(RecordingEnvironment, self._shown, **settings)
        episode = asyncio.run(run_episode(TASK, make_environment, context))
        assert episode.status is EpisodeStatus.ANSWERED, episode.error
        assert all(result.ok for result in episode.results)
        return episode

    def run(self) -> tuple[list[Seconds], list[Seconds], Seconds]:
        """Return the seconds of each turn of a new episode, the same without ids, and those of its rewards."""
        episode = self._run()
        rewards = measure(lambda: asyncio.run(self._score([episode])))
        return self._engine.compute_total_seconds(), self._engine.compute_turn_seconds(), rewards

    def build_messages(self, turn: int) -> list[dict[str, Any]]:
        """Return the messages before the reply of a turn, as transformers takes them."""
        messages = list(self._shown[0])
        for completion, results in zip(self._completions[:turn], self._shown[1:], strict=False):
            text = self._renderer.decode(completion.tokens[:-1])
            messages += [Message(role="assistant", parts=(text,)), *results]
        return [
            {
                "role": message.role,
                "content": [
                    {"type": "image"} if isinstance(part, ImageRef) else {"type": "text", "text": part}
                    for part in message.parts
                ],
            }
            for message in messages
        ]

    def tokenize(self, messages: list[dict[str, Any]], counts: Sequence[int]) -> list[int]:
        """Return the ids of all messages; `counts` are the visual tokens of each image."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=self._schemas, add_generation_prompt=True, tokenize=False
        )
        first, *others = str(text).split(IMAGE_TOKEN)
        parts = [IMAGE_TOKEN * count + part for count, part in zip(counts, others, strict=True)]
        ids: list[int] = self._tokenizer("".join((first, *parts)), add_special_tokens=False)["input_ids"]
        return ids

    def find_near(self, length: int) -> range:
        """Return the turns before the one that exceeds a length."""
        end = sum(each <= length for each in self.lengths)
        if not 1 < end < len(self.lengths):
            raise SystemExit(f"turns have {self.lengths[1]:,} to {self.lengths[-1]:,} tokens, none has {length:,}")
        return range(max(1, end - NUM_NEAR), end)

    def check(self) -> None:
        """Compare the ids of some turns on both sides."""
        for turn in range(0, len(self.lengths), 8):
            ledger = self._engine.ledgers[turn]
            ids = self.tokenize(self.build_messages(turn), [slot.num_tokens for slot in ledger.slots()])
            assert tuple(ids) == ledger.input_ids(), f"the ids of turn {turn} differ"

    def tokenize_turns(self, turns: Sequence[int]) -> Seconds:
        """Return the median seconds of tokenizing the history at each of some turns."""
        seconds = []
        for turn in turns:
            messages = self.build_messages(turn)
            counts = [slot.num_tokens for slot in self._engine.ledgers[turn].slots()]
            seconds.append(measure(partial(self.tokenize, messages, counts)))
        return find_medians(seconds)


def find_medians(seconds: Sequence[Seconds]) -> Seconds:
    """Return the medians of wall and of CPU seconds."""
    wall, cpu = (statistics.median(values) for values in zip(*seconds, strict=True))
    return wall, cpu


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the turns near each length, both sides in turn."""
    options = parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[2000, 4000, 8000, 16000, 32000])
    options.add_argument("--turns", type=int, default=90, help="of the conversation")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        conversation = Conversation(folder, chosen.turns)
    conversation.check()
    near = {length: conversation.find_near(length) for length in chosen.lengths}
    sides = {
        "saccade": conversation.run,
        "all again": lambda: [conversation.tokenize_turns(turns) for turns in near.values()],
    }
    measured: dict[str, list[Any]] = alternate_sides(sides, chosen.rounds)
    totals, bare, rewards = zip(*measured["saccade"], strict=True)
    rows = []
    for index, (length, turns) in enumerate(near.items()):
        # The reply of the turn before is parsed on the way to this turn's request.
        ours, without_ids = (
            [find_medians([times[turn - 1] for turn in turns]) for times in each] for each in (totals, bare)
        )
        new = conversation.lengths[turns[-1]] - conversation.lengths[turns[-1] - 1]
        case = f"a turn of {new} new tokens at {length:,} tokens"
        row = build_comparison_row(
            case, {"saccade": ours, "all again": [seconds[index] for seconds in measured["all again"]]}
        )
        row["without ids CPU s"] = find_medians(without_ids)[1]
        rows.append(row | {"rewards CPU s a turn": find_medians(rewards)[1] / chosen.turns})
    show("Bookkeeping of a turn", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
