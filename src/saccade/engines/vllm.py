"""vLLM servers as an engine: tokens in, tokens out, over HTTP; `saccade serve MODEL` starts one."""

from saccade.engines.remote import vllm_api
from saccade.engines.remote.base import RemoteEngine


class Vllm(RemoteEngine):
    """Samples from vLLM servers.

    Run on CPUs; `weight_sync: nccl` sent tensors between two processes of one GPU, not to vLLM yet. `weight_sync: gloo`
    needs servers that implement it, as those of the tests do.
    """

    api = vllm_api
    supports_broadcast = True
    supports_abort = True
    supports_adapters = True


vllm = Vllm
