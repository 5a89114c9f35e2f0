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


async def until(enough: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Work until it is done, or until `enough` is set: then it is cancelled, and has ended on return."""
    running, signal = asyncio.ensure_future(work), asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait((running, signal), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # for what it may have to raise
    finally:
        for each in (running, signal):
            each.cancel()
        await asyncio.gather(running, signal, return_exceptions=True)


async def settled(value: T | Awaitable[T]) -> T:
    """A value, waited for where it has to be."""
    if inspect.isawaitable(value):
        return await value
    return value
