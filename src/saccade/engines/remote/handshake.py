"""Making sure of a server before it is used: its context, its vocabulary, its logprobs, its weights."""

import logging
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch

from saccade.engines._served import wire
from saccade.engines._served.server import Server, Trouble
from saccade.engines._urls import picture_url
from saccade.errors import BrokenEngineError
from saccade.ledger import Ledger, Picture
from saccade.media.image import png
from saccade.model.backbone import Backbone, log_probabilities
from saccade.protocols import Renderer
from saccade.types import Message, Sampling

_SAMPLES = 61  # ids whose spelling is compared
_SIDE = 256  # pixels, at least, of the picture that is shown: published processors enlarge smaller ones
_TOKENS = 16  # that are sampled to compare logprobs
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}  # mean |difference| of logprobs in nats; other weights differ by 1 or so
_logger = logging.getLogger("saccade")


async def about(server: Server) -> str:
    """What the server serves, where its context is noted. Raises Trouble or EngineError."""
    try:
        return await server.dialect.about(server)
    except (LookupError, TypeError, ValueError):
        raise Trouble(f"{server.url} doesn't say what it serves") from None


async def look(server: Server, renderer: Renderer) -> None:
    """Note the server's context and compare its vocabulary. Raises BrokenEngineError, Trouble or EngineError."""
    name = await about(server)
    marks = (*renderer.stop_ids, *renderer.forbidden_ids)
    plain = min(marks)  # tokens of text come before those of the scaffold
    ids = [*range(0, plain, max(plain // _SAMPLES, 1)), *marks]
    ours = renderer.decode(ids)
    try:
        theirs = await server.dialect.spelled(server, ids)
    except (LookupError, TypeError):
        raise Trouble(f"{server.url} doesn't say how its tokens are spelled") from None
    if theirs != ours:
        raise BrokenEngineError(
            f"{server.url} serves {name}, whose vocabulary is another than the model's: it spells {len(ids)} ids as "
            f"{str(theirs)[:60]!r}…, the model as {ours[:60]!r}…; serve the checkpoint that this run is about"
        )


async def listen(server: Server, renderer: Renderer) -> str:
    """The label of the server's weights. Raises BrokenEngineError where its logprobs are none to learn from, Trouble
    or EngineError.
    """
    try:
        return await server.dialect.listen(server, renderer)
    except (LookupError, TypeError, ValueError):
        raise Trouble(f"{server.url} answered something that is no completion") from None


def seeds(server: Server) -> str:
    """What is to be said of a server whose seeds decide nothing; "" of others."""
    mend = f"start it with {server.dialect.WORDS.seeds}"
    return "" if server.seeded else f"seeds decide nothing there, so no reply can be had again ({mend})"


class Parity:
    """Whether a server's weights are the trainer's: logprobs of a fixed text and a fixed picture, side by side.

    What the trainer says is worked out once per edition of the weights, and kept: a server may come back while the
    trainer's own ones move on.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, renderer = backbone, backbone.renderer
        side = -(-_SIDE // renderer.factor) * renderer.factor
        picture = Picture(path="probe.png", digest="probe", time=None, width=side, height=side)
        ramp = np.linspace(0, 255, side, dtype=np.uint8)
        self._pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], ramp[::-1, None]), axis=-1)
        self._ledgers = [
            Ledger(segments=(renderer.render(Ledger(), (Message(role="user", parts=parts),)),))
            for parts in (("What is shown?",), (picture, "What is shown?"))
        ]
        self._sampling = Sampling(max_tokens=_TOKENS, seed=1, forbidden_ids=renderer.forbidden_ids)
        self._forbidden = [renderer.decode([each]) for each in renderer.forbidden_ids]
        self._known: dict[tuple[str, int], tuple[tuple[int, ...], list[float]]] = {}

    async def check(self, server: Server, edition: str = "") -> float:
        """The mean |difference| in nats; `edition` is the label of published weights, "" for those of before.

        Raises BrokenEngineError where it is beyond the bound of the dtype, Trouble where nothing can be compared or the
        server answers from another edition. In bfloat16 the bound is wider than what most updates change: that a server
        has this edition and not the one before is then known by its label alone.
        """
        gaps: list[float] = []
        # Without seeds the likeliest tokens alone are the same from every server.
        sampling = self._sampling if server.seeded else replace(self._sampling, temperature=0.0)
        for place, ledger in enumerate(self._ledgers):
            urls = [picture_url(png(self._pixels)) for _ in ledger.pictures()]
            body = server.dialect.request(ledger, sampling, urls=urls, forbidden=self._forbidden, filters={})
            reply = await server.post(server.dialect.GENERATE, body)
            said = wire.completion(reply, ledger, sampling, server=server, seconds=0.0)
            if edition and {label for label, _, _ in server.dialect.read(reply).spans} != {edition}:
                raise Trouble(f"{server.url} answers from other weights than those that it was given last")
            ours = self._ours(edition, place, said.tokens)
            gaps += [abs(one - other) for one, other in zip(said.logprobs, ours, strict=False)]
        if not gaps:
            raise Trouble(f"{server.url} samples other tokens from the published weights than another server did")
        gap, bound = sum(gaps) / len(gaps), _BOUNDS[self._backbone.settings.dtype]
        if not gap <= bound:
            raise BrokenEngineError(
                f"{server.url} samples from other weights than the trainer's: their logprobs differ by {gap:.2g} nats "
                f"on average, more than {bound:g}; serve the checkpoint that this run is about, in its dtype (vLLM on "
                "a CPU can't take new weights where input and output embeddings are tied)"
            )
        return gap

    def _ours(self, edition: str, place: int, tokens: tuple[int, ...]) -> list[float]:
        """The trainer's logprobs of a probe's tokens, as far as they are the tokens that it has been asked about."""
        known = self._known.get((edition, place)) if edition else None
        if known is None:
            # Its weights rest: it waits for its first server to have them, or isn't training.
            known = tokens, self.score(self._ledgers[place], tokens)
            recent = dict.fromkeys(label for label, _ in [*self._known, (edition, place)])
            kept = [*recent][-2:]  # an edition that is refused gives way to the one before
            self._known = {key: each for key, each in self._known.items() if key[0] in kept}
            self._known[edition, place] = known
        asked, ours = known
        return ours[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, tokens, strict=False)))]

    @torch.inference_mode()
    def score(self, ledger: Ledger, tokens: tuple[int, ...]) -> list[float]:
        """The trainer's logprob of each token after the ledger, at temperature 1."""
        backbone = self._backbone
        whole = ledger.act(tokens, logprobs=(0.0,) * len(tokens), version=0)
        ids = torch.tensor([whole.expanded()], device=backbone.device)
        at = torch.from_numpy(backbone.renderer.positions(whole))[:, None].to(backbone.device)
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=backbone.device).tril()[None]
        features = backbone.features(ledger.pictures(), lambda picture: self._pixels)
        hidden = backbone.hidden(ids, at, seen, features=type(features[0]).cat(features) if features else None)
        logits = backbone.logits(hidden[0, -len(tokens) - 1 : -1])
        logp = log_probabilities(logits, 1.0)
        found: list[float] = logp.gather(1, torch.tensor(tokens, device=backbone.device)[:, None])[:, 0].tolist()
        return found
