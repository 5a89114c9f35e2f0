"""A gloo backend for vLLM's weight transfer, so that a vLLM without GPUs receives weights as others do by NCCL.

vLLM imports this module in each worker because of `--worker-extension-cls`. Only the transport differs from vLLM's own.
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
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class Gloo(NCCLWeightTransferEngine):
    init_info_cls = InitInfo

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
    """Adds nothing to the worker; importing it registers the backend."""


WeightTransferEngineFactory.register_engine("gloo", Gloo)
