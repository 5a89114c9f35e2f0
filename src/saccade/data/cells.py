"""Tables as text: cells changed where they stand, and every other character left as it is, quotes and line ends too."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from saccade.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    r"""Tables whose cells have `mark` between them, such as "," or a tab.

    >>> Cells(mark=",").changed('a,"b, ""c"" d",\r\n', str.upper)
    'A,"B, ""C"" D",\r\n'
    """

    mark: str
    _cell: re.Pattern[str] = field(init=False)
    _open: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        mark = re.escape(self.mark)
        quoted, bare = r'"([^"]*(?:""[^"]*)*)"(?!")', rf'([^{mark}"\r\n][^{mark}\r\n]*)'
        object.__setattr__(self, "_cell", re.compile(rf"(\A|{mark})(?:{quoted}|{bare})"))
        object.__setattr__(self, "_open", re.compile(rf'(?:\A|{mark})"'))

    def rows(self, lines: Iterable[str]) -> Iterator[str]:
        """The text of each row, which goes on in the next line where a quoted cell is still open."""
        held = ""
        for line in lines:
            held += line
            if '"' not in held or not self._open.search(self._cell.sub("", held)):
                yield held
                held = ""
        if held:
            yield held

    def changed(self, row: str, change: Callable[[str], str]) -> str:
        """The row with every cell changed. DataError where a bare cell would need quotes, which it hadn't before."""

        def replaced(match: re.Match[str]) -> str:
            before, quoted, bare = match.groups()
            if quoted is not None:
                new = change(quoted.replace('""', '"')).replace('"', '""')
                return f'{before}"{new}"'
            new = change(bare)
            if new != bare and self.mark in new:
                raise DataError(f"the cell {new[:80]!r} would be two, since it has {self.mark!r} in it")
            return f"{before}{new}"

        return self._cell.sub(replaced, row)
