"""What a real vLLM without GPUs is started with so that it takes weights as others do by NCCL: a backend by gloo.

vLLM imports this in each worker, as the home of a `--worker-extension-cls`. All but the transport is vLLM's own.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

WAIT = timedelta(seconds=60)


@dataclass
class Invitation(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class Gloo(NCCLWeightTransferEngine):
    init_info_cls = Invitation

    def init_transfer_engine(self, init_info):
        rank = init_info.rank_offset + self.parallel_config.rank
        store = TCPStore(init_info.master_address, init_info.master_port, is_master=False, timeout=WAIT)
        self.group = ProcessGroupGloo(store, rank, init_info.world_size, WAIT)

    def receive_weights(self, update_info):
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([value], options).wait()
            self.model.load_weights([(name, value)])

    def shutdown(self):
        self.group = None


class Extension:
    """Adds nothing to the worker; that it lives here is what brings the backend in."""


WeightTransferEngineFactory.register_engine("gloo", Gloo)
