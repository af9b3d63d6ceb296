"""What a refused call is expected to raise."""

import re

import pytest


def refuses(op: str, error: type[Exception] | tuple[type[Exception], ...], *mentions: str):
    """The error of that type starts with the op's name and mentions these strings."""
    pattern = f"^{op}: " + "".join(f"(?=.*{re.escape(word)})" for word in mentions)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))
