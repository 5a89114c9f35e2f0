"""The handshake: check a server's context, vocabulary, logprobs and weights before it is used.

`probe` makes every check before a run, except the weight comparison, which needs the trainer.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from saccade.engines.image_urls import encode_data_url
from saccade.engines.remote import vllm_api
from saccade.engines.remote.server import (
    SERVERS_KEY,
    LoraSync,
    Server,
    ServerApi,
    ServerError,
    ServerRequest,
    convert_parse_errors,
    require_servers,
)
from saccade.errors import EngineError, SaccadeError
from saccade.ledger import ImageRef, Ledger
from saccade.media.image import encode_png
from saccade.protocols import EngineRequirements, Renderer, WeightSource
from saccade.types import Message, SamplingParams
from saccade.utils.async_utils import run_in_daemon_thread
from saccade.utils.files import read_text

_NUM_VOCABULARY_PROBES = 61  # token ids whose text is compared
_MIN_PROBE_IMAGE_SIDE = 256  # pixels; published image processors enlarge smaller images
_NUM_PROBE_TOKENS = 16  # sampled to compare logprobs
# Mean |difference| of logprobs in nats, by dtype; different weights differ by about 1.
_MAX_LOGPROB_DIFF = {"float32": 1e-4, "bfloat16": 0.1}
_PROBE_TIMEOUT = 60.0  # seconds for all checks of a server: its first completion takes longest
_IGNORED_CONFIG_KEYS = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}


async def describe(server: Server) -> str:
    """Return the served checkpoint; set the server's `max_model_len`. Raises ServerError or EngineError."""
    with convert_parse_errors(f"{server.url} doesn't report which model it serves"):
        return await server.api.describe(server)


async def check_tokenizer(server: Server, renderer: Renderer) -> None:
    """Set the server's context and vocabulary size, and compare its vocabulary.

    Raises BrokenEngineError, ServerError or EngineError.
    """
    name = await describe(server)
    server.vocab_size = renderer.vocab_size
    special_ids = (*renderer.stop_ids, *renderer.forbidden_ids)
    num_text_ids = min(special_ids)  # text tokens come before special tokens
    ids = [*range(0, num_text_ids, max(num_text_ids // _NUM_VOCABULARY_PROBES, 1)), *special_ids]
    model_text = renderer.decode(ids)
    with convert_parse_errors(f"{server.url} returned no text for /detokenize"):
        server_text = await server.api.detokenize(server, ids)
    if server_text != model_text:
        raise server.build_fatal_error(
            f"serves {name}, whose vocabulary differs from the model's: it decodes {len(ids)} ids as "
            f"{str(server_text)[:60]!r}…, the model as {model_text[:60]!r}…; serve this run's checkpoint"
        )


async def check_logprobs(server: Server, renderer: Renderer) -> str:
    """Return the label of the server's weights.

    Raises BrokenEngineError if its logprobs are not those of the sampling distribution; ServerError or EngineError.
    """
    with convert_parse_errors(f"{server.url} returned a malformed completion"):
        return await server.api.check_logprobs(server, renderer)


def check_seeds(server: Server) -> str:
    """Return a warning if the server ignores seeds, else ""."""
    hint = f"start it with {server.api.MESSAGES.deterministic_flag}"
    return "" if server.is_seeded else f"seeds have no effect there, so replies are not reproducible ({hint})"


class LogprobCheck:
    """Compares a server's weights with the trainer's by logprobs after a fixed text and after a fixed image.

    The trainer's logprobs are computed once per weight version and cached: a server may reconnect when training has
    already changed the weights.
    """

    def __init__(self, renderer: Renderer) -> None:
        side = -(-_MIN_PROBE_IMAGE_SIDE // renderer.factor) * renderer.factor
        image = ImageRef(path="probe.png", digest="probe", time=None, width=side, height=side)
        ramp = np.linspace(0, 255, side, dtype=np.uint8)
        self._pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[::-1, None]), axis=-1)
        self._image_urls = {image.key: encode_data_url(encode_png(self._pixels)).encode()}
        self._probes = [
            Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))
            for parts in (("What is shown?",), (image, "What is shown?"))
        ]
        self._sampling = SamplingParams(max_tokens=_NUM_PROBE_TOKENS, seed=1, forbidden_ids=renderer.forbidden_ids)
        self._forbidden_texts = [renderer.decode([token]) for token in renderer.forbidden_ids]
        self._trainer_logprobs: dict[tuple[str, int], tuple[tuple[int, ...], list[float]]] = {}
        self._trainer_lock = asyncio.Lock()  # servers are checked at once, but the trainer scores each version once

    async def check(self, server: Server, source: WeightSource, weight_label: str = "") -> float:
        """Return the mean |difference| in nats; `weight_label` is that of a weight sync, "" before the first.

        Raises BrokenEngineError if it exceeds the bound of the dtype; ServerError if no token can be compared or the
        server samples from another weight version. In bfloat16 the bound is larger than the change of most updates:
        then only the label distinguishes a weight version from the one before.
        """
        diffs: list[float] = []
        # Without seeds only greedy tokens are the same from every server.
        sampling = self._sampling if server.is_seeded else replace(self._sampling, temperature=0.0)
        for index, ledger in enumerate(self._probes):
            request = ServerRequest(
                ledger, sampling, image_urls=self._image_urls, forbidden_texts=self._forbidden_texts
            )
            completion, labels = await server.generate(request)
            if weight_label and labels != {weight_label}:
                raise ServerError(f"{server.url} samples from other weights than those that it received last")
            trainer_logprobs = await self._get_trainer_logprobs(source, weight_label, index, completion.tokens)
            diffs += [
                abs(server_logprob - trainer_logprob)
                for server_logprob, trainer_logprob in zip(completion.logprobs, trainer_logprobs, strict=False)
            ]
        if not diffs:
            raise ServerError(f"{server.url} samples other tokens from the current weights than another server did")
        diff, bound = sum(diffs) / len(diffs), _MAX_LOGPROB_DIFF[source.dtype]
        if not diff <= bound:
            raise server.build_fatal_error(
                f"has other weights than the trainer: logprobs differ by {diff:.2g} nats on average, more than "
                f"{bound:g}; serve this run's checkpoint in its dtype (vLLM on a CPU can't load new weights if "
                "input and output embeddings are tied)"
            )
        return diff

    async def _get_trainer_logprobs(
        self, source: WeightSource, weight_label: str, probe_index: int, tokens: tuple[int, ...]
    ) -> list[float]:
        """Return the trainer's logprobs of `tokens`, as far as they equal the tokens that were scored first."""
        async with self._trainer_lock:
            cached = self._trainer_logprobs.get((weight_label, probe_index)) if weight_label else None
            if cached is None:
                # The trainer's weights don't change now: it waits for the first server to load them, or doesn't train.
                score = partial(source.compute_token_logprobs, self._probes[probe_index], tokens, self._load_pixels)
                cached = tokens, await run_in_daemon_thread(score, "saccade-logprobs")
                labels = dict.fromkeys(label for label, _ in [*self._trainer_logprobs, (weight_label, probe_index)])
                recent = [*labels][-2:]  # the one before is needed after a rollback
                self._trainer_logprobs = {
                    key: value for key, value in self._trainer_logprobs.items() if key[0] in recent
                }
                self._trainer_logprobs[weight_label, probe_index] = cached
        scored_tokens, logprobs = cached
        pairs = zip(scored_tokens, tokens, strict=False)
        return logprobs[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]

    def _load_pixels(self, image: ImageRef) -> Any:
        return self._pixels


