"""What a Triton kernel computes, whatever its name says."""

import ast

from fusedcuda.report.body import Body, read_body


def body_of(code: str, name: str = "triton_poi_fused_addmm_relu_0") -> Body:
    lines = "\n".join(f"    {line}" for line in code.strip().splitlines())
    (function,) = ast.parse(f"def {name}(in_ptr0, in_ptr1, out_ptr0, xnumel):\n{lines}").body
    return read_body(function)


LOAD = "x0 = xindex\ntmp0 = tl.load(in_ptr0 + (x0), xmask)\n"


def test_a_name_with_a_matmul_in_it_is_not_one():
    code = f"""{LOAD}tmp1 = tl.load(in_ptr1 + (x0 % 512), xmask)
tmp2 = tmp0 + tmp1
tmp3 = tl.full([1], 0, tl.int32)
tmp4 = triton_helpers.maximum(tmp3, tmp2)
tl.store(out_ptr0 + (x0), tmp4, xmask)"""
    assert body_of(code).ops == ("add", "relu")


def test_the_maximum_of_two_tensors_is_no_relu():
    code = f"""{LOAD}tmp1 = tl.load(in_ptr1 + (x0), xmask)
tmp2 = triton_helpers.maximum(tmp0, tmp1)
tl.store(out_ptr0 + (x0), tmp2, xmask)"""
    assert body_of(code).ops == ("max",)


def test_arithmetic_of_indices_and_masks_does_not_count():
    code = """x0 = (xindex % 512)
x1 = xindex // 512
tmp0 = tl.load(in_ptr0 + (x0 + 512*x1), xmask & (x1 + 3 < 7))
tl.store(out_ptr0 + (x1 + 8*x0), tmp0, xmask)"""
    assert body_of(code).ops == ()


def test_a_loaded_index_is_a_gather_and_its_wrapping_is_no_arithmetic():
    code = f"""{LOAD}tmp1 = tl.full([1], 50000, tl.int32)
tmp2 = tmp0 + tmp1
tmp3 = tmp0 < 0
tmp4 = tl.where(tmp3, tmp2, tmp0)
tmp5 = tl.load(in_ptr1 + (x0 + 64*tmp4), xmask)
tmp6 = tmp5 * tmp5
tl.store(out_ptr0 + (x0), tmp6, xmask)"""
    body = body_of(code)
    assert body.gathers == 1
    assert body.ops == ("mul",)


def test_a_choice_by_position_is_a_concatenation_and_one_by_value_is_not():
    by_position = f"""{LOAD}tmp1 = x0
tmp2 = tmp1 < 64
tmp3 = tl.load(in_ptr1 + (x0), xmask)
tmp4 = tl.where(tmp2, tmp0, tmp3)
tl.store(out_ptr0 + (x0), tmp4, xmask)"""
    assert body_of(by_position).ops == ("concat or pad",)
    by_value = by_position.replace("tmp1 = x0", "tmp1 = tmp0")
    assert body_of(by_value).ops == ("where",)


def test_silu_is_told_from_a_softmax_of_the_same_operators():
    silu = f"""{LOAD}tmp1 = -tmp0
tmp2 = tl_math.exp(tmp1)
tmp3 = tl.full([1], 1.0, tl.float32)
tmp4 = tmp2 + tmp3
tmp5 = tmp0 / tmp4
tl.store(out_ptr0 + (x0), tmp5, xmask)"""
    assert body_of(silu).ops == ("add", "silu")
    softmax = f"""{LOAD}tmp1 = tl.load(in_ptr1 + (x0 // 512), xmask)
tmp2 = tmp0 + tmp1
tmp3 = tl_math.exp(tmp2)
tmp4 = tmp3 / tmp1
tl.store(out_ptr0 + (x0), tmp4, xmask)"""
    assert body_of(softmax).ops == ("add", "exp", "div")


def test_a_loop_that_is_gone_through_twice_and_what_happens_once_a_row():
    loop = """for r0_offset in range(0, r0_numel, R0_BLOCK):
    tmp{0} = tl.load(in_ptr0 + (r0_1 + 512*x0), r0_mask)
    tmp{1} = tl_math.exp(tmp{0})
    _tmp9 = tl.where(r0_mask, tmp{1}, _tmp9)
"""
    code = f"""_tmp9 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
{loop.format(0, 1)}tmp9 = tl.sum(_tmp9, 1)[:, None]
tmp10 = libdevice.rsqrt(tmp9)
{loop.format(2, 3)}tmp11 = tmp3 * tmp10
tl.store(out_ptr0 + (r0_1 + 512*x0), tmp11, r0_mask)"""
    body = body_of(code, "triton_red_fused_0")
    assert body.passes == 2
    assert body.special == 2  # two exponentials an element; the root is one a row
    assert body.ops == ("exp", "sum", "rsqrt", "mul")


def test_a_copy_computes_nothing():
    assert body_of(f"{LOAD}tl.store(out_ptr0 + (x0), tmp0, xmask)").ops == ()
