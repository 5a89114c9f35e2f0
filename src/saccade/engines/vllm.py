"""vLLM servers as an engine: tokens in, tokens out, over HTTP; `saccade serve MODEL` starts one."""

from saccade.engines.remote import vllm_api
from saccade.engines.remote.base import RemoteEngine


class Vllm(RemoteEngine):
    """Samples from vLLM servers.

    Not run on GPUs yet, and so neither is `weight_sync: nccl`. `weight_sync: gloo` needs servers that implement it, as
    those of the tests do.
    """

    api = vllm_api
    supports_broadcast = True
    supports_abort = True
    supports_adapters = True


vllm = Vllm