# ---- before a run ----------------------------------------------------------------------------------------------------


async def probe(
    api: ServerApi, requirements: EngineRequirements, servers: Sequence[str], by_broadcast: bool, lora: LoraSync
) -> Mapping[str, str | Exception]:
    """Describe each server, by URL, or return the error why it is unusable.

    `by_broadcast` and `lora` are how weights are synced.

    Raises ConfigError if there is no server.
    """
    require_servers(servers, api.MESSAGES)
    urls = list(dict.fromkeys(servers))
    results = await asyncio.gather(*(_probe_server(api, url, requirements, by_broadcast, lora) for url in urls))
    return dict(zip(urls, results, strict=True))


async def _probe_server(
    api: ServerApi, url: str, requirements: EngineRequirements, by_broadcast: bool, lora: LoraSync
) -> str | Exception:
    try:
        server = Server(url, _PROBE_TIMEOUT, api)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                return await _describe_server(server, requirements, by_broadcast, lora)
        finally:
            await server.close()
    except TimeoutError:
        problem = f"{url} did not answer the checks within {_PROBE_TIMEOUT:g} seconds"
        return EngineError(f"{problem}; {api.MESSAGES.unreachable_hint}", key=SERVERS_KEY, value=url)
    except ServerError as error:
        return EngineError(f"{error}; {api.MESSAGES.unreachable_hint}", key=SERVERS_KEY, value=url)
    except SaccadeError as error:
        return error


async def _describe_server(server: Server, requirements: EngineRequirements, by_broadcast: bool, lora: LoraSync) -> str:
    name = await describe(server)
    server.check_context_length(requirements.context_length)
    served_config, model_config = _load_config(name), _load_config(requirements.model_path)
    differences = find_config_differences(served_config, model_config) if served_config and model_config else ()
    for difference in differences:
        raise EngineError(
            f"{server.url} serves another model, {name}: {difference}; serve this run's checkpoint",
            key=SERVERS_KEY,
            value=server.url,
        )
    if requirements.is_training:
        await server.api.check_weight_updates(server, by_broadcast=by_broadcast)
        if lora == "adapters":
            await server.check_path(vllm_api.LOAD_ADAPTER_PATH)
    parts = (f"serves {name}, {server.max_model_len} tokens", check_seeds(server))
    description = "; ".join(filter(None, parts))
    if requirements.renderer is None:
        return f"{description}; not compared: there is no local model"
    await check_tokenizer(server, requirements.renderer)
    await check_logprobs(server, requirements.renderer)
    note = "" if served_config else "its config is not on this machine and was not compared; "
    return f"{description}; {note}its weights are compared with the model's when the run starts"


def _load_config(folder: str) -> dict[str, Any]:
    """Return a checkpoint's config.json; empty if it is not on this machine."""
    try:
        config = json.loads(read_text(Path(folder, "config.json")))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find_config_differences(served: Mapping[str, Any], model: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a phrase per key that differs between two configs, other than keys without influence on the logits."""
    for key in sorted({*served, *model} - _IGNORED_CONFIG_KEYS):
        served_value, model_value = served.get(key), model.get(key)
        # A missing section equals one without values: versions of transformers differ in what they write.
        served_section, model_section = ({} if value is None else value for value in (served_value, model_value))
        if isinstance(served_section, dict) and isinstance(model_section, dict):
            yield from find_config_differences(served_section, model_section, f"{prefix}{key}.")
        elif served_value != model_value:
            yield f"its {prefix}{key} is {served_value}, the model's {model_value}"
