"""Clips that calls can't cover: one needle in one of many places; a cue, a gauge or a cost decides where to look."""
