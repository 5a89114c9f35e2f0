"""Assert an error by its type, key and value rather than by its sentence."""

import contextlib

import pytest

ANY = object()


@contextlib.contextmanager
def raises(error_type, *, key=None, value=ANY):
    """Like `pytest.raises`, for a SaccadeError whose `key` and `value` are as given; yields pytest's info."""
    with pytest.raises(error_type) as caught:
        yield caught
    if key is not None:
        assert caught.value.key == key, f"key {caught.value.key!r}: {caught.value}"
    if value is not ANY:
        assert caught.value.value == value, f"value {caught.value.value!r}: {caught.value}"
    message = str(caught.value)
    assert message, "the error has no sentence"
    assert "\n" not in message, f"the error has more than one line: {message}"
