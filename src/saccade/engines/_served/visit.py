"""A look at servers before a run: all that they are greeted with but for their weights, which takes the trainer's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.engines._served import greeting
from saccade.engines._served.server import Dialect, Orders, Server, Trouble, check_servers
from saccade.errors import EngineError, SaccadeError
from saccade.protocols import Needs

_SECONDS = 60.0  # for each answer: the first that a server gives takes longest
_NOTES = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


async def visit(
    dialect: Dialect, needs: Needs, servers: Sequence[str], orders: Orders | None
) -> Mapping[str, str | Exception]:
    """What each server is, by its address, or why it can't be used; `orders` are those that it must know besides.

    Raises ConfigError without any.
    """
    check_servers(servers, dialect.WORDS)
    return {url: await _visited(url, dialect, needs, orders) for url in dict.fromkeys(servers)}


async def _visited(url: str, dialect: Dialect, needs: Needs, orders: Orders | None) -> str | Exception:
    try:
        server = Server(url, _SECONDS, dialect)
        try:
            return await _about(server, needs, orders)
        finally:
            await server.close()
    except Trouble as error:
        return EngineError(f"{error}; {dialect.WORDS.mend}")
    except SaccadeError as error:
        return error


async def _about(server: Server, needs: Needs, orders: Orders | None) -> str:
    name = await greeting.about(server)
    server.check_room(needs.context)
    if other := next(_differences(Path(name), Path(needs.model)), None):
        raise EngineError(f"{server.url} serves another model, {name}: {other}; serve the checkpoint of this run")
    if needs.training:
        await server.dialect.check_orders(server)
        if orders is not None:
            await orders.check(server)
    seen = "; ".join(filter(None, (f"serves {name}, {server.context} tokens", greeting.seeds(server))))
    if needs.renderer is None:
        return f"{seen}; there is no model here to compare it with"
    await greeting.look(server, needs.renderer)
    await greeting.listen(server, needs.renderer)
    elsewhere = "" if _config(Path(name)) else "its config doesn't lie here, so that it can't be compared; "
    return f"{seen}; {elsewhere}whether its weights are the model's is compared when a run begins"


def _differences(served: Path, model: Path) -> Iterator[str]:
    """What two checkpoints' configs say otherwise, as far as both lie here."""
    one, other = _config(served), _config(model)
    if one and other:
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                yield f"its {key} is {one.get(key)}, the model's {other.get(key)}"


def _config(folder: Path) -> dict[str, Any]:
    """The keys of a config.json by their dotted names, but for notes; empty where there is none."""
    try:
        return dict(_flat(json.loads((folder / "config.json").read_text(encoding="utf-8")), ""))
    except (OSError, ValueError):
        return {}


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        if name not in _NOTES:
            yield from _flat(inner, f"{key}.{name}" if key else name)
