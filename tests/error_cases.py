"""Assert an error by its type, key and value rather than by its sentence."""

import contextlib

import pytest

ANY = object()


@contextlib.contextmanager
def raises(error_type, *, key=None, value=ANY, by=None):
    """Like `pytest.raises`, for an error whose `key` and `value` are as given; yields pytest's info.

    An error without a key is identified by the function that raises it, `by`.
    """
    with pytest.raises(error_type) as caught:
        yield caught
    if by is not None:
        assert caught.traceback[-1].name == by.__name__, f"raised by {caught.traceback[-1].name}: {caught.value!r}"
    if key is not None:
        assert caught.value.key == key, f"key {caught.value.key!r}: {caught.value}"
    if value is not ANY:
        assert caught.value.value == value, f"value {caught.value.value!r}: {caught.value}"
    message = str(caught.value)
    assert message, "the error has no sentence"
    assert "\n" not in message, f"the error has more than one line: {message}"
