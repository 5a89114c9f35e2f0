"""The controller of the training that this process takes part in, and what SIGTERM does to it.

Every command looks it up, also those that train nothing, so this module imports no torch.
"""

from types import FrameType
from typing import TYPE_CHECKING

from saccade.errors import RunError

if TYPE_CHECKING:
    from saccade.training.distributed.controller import Controller

_controller: "Controller | None" = None


def get_controller() -> "Controller | None":
    """Return the controller of this training's processes; None if there is only this one."""
    return _controller


def set_controller(controller: "Controller | None") -> None:
    """Set what `get_controller` returns."""
    global _controller
    _controller = controller


def handle_sigterm(signal_number: int, frame: FrameType | None) -> None:
    """Raise the error of `explain_sigterm`, unless the run is already ending: with it, or because a rank is lost.

    torchrun repeats the signal of a scheduler, and a second error would interrupt the end with the first.
    """
    if _controller is None or _controller.is_ending or _controller.has_lost_rank:
        return
    _controller.is_ending = True
    raise explain_sigterm()


def explain_sigterm() -> RunError:
    """Return why torchrun ends this process: the failure of another rank if it is known, or a stop of the job."""
    from saccade.training.distributed.failure_report import LOST_RANK_KEY  # imports torch

    return (_controller and _controller.find_failure()) or RunError(
        "another rank of this training was lost, or the job was stopped (SIGTERM); resume it with --resume",
        key=LOST_RANK_KEY,
    )
