"""OpenEnv servers as environments: one that follows the published protocol, and one of the real package."""

import asyncio
import json
import math
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from commands import free_port, reserve_refusing_port
from error_cases import raises
from openenv_game import Game, serve_protocol

from saccade import plugins
from saccade.config.schema import RewardTerm
from saccade.engines.scripted import scripted
from saccade.environments.openenv import Openenv, decode_pixels
from saccade.errors import ConfigError
from saccade.media.cache import CachingMediaLoader
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards
from saccade.rollouts.collect import collect
from saccade.rollouts.runner import run_episode
from saccade.testing import check_environment
from saccade.types import AnswerType, EpisodeStatus, SamplingParams, Task

PYTHON = Path(__file__).parents[2] / ".venv-openenv" / "bin" / "python"
TASK = Task(
    id="guess",
    question="Play.",
    media=(),
    answer_type=AnswerType.OPEN,
    ground_truth="",
    extras={"reset": {"number": 7}},
)
SETTINGS = {"action_field": "guess", "text_fields": ["text"], "image_fields": ["picture"], "image_pixels": (256, 4096)}


@pytest.fixture(scope="module", params=["protocol", pytest.param("openenv-core", marks=pytest.mark.slow)])
def server(request, tmp_path_factory):
    if request.param == "protocol":
        with serve_protocol() as url:
            yield url
        return
    if not PYTHON.exists():
        pytest.skip(".venv-openenv is missing: scripts/bootstrap --openenv makes it")
    port, log = free_port(), tmp_path_factory.mktemp("openenv") / "server.log"
    with log.open("w") as output:
        command = [PYTHON, Path(__file__).with_name("openenv_game.py"), str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                assert process.poll() is None, log.read_text()
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(300)


def build_context(renderer, replies):
    engine = scripted(renderer, replies=replies)
    return Context(engine=engine, renderer=renderer, media=CachingMediaLoader(), sampling=SamplingParams(), seed=1)


def play(url, renderer, *replies, task=TASK, **settings):
    environment = partial(Openenv, **{"url": url, **SETTINGS, **settings})
    return asyncio.run(run_episode(task, environment, build_context(renderer, replies)))


def get_texts(episode, renderer):
    return [renderer.decode(segment.tokens) for segment in episode.ledger.segments if not segment.is_sampled]


@pytest.mark.slow
def test_the_environment_fulfills_the_contract(server, renderer):
    asyncio.run(check_environment(partial(Openenv, url=server, **SETTINGS), renderer, task=TASK))


def test_an_episode_has_the_servers_observations_images_and_rewards(server, renderer):
    episode = play(server, renderer, "3", "<answer>9</answer>", "seven", "7")
    assert episode.status is EpisodeStatus.ANSWERED
    assert [turn.reward for turn in episode.turns] == [0.25, 0.25, None, 1.0]
    prompt, higher, lower, error = get_texts(episode, renderer)
    assert "Play.\n" in prompt
    assert "Guess a number from 0 to 9." in prompt
    assert "higher" in higher
    assert "lower" in lower
    assert "Error: guess: " in error
    media, colors = CachingMediaLoader(), []
    for segment in episode.ledger.segments:
        colors += [tuple(media.load_pixels(slot.image)[0, 0]) for slot in segment.slots]
    assert colors == [(128, 128, 128), (255, 0, 0), (0, 0, 255)]


def test_groups_start_alike_and_are_scored_by_their_returns(server, renderer):
    score = compose_rewards({"environment_return": RewardTerm()})
    task = Task(id="seeded", question="", media=(), answer_type=AnswerType.OPEN, ground_truth="")
    environment = partial(Openenv, url=server, **SETTINGS, max_replies=10)
    ctx = build_context(renderer, lambda ledger: str(sum(segment.is_sampled for segment in ledger.segments)))
    [group] = asyncio.run(collect([task], lambda task: environment, ctx, group_size=6, score_fn=score))
    assert {scored.episode.status for scored in group.scored_episodes} == {EpisodeStatus.ANSWERED}
    assert len({scored.episode.ledger.segments for scored in group.scored_episodes}) == 1
    assert [scored.score.value for scored in group.scored_episodes] == [
        1 + 0.25 * (len(scored.episode.turns) - 1) for scored in group.scored_episodes
    ]


def test_an_action_can_be_json_and_have_constant_fields(server, renderer):
    settings = {"action_field": "", "image_fields": [], "text_fields": ["text", "screen_shape"]}
    episode = play(server, renderer, "three", "[3]", '{"guess": 3}', '{"guess": 7}', **settings)
    prompt, *errors, hint = get_texts(episode, renderer)
    assert "text: Guess a number from 0 to 9.\nscreen_shape: [32, 64, 3]" in prompt
    assert all(text.count("Error: ") == 1 for text in errors)
    assert "text: higher" in hint
    assert [turn.reward for turn in episode.turns] == [None, None, 0.25, 1.0]
    assert play(server, renderer, "{}", **{**settings, "action": {"guess": 7}}).turns[0].reward == 1.0


def test_the_number_of_turns_is_limited(server, renderer):
    episode = play(server, renderer, "1", "2", max_replies=2)
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.MAX_TURNS, 2)
    assert episode.turns[1].reward == 0.25


