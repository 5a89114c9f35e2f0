"""An episode of the Python environment: real code in the real sandbox, with predefined replies."""

import asyncio

from viewer_cases import write_clip, write_rollouts

from saccade import plugins, sandbox
from saccade.config.load import load_recipe
from saccade.engines.scripted import Scripted
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards
from saccade.rollouts.runner import run_episode
from saccade.runs.pipeline import IMAGES_FOLDER
from saccade.runs.run_folder import Run
from saccade.training.episode_log import RolloutRecord
from saccade.types import AnswerType, EpisodeStatus, Media, SamplingParams, Task

PLOT = """\
times = [i / video_clue_0.get_avg_fps() for i in range(len(video_clue_0))]
brightness = [video_clue_0[i].asnumpy().mean() for i in range(len(video_clue_0))]
print(f"{len(times)} frames, <b>{brightness[0]:.0f}</b> to {brightness[-1]:.0f}")
plt.plot(times, brightness)
plt.xlabel("time in s")
plt.ylabel("mean brightness")
plt.show()"""
SHOW = """\
for i in (10, 60, 120):
    Image.fromarray(video_clue_0[i].asnumpy()).show()"""
FAIL = 'print("so far")\nbrightness[1000]'
REPLIES = (
    f"I plot the brightness.<code>\n```python\n{PLOT}\n```\n</code>",
    f"I look at one late moment.<code>\n```python\n{FAIL}\n```\n</code>",
    f"Some frames, then.<code>\n```python\n{SHOW}\n```\n</code>",
    "It grows.<answer>\\boxed{brighter}</answer>",
)


async def run_code_episode(folder, renderer):
    """Return an episode, scored, that plots a clip's brightness, fails, shows three frames, and answers."""
    clip = folder / "media" / "clip.mp4"
    write_clip(clip)
    task = Task(
        id="brightness",
        question="Does the clip become brighter or darker?",
        media=(Media(path=str(clip)),),
        answer_type=AnswerType.OPEN,
        ground_truth="brighter",
    )
    recipe = load_recipe("tiny/pyvision_video")
    ctx = Context(
        engine=Scripted(renderer, replies=REPLIES),
        renderer=renderer,
        media=CachingMediaLoader(generated_dir=str(folder / IMAGES_FOLDER)),
        sampling=SamplingParams(max_tokens=4000),
        seed=5,
    )
    episode = await run_episode(task, plugins.resolve("environments", "python", {}), ctx)
    assert episode.status is EpisodeStatus.ANSWERED, episode.error
    return episode, (await compose_rewards(recipe.rewards)([episode]))[0]


def make_code_run(folder, renderer):
    """Make a run with one episode of Python; return the episode's ref."""
    Run.create(folder, load_recipe("tiny/pyvision_video"), metadata={})
    try:
        episode, score = asyncio.run(run_code_episode(folder, renderer))
    finally:
        sandbox.close_shared_servers()
    record = RolloutRecord(stage="rl", step=1, group=0, index=0, outcome="kept", episode=episode, score=score)
    write_rollouts(folder, 1, [record])
    return "rl/1/0/0"
