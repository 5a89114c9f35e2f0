"""Filters, one function per file, true for what is kept; the signature decides when it runs.

    def name(scored: ScoredEpisode, *, settings) -> bool                     episodes, before groups are compared
    def name(group: Group, *, settings) -> bool                              groups of the remaining episodes
    def name(scored: ScoredEpisode, *, advantage: float, settings) -> bool   episodes to train on

`rl.filters` names them, each with its settings; a name may be the path of a file. Episodes that the last form drops
still count in their group's baseline.
"""