def test_a_failing_server_ends_the_episode(server, renderer):
    episode = play(server, renderer, "-1")
    assert (episode.status, episode.turns[0].reward) == (EpisodeStatus.ENVIRONMENT_ERROR, None)
    assert "the game is broken" in episode.error


@pytest.mark.slow
def test_episodes_wait_for_a_free_session(renderer):
    environment = partial(Openenv, max_wait=60.0, **SETTINGS)

    async def play_many(url):
        contexts = [build_context(renderer, ["1", "7"]) for _ in range(6)]
        return await asyncio.gather(*(run_episode(TASK, partial(environment, url=url), ctx) for ctx in contexts))

    with serve_protocol(max_sessions=1) as url:
        assert {episode.status for episode in asyncio.run(play_many(url))} == {EpisodeStatus.ANSWERED}


def test_a_full_server_aborts_the_episode_after_the_wait(renderer):
    with serve_protocol(max_sessions=0) as url:
        episode = play(url, renderer, "1", max_wait=0.0)
    assert (episode.status, episode.turns) == (EpisodeStatus.ABORTED, ())
    assert url in episode.error


class Over(Game):
    def reset(self, **arguments):
        observation, reward, _ = super().reset(**arguments)
        return observation, reward, True


class Malformed(Game):
    def reset(self, **arguments):
        return "a text", None, False


@pytest.mark.parametrize(
    ("game", "settings", "status", "reason"),
    [
        (Over, {}, EpisodeStatus.ABORTED, "task guess"),
        (Malformed, {}, EpisodeStatus.ABORTED, "no OpenEnv message"),
        (Game, {"image_fields": ["text"]}, EpisodeStatus.ABORTED, "'text'"),
        (Game, {"image_fields": ["screen_shape"]}, EpisodeStatus.ABORTED, "'screen_shape'"),
    ],
)
def test_unusable_answers_end_the_episode_with_a_reason(renderer, game, settings, status, reason):
    with serve_protocol(game) as url:
        episode = play(url, renderer, "1", **settings)
    assert episode.status is status
    assert reason in episode.error
    assert "\n" not in episode.error


@pytest.mark.slow
def test_a_step_without_an_answer_in_time_is_an_environment_error(renderer):
    released = threading.Event()

    class StuckGame(Game):
        def step(self, guess):
            released.wait()
            return super().step(guess)

    class Impatient(Openenv):
        async def step(self, reply, ctx):
            self.settings = self.settings.model_copy(update={"timeout": 0.2})  # the reset has the usual time
            return await super().step(reply, ctx)

    with serve_protocol(StuckGame) as url:
        environment = partial(Impatient, url=url, **SETTINGS)
        try:
            episode = asyncio.run(run_episode(TASK, environment, build_context(renderer, ["1"])))
        finally:
            released.set()
    assert episode.status is EpisodeStatus.ENVIRONMENT_ERROR
    assert "0.2" in episode.error
    assert "\n" not in episode.error


def test_a_server_that_is_down_aborts_the_episode(renderer):
    with reserve_refusing_port() as port:
        episode = play(f"http://127.0.0.1:{port}", renderer, "1")
    assert episode.status is EpisodeStatus.ABORTED
    assert f"127.0.0.1:{port}" in episode.error


def test_a_field_that_observations_lack_is_an_error_of_the_recipe(server, renderer):
    with raises(ConfigError, key="environment.settings.text_fields", value="txt"):
        play(server, renderer, "1", text_fields=["txt"])


@pytest.mark.parametrize(("settings", "key"), [({}, "url"), ({"url": "localhost:8000"}, "url")])
def test_the_address_is_checked_before_anything_runs(settings, key):
    with raises(ConfigError, key=f"environment.settings.{key}"):
        plugins.resolve("environments", "openenv", settings)


def test_images_as_arrays():
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    assert np.array_equal(decode_pixels(pixels.tolist(), None), pixels)
    assert np.array_equal(decode_pixels(pixels.ravel().tolist(), [2, 3, 3]), pixels)
    assert np.array_equal(decode_pixels(pixels[..., 0].tolist(), None), pixels[..., :1].repeat(3, axis=2))
    for wrong in ([1, 2, 3], [[0.5, 1.0]], [[256]], [[-1]], [[1], [2, 3]], [[10**30]], [["a"]]):
        with raises(ValueError, by=decode_pixels):
            decode_pixels(wrong, None)


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {},
        {"type": "error"},
        {"type": "error", "data": "a text"},
        {"type": "error", "data": {"message": ["no text"]}},
        {"type": "error", "data": {"code": 7, "message": "no code"}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": "a text"}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"loc": ["guess"]}]}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"loc": 3, "msg": "no place"}]}},
        {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": ["a text"]}},
        {"type": "observation", "data": {"observation": {}, "reward": None, "done": False}},
        {"type": "observation", "data": {"observation": {"text": ""}, "reward": math.nan, "done": False}},
        {"type": "observation", "data": {"observation": {"text": ""}, "reward": "high", "done": False}},
        {"type": "observation", "data": {"observation": {"text": "", "picture": DEEP}, "done": False}},
    ],
)
def test_a_malformed_message_ends_the_episode_alone(renderer, reply):
    class Bad(Game):
        def __init__(self):
            self.reply = reply

    with serve_protocol(Bad) as url:
        episode = play(url, renderer, "1")
    assert (episode.status, len(episode.turns)) == (EpisodeStatus.ENVIRONMENT_ERROR, 1)
    assert episode.error
