"""A Ray cluster on this machine, in a process of its own: Ray replaces signal handlers and may end its process."""

import contextlib
import json
import os
import signal
import subprocess
import sys

OPTIONS = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class RayCluster:
    """A head and, unless `nodes` is 1, further nodes, each with one CPU; `node_options` are those of further nodes."""

    def __init__(self, *, nodes=2, num_cpus=1, node_options=()):
        node_options = [*node_options, *({} for _ in range(nodes - 1 - len(node_options)))]
        self.settings = {"num_cpus": num_cpus, "gcs_server_port": None, "node_options": node_options}
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.address = self.read_value("address")

    def read_value(self, name):
        """Return the value of the next line of this name; Ray prints lines of its own."""
        for line in self.process.stdout:
            if line.startswith(f"{name}="):
                return line.strip().partition("=")[2]
        raise AssertionError(f"the Ray cluster ended with exit code {self.process.wait()}")

    def remove_node(self):
        """Kill the last node."""
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        self.read_value("nodes")

    def restart(self):
        """End all nodes, and start as many anew, with the head at the same address."""
        self.shutdown()
        self.settings["gcs_server_port"] = int(self.address.rpartition(":")[2])
        self.start()

    def shutdown(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.shutdown()


def main():
    from ray.cluster_utils import Cluster

    settings = json.loads(sys.argv[1])
    options = {**OPTIONS, "num_cpus": settings["num_cpus"]}
    port = settings["gcs_server_port"]
    head_options = options if port is None else {**options, "gcs_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head_options)
    nodes = [cluster.add_node(**{**options, **own}) for own in settings["node_options"]]
    print(f"address={cluster.address}", flush=True)
    for _ in sys.stdin:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        print(f"nodes={len(nodes)}", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
