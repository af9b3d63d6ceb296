"""Progress of the demo's longer stages."""

from __future__ import annotations

import sys
import time

_TICK_SECONDS = 1.0


class Progress:
    """Says on stderr what is going on: one line rewritten in a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._stage = ""
        self._last = 0.0

    def stage(self, text: str) -> None:
        self._stage = text
        self._show(f"{text} ...")

    def tick(self, detail: str) -> None:
        """Adds a detail to the stage, at most once a second."""
        if time.monotonic() - self._last >= _TICK_SECONDS:
            self._show(f"{self._stage} ... {detail}")

    def clear(self) -> None:
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        self.clear()
        end = "" if self._rewrites else "\n"
        print(text, end=end, file=sys.stderr, flush=True)
        self._last = time.monotonic()
