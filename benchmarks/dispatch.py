"""A turn with five crops whose sub-agents run at once, beside the same sub-agents one after the other, and one crop.

    python benchmarks/dispatch.py --threads 1

An episode in the environment `tool_calling` with the local engine and the tiny model. The main agent's replies are
ready: calls of `crop_video` for windows spread over a real clip, then an answer. Sub-agents are sampled, each with the
frames of its window and a reply of `--new-tokens` tokens; engine and media loader are new for every episode. The
windows' frames are in the store on disk, as for all episodes of a group but the first, or are decoded. Both ways of
dispatch have the same prompts, seeds and replies (compared). The bar is 1.5 times the seconds of one crop.
"""

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Seconds, alternate_sides, build_comparison_row, describe_machine, measure, parser, show
from _fake_components import FullLengthEngine
from media import make_clip

from saccade.config.schema import MediaConfig, ModelConfig
from saccade.environments.tool_calling import ToolCalling
from saccade.ledger import Origin
from saccade.media.cache import CachingMediaLoader
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel
from saccade.protocols import Context
from saccade.rollouts.runner import run_episode
from saccade.types import (
    AnswerType,
    Call,
    Completion,
    Episode,
    EpisodeStatus,
    FinishReason,
    GenerationRequest,
    Media,
    MediaKind,
    SamplingParams,
    Task,
    ToolResult,
)

CALL = '<tool_call>\n{"name": "crop_video", "arguments": %s}\n</tool_call>'


class SequentialCalls(ToolCalling):
    """Runs a call after the one before has ended."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lock = asyncio.Lock()  # first come, first served: the calls start in their order

    async def call_tool(
        self, turn: int, index: int, call: Call, rejection: str | None, ctx: Context
    ) -> tuple[ToolResult, Episode | None]:
        """See ToolEnvironment."""
        async with self._lock:
            return await super().call_tool(turn, index, call, rejection, ctx)


class ReadyMainAgent(FullLengthEngine):
    """Samples the replies of sub-agents; those of the main agent, which begin with a prefill, are ready."""

    def __init__(self, vlm: VisionLanguageModel, media: CachingMediaLoader, calls: str) -> None:
        super().__init__(vlm, media)
        self._texts = iter((calls, "</think><answer>red</answer>"))
        self._renderer = vlm.renderer

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the main agent's next reply, or sample."""
        if request.ledger.segments[-1].origin is not Origin.PREFILL:
            return await super().generate(request)
        ids = self._renderer.encode(next(self._texts)) + self._renderer.stop_ids[:1]
        return Completion(tokens=ids, logprobs=(-1.0,) * len(ids), version=0, finish_reason=FinishReason.STOP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What is measured: an episode of one turn of crops."""

    vlm: VisionLanguageModel
    clip: str
    duration: float  # of the clip, seconds
    frames: int  # of a crop
    new_tokens: int  # of a sub-agent's reply
    threads: int  # of decoding

    def run(self, crops: int, store: str, environment: type[ToolCalling] = ToolCalling) -> Episode:
        """Run the episode with new caches, but for the frames in the store, if there is one."""
        media = CachingMediaLoader.from_config(MediaConfig(folder=store, decode_threads=self.threads))
        starts = [self.duration * (index + 0.5) / (crops + 1) for index in range(crops)]
        arguments = [
            {"start_time": start, "end_time": start + self.frames, "question": "What is shown?"} for start in starts
        ]
        calls = "I look.</think>" + "".join(CALL % json.dumps(each) for each in arguments)
        context = Context(
            engine=ReadyMainAgent(self.vlm, media, calls),
            renderer=self.vlm.renderer,
            media=media,
            sampling=SamplingParams(max_tokens=self.new_tokens),
            seed=0,
        )
        settings = {
            "tools": {"crop_video": {"frame_range": [1, self.frames], "frame_pixels": [784, 12544]}},
            "num_frames": 4,
            "frame_pixels": [784, 12544],
        }
        task = Task(
            id="crops",
            question="What is shown?",
            media=(Media(path=self.clip, kind=MediaKind.VIDEO),),
            answer_type=AnswerType.OPEN,
            ground_truth="red",
        )
        episode = asyncio.run(run_episode(task, partial(environment, **settings), context))
        assert episode.status is EpisodeStatus.ANSWERED, episode.error
        assert [child.ledger.num_sampled_tokens for child in episode.children] == [self.new_tokens] * crops
        return episode

    def check(self, crops: int, store: str) -> int:
        """Compare the sub-agents of both ways of dispatch; return the tokens of one's prompt."""
        parallel, sequential = (self.run(crops, store, each).children for each in (ToolCalling, SequentialCalls))
        for one, other in zip(parallel, sequential, strict=True):
            assert one.ledger.segments[0] == other.ledger.segments[0], "the prompts differ"
            assert one.ledger.sampled_tokens() == other.ledger.sampled_tokens(), "the replies differ"
        return parallel[0].ledger.segments[0].num_tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the turn with and without frames in the store."""
    options = parser(__doc__)
    options.add_argument("--crops", type=int, default=5, help="of the turn, at most five")
    options.add_argument("--frames", type=int, default=8, help="of a crop, one per second")
    options.add_argument("--new-tokens", type=int, default=64, help="of a sub-agent's reply")
    options.add_argument("--seconds", type=int, default=120, help="of the clip")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        clip, store = str(Path(folder, "clip.mp4")), str(Path(folder, "store"))
        make_clip(Path(clip), 20, chosen.seconds // 20, "pyramid", size=(320, 180))
        turn = Turn(
            vlm=VisionLanguageModel(ModelConfig(path=folder, num_threads=chosen.threads)),
            clip=clip,
            duration=float(chosen.seconds // 20 * 20),
            frames=chosen.frames,
            new_tokens=chosen.new_tokens,
            threads=chosen.threads,
        )
        for crops in (1, chosen.crops):
            turn.run(crops, store)  # the store holds the frames from now on
        prompt = turn.check(chosen.crops, store)
        for name, given in (("frames in the store", store), ("frames decoded", "")):
            sides = {
                "at once": partial(turn.run, chosen.crops, given),
                "one by one": partial(turn.run, chosen.crops, given, SequentialCalls),
                "one crop": partial(turn.run, 1, given),
            }
            seconds: dict[str, list[Seconds]] = alternate_sides(
                {side: partial(measure, run) for side, run in sides.items()}, chosen.rounds
            )
            case = f"{chosen.crops} crops of {prompt} + {chosen.new_tokens} tokens, {name}"
            row = build_comparison_row(case, {side: seconds[side] for side in ("at once", "one by one")})
            for unit, index in (("s", 0), ("CPU s", 1)):
                ratios = [
                    five[index] / one[index] for five, one in zip(seconds["at once"], seconds["one crop"], strict=True)
                ]
                of_one = build_comparison_row("", {"one crop": seconds["one crop"], "five": seconds["at once"]})
                row[f"one crop {unit}"] = of_one[f"one crop {unit}"]
                row[f"of one crop, {unit}"] = row[f"at once {unit}"] / of_one[f"one crop {unit}"]
                row[f"of one crop, {unit}, spread"] = f"{min(ratios):.2f}–{max(ratios):.2f}"
            rows.append(row)
    show("A turn of crops, tiny model", rows, describe_machine(), chosen.out)


if __name__ == "__main__":
    main()
