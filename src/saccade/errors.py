"""Define Saccade's error types; each message is one sentence that names the cause and the fix.

    SaccadeError                any error a user can fix; the command line prints it and exits with its `exit_code`
    ├── ConfigError             a recipe, a key, a value
    ├── DataError               a task, a record, a dataset
    ├── MediaError              a video or an image
    ├── ModelError              a checkpoint, a tokenizer, weights
    ├── EngineError             one request to an engine failed
    ├── BrokenEngineError       the engine itself is unusable; no later request can succeed
    ├── ToolError               a tool call by the model
    ├── SandboxError            the process that runs the model's code
    ├── EnvironmentServerError  a server that an environment depends on
    ├── RunError                a run folder
    └── AlarmError              a training that an alarm of the recipe stopped

Inside Saccade, failures are data wherever work can continue without the failed part (a tool result, an episode's
status); an exception is raised only where it can't. `convert_errors` is the single place that converts a third-party
exception into one of these types.
"""

import contextlib
from collections.abc import Iterator

MAX_MESSAGE_CHARS = 4_000


class SaccadeError(Exception):
    """An error that a user can fix; its text is one clear sentence, in one line whatever names it quotes."""

    exit_code = 1  # of the command line

    def __init__(self, message: str = "", *, key: str = "", value: object = None) -> None:
        text = " ".join(message.splitlines())
        if len(text) > MAX_MESSAGE_CHARS:  # it quotes something huge; the beginning and the fix at the end stay
            text = f"{text[: MAX_MESSAGE_CHARS // 2]} … {text[-MAX_MESSAGE_CHARS // 2 :]}"
        super().__init__(text)
        # the cause, so that a program needn't parse the sentence: a recipe key ("rl.max_staleness"), a setting
        # ("crop_video.fps"), a field of a row ("ground_truth"), or a file's path
        self.key = key
        self.value = value  # the rejected value


class ConfigError(SaccadeError):
    """A recipe, a key or a value is unusable."""


class DataError(SaccadeError):
    """A task, a record or a dataset is unusable."""


class MediaError(SaccadeError):
    """A video or an image can't be opened or decoded, or has no frame at the requested time."""


class ModelError(SaccadeError):
    """A checkpoint folder, a tokenizer or weights are unusable."""


class EngineError(SaccadeError):
    """An engine can't sample: the episode that needed the completion is aborted."""


class BrokenEngineError(SaccadeError):
    """An engine is unreachable, or disagrees with the ledger or the trainer: the run stops."""


class ToolError(SaccadeError):
    """A tool call can't be executed; the model reads the text."""


class SandboxError(SaccadeError):
    """A sandbox can't start, or failed; never caused by the code that runs in it."""


class EnvironmentServerError(SaccadeError):
    """A server that an environment depends on failed; never caused by the model."""


class RunError(SaccadeError):
    """A run folder can't be written, read or resumed."""


class AlarmError(SaccadeError):
    """A training was stopped by an alarm with `action: stop`, after its checkpoint was saved."""

    exit_code = 3  # 2 is a wrong command line


@contextlib.contextmanager
def convert_errors(
    error_type: type[SaccadeError], message: str, *, key: str = "", value: object = None
) -> Iterator[None]:
    """Convert any third-party exception into `error_type` with the text "message: reason", and with `key` and `value`.

    Saccade's own errors, cancellation and KeyboardInterrupt pass unchanged. SystemExit would end a run without a word.

    >>> with convert_errors(MediaError, "clip.mp4 can't be decoded"):
    ...     raise ValueError("bad header")
    Traceback (most recent call last):
    saccade.errors.MediaError: clip.mp4 can't be decoded: bad header
    """
    try:
        yield
    except SaccadeError:
        raise
    except (Exception, SystemExit) as error:  # the only broad except of the package
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, SystemExit):
            text = f"it tried to exit with {text}"
        if isinstance(error, OSError) and error.strerror and error.filename:
            is_named = str(error.filename).removesuffix(".part") in message  # the file, or a draft beside it
            text = error.strerror.lower() if is_named else text
        raise error_type(f"{message}: {text}", key=key, value=value) from error
