"""Responses that no honest server sends: without end, compressed a thousandfold, with the request's key in them."""

import asyncio
import base64
import gzip
import json
import textwrap
import time
import tracemalloc
import urllib.parse
import zlib
from contextlib import contextmanager

import http_server
import pytest

from saccade.chat.message_renderer import MessageRenderer
from saccade.engines.chat_completions import ChatCompletions
from saccade.errors import EngineError, SaccadeError
from saccade.ledger import Ledger, Segment
from saccade.testing import FakeMediaLoader
from saccade.types import GenerationRequest, Message, SamplingParams
from saccade.utils.http_client import HttpClient, RequestFailed
from saccade.utils.jsonl import to_jsonable
from saccade.utils.openai_client import OpenAIClient
from saccade.utils.text import REDACTED, redact

KEY = "sk-0123456789abcdef"
BLOCK = b" " * 65536
MANY = 4096  # blocks: 256 MiB


def reply(text="red", **changes):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], **changes}


class Served:
    def __init__(self):
        self.url, self.num_sent, self.num_requests, self.is_hostile = "", 0, 0, True


@contextmanager
def server(blocks, *, status=200, encoding="", pause=0.0, is_hostile=lambda body: True):
    """Run a server that sends the `blocks` to requests that it is hostile to, and a valid reply to all others."""

    class Handler(http_server.Handler):
        def do_GET(self):
            self.send(200, {"data": [{"id": "m"}]})

        def do_POST(self):
            served.num_requests += 1
            body = self.body()
            if not is_hostile(body):
                self.send(200, reply())
                return
            self.send_response(status)
            self.send_header("Connection", "close")
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            self.close_connection = True
            try:
                for block in blocks(self.headers, body):
                    self.wfile.write(block)
                    served.num_sent += len(block)
                    time.sleep(pause)
            except OSError:  # the client has closed the connection
                pass

    served = Served()
    with http_server.serve_http(Handler) as url:
        served.url = f"{url}/v1"
        yield served


def request(served, **settings):
    async def body():
        client = OpenAIClient(base_url=served.url, timeout=settings.pop("timeout", 60.0), api_key=KEY, **settings)
        return await client.create_chat_completion({"model": "m", "messages": []})

    return asyncio.run(body())


