"""Scripted vLLM servers in a process of their own: `_scripted_server.py MODEL COUNT LOAD_SECONDS REPLY_SECONDS SIGMA`.

They keep images by uuid, as strictly as vLLM does, load weights in LOAD_SECONDS, and reply after a time that is
log-normal with the median REPLY_SECONDS. Prints the servers' addresses as JSON, and at the end of stdin what they
received.
"""

import asyncio
import base64
import json
import math
import random
import struct
import sys
from typing import Any

from saccade.chat.renderer import load_renderer

LOGPROBS = [-1.0 - index for index in range(64)]


class Refused(Exception):
    """A request that vLLM would refuse."""


class ScriptedServer:
    """One server; `received` counts requests, bytes and images."""

    def __init__(self, renderer: Any, load_seconds: float, reply_seconds: float, sigma: float) -> None:
        self.renderer, self.load_seconds, self.reply_seconds, self.sigma = renderer, load_seconds, reply_seconds, sigma
        self.label, self.images = "default", dict[str, int]()
        self.resumed, self.rng = asyncio.Event(), random.Random(0)
        self.resumed.set()
        self.received = {"requests": 0, "MB": 0.0, "images sent": 0, "images omitted": 0, "refused": 0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
                )
                body = await reader.readexactly(length)
                try:
                    status, content = b"200 OK", await self.answer(method, path.decode(), body)
                except Refused as error:
                    self.received["refused"] += 1
                    status, content = b"400 Bad Request", {"error": {"message": str(error)}}
                data = json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: bytes, path: str, body: bytes) -> Any:
        """Return the content of a response."""
        path = path.partition("?")[0]
        content = json.loads(body) if body else {}
        if path == "/v1/models":
            return {"data": [{"id": "m", "root": "m", "max_model_len": 1 << 17}]}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/weight_checker":
            return {"checksums": {}}
        if path == "/detokenize":
            return {"prompt": self.renderer.decode(content["tokens"])}
        if path == "/inference/v1/generate":
            return await self.generate(content, len(body))
        if path == "/pause":
            self.resumed.clear()
        elif path == "/resume":
            self.resumed.set()
        elif path == "/collective_rpc":
            await asyncio.sleep(self.load_seconds)
        elif path == "/update_weight_version":
            self.label = content["new_version"]
        elif path == "/reset_mm_cache":
            self.images.clear()
        return {"success": True}

    async def generate(self, content: Any, num_bytes: int) -> Any:
        sampling = content["sampling_params"]
        sizes = [self.read_image(part) for part in content.get("content_parts", [])]
        self.received["requests"] += 1
        self.received["MB"] += num_bytes / 1e6
        await self.resumed.wait()
        allowed = sampling.get("allowed_token_ids")
        if not allowed and sampling.get("seed") != 1:  # not a handshake
            await asyncio.sleep(self.reply_seconds * math.exp(self.sigma * self.rng.gauss(0, 1)))
        visual, placeholder = iter(sizes), self.renderer.forbidden_ids[0]
        prompt = []
        for token in content["token_ids"]:
            prompt += [token] * (next(visual) if token == placeholder else 1)
        count = sampling["max_tokens"]
        entries = [{"logprob": 0.0 if allowed else LOGPROBS[index % 64]} for index in range(count)]
        choice = {
            "token_ids": allowed or [10 + (sampling["seed"] * 7 + index) % 50 for index in range(count)],
            "logprobs": {"content": entries},
            "finish_reason": "length",
            "weight_versions": [{"version": self.label, "start": 0, "end": count}],
        }
        return {"prompt_token_ids": prompt, "choices": [choice]}

    def read_image(self, part: Any) -> int:
        """Return an image's number of visual tokens; keep it."""
        key = part["uuid"]
        if "url" in part:
            self.received["images sent"] += 1
            width, height = struct.unpack(">II", base64.b64decode(part["url"][22:66])[16:24])
            self.images[key] = width * height // self.renderer.factor**2
        elif key not in self.images:
            raise Refused("Cache miss for image, but data is not provided.")
        else:
            self.received["images omitted"] += 1
        return self.images[key]


async def main(model: str, count: str, *settings: str) -> None:
    renderer = load_renderer(model)
    scripted = [ScriptedServer(renderer, *map(float, settings)) for _ in range(int(count))]
    servers = [await asyncio.start_server(one.serve, "127.0.0.1", 0, limit=1 << 26, backlog=4096) for one in scripted]
    print(json.dumps([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark ends, or is killed
    print(json.dumps([one.received for one in scripted]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
