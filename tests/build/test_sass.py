"""The machine code of the real kernels: 16-byte accesses where they are promised, no spills."""

import subprocess
from pathlib import Path

import pytest
import sass
import torch

from fusedcuda import _toolchain

# The kernels that move 16 bytes a thread and access.
VECTOR_KERNELS = {
    "pointwise_linear_kernel",
    "pointwise_broadcast_kernel",
    "pointwise_bwd_kernel",
    "pointwise_bwd_sum_kernel",
    "norm_kernel",
    "norm_pipeline_kernel",
    "norm_bwd_kernel",
    "softmax_kernel",
    "softmax_stream_kernel",
    "softmax_bwd_kernel",
    "softmax_bwd_stream_kernel",
    "cross_entropy_kernel",
    "cross_entropy_stream_kernel",
    "cross_entropy_bwd_kernel",
    "rope_kernel",
    "dot_interaction_kernel",
    "dot_interaction_bwd_kernel",
    "dot_interaction_threads_kernel",
    "dot_interaction_bwd_threads_kernel",
    "embedding_sum_kernel",
    "linear_sigmoid_bce_kernel",
    "linear_sigmoid_bce_bwd_kernel",
    "lora_dropout_kernel",
    "scale_gradient_kernel",
    "act_rows_kernel",
    "relu_mask_kernel",
    "act_rows_bwd_kernel",
    "act_rows_bwd_sum_kernel",
    "column_sums_kernel",
    "one_output_bwd_kernel",
}


def arguments_of(kernel: sass.Kernel) -> list[str]:
    """The template arguments."""
    return kernel.name.split("<")[-1].rstrip(">").split(", ")


def is_scalar(kernel: sass.Kernel) -> bool:
    """The scalar path (kVec = 1), which all of float64 takes.

    The last template argument of these kernels says whether there are whole vectors.
    """
    says = kernel.function.startswith(("dot_interaction", "linear_sigmoid_bce", "lora_dropout"))
    if says and arguments_of(kernel)[-1] == "false":
        return True
    return kernel.name.endswith(", 1>") or "double" in kernel.name


def stores_words(kernel: sass.Kernel) -> bool:
    """Unaligned rows that stream: loaded 16 bytes at once, stored as words, a line a warp.

    The third template argument of these kernels is how they reach a row (RowAccess): 2 is
    kShifted. And the head of a DLRM, which writes numbers of a row, and sums of columns.
    """
    streams = kernel.function in ("norm_pipeline_kernel", "norm_bwd_kernel")
    only_numbers = kernel.function in ("linear_sigmoid_bce_kernel", "column_sums_kernel")
    return only_numbers or (streams and arguments_of(kernel)[2].endswith(")2"))


@pytest.fixture(scope="module")
def kernels(extension: Path) -> list[sass.Kernel]:
    return sass.kernels(extension)


def test_every_vector_kernel_is_there(kernels) -> None:
    assert {kernel.function for kernel in kernels} >= VECTOR_KERNELS


def test_vector_kernels_load_and_store_16_bytes_at_once(kernels) -> None:
    narrow = [
        kernel
        for kernel in kernels
        if kernel.function in VECTOR_KERNELS
        and not is_scalar(kernel)
        and not (kernel.loads_128 and (kernel.stores_128 or stores_words(kernel)))
    ]
    assert not narrow, "\n" + sass.table(narrow)


def test_the_interaction_multiplies_on_tensor_cores(kernels) -> None:
    names = ("dot_interaction_kernel", "dot_interaction_bwd_kernel")
    interactions = [kernel for kernel in kernels if kernel.function in names]
    # Forward, backward; types; tiles; lookup; alignment.
    assert len(interactions) == 2 * 2 * 2 * 2 * 2
    without = [kernel for kernel in interactions if not kernel.products]
    assert not without, "\n" + sass.table(without)


def test_the_products_of_an_adapter_are_copies_to_tensor_cores(kernels) -> None:
    products = [k for k in kernels if k.function in ("lora_down_kernel", "lora_up_kernel")]
    assert len(products) == 2 * 4 + 2  # types; of lora_down, factors in 16 or 32 bits, either way
    without = [k for k in products if not (k.products and k.loads_128)]
    assert not without, "\n" + sass.table(without)
    # Two blocks of 256 threads on an SM.
    assert max(k.registers for k in products) <= 128


def test_a_layer_of_few_inputs_stores_sixteen_bytes_at_a_time(kernels) -> None:
    narrow = [k for k in kernels if k.function == "linear_narrow_kernel"]
    assert len(narrow) == 2 * 2  # types; plain ones and all others
    without = [k for k in narrow if not (k.products and k.loads_128 and k.stores_128)]
    assert not without, "\n" + sass.table(without)
    # Four blocks of 256 threads on an SM, or two.
    assert sorted(k.registers <= 64 for k in narrow) == [False, False, True, True]
    assert max(k.registers for k in narrow) <= 128


