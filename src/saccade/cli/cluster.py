"""`saccade cluster`: look at the Ray cluster that rollout workers run on."""

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from saccade.cli.terminal import out, print_table
from saccade.errors import ConfigError

if TYPE_CHECKING:
    from saccade.rollouts.messages import RunStatus

_WORKER_COLUMNS = ("worker", "host", "pid", "groups running", "finished", "episodes", "tokens", "tokens/s", "version")
cluster_app = typer.Typer(no_args_is_help=True, help="Look at the Ray cluster of rollout workers.")


@cluster_app.callback()
def _group() -> None:
    """Look at the Ray cluster of rollout workers."""


@cluster_app.command("status")
def _show_status(
    address: Annotated[
        str, typer.Option(help="The cluster: auto = the running one (of RAY_ADDRESS, or here), or host:port.")
    ] = "auto",
) -> None:
    """Show the nodes of a running cluster, and the rollout workers of every run on it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("`saccade cluster` needs the package ray; install it: pip install 'saccade[ray]'", key="ray")
    from saccade.rollouts.ray.status import read_status

    report = read_status(address)
    nodes = Table("node", "address", "resources (free of all)", box=None)
    for node in report.nodes:
        names = [name for name in sorted(node.total) if ":" not in name and "memory" not in name]
        resources = ", ".join(f"{name} {node.free.get(name, 0.0):g} of {node.total[name]:g}" for name in names)
        nodes.add_row(escape(node.host), escape(node.address), escape(resources))
    print_table(nodes)
    if not report.workers:
        out.print("no rollout worker")
        return
    runs: dict[str, RunStatus] = {}
    workers = Table(*_WORKER_COLUMNS, box=None)
    for name, status in report.workers.items():
        if isinstance(status, str):
            workers.add_row(escape(name), escape(status))
            continue
        if status.run is not None:
            runs[name.rpartition("/")[0]] = status.run
        numbers = (
            status.pid,
            status.num_running_groups,
            status.num_finished_groups,
            status.num_finished_episodes,
            status.num_sampled_tokens,
            round(status.sampled_tokens_per_second),
            status.version,
        )
        workers.add_row(escape(name), escape(status.host), *(str(number) for number in numbers))
    print_table(workers)
    table = Table("run", "workers up", "groups waiting", "workers lost", "groups run again", "last error", box=None)
    for name, run in runs.items():
        counts = (f"{run.num_up} of {run.num_workers}", run.num_waiting_groups, run.num_lost, run.num_rerun)
        table.add_row(escape(name), *(str(count) for count in counts), escape(run.last_error or "none"))
    print_table(table)
