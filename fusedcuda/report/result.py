"""The report itself: plain data, from which every form of it is rendered, and back from JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Kernel:
    """Launches that are alike, as one row. Bytes and microseconds are of all `count` together.

    first: where the first of them is in the step. share: of the step's kernel time.
    peak: what it reaches of the rate that bounds it: copy bandwidth, or matmul throughput
    """

    first: int
    phase: str
    name: str
    kind: str
    ops: list[str]
    count: int
    where: str
    code: str
    shape: list[int]
    dtype: str
    bytes_in: int
    bytes_out: int
    us: float
    bound: str
    peak: float
    share: float


@dataclass(frozen=True)
class Span:
    """One launch in the timeline: its kernel (position in the list) and microseconds."""

    kernel: int
    start: float
    us: float


@dataclass(frozen=True)
class Break:
    """Where fusion broke; alike ones as one row. saved: bytes that fusing would not move."""

    code: str
    count: int
    producer: str
    consumer: str
    where: str
    bytes: int
    saved: int
    saved_us: float
    why: str
    fix: str
    said: str = ""


@dataclass(frozen=True)
class Swap:
    """A fusedcuda op in the place of a part of the model.

    kernels, bytes, us: what the step has less of with it (negative: more). error: the largest
    difference of the results over the largest value, where it was measured.
    """

    rule: str
    op: str
    where: list[str]
    kernels: int
    bytes: int
    us: float
    use: bool
    why: str
    measured: bool = False
    error: float | None = None


@dataclass(frozen=True)
class Advice:
    """A reason not to fuse further, or not to expect much of it, with its numbers."""

    topic: str
    text: str


@dataclass(frozen=True)
class GraphBreak:
    reason: str
    where: str
    code: str
    fix: str


@dataclass(frozen=True)
class CudaGraphs:
    used: bool
    text: str


@dataclass(frozen=True)
class Variant:
    """One way to run the step. host_us: of the CPU, to launch it; None where it is not known."""

    name: str
    kernels: int
    bytes: int
    gpu_us: float
    host_us: float | None


@dataclass(frozen=True)
class Report:
    """What `fusedcuda.report` found. `print` shows it as text."""

    subject: str
    device: str
    torch: str
    mode: str
    backward: bool
    measured: bool
    verdict: str
    kernels: list[Kernel]
    timeline: list[Span]
    breaks: list[Break]
    swaps: list[Swap]
    advice: list[Advice]
    graph_breaks: list[GraphBreak]
    cuda_graphs: CudaGraphs
    variants: list[Variant]
    notes: list[str] = field(default_factory=list)
    bytes_measured: int | None = None  # by ncu, of the compiled step

    def numbers(self) -> dict[str, float]:
        """What --fail-on and --diff know, by name."""
        compiled = self.variant("compiled")
        return {
            "kernels": sum(kernel.count for kernel in self.kernels),
            "gemms": sum(k.count for k in self.kernels if k.kind == "matmul"),
            "single_op": sum(k.count for k in self.kernels if is_single_op(k.kind, k.ops)),
            "breaks": len(self.graph_breaks),
            "fusion_breaks": sum(item.count for item in self.breaks if item.saved),
            "bytes": compiled.bytes,
            "avoidable_bytes": self.avoidable_bytes,
            "avoidable_share": self.avoidable_bytes / max(compiled.bytes, 1),
            "gpu_us": compiled.gpu_us,
            "swaps": sum(item.use for item in self.swaps),
        }

    @property
    def avoidable_bytes(self) -> int:
        return sum(item.saved for item in self.breaks)

    def variant(self, name: str) -> Variant:
        return next(item for item in self.variants if item.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"report: expected schema {SCHEMA}, found {data.get('schema')!r}")
        parts = {name: value for name, value in data.items() if name != "schema"}
        for name, kind in _LISTS.items():
            parts[name] = [kind(**item) for item in data[name]]
        parts["cuda_graphs"] = CudaGraphs(**data["cuda_graphs"])
        return Report(**parts)

    def to_markdown(self) -> str:
        from .render import markdown

        return markdown(self)

    def to_html(self) -> str:
        from .html import html

        return html(self)

    def save(self, path: str | Path) -> Path:
        """Writes .json, .md or .html, by the name's ending; anything else gets the plain text."""
        import json

        path = Path(path)
        forms = {".md": self.to_markdown, ".html": self.to_html}
        if path.suffix == ".json":
            text = json.dumps(self.to_dict(), indent=1) + "\n"
        else:
            text = forms.get(path.suffix, lambda: f"{self}\n")()
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        from .render import text

        return text(self)


_LISTS: dict[str, Any] = {
    "kernels": Kernel,
    "timeline": Span,
    "breaks": Break,
    "swaps": Swap,
    "advice": Advice,
    "graph_breaks": GraphBreak,
    "variants": Variant,
}


def is_single_op(kind: str, ops: list[str] | tuple[str, ...]) -> bool:
    """A kernel of Inductor's that computes one thing: what fusing could have taken along."""
    return kind in ("pointwise", "copy") and len(ops) <= 1
