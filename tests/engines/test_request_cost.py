"""What requests cost: images are encoded and sent once, connections and open files are bounded, and time is ours."""

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import threading
from collections import Counter

import pytest
from generate_server import server
from hypothesis import given
from hypothesis import strategies as st
from polling import wait_until

from saccade.chat.renderer import load_renderer
from saccade.engines.image_urls import ImageUrls, encode_data_url, join_json, mark_image
from saccade.engines.vllm import Vllm
from saccade.errors import EngineError
from saccade.ledger import ImageRef, Ledger
from saccade.media.image import encode_png
from saccade.sandbox import descriptors
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams


@pytest.fixture(scope="module")
def renderer(tiny_folder):
    return load_renderer(tiny_folder)


@contextlib.asynccontextmanager
async def engine_of(renderer, *urls, **settings):
    given = {"verify_weights": False, "retry_backoff": 0.01, "down_timeout": 300.0, "request_timeout": 300.0}
    engine = Vllm(renderer, FakeMediaLoader(), servers=urls, **{**given, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def prompt(renderer, *parts):
    return Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))


def frame(renderer, time, wide=1):
    return ImageRef(path="a.mp4", digest="d", time=time, width=wide * renderer.factor, height=renderer.factor)


def generate(engine, ledger, seed=0):
    return engine.generate(GenerationRequest(ledger, SamplingParams(max_tokens=3, seed=seed)))


# ---- images ----------------------------------------------------------------------------------------------------------


def test_each_image_is_sent_once_per_server(renderer):
    """A group's later episodes and turns omit what the server has; it loses two images, then all by a weight sync."""
    first, second, third = (frame(renderer, float(time), wide=1 + time) for time in range(3))

    async def body(served):
        async with engine_of(renderer, served.url) as engine:
            ledger = prompt(renderer, first, "and", second, first)
            await generate(engine, ledger)
            assert served.num_uploads == 3, "an image may be twice in one body"
            await asyncio.gather(*(generate(engine, ledger, seed) for seed in range(4)))
            longer = prompt(renderer, first, "and", second, first, third)
            await asyncio.gather(*(generate(engine, longer, seed) for seed in (7,)))
            assert (served.num_uploads, served.num_misses) == (4, 0)
            served.images.clear()
            await generate(engine, ledger)
            assert (served.num_uploads, served.num_misses) == (7, 1)
            await generate(engine, longer)
            assert (served.num_uploads, served.num_misses) == (11, 2)
            engine._pool.servers[0].forget_images()  # as after a weight sync
            await generate(engine, longer)
            assert (served.num_uploads, served.num_misses) == (15, 2)

    with server(renderer) as served:
        asyncio.run(body(served))
    assert len(served.bodies) == 9


@pytest.mark.slow
def test_a_group_that_starts_at_once_has_its_replies(renderer):
    """Its requests omit images that another one is sending, and repeat themselves until the server has them."""
    images = [frame(renderer, float(time)) for time in range(6)]
    is_slow = threading.Event()

    async def body(served):
        read_images = served.read_images

        def read_slowly(body):
            if any("url" in part for part in body["content_parts"]):
                is_slow.wait(0.4)
            return read_images(body)

        served.read_images = read_slowly
        async with engine_of(renderer, served.url) as engine:
            await generate(engine, prompt(renderer, frame(renderer, 9.0), "warm"))
            return await asyncio.gather(*(generate(engine, prompt(renderer, *images), seed) for seed in range(8)))

    with server(renderer) as served:
        replies = asyncio.run(body(served))
    assert len({reply.tokens for reply in replies}) == 8
    assert 1 + len(images) <= served.num_uploads < 1 + 8 * len(images)


def test_a_refusal_for_another_reason_is_raised(renderer):
    async def body(served):
        async with engine_of(renderer, served.url, max_retries=0) as engine:
            ledger = prompt(renderer, frame(renderer, 1.0), "Which?")
            await generate(engine, ledger)
            with pytest.raises(EngineError) as caught:
                await generate(engine, ledger)
            return caught.value

    with server(renderer, lambda number, body: 400 if number else None) as served:
        error = asyncio.run(body(served))
    assert (error.key, error.value) == ("engine.settings.servers", served.url)
    assert len(served.bodies) == 3, "once without the image, once with it"


