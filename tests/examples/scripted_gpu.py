"""A scripted clock in the place of the GPU's, and where the repository is."""

from contextlib import nullcontext
from pathlib import Path

from scripted_backend import ScriptedBackend

ROOT = Path(__file__).parents[2]


class ScriptedGpu(ScriptedBackend):
    """As `CudaBackend`: calls run once, times come from the script, by the order of recording."""

    l2_bytes = 50_000_000

    def on_stream(self):
        return nullcontext()

    def sample(self, replay, count: int) -> list[float]:
        replay_us = getattr(replay, "us", None)
        if replay_us is None:  # back to back: run it, all calls equally long
            replay.launch()
            replay_us = 20_000.0
        self.order.append(replay_us)
        return [replay_us] * count
