"""A server with vLLM's API around the local engine, on one port: `_tiny_server.py MODEL PORT`.

It samples from weights of its own, loads new ones from folders as vLLM does, and prints its address when it is ready.
"""

import asyncio
import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _scripted_server import Refused, ScriptedServer
from PIL import Image
from safetensors.torch import load_file

from saccade.config.schema import ModelConfig
from saccade.engines.local import Local
from saccade.ledger import ImageRef, ImageSlot, Ledger
from saccade.models.vlm import VisionLanguageModel
from saccade.types import GenerationRequest, SamplingParams


class TinyServer(ScriptedServer):
    """Serves a tiny model."""

    def __init__(self, vlm: VisionLanguageModel) -> None:
        super().__init__(vlm.renderer, 0.0, 0.0, 0.0)
        self.vlm, self.engine, self.folder = (
            vlm,
            Local(vlm, self),
            vlm.settings.path,
        )
        self.pixels = dict[str, np.ndarray]()

    def load_pixels(self, image: ImageRef) -> np.ndarray:
        """Return the pixels that a request sent; see protocols.MediaLoader."""
        return self.pixels[image.digest]

    async def answer(self, method: bytes, path: str, body: bytes) -> Any:
        """Return the content of a response; load weights as ordered."""
        if path.partition("?")[0] == "/v1/models":
            return {"data": [{"id": "m", "root": self.folder, "max_model_len": 1 << 17}]}
        if path.partition("?")[0] == "/collective_rpc":
            folder = Path(json.loads(body)["kwargs"]["weights_path"])
            weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
            missing = self.vlm.model.load_state_dict(weights, strict=False).missing_keys
            assert set(missing) <= {"lm_head.weight"}, missing  # tied
            await self.engine.sync_weights(self.vlm, 0)
        return await super().answer(method, path, body)

    async def generate(self, content: Any, num_bytes: int) -> Any:
        sampling = content["sampling_params"]
        images = [self.keep_image(part) for part in content.get("content_parts", [])]
        await self.resumed.wait()
        remaining, placeholder = iter(images), self.renderer.forbidden_ids[0]
        tokens, slots = tuple(content["token_ids"]), list[ImageSlot]()
        for index, token in enumerate(tokens):
            if token == placeholder:
                image = next(remaining)
                slots.append(ImageSlot(index=index, image=image, num_tokens=self.renderer.count_visual_tokens(image)))
        ledger = Ledger().observe(tokens, slots=slots)
        label = self.label
        if allowed := sampling.get("allowed_token_ids"):
            sampled, logprobs = allowed, (0.0,)
        else:
            params = SamplingParams(
                temperature=sampling["temperature"],
                max_tokens=sampling["max_tokens"],
                seed=sampling["seed"],
                stop_ids=tuple(sampling["stop_token_ids"]),
                forbidden_ids=self.renderer.forbidden_ids,
            )
            completion = await self.engine.generate(GenerationRequest(ledger, params))
            sampled, logprobs = list(completion.tokens), completion.logprobs
        choice = {
            "token_ids": sampled,
            "logprobs": {"content": [{"logprob": value} for value in logprobs]},
            "finish_reason": "stop" if sampled[-1] in sampling.get("stop_token_ids", ()) else "length",
            "weight_versions": [{"version": label, "start": 0, "end": len(sampled)}],
        }
        return {"prompt_token_ids": list(ledger.input_ids()), "choices": [choice]}

    def keep_image(self, part: Any) -> ImageRef:
        """Return an image's reference; keep its pixels."""
        key = part["uuid"]
        if "url" in part:
            png = base64.b64decode(part["url"].partition(",")[2])
            self.pixels[key] = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        elif key not in self.pixels:
            raise Refused("Cache miss for image, but data is not provided.")
        height, width = self.pixels[key].shape[:2]
        return ImageRef(path=key, digest=key, time=None, width=width, height=height)


async def main(model: str, port: str) -> None:
    torch.set_num_threads(1)
    served = TinyServer(VisionLanguageModel(ModelConfig(path=model, num_threads=1)))
    async with await asyncio.start_server(served.serve, "127.0.0.1", int(port), limit=1 << 26, backlog=4096):
        print(f"http://127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
