"""SGLang servers as an engine: tokens in, tokens out, over HTTP. Not run on a real SGLang yet.

Requests and responses follow the source of SGLang 0.5.23; the tests use a fake server that follows it, too.
"""

from saccade.engines.remote import sglang_api
from saccade.engines.remote.base import RemoteEngine


class Sglang(RemoteEngine):
    """Samples from SGLang servers. Not run on a real SGLang yet.

    Of the choices below SGLang has these: `weight_sync: files`, `replies_on_sync: drain` or `continue`, `lora: merged`.
    """

    api = sglang_api


sglang = Sglang
