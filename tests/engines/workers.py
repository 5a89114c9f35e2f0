"""Fake vLLM workers for tests: threads that hold weights and take part in real broadcasts over gloo.

They follow the source of vLLM 0.32: weights are received only after a start, a failed update can't be finished, and a
failure returns 500.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

WAIT = timedelta(seconds=300)
INVITED = {"master_address", "master_port", "rank_offset", "world_size"}


class Workers:
    """`count` workers; `behave(number)` decides what happens at the n-th list of tensors, counted over all updates.

    It returns None (received), "die" (the server exits during the broadcast), "hang" (it stops responding), "refuse"
    (it fails after receiving all) or "deny" (it fails before receiving anything).
    """

    def __init__(self, count=1, *, configured=True, behave=None):
        self.count, self.configured, self.behave = count, configured, behave
        self.num_lists, self.joined, self.life = 0, 0, threading.Event()
        self.restart()

    def restart(self):
        """Reset to the weights of the start, like a new process."""
        self.life.set()  # ends the threads that hang
        self.life = threading.Event()
        self.groups, self.active, self.mixed, self.dead = [], False, False, False
        self.weights = [{} for _ in range(self.count)]

    def get(self, path, label):
        return {"/get_world_size": {"world_size": self.count}, "/weight_info": {"weight_version": label}}.get(path)

    def obey(self, path, body):
        """Handle a weight transfer request: return status and content, None for other requests."""
        orders = {
            "/init_weight_transfer_engine": self.join,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
        }
        if path not in orders:
            return None
        try:
            if not self.configured:
                raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config")
            orders[path](body)
        except (RuntimeError, ValueError) as error:
            return 500, {
                "error": {"message": f"Call to collective_rpc method failed: Worker failed with error '{error}'"}
            }
        return 200, {"message": "done"}

    def all(self, work):
        """Call `work(rank)` in all workers concurrently."""
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(work, range(self.count)))

    def join(self, body):
        given = body["init_info"]
        if set(given) != INVITED:
            raise ValueError(f"Invalid init_info: {sorted(given)}")

        def join_group(rank):
            store = TCPStore(given["master_address"], given["master_port"], is_master=False, timeout=WAIT)
            return ProcessGroupGloo(store, given["rank_offset"] + rank, given["world_size"], WAIT)

        self.groups = self.all(join_group)
        self.joined += 1

    def start(self, body):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.active, self.mixed, self.received = True, True, [{} for _ in range(self.count)]

    def update(self, body):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        number, self.num_lists, life = self.num_lists, self.num_lists + 1, self.life
        behavior = self.behave(number) if self.behave else None
        try:
            if behavior == "die":
                self.dead = True
                raise RuntimeError("the server exited")
            if behavior == "hang":
                life.wait()
                raise RuntimeError("the server was restarted")
            if behavior == "deny":
                raise RuntimeError("denied as configured")
            self.all(lambda rank: self.receive(rank, **body["update_info"]))
            if behavior == "refuse":
                raise RuntimeError("refused as configured")
        except RuntimeError:
            if life is self.life:
                self.active, self.groups = False, []
            raise

    def receive(self, rank, names, dtype_names, shapes):
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            assert name not in self.received[rank], "a weight was sent twice"
            value = self.received[rank][name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.groups[rank].broadcast([value], options).wait()

    def finish(self, body):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.active, self.mixed, self.weights = False, False, self.received
