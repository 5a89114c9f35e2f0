"""How things fail: one sentence that names the thing and the mend.

    SaccadeError            anything a user can meet; the command line prints it and exits with 1
    ├── ConfigError         a recipe, a key, a value
    ├── DataError           a task, a record, a data set
    ├── MediaError          a video or a picture
    ├── ModelError          a checkpoint, a tokenizer, weights
    ├── EngineError         what samples tokens
    ├── BrokenEngineError   the same, where nothing more can be expected of it
    ├── ToolError           what the model called
    ├── SandboxError        what runs the model's code
    └── RunError            a run folder

Inside Saccade errors are data wherever work can go on without the part that failed (a tool result, an episode's
end); they are exceptions only where it can't. `boundary` is the single place that turns a foreign exception into
one of these.
"""

import contextlib
from collections.abc import Iterator


class SaccadeError(Exception):
    """Anything that a user can meet and mend; its text is one clear sentence."""


class ConfigError(SaccadeError):
    """A recipe, a key or a value that can't be used."""


class DataError(SaccadeError):
    """A task, a record or a data set that can't be used."""


class MediaError(SaccadeError):
    """A video or a picture that can't be opened, decoded or reached at a time."""


class ModelError(SaccadeError):
    """A checkpoint folder, a tokenizer or weights that can't be used."""


class EngineError(SaccadeError):
    """An engine that can't sample: the attempt that needed it ends."""


class BrokenEngineError(SaccadeError):
    """An engine that can't be reached any more, or that disagrees with ledger or trainer: the run stops."""


class ToolError(SaccadeError):
    """A tool call that can't be served; its text is shown to the model."""


class SandboxError(SaccadeError):
    """A sandbox that can't be started or that failed; never the fault of the code that runs in it."""


class RunError(SaccadeError):
    """A run folder that can't be written, read or resumed."""


@contextlib.contextmanager
def boundary(kind: type[SaccadeError], what: str) -> Iterator[None]:
    """Name every foreign exception at the border it crosses.

    Saccade's own errors, cancellation and Ctrl-C pass unchanged; anything else becomes `kind("what: reason")`.

    >>> with boundary(MediaError, "clip.mp4 can't be decoded"):
    ...     raise ValueError("bad header")
    Traceback (most recent call last):
    saccade.errors.MediaError: clip.mp4 can't be decoded: bad header
    """
    try:
        yield
    except SaccadeError:
        raise
    except Exception as error:  # the only broad except of the package
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename and str(error.filename) in what:
            text = error.strerror.lower()  # the file is named in `what`
        raise kind(f"{what}: {text}") from error
