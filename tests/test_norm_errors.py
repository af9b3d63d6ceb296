"""What rms_norm and layer_norm refuse, and that each message says which op, what and why."""

import pytest
import torch
from norms import NORMS, RMS_NORM, Norm
from reference import by_name
from refusals import refuses

import fusedcuda

EVERY_NORM = pytest.mark.parametrize("norm", NORMS, ids=by_name)


def replaced(norm: Norm, name: str, value, device: str) -> list:
    operands = norm.random_operands(4, 8, device=device)
    operands[norm.operands.index(name)] = value
    return operands


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
@EVERY_NORM
def test_unsupported_dtype(norm, dtype, device):
    for name in norm.operands:
        shape = (4, 8) if name in ("x", "residual") else (8,)
        wrong = torch.ones(shape, device=device).to(dtype)
        with refuses(norm.name, TypeError, name, str(dtype)):
            norm(*replaced(norm, name, wrong, device))


@pytest.mark.parametrize("wrong", [1.0, "1", [1.0]], ids=repr)
@EVERY_NORM
def test_operands_that_are_no_tensor(norm, wrong, device):
    for name in norm.operands:
        with refuses(norm.name, TypeError, name, type(wrong).__name__):
            norm(*replaced(norm, name, wrong, device))


@EVERY_NORM
def test_a_number_as_a_tensor(norm, device):
    with refuses(norm.name, ValueError, "x", "at least one dimension"):
        norm(torch.ones((), device=device), None, *(None for _ in norm.vectors))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 8), (1, 8)], ids=str)
@EVERY_NORM
def test_shapes_of_vectors(norm, shape, device):
    for name in norm.vectors:
        wrong = torch.ones(shape, device=device)
        for operand in (wrong, wrong.clone().requires_grad_()):
            with refuses(norm.name, ValueError, name, str(shape), "(8,)"):
                norm(*replaced(norm, name, operand, device))


@EVERY_NORM
def test_the_residual_is_not_broadcast_or_converted(norm, device):
    for wrong in (
        torch.ones(8, device=device),
        torch.ones(1, 8, device=device),
        torch.ones(4, 8, device=device, dtype=torch.bfloat16),
    ):
        with refuses(norm.name, ValueError, "residual", "(4, 8)", "torch.float32"):
            norm(*replaced(norm, "residual", wrong, device))


@pytest.mark.parametrize("wrong", [None, "1e-6", [1e-6]], ids=repr)
@EVERY_NORM
def test_eps_has_to_be_a_number(norm, wrong, device):
    for residual in (False, True):
        operands = norm.random_operands(4, 8, device=device, residual=residual)
        with refuses(norm.name, TypeError, "eps", type(wrong).__name__):
            norm(*operands, eps=wrong)


def test_an_offset_needs_a_weight(device):
    x = torch.ones(4, 8, device=device)
    for residual in (None, x):
        with refuses("rms_norm", ValueError, "weight_offset", "1.0"):
            fusedcuda.rms_norm(x, residual=residual, weight_offset=1.0)
    with refuses("rms_norm", TypeError, "weight_offset", "str"):
        fusedcuda.rms_norm(x, x[0], weight_offset="1")


@EVERY_NORM
def test_different_devices_without_a_gpu(norm):
    """The meta device stands in for a second one."""
    for name in norm.operands:
        operands = norm.random_operands(4, 8)
        position = norm.operands.index(name)
        operands[position] = operands[position].to("meta")
        with refuses(norm.name, ValueError, "cpu", "meta"):
            norm(*operands)


@pytest.mark.gpu
@EVERY_NORM
def test_different_devices(norm):
    for name in norm.operands:
        operands = norm.random_operands(4, 8, device="cuda")
        position = norm.operands.index(name)
        operands[position] = operands[position].cpu()
        with refuses(norm.name, ValueError, "cpu", "cuda:0"):
            norm(*operands)


@EVERY_NORM
def test_sparse_tensors_are_refused(norm):
    x, *rest = norm.random_operands(4, 8)
    with pytest.raises((TypeError, NotImplementedError, RuntimeError, ValueError)):
        norm(x.to_sparse(), *rest)


@EVERY_NORM
def test_a_call_goes_on_working_after_an_error(norm, device):
    operands = norm.random_operands(4, 8, device=device)
    with pytest.raises(TypeError):
        norm(operands[0].long(), *operands[1:])
    torch.testing.assert_close(norm(*operands), norm.eager(*operands))
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------- raw gradients


def raw_backward(norm: Norm, device: str, mask: int, **wrong) -> list:
    x, _, *vectors = norm.random_operands(4, 8, device=device)
    statistics = ["rstd"] if norm is RMS_NORM else ["mean", "rstd"]
    given = {"dy": x, "h": x, **{name: torch.ones(4, device=device) for name in statistics}}
    given |= dict(zip(norm.vectors, vectors, strict=True)) | {"dh": None}
    assert not wrong.keys() - given.keys()
    options = (0.0, mask) if norm is RMS_NORM else (mask,)
    raw = getattr(torch.ops.fusedcuda, f"{norm.name}_backward")
    return raw(*(given | wrong).values(), *options)


@EVERY_NORM
def test_raw_gradients_refuse_what_does_not_fit(norm, device):
    every_bit = (2 << len(norm.vectors)) - 1
    assert len(raw_backward(norm, device, every_bit)) == 1 + len(norm.vectors)
    for name in ("dy", "dh"):
        for wrong in (torch.ones(4, 7), torch.ones(8), torch.ones(4, 8).double()):
            with refuses(f"{norm.name}_backward", (ValueError, RuntimeError), name):
                raw_backward(norm, device, every_bit, **{name: wrong.to(device)})
    for name in ("rstd",) if norm is RMS_NORM else ("mean", "rstd"):
        for wrong in (torch.ones(3), torch.ones(4, 1), torch.ones(4).bfloat16()):
            with refuses(f"{norm.name}_backward", (ValueError, TypeError, RuntimeError), name):
                raw_backward(norm, device, every_bit, **{name: wrong.to(device)})
    for name in norm.vectors:
        with refuses(f"{norm.name}_backward", (ValueError, RuntimeError), name):
            raw_backward(norm, device, every_bit, **{name: torch.ones(7, device=device)})
        with refuses(f"{norm.name}_backward", (ValueError, RuntimeError), name, "absent"):
            raw_backward(norm, device, every_bit, **{name: None})
