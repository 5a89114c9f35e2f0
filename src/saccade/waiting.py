"""Waiting: for several at once, and for what may or may not have to be waited for."""

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once, results in order; the first failure is raised and cancels the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # `gather` alone would let the others run on
            task.cancel()


async def settled(value: T | Awaitable[T]) -> T:
    """A value, waited for where it has to be."""
    if inspect.isawaitable(value):
        return await value
    return value
