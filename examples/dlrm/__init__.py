"""DLRM, the recommendation model, in plain PyTorch and with fusedcuda: `python -m examples.dlrm`.

models.py has both models; step.py a forward pass and a training step, and the ways to run them;
counts.py what they move, by the operators alone; check.py whether they agree; page.py the result.
"""
