"""Hand-written Triton kernels, autotuned: what a careful user would write without fusedcuda."""
