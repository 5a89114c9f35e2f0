"""Encode text by its source: the template (all special tokens), the model (structural tags), others (plain text)."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from saccade.errors import ModelError, convert_errors
from saccade.utils.files import read_text


class ChatTokenizer:
    """A checkpoint's tokenizer.

    Text is split at the added tokens that its source may use; the rest is encoded by the same tokenizer without added
    tokens, so that text which spells a special token never becomes one. Adjacent texts are encoded as one.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            message = f"{folder} has no tokenizer.json; save the tokenizer there with save_pretrained"
            raise ModelError(message, key=str(path))
        with convert_errors(ModelError, f"{path} can't be read", key=str(path)):
            data = json.loads(read_text(path))
            self._tokenizer = Tokenizer.from_str(json.dumps(data))
            # Without its added tokens the same tokenizer encodes `<|im_end|>` as ordinary characters.
            self._plain_tokenizer = Tokenizer.from_str(json.dumps({**data, "added_tokens": [], "post_processor": None}))
            self._added_ids = {entry["content"]: int(entry["id"]) for entry in data["added_tokens"]}
            structural = [entry["content"] for entry in data["added_tokens"] if not entry["special"]]
        self._path = path
        self._added_pattern = _build_token_pattern(self._added_ids)
        self._structural_pattern = _build_token_pattern(structural)
        added = set(self._added_ids.values())
        for content in self._added_ids:
            if not added.isdisjoint(self._plain_tokenizer.encode(content).ids):
                message = f"{self._path} spells {content!r} as plain text with a special token's id"
                raise ModelError(message, key=str(self._path), value=content)

    def get_added_token_id(self, content: str) -> int:
        """Return the id of an added token. Raises ModelError if the tokenizer lacks it."""
        if content not in self._added_ids:
            message = f"{self._path} has no special token {content!r}; it isn't this family's tokenizer"
            raise ModelError(message, key=str(self._path), value=content)
        return self._added_ids[content]

    def split(self, text: str, *, is_template: bool) -> list[int | str]:
        """Split text into the ids of the template's tokens, or of the model's structural tags, and the text between."""
        pattern = self._added_pattern if is_template else self._structural_pattern
        # A pattern with one group puts the separators, here the added tokens, at odd indices.
        parts = enumerate(pattern.split(text))
        return [self._added_ids[part] if index % 2 else part for index, part in parts if part]

    def encode(self, pieces: Iterable[int | str]) -> list[int]:
        """Encode the texts among the pieces as plain text, adjacent ones joined; ids are unchanged."""
        ids: list[int] = []
        for is_id, group in groupby(pieces, key=lambda piece: isinstance(piece, int)):
            if is_id:
                ids += map(int, group)
            else:
                ids += self._plain_tokenizer.encode(replace_surrogates("".join(map(str, group)))).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode ids to text, special tokens included; invalid UTF-8 becomes U+FFFD, ids without a token nothing."""
        # The tokenizer ignores ids beyond its vocabulary, but raises for those that aren't unsigned 32-bit integers.
        ids = [token for token in tokens if 0 <= token < 2**32]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size()


def _build_token_pattern(contents: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest first; without any it never matches."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which tools may print and tokenizers reject, as question marks."""
    return text.encode("utf-8", "replace").decode()
