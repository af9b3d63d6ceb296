"""What the compiler made of each kernel: registers, vector accesses, local memory.

python tests/build/sass.py [LIBRARY]    (default: the installed extension)
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Kernel:
    """The static facts about one compiled kernel."""

    name: str
    registers: int = 0
    stack_bytes: int = 0
    loads_128: int = 0  # LDG, and LDGSTS, which copies to shared memory
    stores_128: int = 0
    products: int = 0  # of 16-bit types on tensor cores: HMMA, HGMMA
    hopper_products: int = 0  # of those, HGMMA: Hopper's own
    hopper_groups: int = 0  # of those, as many as are started together
    products_from_registers: int = 0  # of those, HGMMA whose first factor is in registers
    overwritten: int = 0  # instructions that write to such a factor while the product runs
    bulk_copies: int = 0  # UBLKCP, of the copy engine
    copies_lane_by_lane: int = 0  # of those, in a loop over lanes that has one turn
    local_accesses: int = 0  # LDL and STL: spills, or arrays that did not fit registers

    @property
    def function(self) -> str:
        """The bare name, without namespace and template arguments."""
        return self.name.split("<")[0].split("::")[-1]


def kernels(binary: Path, arch: str = "sm_90a") -> list[Kernel]:
    """Every kernel in a library that is compiled for `arch`, by demangled name."""
    found: dict[str, Kernel] = {}
    for block in _blocks(binary, "-res-usage", arch):
        for mangled, usage in re.findall(r"Function (\S+):\n\s*(.*)", block):
            numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK):(\d+)", usage)}
            found[mangled] = Kernel(mangled, numbers["REG"], numbers["STACK"])
    for block in _blocks(binary, "-sass", arch):
        for part in block.split("Function : ")[1:]:
            mangled, code = part.split("\n", 1)
            kernel = found[mangled.strip()]
            kernel.loads_128 += len(re.findall(r"\bLDG(?:STS)?\.E(?:\.\w+)*\.128\b", code))
            kernel.stores_128 += len(re.findall(r"\bSTG\.E(?:\.\w+)*\.128\b", code))
            kernel.products += len(re.findall(r"\bH(?:G)?MMA\b", code))
            kernel.hopper_products += len(re.findall(r"\bHGMMA\b", code))
            kernel.hopper_groups += len(re.findall(r"\bHGMMA\b[^;]*\bgsb0\b", code))
            from_registers, overwritten = factors_in_registers(code)
            kernel.products_from_registers += from_registers
            kernel.overwritten += overwritten
            kernel.bulk_copies += len(re.findall(r"\bUBLKCP\b", code))
            kernel.copies_lane_by_lane += copies_lane_by_lane(code)
            kernel.local_accesses += len(re.findall(r"\b(?:LDL|STL)\b", code))
    names = subprocess.run(
        ["c++filt", "-p"], input="\n".join(found), capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for kernel, name in zip(found.values(), names, strict=False):
        kernel.name = name
    return sorted(found.values(), key=lambda kernel: kernel.name)


def copies_lane_by_lane(code: str) -> int:
    """How many bulk copies are in a loop over the lanes that start one.

    The compiler makes it where it cannot know that the addresses are the same for the warp, which
    have to be in uniform registers; it is three times as many instructions.
    """
    return len(re.findall(r"\bUBLKCP\b[^;]*;[^;]*\bBRA\.U\.ANY\b", code))


def factors_in_registers(code: str) -> tuple[int, int]:
    """Of the HGMMA with a factor in registers: how many, and how many writes come too early.

    They read these registers while the warps go on, until WARPGROUP.DEPBAR has waited for all but
    the latest groups; a group ends with gsb0. The compiler does not know that, so the source has to
    keep the registers in use. In the order of the code: what a loop carries around is not seen.
    """
    count = early = 0
    groups: list[set[int]] = [set()]
    for text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][^;]*);", code):
        if product := re.match(r"HGMMA\S+ R\d+, R(\d+), gdesc", text):
            first = int(product[1])
            groups[-1].update(range(first, first + 4))
            count += 1
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text):
            pending = int(wait[1], 16)
            groups = [*groups[-1 - pending : -1], set()] if pending else [set()]
        elif written := re.match(r"(?!ST|RED|SYNCS|BAR)\S+ R(\d+)", text):
            first = int(written[1])
            width = 4 if re.match(r"LDSM\S*\.M?T?88\.4|LDSM\S*\.4 ", text) else 1
            early += any(not group.isdisjoint(range(first, first + width)) for group in groups)
        if text.startswith("HGMMA") and "gsb0" in text:
            groups.append(set())
    return count, early


def _blocks(binary: Path, what: str, arch: str) -> list[str]:
    """The parts of cuobjdump's output that are about `arch`."""
    tool = find_cuobjdump()
    run = subprocess.run([tool, what, binary], capture_output=True, text=True, check=True)
    blocks = run.stdout.split("\nFatbin elf code:\n")
    return [block for block in blocks if f"arch = {arch}\n" in block]


def find_cuobjdump() -> str:
    """The CUDA toolkit's, or the one that Triton brings along with torch."""
    if found := shutil.which("cuobjdump"):
        return found
    if triton := importlib.util.find_spec("triton"):
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if bundled.exists():
            return str(bundled)
    raise FileNotFoundError(
        "cuobjdump was not found: install a CUDA toolkit, or pip install triton"
    )


def table(rows: list[Kernel]) -> str:
    """One line for each kernel."""
    head = f"{'regs':>4} {'stack':>5} {'LD.128':>7} {'ST.128':>7} {'MMA':>5} {'LDL/STL':>7}  kernel"
    lines = [
        f"{k.registers:4} {k.stack_bytes:5} {k.loads_128:7} {k.stores_128:7} {k.products:5} "
        f"{k.local_accesses:7}  {k.name}"
        for k in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    if len(sys.argv) > 1:
        binary = Path(sys.argv[1])
    else:
        from fusedcuda._jit import PREBUILT as binary
    print(table(kernels(binary)))


if __name__ == "__main__":
    main()
