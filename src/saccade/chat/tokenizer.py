"""Text to ids and back for one tokenizer, with three voices: the scaffold's, the model's own, and anybody's."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from saccade.errors import ModelError, boundary


class Tokens:
    """A checkpoint's tokenizer.

    Text is cut at the added tokens a voice may use, and the rest is tokenised by the same tokenizer with its added
    tokens taken out: no text can become a special token by spelling it. Adjacent texts are tokenised as one.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; save the tokenizer there with save_pretrained")
        with boundary(ModelError, f"{path} can't be read"):
            data = json.loads(path.read_text(encoding="utf-8"))
            self._full = Tokenizer.from_str(json.dumps(data))
            # Without its added tokens the same tokenizer spells `<|im_end|>` letter by letter.
            self._plain = Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))
            self._ids = {entry["content"]: int(entry["id"]) for entry in data["added_tokens"]}
            structural = [entry["content"] for entry in data["added_tokens"] if not entry["special"]]
        self._path = path
        self._any_added: re.Pattern[str] | None = cutter(self._ids)
        self._structural = cutter(structural)
        self._refuse_fakes()

    def _refuse_fakes(self) -> None:
        added = set(self._ids.values())
        for content in self._ids:
            if not added.isdisjoint(self._plain.encode(content).ids):
                raise ModelError(f"{self._path} spells {content!r} as plain text with a special token's id")

    def special(self, content: str) -> int:
        """The id of an added token. Raises ModelError where the tokenizer has none."""
        if content not in self._ids:
            raise ModelError(f"{self._path} has no special token {content!r}; it isn't this family's tokenizer")
        return self._ids[content]

    def scaffold(self, text: str) -> list[int | str]:
        """Every added token in `text` as its id, the rest as text."""
        return self._cut(text, self._any_added)

    def spoken(self, text: str) -> list[int | str]:
        """Structural tags in `text` as their ids; turn and vision marks stay text."""
        return self._cut(text, self._structural)

    def _cut(self, text: str, cutter: re.Pattern[str] | None) -> list[int | str]:
        # A split by one group puts the separators, here the added tokens, at the odd places.
        parts = [text] if cutter is None else cutter.split(text)
        return [self._ids[part] if index % 2 else part for index, part in enumerate(parts) if part]

    def encode(self, pieces: Iterable[int | str]) -> list[int]:
        """Ids as they are, texts as plain text; neighbouring texts are joined first."""
        ids: list[int] = []
        texts: list[str] = []
        for piece in (*pieces, None):
            if isinstance(piece, str):
                texts.append(piece)
                continue
            if texts:
                ids += self._spell("".join(texts))
                texts = []
            if piece is not None:
                ids.append(piece)
        return ids

    def _spell(self, text: str) -> list[int]:
        return list(self._plain.encode(utf8(text)).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids to text, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._full.decode(list(tokens), skip_special_tokens=False)


def cutter(contents: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of these texts, the longest first; None where there are none."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def utf8(text: str) -> str:
    """The text as it can be written down."""
    # Lone surrogates (a tool may print them) become question marks; the tokenizer would refuse them.
    return text.encode("utf-8", "replace").decode()
