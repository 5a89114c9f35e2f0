"""Needle worlds: generated videos with short events at known times, or pictures with small cards at known places, and
questions with exact labels.
"""

import os
from collections.abc import Sequence

from saccade.data.world import check, make, phrases, sheet
from saccade.data.world.check import WorldReport
from saccade.data.world.folder import medium
from saccade.data.world.make import FRAME_BUDGETS, Progress
from saccade.data.world.still import check as still_check
from saccade.data.world.still import make as still_make
from saccade.data.world.still import phrases as still_phrases
from saccade.sections import World


def make_world(
    folder: str | os.PathLike[str],
    world: World,
    *,
    seed: int,
    budgets: Sequence[int] = FRAME_BUDGETS,
    progress: Progress | None = None,
) -> None:
    """Make the world in `folder`, or go on where an interrupted one stopped; the same seed gives the same files.

    `budgets` are those of the overviews in the traces of videos. `progress(split, done, total)` is told of every video
    or picture. Raises ConfigError for settings that can't be met, DataError for a folder that holds another world.
    """
    if world.media == "video":
        make.make_world(folder, world, seed=seed, budgets=budgets, progress=progress)
    else:
        still_make.make_stills(folder, world, seed=seed, progress=progress)


def check_world(folder: str | os.PathLike[str]) -> WorldReport:
    """Whether nothing leaks between the splits of a world, and every answer follows from its labels.

    Raises DataError for missing files.
    """
    return still_check.check_stills(folder) if medium(folder) == "image" else check.check_world(folder)


def contact_sheet(folder: str | os.PathLike[str], out_png: str | os.PathLike[str]) -> None:
    """Draw some of a world's videos or pictures, with what is in them."""
    if medium(folder) == "image":
        still_check.still_sheet(folder, out_png)
    else:
        sheet.contact_sheet(folder, out_png)


def pieces(world: World) -> tuple[str, ...]:
    """What a tiny tokenizer should have as one token each: the fixed parts of all that is said in the world."""
    if world.media == "image":
        return still_phrases.PIECES
    code = (*phrases.CODE, *phrases.code_pieces(world.fps)) if world.traces == "code" else ()
    return (*phrases.PIECES, *code)
