"""What the adapter writes down of one graph that Inductor lowered: plain data, kept as JSON.

Everything after the adapter reads only this, so that it can be tested from recordings of several
torch versions, on any machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Frame:
    """A line of the user's code."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Node:
    """One node of Inductor's final schedule.

    kind:    the scheduler's class name, which tells extern calls and no-ops from kernels
    outputs: buffers that it defines, those of the nodes fused into it included
    mutates: buffers of others, or inputs, that it writes into
    reads, writes: bytes by buffer; a gather counts the elements that it picks
    origins: the aten operators it came from. They tell where a kernel came from, not what is in
             it: an operator next to it may be among them.
    """

    name: str
    kind: str
    outputs: tuple[str, ...]
    reads: dict[str, int]
    writes: dict[str, int]
    mutates: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    frame: Frame | None = None


@dataclass(frozen=True)
class Refusal:
    """The scheduler's reason why two nodes (of its own names) did not become one."""

    first: str
    second: str
    reason: str


@dataclass(frozen=True)
class RecordedGraph:
    """One lowered graph: `source` is the Python module that Inductor wrote for it."""

    phase: str  # forward or backward
    source: str
    nodes: tuple[Node, ...]
    members: dict[str, str] = field(default_factory=dict)  # node fused away -> node that has it
    buffers: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # shape, dtype
    outputs: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    cuda_graph_skip: str | None = None  # why CUDA graphs would leave this graph out
    torch: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RecordedGraph:
        if data.get("format") != FORMAT:
            raise ValueError(
                f"recorded graph: expected format {FORMAT}, found {data.get('format')!r}"
            )
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["nodes"] = tuple(_node(entry) for entry in data["nodes"])
        fields["refusals"] = tuple(Refusal(**entry) for entry in data["refusals"])
        fields["buffers"] = {
            name: (tuple(shape), dtype) for name, (shape, dtype) in data["buffers"].items()
        }
        fields["outputs"] = tuple(data["outputs"])
        return RecordedGraph(**fields)


def _node(entry: dict[str, Any]) -> Node:
    frame = Frame(**entry["frame"]) if entry["frame"] else None
    names = {key: tuple(entry[key]) for key in ("outputs", "mutates", "origins")}
    return Node(**{**entry, **names, "frame": frame})
