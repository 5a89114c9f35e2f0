"""The index of a run's episodes: one SQLite file beside the run, from which lists of 100,000 episodes are paged.

    episodes/*.jsonl.gz    ──a changed file is read again──┐
    evaluations/*.jsonl    ──appended lines are read───────┴──> .viewer/index.sqlite ──filter, sort, page──> rows

The index holds what lists show, and where each episode is stored; the episode itself stays in its file. A file is read
again if its size or time has changed, so a training run's index grows step by step. A damaged index, or one of another
version, is deleted and built again.
"""

import contextlib
import functools
import json
import os
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from saccade.errors import RunError, SaccadeError
from saccade.evaluation.judge_results import VERDICTS_SUFFIX, apply_verdicts, list_results_files, read_verdicts
from saccade.evaluation.records import read_records
from saccade.training.episode_log import list_rollout_files, read_rollout_lines
from saccade.types import BlockKind, ScoredEpisode
from saccade.utils.files import create_private_folder, open_file
from saccade.utils.hashing import compute_digest
from saccade.utils.jsonl import parse_plain_json

INDEX_FOLDER = ".viewer"  # of a run
VERSION = 4  # of the tables; another one is built again
MAX_SEARCHED_CHARS = 6000  # of an episode's text, from its start; a megabyte that a model repeats isn't worth an index
MAX_SHOWN_CHARS = 200  # of a text in a list
MAX_PAGE = 500  # rows
BATCH_LINES = 400  # between two commits: readers see a growing index
FACETS = ("stage", "status", "outcome", "answer_type", "source", "environment", "mode")
SORTS = {
    "": "step DESC, grp, idx",
    "reward": "reward IS NULL, reward, step DESC, grp, idx",
    "-reward": "reward DESC, step DESC, grp, idx",
    "-calls": "calls DESC, step DESC, grp, idx",
    "-tool_errors": "tool_errors DESC, step DESC, grp, idx",
    "-sampled_tokens": "sampled_tokens DESC, step DESC, grp, idx",
    "-visual_tokens": "visual_tokens DESC, step DESC, grp, idx",
    "-seconds": "seconds DESC, step DESC, grp, idx",
}
FIXED_FILTERS = {
    "verdict": {
        "right": "correct >= 0.5",
        "wrong": "correct < 0.5",
        "ungraded": "correct IS NULL",
        "failed": "is_failed",
    },
    "errors": {"yes": "tool_errors > 0", "no": "tool_errors = 0"},
    "called": {"yes": "calls > 0", "no": "calls = 0"},
}
_COLUMNS = {
    "ref": "TEXT UNIQUE NOT NULL",  # stage/step/mode/group/index, or eval/NAME/task/sample
    "file": "INTEGER NOT NULL",
    "start": "INTEGER NOT NULL",  # byte of the line in an evaluation's file; number of the line in a step's
    "length": "INTEGER NOT NULL",
    "kind": "TEXT NOT NULL",  # evaluation or rollout
    "stage": "TEXT NOT NULL",  # rl, rl_validation, sft_validation, or the name of an evaluation
    "step": "INTEGER NOT NULL",  # 0 for an evaluation
    "mode": "TEXT NOT NULL",
    "grp": "INTEGER NOT NULL",
    "idx": "INTEGER NOT NULL",
    "outcome": "TEXT NOT NULL",
    "reason": "TEXT NOT NULL",
    "task": "TEXT NOT NULL",
    "question": "TEXT NOT NULL",
    "answer_type": "TEXT NOT NULL",
    "ground_truth": "TEXT NOT NULL",
    "answer": "TEXT",
    "status": "TEXT NOT NULL",
    "environment": "TEXT NOT NULL",
    "source": "TEXT NOT NULL",
    "correct": "REAL",
    "reward": "REAL",
    "parts": "TEXT NOT NULL",
    "turns": "INTEGER NOT NULL",
    "calls": "INTEGER NOT NULL",
    "tool_errors": "INTEGER NOT NULL",
    "sampled_tokens": "INTEGER NOT NULL",
    "visual_tokens": "INTEGER NOT NULL",
    "seconds": "REAL NOT NULL",
    "frame_budget": "INTEGER",
    "version": "INTEGER",
    "error": "TEXT",
    "is_failed": "INTEGER NOT NULL",  # whether it has an error
}
# Errors that don't come from the index's content: to build it again would neither help nor be possible.
_UNWRITABLE = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM),
}
_VALUE_TYPES: dict[str, tuple[type, ...]] = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float)}
_TYPES = [(name, _VALUE_TYPES[kind.split()[0]], "NOT NULL" not in kind) for name, kind in _COLUMNS.items()]
# An index with all of these is read alone: 100,000 whole rows take several times as long.
_FILTERED = (
    *("correct", "reward", "tool_errors", "calls", "is_failed", "status", "outcome", "answer_type", "source"),
    *("environment", "mode", "kind", "sampled_tokens", "visual_tokens", "seconds"),
)
_SHOWN = [name for name in _COLUMNS if name not in ("file", "start", "length", "is_failed")]
_SCHEMA = f"""
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, stamp TEXT NOT NULL, inode INTEGER NOT NULL,
    done INTEGER NOT NULL);
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())});
CREATE VIRTUAL TABLE texts USING fts5(body);
CREATE INDEX by_order ON episodes (step DESC, grp, idx, {", ".join(_FILTERED)}, stage);
CREATE INDEX by_stage ON episodes (stage, step DESC, grp, idx, {", ".join(_FILTERED)});
CREATE INDEX by_file ON episodes (file);
CREATE INDEX by_task ON episodes (task);
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an episode is stored: its file, and the byte (`evaluation`) or number (`rollout`) of its line."""

    path: Path
    start: int
    length: int
    kind: Literal["evaluation", "rollout"]


