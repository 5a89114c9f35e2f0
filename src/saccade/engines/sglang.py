"""SGLang servers as an engine: tokens in, tokens out, over HTTP. It was not run on a real SGLang yet.

What is said and understood follows the source of SGLang 0.5.23; the tests ask a server of their own that speaks so.
"""

from saccade.engines._served import sglang_dialect
from saccade.engines._served.engine import Served


class sglang(Served):
    """Samples from SGLang servers; `Served` says what the settings mean. Not run on a real SGLang yet."""

    dialect = sglang_dialect