def measure_failure(served, **settings):
    """Return the error of a request, and the most memory in bytes that Python used for it."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestFailed) as caught:
            request(served, **settings)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_response_without_end_is_not_read_to_its_end(status):
    with server(lambda *_: (BLOCK for _ in range(MANY)), status=status) as served:
        error, memory = measure_failure(served)
    assert error.status == status
    assert memory < 64 * 2**20
    assert served.num_sent < MANY * len(BLOCK) / 2
    assert served.num_requests == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_response_is_not_expanded_to_its_end(encoding, status):
    compressor = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    bomb = b"".join([*(compressor.compress(BLOCK) for _ in range(MANY)), compressor.flush()])
    assert len(bomb) < 2**20
    with server(lambda *_: [bomb], status=status, encoding=encoding) as served:
        error, memory = measure_failure(served)
    assert error.status == status
    assert memory < 64 * 2**20


def test_a_response_in_tiny_parts_is_not_read_to_its_end():
    """Each part costs the client some microseconds, in which no other request continues."""
    start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with http_server.serve_endless(start, b"1\r\n \r\n" * 10_000) as port:
        client = HttpClient(base_url=f"http://127.0.0.1:{port}", timeout=300, max_response_bytes=2**20)
        with pytest.raises(RequestFailed, match="too many parts"):
            asyncio.run(client.request("GET", "", parse=lambda response: response))


def test_a_compressed_reply_is_read():
    body = gzip.compress(json.dumps(reply("blue")).encode())
    with server(lambda *_: [body[:9], body[9:]], encoding="gzip") as served:
        assert request(served).text == "blue"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "strange"])
def test_a_response_with_an_invalid_compression_is_refused(encoding):
    with server(lambda *_: [b"not compressed"], encoding=encoding) as served:
        error, _ = measure_failure(served)
    assert error.status == 200


@pytest.mark.slow
def test_a_response_that_never_ends_is_a_timeout():
    with server(lambda *_: (b" " for _ in range(10**9)), pause=0.01) as served:
        error, _ = measure_failure(served, timeout=0.5)
    assert error.is_timeout


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"9" * 10_000,
        b"\xff\xfe\xfd",
        b"null",
        b"[]",
        b"",
        json.dumps({"choices": [{"message": {"content": 7}}]}).encode(),
        json.dumps({"choices": [{"message": {"content": None}}]}).encode(),
        json.dumps({"choices": 7}).encode(),
    ],
)
def test_a_response_that_is_no_completion_is_refused(body):
    with server(lambda *_: [body]) as served:
        error, _ = measure_failure(served)
    assert error.status == 200


@pytest.mark.parametrize(
    "usage", [None, 7, [], {"completion_tokens": float("inf")}, {"completion_tokens": "9"}, {"completion_tokens": -9}]
)
def test_a_wrong_token_count_does_not_lose_a_reply(usage):
    with server(lambda *_: [json.dumps(reply(usage=usage)).encode()]) as served:
        completion = request(served)
    assert (completion.text, completion.num_tokens) == ("red", 0)


def echo(headers, body):
    return [json.dumps({"error": {"message": f"bad request with {headers['Authorization']}"}}).encode()]


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_key_that_a_server_echoes_is_not_in_the_error(status):
    with server(echo, status=status) as served:
        error, _ = measure_failure(served)
    assert "bad request with" in error.server_message
    assert KEY not in f"{error!r} {error.server_message} {error}"


def test_a_key_that_a_server_echoes_is_not_in_the_reply():
    escaped = json.dumps(reply(f"my key is {KEY}")).replace("sk-0", "\\u0073k-0")
    with server(lambda *_: [escaped.encode()]) as served:
        completion = request(served)
    assert completion.text == "my key is [redacted]"
    assert KEY not in json.dumps(to_jsonable(completion))


SECRET = "sk-proj-aB3+/9_xYz?Q0"  # with every kind of character that encodings change
ENCODINGS = {
    "base64": lambda data: base64.b64encode(data).decode(),
    "base64 for URLs": lambda data: base64.urlsafe_b64encode(data).decode(),
    "base64 without padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "base64 in lines": lambda data: "\n".join(textwrap.wrap(base64.b64encode(data).decode(), 10)),
    "base32": lambda data: base64.b32encode(data).decode(),
    "hex": lambda data: data.hex(),
    "hex in capitals": lambda data: data.hex(":").upper(),
    "bytes": lambda data: " ".join(f"0x{byte:02x}" for byte in data),
    "a URL": lambda data: urllib.parse.quote(data, safe=""),
    "percents": lambda data: "".join(f"%{byte:02X}" for byte in data),
    "JSON": lambda data: "".join(f"\\u{byte:04x}" for byte in data),
    "JSON in JSON": lambda data: "".join(f"\\\\u{byte:04X}" for byte in data),
    "Python": lambda data: "".join(f"\\x{byte:02x}" for byte in data),
    "octal": lambda data: "".join(f"\\{byte:03o}" for byte in data),
    "XML": lambda data: "".join(f"&#{byte};" for byte in data),
    "XML in hex": lambda data: "".join(f"&#x{byte:X};" for byte in data),
    "quoted-printable": lambda data: "".join(f"={byte:02X}" for byte in data),
    "escaped slashes": lambda data: json.dumps(data.decode()).replace("/", "\\/"),
    "capitals": lambda data: data.decode().upper(),
    "two lines": lambda data: f"{data[:12].decode()}\r\n  {data[12:].decode()}",
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("before", ["", "a", "ab", "abc", "Bearer "])
@pytest.mark.parametrize("after", ["", ".", "..", " ok"])
def test_encoded_keys_are_redacted(encode, before, after):
    encoded = encode(f"{before}{SECRET}{after}".encode())
    text = redact({"error": [f"no such key: <{encoded}>"]}, SECRET)["error"][0]
    assert text.startswith("no such key: <")
    assert text.count(REDACTED) == 1
    rest = text.removeprefix("no such key: <").replace(REDACTED, "").removesuffix(">")
    assert len(rest) <= 6 * len(before + after) + 12  # the texts around, encoded, and what two encoded bytes share


def test_texts_without_the_key_are_unchanged():
    text = f"{base64.b64encode(SECRET[:-1].encode()).decode()} {SECRET[::-1]} {SECRET[:10]} {SECRET[1:]}"
    assert redact(text, SECRET) == text


def generate_all(served, texts):
    """Generate a completion per text with one engine; return the completion or the error of each."""

    async def body():
        engine = ChatCompletions(FakeMediaLoader(), url=served.url, max_retries=0, request_timeout=60.0)
        requests = [
            engine.generate(GenerationRequest(ledger=prompt(text), sampling=SamplingParams(max_tokens=8)))
            for text in texts
        ]
        try:
            return await asyncio.gather(*requests, return_exceptions=True)
        finally:
            await engine.close()

    return asyncio.run(body())


def prompt(text):
    segment: Segment = MessageRenderer(32).render(Ledger(), (Message(role="user", parts=(text,)),))
    return Ledger(segments=(segment,))


def test_a_hostile_reply_costs_its_episode_alone():
    def is_hostile(body):
        return "bad" in json.dumps(body)

    with server(lambda *_: (BLOCK for _ in range(MANY)), is_hostile=is_hostile) as served:
        outcomes = generate_all(served, ["good", "bad", "good too"])
    assert [type(outcome) is EngineError for outcome in outcomes] == [False, True, False]
    assert [outcome.text for outcome in outcomes if not isinstance(outcome, SaccadeError)] == ["red", "red"]


BROKEN_RESPONSES = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a NUL in a header": b"HTTP/1.1 200 OK\r\nX-Name: \x00\r\n\r\n",
    "a chunk without end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"F" * 99 + b"\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    "less than announced": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("response", BROKEN_RESPONSES.values(), ids=BROKEN_RESPONSES)
def test_a_response_that_is_no_http_costs_its_episode_alone(response):
    class Handler(http_server.Handler):
        def do_GET(self):
            self.send(200, {"data": [{"id": "m"}]})

        def do_POST(self):
            if "bad" not in json.dumps(self.body()):
                self.send(200, reply())
                return
            self.wfile.write(response)
            self.close_connection = True

    served = Served()
    with http_server.serve_http(Handler) as served.url:
        outcomes = generate_all(served, ["good", "bad", "good too"])
    assert [type(outcome) is EngineError for outcome in outcomes] == [False, True, False]
    assert "sent no complete HTTP response" in str(outcomes[1])


def test_a_prompt_that_is_no_unicode_is_sent():
    with server(lambda *_: [], is_hostile=lambda body: False) as served:
        (outcome,) = generate_all(served, ["a \ud800 b"])
    assert outcome.text == "red"
