"""The case studies on the CPU, at tiny sizes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # examples and bench are not installed

from examples import results


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads would mostly wait for one another, and for other busy processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may be marked as measured where there is no GPU to name."""
    machine = ("NVIDIA H200", "2.11.0", "1234567", "2026-01-31")
    monkeypatch.setattr(results, "_machine", lambda: machine)
