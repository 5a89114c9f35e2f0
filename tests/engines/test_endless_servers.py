"""Servers that never finish what they begin: no probe of a server waits longer than its limit."""

import asyncio
import socket

import pytest
from http_server import serve_endless

from saccade.engines.remote import handshake, server, sglang_api, vllm_api
from saccade.errors import EngineError
from saccade.protocols import EngineRequirements
from saccade.utils import openai_client
from saccade.utils.http_client import RequestFailed, fetch
from saccade.utils.openai_client import OpenAIClient

STARTS = {
    "nothing": b"",
    "a status line": b"HTTP/1.1 ",
    "headers": b"HTTP/1.1 200 OK\r\nX-Long: ",
    "a body": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
}
DRIPS = {"chunks": b"1\r\n \r\n"}


@pytest.fixture(params=STARTS)
def endless_url(request):
    """Yield the address of a server that begins each response, and then sends it byte by byte, without end."""
    start = STARTS[request.param]
    with serve_endless(start, DRIPS.get(request.param, b" ") if start else b"") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
def test_a_list_of_models_has_a_limit_of_its_own(endless_url, monkeypatch):
    monkeypatch.setattr(openai_client, "_LIST_TIMEOUT", 0.3)
    client = OpenAIClient(base_url=endless_url, timeout=3600.0, max_retries=9)
    with pytest.raises(RequestFailed, match=r"did not answer within 0\.3 seconds") as caught:
        asyncio.run(client.list_models())
    assert caught.value.is_timeout


def test_retries_of_a_list_of_models_share_its_limit(monkeypatch):
    monkeypatch.setattr(openai_client, "_LIST_TIMEOUT", 0.3)
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        client = OpenAIClient(base_url=url, timeout=3600.0, max_retries=99, retry_backoff=3600.0)
        with pytest.raises(RequestFailed, match="can't be reached"):
            asyncio.run(client.list_models())


@pytest.mark.slow
@pytest.mark.parametrize("api", [vllm_api, sglang_api])
@pytest.mark.parametrize(("module", "limit"), [(server, "_METADATA_TIMEOUT"), (handshake, "_PROBE_TIMEOUT")])
def test_a_probe_of_servers_has_limits(endless_url, monkeypatch, api, module, limit):
    monkeypatch.setattr(module, limit, 0.3)
    requirements = EngineRequirements(model_path="", renderer=None, context_length=8, is_training=True)
    urls = [endless_url, f"{endless_url}/other"]
    results = asyncio.run(handshake.probe(api, requirements, urls, by_broadcast=False, lora="merged"))
    for url in urls:
        assert type(results[url]) is EngineError
        assert url in str(results[url])
        assert "within 0.3 seconds" in str(results[url])


@pytest.mark.slow
def test_a_fetch_ends_in_time(endless_url):
    assert fetch(f"{endless_url}/health", timeout=0.3) is None
