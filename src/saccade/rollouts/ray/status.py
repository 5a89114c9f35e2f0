"""Read the state of a Ray cluster: its nodes, and the rollout workers of all runs on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors

from saccade.errors import RunError, convert_errors
from saccade.rollouts.messages import WorkerStatus
from saccade.rollouts.ray.driver import NAMESPACE, connect

_STATUS_SECONDS = 10.0  # for a worker to respond


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node that is up."""

    host: str
    address: str
    total: dict[str, float]  # resources
    free: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """Nodes and workers; workers that don't respond have the reason in place of a status."""

    nodes: Sequence[NodeStatus]
    workers: dict[str, WorkerStatus | str]  # by name


def read_status(address: str) -> ClusterReport:
    """Connect to a cluster and read its state. Raises RunError if there is none."""
    message = f"there is no Ray cluster at {address}; start one (ray start --head), or give --address host:port"
    with convert_errors(RunError, message, key="--address", value=address):
        connect(address)
    try:
        api: Any = ray  # its own functions are untyped
        free: dict[str, dict[str, float]] = api._private.state.available_resources_per_node()
        nodes = [
            NodeStatus(
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
            )
            for node in api.nodes()
            if node["Alive"]
        ]
        names = [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
        return ClusterReport(nodes=nodes, workers={name: _read_worker(name) for name in sorted(names)})
    finally:
        ray.shutdown()


def _read_worker(name: str) -> WorkerStatus | str:
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        status: WorkerStatus = ray.get(actor.get_status.remote(), timeout=_STATUS_SECONDS)
    except GetTimeoutError:
        return "waits for room on a node, or doesn't respond"
    except (RayError, ValueError) as error:
        return " ".join(str(error).split())[:80]
    return status
