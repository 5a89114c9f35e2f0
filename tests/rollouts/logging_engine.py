"""An engine in a file, for tests with workers: writes code, then answers; logs its requests; may kill its process.

Of the episodes of a prompt with the word "endless", every second one waits for its first reply until it is cancelled.
"""

import os
import signal
from collections import Counter

from saccade.engines.scripted import Scripted

CODE = """I look.<code>
```python
import numpy as np
image_clue_0.crop((0, 0, 40, 40)).show()
print(np.asarray(image_clue_0).sum(), np.random.rand())
```
</code>"""


def is_first(ledger):
    return not any(segment.is_sampled for segment in ledger.segments)


class LoggingEngine(Scripted):
    """Appends a line per request to the file `log`: process, kind, version; kills its process at `kills` answers."""

    def __init__(self, renderer, *, log: str, latency: float = 0.0, kills: int = 0) -> None:
        super().__init__(renderer, replies=self.reply, latency=self.compute_latency)
        self.log, self.latency, self.kills = log, latency, kills
        self.num_endless = Counter()

    def compute_latency(self, ledger):
        prompt = self._renderer.decode(ledger.unexpanded_ids())
        if not is_first(ledger) or "endless" not in prompt:
            return self.latency
        self.num_endless[prompt] += 1
        return self.latency if self.num_endless[prompt] % 2 else 10**6

    def reply(self, ledger):
        with open(self.log, "a") as file:  # one write: lines of several processes don't mix
            file.write(f"{os.getpid()} {'code' if is_first(ledger) else 'answer'} {self.version}\n")
        if "explode" in self._renderer.decode(ledger.unexpanded_ids()):
            raise ValueError("a bug")
        if is_first(ledger):
            return CODE
        for number in range(self.kills):
            try:
                os.close(os.open(f"{self.log}.{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return "I know.</think><answer>\\boxed{red}</answer>"
