"""The processes of a server that hold its weights, as threads that really take part in broadcasts, over gloo.

They obey as the source of vLLM 0.32 does, and as strictly: nothing is taken before it was begun, nothing is finished
that failed, and what fails is answered with 500.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

WAIT = timedelta(seconds=20)
INVITED = {"master_address", "master_port", "rank_offset", "world_size"}


class Workers:
    """`count` of them. `behave(number)` is asked before the n-th tensor list is taken, of all that ever were.

    It gives None (well), "die" (the server is gone in the middle of the broadcast), "hang" (it answers no
    more), "refuse" (it fails when it has received all) or "deny" (it fails before it receives anything).
    """

    def __init__(self, count=1, *, configured=True, behave=None):
        self.count, self.configured, self.behave = count, configured, behave
        self.told, self.joined, self.life = 0, 0, threading.Event()
        self.restart()

    def restart(self):
        """As a new process: nothing is left but the weights that it was started with."""
        self.life.set()  # what hung in the life before is gone with it
        self.life = threading.Event()
        self.groups, self.active, self.mixed, self.dead = [], False, False, False
        self.weights = [{} for _ in range(self.count)]

    def get(self, path, label):
        return {"/get_world_size": {"world_size": self.count}, "/weight_info": {"weight_version": label}}.get(path)

    def obey(self, path, body):
        """What is answered, as status and words; None where it is no order for weights."""
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
        """What every worker does at the same time."""
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(work, range(self.count)))

    def join(self, body):
        given = body["init_info"]
        if set(given) != INVITED:
            raise ValueError(f"Invalid init_info: {sorted(given)}")

        def joined(rank):
            store = TCPStore(given["master_address"], given["master_port"], is_master=False, timeout=WAIT)
            return ProcessGroupGloo(store, given["rank_offset"] + rank, given["world_size"], WAIT)

        self.groups = self.all(joined)
        self.joined += 1

    def start(self, body):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.active, self.mixed, self.news = True, True, [{} for _ in range(self.count)]

    def update(self, body):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        number, self.told, life = self.told, self.told + 1, self.life
        does = self.behave(number) if self.behave else None
        try:
            if does == "die":
                self.dead = True
                raise RuntimeError("gone")
            if does == "hang":
                life.wait()
                raise RuntimeError("too late")
            if does == "deny":
                raise RuntimeError("told to deny")
            self.all(lambda rank: self.receive(rank, **body["update_info"]))
            if does == "refuse":
                raise RuntimeError("told to refuse")
        except RuntimeError:
            if life is self.life:
                self.active, self.groups = False, []
            raise

    def receive(self, rank, names, dtype_names, shapes):
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            assert name not in self.news[rank], "a weight came twice"
            value = self.news[rank][name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.groups[rank].broadcast([value], options).wait()

    def finish(self, body):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.active, self.mixed, self.weights = False, False, self.news
