"""Rewards, one function or class per file; the first parameter decides what is scored.

    def name(episode: Episode, *, settings) -> float | Score | Ungraded    usually in [0, 1]
    def name(episode: Episode, *, correct: float, settings) -> ...         with the value of the `is_accuracy` term
    def name(group: Group, *, settings) -> list[float] | Ungraded          one value per episode, in order

A class receives its settings in `__init__` and holds expensive resources, such as a judge's client. A reward is
deterministic. `Ungraded` means that the value is unknown, not 0; from a group reward, it leaves the whole group without
scores. A `Score` with `credits` rewards particular tokens. A reward that waits for a server or a process is a coroutine
function. The episodes of a group have the scores of the other terms; those that have none are in `group.ungraded`.
"""
