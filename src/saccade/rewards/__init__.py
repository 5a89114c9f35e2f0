"""Rewards, one function or class per file; the first parameter decides what is scored.

    def name(episode: Episode, *, settings) -> float | Score | Ungraded    usually in [0, 1]
    def name(episode: Episode, *, correct: float, settings) -> ...         with the value of the term marked `correct`
    def name(group: Group, *, settings) -> list[float] | Ungraded          one value per episode, in order

A class receives its settings in `__init__` and holds expensive resources, such as a judge's client. The value of an
episode is always the same; `Ungraded` means that it is unknown (never 0), for a group that no episode has a score. A
`Score` with `credits` rewards particular tokens. A reward that waits for a server or a process is a coroutine function.
The episodes of a group have the scores of the other terms; those that could not be graded are in `group.ungraded`.
"""
