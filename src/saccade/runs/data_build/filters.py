"""The filters of questions: votes of the teacher, each one reply without tools, graded by the recipe's rewards.

task ─┬─ without the video: more than `max_no_video_correct` votes right? ──> dropped
      ├─ a few frames of the whole video: all votes right? ──> dropped as too easy
      ├─ the frames of its scenes: any vote wrong? ──> dropped: the teacher doesn't confirm its own answer
      └─> stays
"""

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.chat.parser import parse_reply
from saccade.config.schema import CaptionsConfig, QuestionFiltersConfig
from saccade.environments.prompt import format_question
from saccade.errors import EngineError
from saccade.ledger import Ledger
from saccade.media.frame_sampling import interleave_timestamps, sample_uniform_times
from saccade.media.scenes import Scene
from saccade.protocols import MediaLoader, ScoreFn
from saccade.runs.data_build.captions import load_frames, sample_scene_times
from saccade.runs.data_build.journal import Teacher
from saccade.runs.data_build.questions import PROVENANCE
from saccade.types import Episode, EpisodeStatus, Message, Score, Task, Turn
from saccade.utils.async_utils import gather_or_cancel
from saccade.utils.hashing import derive_seed

NO_VIDEO, FEW_FRAMES, AGREEMENT = "no_video", "few_frames", "agreement"
STAGES = (NO_VIDEO, FEW_FRAMES, AGREEMENT)
PROMPT = "Answer the question about a video, of which you see some frames, each after its time in seconds."
NO_VIDEO_PROMPT = "Answer the question about a video that you don't see. Give the most probable answer."
ANSWER_PROMPT = (
    " Give only the answer, inside <answer></answer>: of a question with options the letter, of one about when "
    "something is shown the start and the end in seconds, such as 3.5-8."
)
REASONS = {
    NO_VIDEO: "answerable without the video",
    FEW_FRAMES: "answerable from a few frames",
    AGREEMENT: "the votes don't confirm the answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Voting:
    """What votes need besides the task."""

    settings: QuestionFiltersConfig
    captions: CaptionsConfig  # the frames of a scene, and the size of frames
    media: MediaLoader
    score_fn: ScoreFn
    seed: int

    def is_dropped(self, stage: str, num_correct: int) -> bool:
        """Return whether a filter drops a task with so many right votes."""
        if stage == NO_VIDEO:
            return num_correct > self.settings.max_no_video_correct
        return (num_correct == count_votes(stage, self.settings)) is (stage == FEW_FRAMES)


def count_votes(stage: str, settings: QuestionFiltersConfig) -> int:
    """Return how many votes a filter takes; 0 for one that is off."""
    votes = {
        NO_VIDEO: settings.no_video_votes,
        FEW_FRAMES: settings.few_frames_votes,
        AGREEMENT: settings.agreement_votes,
    }
    return votes[stage]


def sample_vote_times(
    stage: str, scenes: Sequence[Scene], duration: float, settings: QuestionFiltersConfig, captions: CaptionsConfig
) -> tuple[float, ...]:
    """Return the times, in seconds, of the frames that a vote sees."""
    if stage == NO_VIDEO:
        return ()
    if stage == FEW_FRAMES:
        return sample_uniform_times(duration, settings.few_frames)
    return tuple(time for scene in scenes for time in sample_scene_times(scene, captions))


async def collect_votes(task: Task, stage: str, voting: Voting, *, teacher: Teacher) -> list[bool]:
    """Return for each vote of a filter whether it is right. Raises EngineError or MediaError."""
    path = task.media[0].path
    scenes = [Scene(*bounds) for bounds in task.extras[PROVENANCE]["scenes"]]
    info = await voting.media.probe(path)
    times = sample_vote_times(stage, scenes, info.duration, voting.settings, voting.captions)
    frames = await load_frames(path, times, voting.captions, teacher=teacher, media=voting.media)
    messages = (
        Message(role="system", parts=((NO_VIDEO_PROMPT if stage == NO_VIDEO else PROMPT) + ANSWER_PROMPT,)),
        Message(role="user", parts=(*interleave_timestamps(frames), format_question(task))),
    )

    async def vote(index: int) -> bool:
        seed = derive_seed(voting.seed, stage, task.digest, index)
        completion = await teacher.ask(messages, voting.settings, seed=seed)
        turn = Turn(reply=parse_reply(completion.text or ""))
        episode = Episode(task=task, environment="vote", ledger=Ledger(), turns=(turn,), status=EpisodeStatus.ANSWERED)
        return await is_right(episode, voting.score_fn)

    return await gather_or_cancel([vote(index) for index in range(count_votes(stage, voting.settings))])


async def is_right(episode: Episode, score_fn: ScoreFn) -> bool:
    """Return whether an episode's answer is correct. Raises EngineError if a reward can't grade it."""
    (result,) = await score_fn([episode])
    if not isinstance(result, Score):
        raise EngineError(f"the answer to {episode.task.id} can't be graded: {result.reason}", key="rewards")
    return result.is_correct
