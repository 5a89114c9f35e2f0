"""A scripted engine in a file, so that a recipe can name it: replies of any length, at so many seconds per token."""

import numpy as np

from saccade.engines.scripted import Scripted
from saccade.ledger import Ledger
from saccade.protocols import Renderer
from saccade.types import Completion, GenerationRequest

CODE = "I look.<code>\n```python\nimport time\ntime.sleep({seconds:.3f})\n```\n</code>"
ANSWER = "I know.</think><answer>red</answer>"


class PacedEngine(Scripted):
    """Two replies with code, then an answer; lengths, and the code's times, are log-normal, by the request's seed."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        token_seconds: float = 0.02,  # of a reply
        more_tokens: float = 30.0,  # at the median, beside the code or the answer
        call_seconds: float = 0.3,  # at the median
        sigma: float = 0.7,  # of the logarithm of each
    ) -> None:
        super().__init__(renderer, replies=self.reply, latency=self.get_seconds)
        self.token_seconds, self.more_tokens, self.call_seconds, self.sigma = (
            token_seconds,
            more_tokens,
            call_seconds,
            sigma,
        )
        self._rng, self._num_tokens = np.random.default_rng(), 0

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return a reply; see protocols.Engine."""
        self._rng = np.random.default_rng(request.sampling.seed)
        return await super().generate(request)  # calls `reply` and `get_seconds` before it waits

    def reply(self, ledger: Ledger) -> str:
        """Return code in the first two turns, then an answer."""
        tokens, seconds = np.exp(self.sigma * self._rng.standard_normal(2)) * (self.more_tokens, self.call_seconds)
        is_last = sum(segment.is_sampled for segment in ledger.segments) == 2
        text = "look " * round(tokens) + (ANSWER if is_last else CODE.format(seconds=seconds))
        self._num_tokens = len(self._renderer.encode(text)) + 1
        return text

    def get_seconds(self, ledger: Ledger) -> float:
        """Return how long the reply takes."""
        return self._num_tokens * self.token_seconds
