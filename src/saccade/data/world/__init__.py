"""Needle worlds: generated videos with short events at known times, and questions with exact labels."""

from saccade.data.world.check import check_world
from saccade.data.world.make import make_world
from saccade.data.world.sheet import contact_sheet

__all__ = ["check_world", "contact_sheet", "make_world"]
