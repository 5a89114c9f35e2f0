"""vLLM servers as an engine: tokens in, tokens out, over HTTP; `saccade serve MODEL` starts one."""

from saccade.engines.remote import vllm_api
from saccade.engines.remote.base import RemoteEngine


class Vllm(RemoteEngine):
    """Samples from vLLM servers."""

    api = vllm_api
    supports_broadcast = True
    supports_abort = True
    supports_adapters = True


vllm = Vllm
