"""A scripted engine in a file, so that a recipe can name it: two replies with code on a video, then an answer."""

from saccade.engines.scripted import Scripted
from saccade.ledger import Ledger
from saccade.protocols import Renderer

CODE = """I look.<code>
```python
import numpy as np
frames = np.stack([np.asarray(video_clue_0[index]) for index in range({first}, {last}, {stride})])
total = 0.0
for _ in range({rounds}):
    total += float(np.abs(np.diff(frames.astype(np.float32), axis=0)).mean())
print(round(total / {rounds}, 3))
```
</code>"""


class CodingEngine(Scripted):
    """Replies at once: an episode costs what decoding, its sandbox and the client cost."""

    def __init__(self, renderer: Renderer, *, rounds: int = 20, num_frames: int = 200) -> None:
        super().__init__(renderer, replies=self.reply)
        self.rounds, self.num_frames = rounds, num_frames

    def reply(self, ledger: Ledger) -> str:
        """Return code for one half of the video, code for the other, the answer."""
        turn = sum(segment.is_sampled for segment in ledger.segments)
        if turn == 2:
            return "I know.</think><answer>red</answer>"
        half = self.num_frames // 2
        return CODE.format(first=turn * half, last=(turn + 1) * half, stride=4, rounds=self.rounds)