def test_an_image_is_encoded_once(renderer):
    """By concurrent requests, and read from the disk when the memory is full; with both full, its pixels are loaded."""
    loads, may_load = Counter(), threading.Event()

    class CountingLoader(FakeMediaLoader):
        def load_pixels(self, image):
            may_load.wait(60)
            loads[image.key] += 1
            return super().load_pixels(image)

    image, other = frame(renderer, 1.0), frame(renderer, 2.0)
    url = encode_data_url(encode_png(FakeMediaLoader().load_pixels(image))).encode()

    async def body():
        urls = ImageUrls(CountingLoader(), memory_bytes=len(url) + 10)
        requests = [asyncio.ensure_future(urls.encode([image, image])) for _ in range(8)]
        await asyncio.sleep(0)
        requests[0].cancel()  # the others still get it
        may_load.set()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert results[1:] == [{image.key: url}] * 7
        await urls.encode([other])  # evicts the first from memory
        assert await urls.encode([image]) == {image.key: url}
        assert loads == {image.key: 1, other.key: 1}
        small = ImageUrls(CountingLoader(), memory_bytes=0, disk_bytes=0)
        assert await small.encode([image]) == await small.encode([image]) == {image.key: url}
        assert loads[image.key] == 3

    asyncio.run(body())


@given(st.lists(st.text() | st.sampled_from(['"', "\\", "image-", "\ud800"]), max_size=6), st.data())
def test_joined_json_is_the_body_with_urls(texts, data):
    images = [ImageRef(path="a", digest=str(number), time=None, width=8, height=8) for number in range(3)]
    urls = {image.key: encode_data_url(image.key.encode()).encode() for image in images}
    parts = data.draw(st.lists(st.sampled_from([*texts, *images]), max_size=9)) if texts else images

    def build(url_of):
        return {"texts": texts, "parts": [part if isinstance(part, str) else {"url": url_of(part)} for part in parts]}

    joined = json.loads(b"".join(join_json(build(mark_image), urls)))
    assert joined == build(lambda image: urls[image.key].decode())


# ---- time and open files ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_that_takes_too_long_does_not_mark_a_healthy_server_down(renderer):
    async def body(served):
        async with engine_of(renderer, served.url, request_timeout=0.5, max_retries=3) as engine:
            await generate(engine, prompt(renderer, "warm"))
            reply = await generate(engine, prompt(renderer, "What?"))
            return reply, engine._pool.servers[0].incarnation

    with server(renderer, lambda number, body: "hang" if number == 1 else None) as served:
        reply, incarnation = asyncio.run(body(served))
    assert len(reply.tokens) == 3
    assert incarnation == 1


def test_requests_beyond_the_limit_wait_and_controls_do_not(renderer):
    """With every connection in use by a held reply, a weight sync's requests still get through."""

    async def body(served):
        async with engine_of(renderer, served.url) as engine:
            await generate(engine, prompt(renderer, "warm"))
            (pooled,) = engine._pool.servers
            pooled._client.max_concurrency = 2
            await pooled._client.close()  # the next session has the limit
            served.most = 0
            gate = served.hold_replies(1)
            tasks = [asyncio.create_task(generate(engine, prompt(renderer, str(seed)), seed)) for seed in range(5)]
            await wait_until(lambda: gate.sampled == [1, 1])
            await pooled.post("/pause", mode="keep")
            await pooled.post("/resume")
            gate.open()
            replies = await asyncio.gather(*tasks)
            assert served.most == 2
            return replies

    with server(renderer) as served:
        replies = asyncio.run(body(served))
    assert len({reply.tokens for reply in replies}) == 5


NO_ROOM = """
import asyncio, os, resource, sys
from saccade.utils.http_client import HttpClient
async def main(url):
    client = HttpClient(base_url=url, timeout=300, keeps_connections=True)
    await client.request("GET", "v1/models", parse=bool)
    limit = len(os.listdir("/proc/self/fd")) + 6
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    requests = [client.request("GET", "v1/models", parse=lambda content: content["data"]) for _ in range(40)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    await client.close()
    print([repr(result) for result in results if not isinstance(result, list)])
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_requests_wait_for_open_files(renderer):
    """40 at a time, of which six have room."""
    with server(renderer) as served:
        done = subprocess.run([sys.executable, "-c", NO_ROOM, served.url], capture_output=True, text=True, timeout=300)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("hard", "num_connections", "num_sandboxes"), [(1024, 309, 77), (4096, 1333, 333), (1 << 20, 8192, 5453)]
)
def test_the_plan_of_open_files_fits_the_limit(monkeypatch, hard, num_connections, num_sandboxes):
    limits = [256, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: limits.__setitem__(slice(None), given))
    assert (descriptors.plan_connections(), descriptors.plan_sandboxes()) == (num_connections, num_sandboxes)
    assert limits[0] == min(hard, 1 << 16)
    assert num_connections + 6 * num_sandboxes + 96 <= limits[0]
