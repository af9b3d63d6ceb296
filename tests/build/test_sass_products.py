"""Products whose first factor is in registers, and bulk copies, in the machine code."""

from pathlib import Path

import sass

IN_FLIGHT = """
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR16].tnspB, R24, UP0 ;
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR20].tnspB, R24, gsb0 ;
        /*0120*/                   LDSM.16.M88.4 R{first}, [R14+UR11] ;
        /*0130*/                   HMUL2.BF16_V2 R{second}, R16, R17 ;
        /*0140*/                   WARPGROUP.DEPBAR.LE gsb0, {pending} ;
        /*0150*/              @!P0 MOV R{third}, R2 ;
"""


def early(first: int, second: int, third: int, pending: int = 0) -> int:
    code = IN_FLIGHT.format(first=first, second=second, third=third, pending=hex(pending))
    count, writes = sass.factors_in_registers(code)
    assert count == 2
    return writes


def test_what_is_recognized() -> None:
    assert early(64, 68, 56) == 0
    assert early(53, 68, 70) == 1  # R56 is the last of its four
    assert early(64, 63, 70) == 1
    assert early(56, 60, 70) == 2
    assert early(64, 68, 56, pending=1) == 1
    assert early(64, 68, 56, pending=0) == 0


def test_nothing_overwrites_what_a_product_still_reads(extension: Path) -> None:
    kernels = [k for k in sass.kernels(extension) if k.products_from_registers > 0]
    assert {k.function for k in kernels} >= {
        "linear_act_dx_kernel_sm90",
        "linear_act_dweight_kernel_sm90",
    }
    assert [k.name for k in kernels if k.overwritten] == []


def test_products_are_started_together(extension: Path) -> None:
    """Where a kernel calls a function, if only to fail, the compiler waits for each (C7510)."""
    kernels = [k for k in sass.kernels(extension) if k.hopper_products > 0]
    assert {k.function for k in kernels} >= {
        "gated_product_kernel_sm90",
        "linear_act_kernel_sm90",
        "lora_pass_kernel_sm90",
        "lora_product_kernel_sm90",
    }
    assert [k.name for k in kernels if k.hopper_groups * 4 > k.hopper_products] == []


COPIES = """
        /*14d0*/               @P3 R2UR UR9, R21 ;
        /*1520*/                   UBLKCP.S.G [UR8], [UR6], UR4 ;   /* 0x040005 */
                                                                   /* 0x000fe2 */
        /*1530*/               @P0 BRA.U.ANY 0x14a0 ;
        /*1540*/                   UBLKCP.S.G [UR8], [UR6], UR4 ;
        /*1550*/                   UIADD3 UR9, UR9, 0x4, URZ ;
        /*1560*/               @P0 BRA.U.ANY 0x14a0 ;
"""


def test_copies_in_loops_over_lanes_are_recognized() -> None:
    assert sass.copies_lane_by_lane(COPIES) == 1
