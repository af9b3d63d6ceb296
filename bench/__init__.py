"""Benchmarks of fusedcuda against eager PyTorch, torch.compile, Triton, Liger and QuACK.

`python -m bench.bench_<family>` runs one family; `bench/harness.py` holds the protocol.
"""
