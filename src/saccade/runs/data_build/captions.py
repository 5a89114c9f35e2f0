"""The stage of captions: the teacher describes the frames of each scene."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.config.schema import CaptionsConfig
from saccade.ledger import ImageRef
from saccade.media.frame_sampling import interleave_timestamps, sample_window_times
from saccade.media.scenes import Scene
from saccade.protocols import MediaLoader, PixelBudget
from saccade.runs.data_build.clips import Clip
from saccade.runs.data_build.journal import Teacher
from saccade.runs.data_build.replies import InvalidReply, parse_json, validate
from saccade.types import Message
from saccade.utils.hashing import derive_seed

STAGE = "captions"
PROMPT = """You see frames of one scene of a video, each after its time in seconds. Describe what is visible: people, \
objects, texts, actions, and what changes from frame to frame. Describe only what you see.
Reply with JSON alone: {"summary": "two or three sentences about the scene", "frames": [{"time": 12.5, "caption": \
"one sentence"}]}, with one entry per frame, in their order."""
_TIME_TOLERANCE = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class FrameCaption:
    """What a frame shows; its time in seconds."""

    time: float
    caption: str


@dataclass(frozen=True, slots=True)
class SceneText:
    """The reply to the prompt."""

    summary: str
    frames: tuple[FrameCaption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedScene:
    """A scene of a clip with its description."""

    clip: Clip
    index: int
    text: SceneText

    @property
    def scene(self) -> Scene:
        """Start and end, in seconds."""
        return self.clip.record.scenes[self.index]


def sample_scene_times(scene: Scene, settings: CaptionsConfig) -> tuple[float, ...]:
    """Return the times, in seconds, of the frames that the teacher sees of a scene."""
    least, most = settings.frame_range
    return sample_window_times(scene.start, scene.end, fps=settings.fps, min_frames=least, max_frames=most)


async def caption_scene(
    clip: Clip, index: int, settings: CaptionsConfig, *, teacher: Teacher, media: MediaLoader, seed: int
) -> CaptionedScene:
    """Return a scene with the teacher's description. Raises InvalidReply, EngineError or MediaError."""
    scene = clip.record.scenes[index]
    frames = await load_frames(clip.path, sample_scene_times(scene, settings), settings, teacher=teacher, media=media)
    message = Message(role="user", parts=(*interleave_timestamps(frames), PROMPT))
    seed = derive_seed(seed, STAGE, clip.record.digest, index)
    completion = await teacher.ask((message,), settings, seed=seed)
    return CaptionedScene(clip=clip, index=index, text=read_caption(parse_json(completion), scene))


async def load_frames(
    path: str, times: Sequence[float], settings: CaptionsConfig, *, teacher: Teacher, media: MediaLoader
) -> list[ImageRef]:
    """Return the frames of a video shown at `times`, in seconds, each once. Raises MediaError."""
    if not times:
        return []
    budget = PixelBudget(min_pixels=settings.frame_pixels[0], max_pixels=settings.frame_pixels[1])
    frames = await media.load_frames(path, times, factor=teacher.renderer.factor, budget=budget)
    return list({frame.key: frame for frame in frames}.values())


def read_caption(values: Sequence[Any], scene: Scene) -> SceneText:
    """Return a description of a scene from the JSON of a reply: the last object with `frames`, as a draft precedes it.

    Raises InvalidReply for blank texts and times outside the scene.
    """
    value = next((item for item in reversed(values) if isinstance(item, Mapping) and "frames" in item), values[-1])
    text = validate(value, SceneText, "a field is missing or has the wrong type")
    if not text.summary.strip() or not text.frames or not all(frame.caption.strip() for frame in text.frames):
        raise InvalidReply("a caption is blank", text)
    outside = [
        frame.time
        for frame in text.frames
        if not scene.start - _TIME_TOLERANCE <= frame.time <= scene.end + _TIME_TOLERANCE
    ]
    if outside:
        raise InvalidReply("a time is outside the scene", f"{outside[0]} is not in {scene.start} to {scene.end}")
    return text