def test_a_dropped_branch_stores_sixteen_bytes_at_a_time(kernels) -> None:
    branches = [k for k in kernels if k.function == "lora_branch_kernel"]
    assert len(branches) == 2  # types
    without = [k for k in branches if not (k.products and k.loads_128 and k.stores_128)]
    assert not without, "\n" + sass.table(without)
    assert max(k.registers for k in branches) <= 64  # four blocks of 256 threads on an SM


def test_the_gradient_of_one_output_leaves_room_for_three_blocks(kernels) -> None:
    """Of 256 threads on an SM, with the loads of six rows side by side."""
    names = ("one_output_bwd_kernel", "linear_sigmoid_bce_bwd_kernel")
    vectors = [k for k in kernels if k.function in names and not is_scalar(k)]
    assert len(vectors) == 2 + 3  # types
    assert max(k.registers for k in vectors) <= 80
    # Before the loop, and in it.
    assert all(k.loads_128 >= 2 * 6 for k in vectors), "\n" + sass.table(vectors)


def test_a_layer_of_few_rows_streams_its_weight_to_tensor_cores(kernels) -> None:
    few = [k for k in kernels if k.function == "lora_decode_kernel"]
    assert len(few) == 2 * 2  # types; 16 and 32 rows
    without = [k for k in few if not (k.products and k.loads_128)]
    assert not without, "\n" + sass.table(without)
    assert max(k.registers for k in few) <= 128  # a block of 512 threads on an SM


def test_the_product_of_a_gated_mlp_is_one_loop_on_tensor_cores(kernels) -> None:
    products = [k for k in kernels if k.function == "gated_product_kernel_sm90"]
    assert len(products) == 2 * 2  # types; tiles
    # A stage: 64 values of k in steps of 16, 128 rows in two halves. No second copy of the loop.
    assert [k.products for k in products] == [4 * 2] * 4, "\n" + sass.table(products)
    assert not any(k.products_from_registers for k in products)


def test_a_gated_mlp_of_few_rows_streams_its_weights_to_tensor_cores(kernels) -> None:
    decode = [k for k in kernels if k.function == "gated_mlp_decode_kernel_sm90"]
    assert len(decode) == 2 * 2  # types; 8 and 16 rows
    without = [k for k in decode if not (k.products and k.bulk_copies and k.loads_128)]
    assert not without, "\n" + sass.table(without)
    # Addresses in uniform registers, or one thread could not start copies as fast as they end.
    assert [k.name for k in decode if k.copies_lane_by_lane] == []
    # Three warpgroups on an SM.
    assert max(k.registers for k in decode) <= 168


def test_no_kernel_uses_local_memory(kernels) -> None:
    spilling = [kernel for kernel in kernels if kernel.local_accesses or kernel.stack_bytes]
    assert not spilling, "\n" + sass.table(spilling)


def test_the_checks_see_narrow_accesses_and_local_memory(real_compilers) -> None:
    """A kernel that does everything wrong: the tests above must not pass by seeing nothing."""
    source = real_compilers.root / "bad.cu"
    source.write_text("""
        #include <cuda_pipeline.h>
        __global__ void bad_kernel(float* x, int n) {
          float local[512];
          for (int i = 0; i < 512; ++i) local[i] = x[i * n];
          x[threadIdx.x] = local[n];
        }
        __global__ void good_kernel(float4* x) { x[threadIdx.x + 1] = x[threadIdx.x]; }
        __global__ void good_copy_kernel(float4* x) {
          __shared__ float4 shared[32];
          __pipeline_memcpy_async(&shared[threadIdx.x], &x[threadIdx.x], 16);
          __pipeline_commit();
          __pipeline_wait_prior(0);
          x[threadIdx.x + 1] = shared[threadIdx.x];
        }
    """)
    library = real_compilers.root / "libbad.so"
    nvcc = _toolchain.find_toolchain(_toolchain.describe_torch(torch)).nvcc
    flags = ["-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90a,code=sm_90a"]
    subprocess.run([nvcc, *flags, "-cudart=none", source, "-o", library], check=True)
    bad, *good = sass.kernels(library)
    assert (bad.function, bad.loads_128, bad.stores_128) == ("bad_kernel", 0, 0)
    assert bad.local_accesses > 0
    assert bad.stack_bytes >= 2048
    assert [kernel.function for kernel in good] == ["good_copy_kernel", "good_kernel"]
    for kernel in good:
        assert (kernel.loads_128, kernel.stores_128) == (1, 1)
        assert kernel.local_accesses == kernel.stack_bytes == 0
        assert kernel.registers > 0
