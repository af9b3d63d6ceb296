"""That a stage of the ring is given back when all of it has been read, in the machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import sass

INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][^;]*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s+"
    r"/\* (0x[0-9a-f]{16}) \*/"
)


def early_arrivals(code: str) -> tuple[int, int]:
    """How many arrivals at barriers there are, and before how many a load is under way.

    A load from shared memory counts up one of six scoreboards until its registers are there (or
    none, number 7: the load behind it does, and they come in this order). Which, and for which an
    instruction waits, is in the upper bits of its code.
    """
    arrivals = early = 0
    under_way: set[int] = set()
    for text, upper in INSTRUCTION.findall(code):
        control = int(upper, 16) >> 41
        counted, waits = control >> 5 & 7, control >> 11 & 63
        under_way -= {board for board in range(6) if waits >> board & 1}
        if re.match(r"LDS\S* R\d", text) and counted != 7:
            under_way.add(counted)
        if re.match(r"SYNCS\.ARRIVE\.TRANS64\.A1T0", text):
            arrivals += 1
            early += bool(under_way)
    return arrivals, early


def functions(binary: Path, wanted: str) -> list[tuple[str, str]]:
    """Name and code of each kernel whose name contains `wanted`."""
    command = [sass.find_cuobjdump(), "-sass", binary]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = [part.split("\n", 1) for part in text.split("Function : ")[1:]]
    return [(name, code) for name, code in parts if wanted in name]


def coded(text: str, counts: int = 7, waits: int = 0) -> str:
    upper = (waits << 11 | counts << 5) << 41
    return (
        f"        /*7d40*/   {text} ;   /* 0x000fe20000000f00 */\n"
        f"                                      /* 0x{upper:016x} */\n"
    )


def test_what_is_recognized() -> None:
    loads = coded("LDS.128 R8, [R2]", counts=0) + coded("@P2 LDS.128 R4, [R2+UR10]", counts=3)
    arrival = "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R3+URZ+0x8], RZ"
    product = "HMMA.16816.F32.BF16 R156, R156, R8, RZ"
    assert early_arrivals(loads + coded(arrival)) == (1, 1)
    assert early_arrivals(loads + coded(product, waits=1) + coded(arrival)) == (1, 1)
    assert early_arrivals(loads + coded(product, waits=0b1001) + coded(arrival)) == (1, 0)
    assert early_arrivals(loads + coded(arrival, waits=0b1001) + coded(arrival)) == (2, 0)


def test_nothing_is_given_back_while_it_is_read(extension: Path) -> None:
    """Or the copy engine overwrites what a load has still to bring: wrong sums, once in a while."""
    arrivals = 0
    for name, code in functions(extension, "gated_mlp_decode_kernel_sm90"):
        found, early = early_arrivals(code)
        assert early == 0, f"{name}: {early} of {found} arrivals do not wait for what was read"
        arrivals += found
    assert arrivals > 0