class EpisodeIndex:
    """The index of one run. `refresh` is called by one thread at a time; queries may run beside it."""

    def __init__(self, run_folder: Path) -> None:
        self._run, self._path, self._refreshing = run_folder, _choose_path(run_folder), threading.Lock()
        self.num_files_left = 0  # that have changed and aren't read yet
        self.problems: dict[str, str] = {}  # by file: why some of its lines are left out

    # ---- building --------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Read what has changed on disk; return whether anything had. A call beside another returns at once."""
        if not self._refreshing.acquire(blocking=False):
            return False
        try:
            with self._open(is_writer=True) as connection:
                return self._refresh(connection)
        except sqlite3.DatabaseError as error:
            # An extended code's lowest byte is its kind. Only Python's own errors have none.
            if vars(error).get("sqlite_errorcode", 0) & 0xFF in _UNWRITABLE:
                problem = f"{self._path} can't be written: {error}; free some space, or allow writing to its folder"
                raise RunError(problem, key=str(self._path)) from error
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            with self._open(is_writer=True) as connection:
                return self._refresh(connection)
        finally:
            self.num_files_left = 0
            self._refreshing.release()

    def _refresh(self, connection: sqlite3.Connection) -> bool:
        known = {
            path: (file, stamp, inode, done)
            for file, path, stamp, inode, done in connection.execute("SELECT id, path, stamp, inode, done FROM files")
        }
        found = dict(self._list_files())
        changed = [path for path, stamp in found.items() if known.get(path, (0, ""))[1] != stamp]
        gone, is_changed = [known[path][0] for path in known.keys() - found.keys()], False
        for file in gone:
            self._forget(connection, file)
            connection.execute("DELETE FROM files WHERE id = ?", (file,))
        for number, path in enumerate(changed):
            self.num_files_left = len(changed) - number
            try:
                self._read_file(connection, path, found[path], known.get(path))
            except FileNotFoundError:  # deleted since it was listed
                continue
            except OSError as error:  # the next look tries again
                self.problems[path] = f"can't be read: {error.strerror}"
                continue
            except SaccadeError as error:  # verdicts of a judge on damaged results
                self.problems[path] = str(error)
            # Only now: a process that ends while it reads a file leaves the rest of it to the next one.
            connection.execute("UPDATE files SET stamp = ? WHERE path = ?", (found[path], path))
            connection.commit()
            is_changed = True
        connection.commit()
        return bool(is_changed or gone)

    def _list_files(self) -> Iterator[tuple[str, str]]:
        """Yield the path, relative to the run, and the stamp of each file with episodes."""
        for path in (*list_results_files(self._run), *(path for path, _, _ in list_rollout_files(self._run))):
            with contextlib.suppress(OSError):  # deleted since it was listed
                stamps = [_stamp(file) for file in (path, path.with_suffix(VERDICTS_SUFFIX)) if file.exists()]
                yield path.relative_to(self._run).as_posix(), " ".join(stamps)

    def _forget(self, connection: sqlite3.Connection, file: int) -> None:
        connection.execute("DELETE FROM texts WHERE rowid IN (SELECT id FROM episodes WHERE file = ?)", (file,))
        connection.execute("DELETE FROM episodes WHERE file = ?", (file,))

    def _read_file(
        self, connection: sqlite3.Connection, name: str, stamp: str, known: tuple[int, str, int, int] | None
    ) -> None:
        """Read the lines that the index lacks. The file's stamp stays empty until the caller has the whole file."""
        path = self._run / name
        status = path.stat()
        # A results file of the same inode that has grown was appended to; any other change is read as a new file, and
        # so are verdicts that are changed or gone: their episodes have another score then.
        is_appended = (
            known is not None
            and path.suffix == ".jsonl"
            and known[2] == status.st_ino
            and status.st_size >= known[3] > 0
            and known[1].partition(" ")[2] in ("", stamp.partition(" ")[2])
        )
        if known is not None and not is_appended:
            self._forget(connection, known[0])
        done = known[3] if known is not None and is_appended else 0
        connection.execute(
            "INSERT OR REPLACE INTO files VALUES ((SELECT id FROM files WHERE path = ?1), ?1, ?2, ?3, ?4)",
            (name, "", status.st_ino, done),
        )
        (file,) = connection.execute("SELECT id FROM files WHERE path = ?", (name,)).fetchone()
        self.problems.pop(name, None)
        read_rows = self._iterate_rollouts if path.suffix == ".gz" else self._iterate_results
        for count, (row, text, end) in enumerate(read_rows(path, done), start=1):
            self._write_row(connection, {"file": file, **row}, text)
            done = end
            if count % BATCH_LINES == 0:
                connection.commit()
        connection.execute("UPDATE files SET done = ? WHERE id = ?", (done, file))
        if path.with_suffix(VERDICTS_SUFFIX).exists():
            self._apply_verdicts(connection, path)
        connection.commit()

    def _write_row(self, connection: sqlite3.Connection, row: Mapping[str, Any], text: str) -> None:
        names = list(_COLUMNS)
        old = connection.execute("SELECT id FROM episodes WHERE ref = ?", (row["ref"],)).fetchone()
        if old is not None:  # an episode that was sampled again
            connection.execute("DELETE FROM texts WHERE rowid = ?", old)
            connection.execute("DELETE FROM episodes WHERE id = ?", old)
        cursor = connection.execute(
            f"INSERT INTO episodes ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            [row[name] for name in names],
        )
        connection.execute("INSERT INTO texts (rowid, body) VALUES (?, ?)", (cursor.lastrowid, text))

    def _iterate_rollouts(self, path: Path, done: int) -> Iterator[tuple[dict[str, Any], str, int]]:
        problems = list[str]()
        lines = read_rollout_lines(path, problems)
        if problems:
            self.problems[path.relative_to(self._run).as_posix()] = problems[0]
        for number, line in enumerate(lines):
            if built := self._build_row(path, line, _place_rollout):
                row, text = built
                yield {"start": number, "length": len(line), **row}, text, number

    def _iterate_results(self, path: Path, done: int) -> Iterator[tuple[dict[str, Any], str, int]]:
        with open_file(path) as file:
            file.seek(done)
            start = done
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    return
                end = start + len(line)
                if built := self._build_row(path, line, functools.partial(_place_result, path.stem)):
                    row, text = built
                    # Results are in the order of the file.
                    yield {"start": start, "length": len(line), "grp": start, **row}, text, end
                start = end

    def _build_row(
        self, path: Path, line: bytes, place: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> tuple[dict[str, Any], str] | None:
        """Return what a line is in the index, and its text for the search.

        None for a void line, and, with a note of the problem, for one that is no episode.
        """
        # Plain JSON: building typed episodes takes several times as long, and a page builds the one that it shows.
        try:
            record: dict[str, Any] = parse_plain_json(line)
            if record.get("is_void"):
                return None
            outcome = record if "episode" in record else record["outcome"]
            facts, text = _summarize(outcome["episode"], outcome.get("score"))
            row = place(record) | facts
            _require_types(row)
            # A lone surrogate has no UTF-8 form, which SQLite needs.
            row = {name: _drop_surrogates(value) if isinstance(value, str) else value for name, value in row.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            self.problems[path.relative_to(self._run).as_posix()] = f"a line can't be read: {error!r:.200}"
            return None
        return row, _drop_surrogates(text)

    def _apply_verdicts(self, connection: sqlite3.Connection, path: Path) -> None:
        records = [record for record in read_records(path) if isinstance(record.outcome, ScoredEpisode)]
        judged = apply_verdicts([cast(ScoredEpisode, record.outcome) for record in records], read_verdicts(path))
        for record, scored in zip(records, judged, strict=True):
            values = (scored.score.correct, scored.score.value, scored.episode.task.id, record.sample_index, path.stem)
            connection.execute(
                "UPDATE episodes SET correct = ?, reward = ? "
                "WHERE task = ? AND idx = ? AND stage = ? AND kind = 'evaluation'",
                values,
            )

    # ---- queries ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self, *, is_writer: bool = False) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # a damaged index is built again
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if is_writer and version not in (0, VERSION):
                raise sqlite3.DatabaseError("an index of another version")
            if is_writer and version == 0:
                connection.executescript(_SCHEMA)
            yield connection
        finally:
            connection.close()

    def _select(self, query: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        try:
            with self._open() as connection:
                connection.row_factory = sqlite3.Row
                return connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError:  # before the first refresh there are no tables
            return []

    def count(self) -> int:
        """Return the number of episodes in the index."""
        rows = self._select("SELECT count(*) FROM episodes")
        return rows[0][0] if rows else 0

    def get_stamp(self) -> tuple[int, int]:
        """Return what changes whenever episodes are added or deleted."""
        rows = self._select("SELECT count(*), coalesce(max(id), 0) FROM episodes")
        return tuple(rows[0]) if rows else (0, 0)

    def list_facets(self) -> dict[str, list[tuple[str, int]]]:
        """Return the values of each facet with their numbers of episodes, the most frequent first."""
        return {
            name: [
                (str(value), count)
                for value, count in self._select(
                    f"SELECT {name}, count(*) AS n FROM episodes GROUP BY {name} ORDER BY n DESC LIMIT 100"
                )
                if value != ""
            ]
            for name in FACETS
        }

    def list_episodes(
        self, filters: Mapping[str, str], *, sort: str = "", offset: int = 0, limit: int = 100
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many episodes pass the filters, and a page of at most MAX_PAGE of them."""
        where, values = build_condition(filters)
        counts = self._select(f"SELECT count(*) FROM episodes WHERE {where}", values)
        order = SORTS.get(sort, SORTS[""])
        # The numbers of the page's rows come from an index alone, and then its rows.
        page = f"SELECT id FROM episodes WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        rows = self._select(
            f"SELECT {', '.join(_SHOWN)} FROM episodes WHERE id IN ({page}) ORDER BY {order}",
            (*values, min(max(limit, 0), MAX_PAGE), max(offset, 0)),
        )
        return counts[0][0] if counts else 0, [_to_dict(row) for row in rows]

    def find_position(self, ref: str, filters: Mapping[str, str], sort: str = "") -> int | None:
        """Return the position of an episode in a filtered list, from 0; None if it isn't in it."""
        where, values = build_condition(filters)
        order = SORTS.get(sort, SORTS[""])
        rows = self._select(
            f"SELECT position FROM (SELECT id, row_number() OVER (ORDER BY {order}) - 1 AS position FROM episodes "
            f"WHERE {where}) WHERE id = (SELECT id FROM episodes WHERE ref = ?)",
            (*values, ref),
        )
        return rows[0][0] if rows else None

    def list_steps(self) -> list[dict[str, Any]]:
        """Return stage, step, and the numbers of episodes, groups and outcomes of each step with episodes."""
        rows = self._select(
            "SELECT stage, step, count(*) AS episodes, count(DISTINCT grp) AS groups, avg(reward) AS reward, "
            "avg(correct) AS correct, sum(outcome = 'kept') AS kept FROM episodes WHERE kind = 'rollout' "
            "GROUP BY stage, step ORDER BY stage, step"
        )
        return [dict(row) for row in rows]

    def find(self, ref: str) -> tuple[Location, dict[str, Any]] | None:
        """Return where an episode is stored, and its row; None for an unknown one."""
        rows = self._select("SELECT e.*, f.path FROM episodes e JOIN files f ON e.file = f.id WHERE ref = ?", (ref,))
        if not rows:
            return None
        row = rows[0]
        location = Location(path=self._run / row["path"], start=row["start"], length=row["length"], kind=row["kind"])
        return location, _to_dict(row)

    def list_outcomes(self, stage: str, step: int = 0) -> list[dict[str, Any]]:
        """Return all rows of an evaluation, or of a step, in order."""
        rows = self._select(
            f"SELECT {', '.join(_SHOWN)} FROM episodes WHERE stage = ? AND step = ? ORDER BY grp, idx", (stage, step)
        )
        return [_to_dict(row) for row in rows]


def build_condition(filters: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Return the SQL condition of a list's filters, and its values. Unknown and empty filters are left out."""
    clauses, values = ["1"], list[Any]()
    for name in (*FACETS, "task", "step", "grp", "kind"):
        if filters.get(name):
            clauses.append(f"{name} = ?")
            values.append(filters[name])
    for name, clause in (("reward_min", "reward >= ?"), ("reward_max", "reward <= ?")):
        with contextlib.suppress(ValueError):
            if filters.get(name):
                values.append(float(filters[name]))
                clauses.append(clause)
    clauses += [options[filters[name]] for name, options in FIXED_FILTERS.items() if filters.get(name) in options]
    if words := re.findall(r"\w+", filters.get("text", "")):
        clauses.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
        values.append(" ".join(f'"{word}"*' for word in words))
    return " AND ".join(clauses), values


def _to_dict(row: sqlite3.Row) -> dict[str, Any]:
    values = {name: row[name] for name in _SHOWN}
    return values | {"parts": json.loads(values["parts"])}


def _choose_path(run_folder: Path) -> Path:
    """Return the path of the index: beside the run, or in the temporary folder if the run can't be written."""
    folder = run_folder / INDEX_FOLDER
    try:
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder / "index.sqlite"
    except OSError:
        pass
    shared = Path(tempfile.gettempdir(), f"saccade-index-{os.getuid()}")
    try:
        create_private_folder(shared)  # other users could read or replace a file at a path that they can predict
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problem = f"{shared} can't hold the index of {run_folder}: {reason}; set TMPDIR to a folder of your own"
        raise RunError(problem, key=str(shared)) from error
    return shared / f"{compute_digest(str(run_folder.resolve()))[:16]}.sqlite"


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_mtime_ns}:{status.st_size}:{status.st_ino}"


def _place_rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    stage, step, mode = record["stage"], record["step"], record.get("mode") or ""
    group, index = record["group"], record["index"]
    return {
        "ref": "/".join(filter(None, (stage, str(step), mode, str(group), str(index)))),
        "kind": "rollout",
        "stage": stage,
        "step": step,
        "mode": mode,
        "grp": group,
        "idx": index,
        "outcome": record["outcome"],
        "reason": record.get("reason") or "",
    }


def _place_result(evaluation: str, record: Mapping[str, Any]) -> dict[str, Any]:
    outcome, sample = record["outcome"], record["sample_index"]
    return {
        "ref": f"eval/{evaluation}/{compute_digest(outcome['episode']['task']['id'])[:12]}/{sample}",
        "kind": "evaluation",
        "stage": evaluation,
        "step": 0,
        "mode": "" if record.get("use_tools", True) else "no tools",
        "idx": sample,
        "outcome": "scored" if "score" in outcome else "ungraded",
        "reason": outcome.get("reason") or "",
    }


def _require_types(row: Mapping[str, Any]) -> None:
    """Raise TypeError for a value that its column can't hold: SQLite would store it as another type, or fail."""
    for name, types, is_optional in _TYPES:
        value = row.get(name)
        if value is None and (is_optional or name not in row):
            continue
        # NaN becomes NULL; an integer has 64 bits.
        is_held = isinstance(value, types) and (is_optional or value == value)
        if not is_held or (isinstance(value, int) and value.bit_length() > 63):
            raise TypeError(f"{name} is {value!r:.40}")


def _summarize(episode: Mapping[str, Any], score: Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Return the columns of an episode, read from its plain JSON, and its text for the search."""
    task, usage = episode["task"], episode.get("usage") or {}
    replies = [turn["reply"] for turn in episode["turns"]]
    results = [result for turn in episode["turns"] for result in turn.get("results") or ()]
    blocks = [block for reply in replies for block in reply.get("blocks") or ()]
    answers = [
        block["body"].strip()
        for block in blocks
        if block["kind"] == BlockKind.ANSWER and block["is_closed"] and block["body"].strip()
    ]
    versions = [segment.get("version") for segment in episode["ledger"]["segments"]]
    extras, parts = task.get("extras") or {}, dict((score or {}).get("parts") or {})
    answer = answers[-1] if answers else None
    facts = {
        "task": task["id"],
        "question": task["question"][:MAX_SHOWN_CHARS],
        "answer_type": str(task["answer_type"]),
        "ground_truth": json.dumps(task["ground_truth"], ensure_ascii=False)[:MAX_SHOWN_CHARS],
        "answer": None if answer is None else answer[:MAX_SHOWN_CHARS],
        "status": episode["status"],
        "environment": episode["environment"],
        "source": str(next((extras[name] for name in ("data_source", "source") if extras.get(name)), "")),
        "correct": None if score is None else score.get("correct"),
        "reward": None if score is None else score.get("value"),
        "parts": json.dumps(parts),
        "turns": len(replies),
        "calls": sum(block.get("call") is not None for block in blocks),
        "tool_errors": sum(result.get("error") is not None for result in results),
        "sampled_tokens": usage.get("sampled_tokens", 0),
        "visual_tokens": usage.get("visual_tokens", 0),
        "seconds": usage.get("seconds", 0.0),
        "frame_budget": episode.get("frame_budget"),
        "version": max((version for version in versions if version is not None), default=None),
        "error": episode.get("error"),
        "is_failed": episode.get("error") is not None,
    }
    texts = [
        task["id"],
        task["question"],
        str(task["ground_truth"]),
        *(reply["text"] for reply in replies),
        *(result.get("text") or result.get("error") or "" for result in results),
        *(turn["reply"]["text"] for child in episode.get("children") or () for turn in child["turns"]),
        episode.get("error") or "",
    ]
    return facts, "\n".join(texts)[:MAX_SEARCHED_CHARS]


def _drop_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
