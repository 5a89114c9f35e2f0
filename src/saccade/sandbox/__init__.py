"""Run Python that a model wrote: persistent interpreters that start in milliseconds, jailed by the kernel.

    host (trainer, evaluation) ──exec──> supervisor ──fork──> zygote ──fork──> worker, one per episode, jailed
      │   Sandbox (client.py)                │                  │                 │
      │                                      │                  └─ imports libraries once; never holds task data
      │                                      └─ kills the zygote, and with it every worker, when the host exits
      └─ per worker: a socket (requests, replies), a stdout pipe, a status socket (pid, exit status), a pidfd (signals)

The names below are the public API; README.md describes it, the guarantees and the isolation layers.
"""

from saccade.sandbox.client import Sandbox as Sandbox
from saccade.sandbox.descriptors import plan_connections as plan_connections
from saccade.sandbox.forkserver_client import ForkServerClient as ForkServerClient
from saccade.sandbox.forkserver_client import close_shared_servers as close_shared_servers
from saccade.sandbox.forkserver_client import get_shared_server as get_shared_server
from saccade.sandbox.forkserver_client import probe_isolation as probe_isolation
from saccade.sandbox.isolation import IsolationLayers as IsolationLayers
from saccade.sandbox.isolation import IsolationReport as IsolationReport
from saccade.sandbox.limits import ExecutionResult as ExecutionResult
from saccade.sandbox.limits import FailureReason as FailureReason
from saccade.sandbox.limits import IsolationMode as IsolationMode
from saccade.sandbox.limits import Limits as Limits
from saccade.sandbox.limits import ShownImage as ShownImage
from saccade.sandbox.media import SealedImage as SealedImage
from saccade.sandbox.media import Video as Video
from saccade.sandbox.media import seal_images as seal_images
from saccade.sandbox.protocol import VideoMetadata as VideoMetadata
from saccade.sandbox.scheduler import limit_cpus as limit_cpus
