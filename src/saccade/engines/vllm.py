"""vLLM servers as an engine: tokens in, tokens out, over HTTP; `saccade serve MODEL` starts one."""

from saccade.engines._served import vllm_dialect, vllm_transfer
from saccade.engines._served.engine import Served


class vllm(Served):
    """Samples from vLLM servers; `Served` says what the settings mean."""

    dialect = vllm_dialect
    orders = vllm_transfer
