"""An engine in a file, for tests with workers: writes code, then answers; logs its requests; may kill its process."""

import os
import signal

from saccade.engines.scripted import Scripted

CODE = """I look.<code>
```python
import numpy as np
image_clue_0.crop((0, 0, 40, 40)).show()
print(np.asarray(image_clue_0).sum(), np.random.rand())
```
</code>"""


class LoggingEngine(Scripted):
    """Appends a line per request to the file `log`: process, kind, version; kills its process at `kills` answers."""

    def __init__(self, renderer, *, log: str, latency: float = 0.0, kills: int = 0) -> None:
        super().__init__(renderer, replies=self.reply, latency=latency)
        self.log, self.kills = log, kills

    def reply(self, ledger):
        is_first = not any(segment.is_sampled for segment in ledger.segments)
        with open(self.log, "a") as file:  # one write: lines of several processes don't mix
            file.write(f"{os.getpid()} {'code' if is_first else 'answer'} {self.version}\n")
        if "explode" in self._renderer.decode(ledger.prompt_ids()):
            raise ValueError("a bug")
        if is_first:
            return CODE
        for number in range(self.kills):
            try:
                os.close(os.open(f"{self.log}.{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return "I know.</think><answer>\\boxed{red}</answer>"
