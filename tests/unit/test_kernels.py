"""Attention to blocks of keys: out, log-sum-exp and gradients, against softmax written out in float64.

The CUDA operators don't run here. `cuda_operators` puts in their place, on CPU, what torch's sources say of them. So
the tests prove that the operators are called as described there; that the description is right only a GPU can show.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cpgen.runtime.kernels import attend, attend_backward, choose_kernel
from tests.unit.cuda_operators import INF, cuda_operators, weights_of

SCALE = 0.3
KERNELS = ["cpu_flash", "math", "cuda_flash", "cuda_efficient", "cuda_cudnn"]
TAKE_MASKS = [kernel for kernel in KERNELS if kernel != "cuda_flash"]
EXACT = 1e-13  # float64
# What a number of each type can differ by, and some for sums.
PRECISION = {torch.float64: EXACT, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def stand_ins() -> Iterator[None]:
    with cuda_operators():
        yield


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """What `attend` should give, in float64 and for autograd; rows without a key: 0 and -inf."""
    groups = query.shape[1] // key.shape[1]
    key, value = (torch.stack([x] * groups, dim=2).flatten(1, 2) for x in (key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -INF)
    scores, lse = weights_of(query.double(), key.double(), None if mask is None else mask.double(), causal, SCALE)
    blind = (lse == -INF).unsqueeze(-1)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return weights @ value.double(), lse


def tensors(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the norm, or to 1; infinities must be the same."""
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isinf(), expected.isinf())
    difference = torch.where(expected.isinf(), 0.0, actual - expected)
    return float(difference.norm() / torch.where(expected.isinf(), 0.0, expected).norm().clamp(min=1.0))


def check_block(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    grad: Tensor | None = None,
) -> None:
    """One block that is the whole: out, log-sum-exp and gradients are right, and have their shapes and dtypes."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = softmax_attention(*leaves, mask, causal)
    grad = tensors(query.shape, seed=9, dtype=query.dtype)[0] if grad is None else grad
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())

    out, lse = attend(kernel, query, key, value, mask, causal, SCALE)
    grads = attend_backward(kernel, grad, query, key, value, mask, out, lse, causal, SCALE)
    assert out.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    precision = PRECISION[query.dtype]
    assert error(out, expected.detach()) <= precision
    assert error(lse, expected_lse.detach()) <= precision
    for actual, reference in zip(grads, expected_grads, strict=True):
        assert error(actual, reference) <= precision


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of all blocks from attention to each."""
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - lse.masked_fill(lse == -INF, 0.0))
    return sum(out * share.unsqueeze(-1) for (out, _), share in zip(parts, shares, strict=True)), lse


def check_blocks(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sizes: list[int]
) -> tuple[Tensor, ...]:
    """Keys in blocks of `sizes`: merged out and log-sum-exp are right, and gradients summed. Returns the gradients."""
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = softmax_attention(*leaves, mask)
    (grad,) = tensors(query.shape, seed=9, dtype=query.dtype)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())

    keys, values = key.split(sizes, 2), value.split(sizes, 2)
    masks = [mask] * len(sizes) if mask is None or mask.shape[-1] == 1 else mask.split(sizes, -1)
    blocks = list(zip(keys, values, masks, strict=True))
    out, lse = merge([attend(kernel, query, *block, False, SCALE) for block in blocks])
    parts = [attend_backward(kernel, grad, query, *block, out, lse, False, SCALE) for block in blocks]
    grads = (
        torch.stack([dq for dq, _, _ in parts]).sum(0),
        torch.cat([dk for _, dk, _ in parts], 2),
        torch.cat([dv for _, _, dv in parts], 2),
    )
    assert error(out, expected.detach()) <= EXACT
    assert error(lse, expected_lse.detach()) <= EXACT
    for actual, reference in zip(grads, expected_grads, strict=True):
        assert error(actual, reference) <= EXACT
    return grads


MASK_SHAPES = [
    (1, 1, 1, 13),
    (2, 1, 1, 13),
    (1, 4, 1, 13),
    (1, 1, 9, 13),
    (1, 4, 9, 13),
    (2, 4, 9, 13),
    (2, 4, 9, 1),
    (1, 1, 1, 1),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_no_mask(kernel: str, kv_heads: int) -> None:
    check_block(kernel, *tensors((2, 4, 9, 8), (2, kv_heads, 13, 8), (2, kv_heads, 13, 8)))


@pytest.mark.parametrize("kernel", TAKE_MASKS)
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_masks(kernel: str, shape: tuple[int, ...]) -> None:
    query, key, value, mask = tensors((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8), shape)
    check_block(kernel, query, key, value, mask)
    check_block(kernel, query, key, value, mask > -0.5)
    check_block(kernel, query, key, value, mask.float().masked_fill(mask < -0.5, -INF))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [1, 9, 33])
def test_causal(kernel: str, length: int) -> None:
    check_block(kernel, *tensors((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8)), causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 64])
def test_dtypes_and_head_dims(kernel: str, dtype: torch.dtype, head_dim: int) -> None:
    query, key, value, mask = tensors((2, 2, 9, head_dim), *[(2, 2, 33, head_dim)] * 2, (1, 1, 9, 33), dtype=dtype)
    check_block(kernel, query, key, value, mask if kernel in TAKE_MASKS else None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts(kernel: str) -> None:
    """Inputs of any strides, such as BSHD's, slices, and a gradient without a size of its own."""
    masked = kernel in TAKE_MASKS
    query, key, value = (x.transpose(1, 2) for x in tensors((2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8)))
    mask = tensors((1, 1, 13, 9))[0].mT
    check_block(kernel, query, key, value, mask if masked else None)
    check_block(kernel, query, key, value, grad=torch.ones((), dtype=torch.float64).expand(2, 4, 9, 8))
    check_block(kernel, query, key, value, grad=tensors((8, 9, 4, 2))[0].permute(3, 2, 1, 0))
    tokens_last = [x.mT for x in tensors((2, 4, 8, 9), (2, 2, 8, 13), (2, 2, 8, 13))]
    check_block(kernel, *tokens_last)
    heads_last = [x.permute(0, 3, 1, 2) for x in tensors((2, 9, 3, 4), (2, 13, 3, 2), (2, 13, 3, 2))]
    check_block(kernel, *heads_last)
    if masked:
        query, key, value, mask = tensors((2, 4, 9, 8), (2, 2, 16, 8), (2, 2, 16, 8), (2, 4, 9, 16))
        check_block(kernel, query, key, value, mask.contiguous(memory_format=torch.channels_last))
    cut = [x.narrow(2, 1, 7).narrow(3, 1, 8) for x in tensors((2, 4, 9, 10), (2, 2, 13, 10), (2, 2, 13, 10))]
    check_block(kernel, *cut, tensors((2, 4, 9, 15))[0][:, :, 1:8, 3:10] if masked else None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_of_what_was_merged(kernel: str) -> None:
    """`out` and `lse` may come in any strides, and `out` and its gradient in another dtype."""
    query, key, value, grad = tensors(*[(2, 3, 9, 8)] * 4, dtype=torch.float32)
    out, lse = attend(kernel, query, key, value, None, False, SCALE)
    expected = attend_backward(kernel, grad, query, key, value, None, out, lse, False, SCALE)
    strange = out.double().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    lse = lse.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    actual = attend_backward(kernel, grad.double(), query, key, value, None, strange, lse, False, SCALE)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype and error(left, right) <= 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_add_up(kernel: str) -> None:
    check_blocks(kernel, *tensors((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8)), None, [4, 1, 8])


@pytest.mark.parametrize("kernel", TAKE_MASKS)
@pytest.mark.parametrize("additive", [False, True])
def test_rows_without_a_key(kernel: str, additive: bool) -> None:
    """Row 1 sees no key of the middle block, row 2 none but there, row 3 none at all."""
    query, key, value = tensors((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8))
    sees = torch.ones(2, 1, 9, 13, dtype=torch.bool)
    sees[:, :, 1, 4:9] = sees[:, :, 2, :4] = sees[:, :, 2, 9:] = sees[:, :, 3] = False
    mask = torch.where(sees, 0.5, -INF) if additive else sees
    dq, _, _ = check_blocks(kernel, query, key, value, mask, [4, 5, 4])
    assert not dq[:, :, 3].any() and dq[:, :, 2].all()

    out, lse = attend(kernel, query, key[:, :, 4:9], value[:, :, 4:9], mask[..., 4:9], False, SCALE)
    blind = torch.tensor([row in (1, 3) for row in range(9)])
    assert torch.equal((lse == -INF), blind.expand(2, 4, 9))
    assert not out[:, :, blind].any()


@pytest.mark.parametrize("kernel", TAKE_MASKS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 1, 1)])
def test_no_row_has_a_key(kernel: str, shape: tuple[int, ...]) -> None:
    query, key, value, grad = tensors((2, 4, 9, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 4, 9, 8))
    mask = torch.zeros(shape, dtype=torch.bool)
    out, lse = attend(kernel, query, key, value, mask, False, SCALE)
    assert not out.any() and torch.equal(lse, torch.full((2, 4, 9), -INF, dtype=torch.float64))
    for part in attend_backward(kernel, grad, query, key, value, mask, out, lse, False, SCALE):
        assert not part.any()  # nan would be true


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 0), (0, 13)])
def test_no_keys_or_no_queries(kernel: str, queries: int, keys: int) -> None:
    query, key, value = tensors((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), dtype=torch.float32)
    out, lse = attend(kernel, query, key, value, None, False, SCALE)
    assert not out.any() and out.shape == query.shape
    assert torch.equal(lse, torch.full((2, 4, queries), -INF))
    grads = attend_backward(kernel, out, query, key, value, None, out, lse, False, SCALE)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    assert not any(grad.any() for grad in grads)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_blocks(data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from(KERNELS))
    batch, kv_heads, queries = (data.draw(st.integers(1, most)) for most in (2, 3, 40))
    heads = kv_heads * data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    whole = (batch, heads, queries, sum(sizes))
    head_dim = data.draw(st.integers(1, 17))
    seed = data.draw(st.integers(0, 999))
    shape = tuple(data.draw(st.sampled_from([1, size])) for size in whole)
    query, key, value, mask = tensors(
        (batch, heads, queries, head_dim), *[(batch, kv_heads, sum(sizes), head_dim)] * 2, shape, seed=seed
    )
    kind = data.draw(st.sampled_from(["none", "additive", "bool"])) if kernel in TAKE_MASKS else "none"
    some_see = mask > data.draw(st.sampled_from([-1.0, 0.0, 2.0]))
    masks = {"none": None, "additive": mask.masked_fill(~some_see, -INF), "bool": some_see}
    check_blocks(kernel, query, key, value, masks[kind], sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_math_computes_in_float32(dtype: torch.dtype) -> None:
    """Also under autocast; gradients stay so."""
    query, key, value, grad = tensors(*[(2, 2, 33, 8)] * 4, dtype=dtype)
    wide = [x.float() for x in (query, key, value)]
    expected, lse = attend("math", *wide, None, True, SCALE)
    expected_grads = attend_backward("math", grad.float(), *wide, None, expected, lse, True, SCALE)
    with torch.autocast("cpu", torch.bfloat16):
        out, actual_lse = attend("math", query, key, value, None, True, SCALE)
        grads = attend_backward("math", grad, query, key, value, None, expected, lse, True, SCALE)
    assert torch.equal(out, expected.to(dtype)) and torch.equal(actual_lse, lse)
    for actual, reference in zip(grads, expected_grads, strict=True):
        assert torch.equal(actual, reference)


class Backend(str, enum.Enum):
    """As diffusers' AttentionBackendName."""

    NATIVE = "native"
    FLASH = "flash"
    _NATIVE_MATH = "_native_math"


@pytest.mark.parametrize("kernel", ["cpu_flash", "math"])
def test_compiles_whole(kernel: str) -> None:
    backend = Backend.NATIVE if kernel == "cpu_flash" else Backend._NATIVE_MATH

    def step(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        chosen = choose_kernel(backend, query, True)
        blocks = [(key[:, :, :5], value[:, :, :5], mask[..., :5]), (key[:, :, 5:], value[:, :, 5:], mask[..., 5:])]
        out, lse = merge([attend(chosen, query, *block, False, SCALE) for block in blocks])
        parts = [attend_backward(chosen, grad, query, *block, out, lse, False, SCALE) for block in blocks]
        return out, lse, *parts[0], *parts[1]

    inputs = tensors((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8), (2, 1, 9, 13), (2, 4, 9, 8), dtype=torch.float32)
    inputs[3] = (inputs[3] > 0) & (torch.arange(9) != 3)[:, None]
    expected = step(*inputs)
    assert (expected[1] == -INF).sum() >= 2 * 4
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    for left, right in zip(compiled, expected, strict=True):
        assert error(left, right) <= 1e-6


def fake_query(device: str, dtype: torch.dtype, head_dim: int = 64) -> Tensor:
    return torch.empty(1, 2, 9, head_dim, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "masked", "kernel"),
    [
        (None, "cpu", torch.float32, True, "cpu_flash"),
        (Backend.NATIVE, "cpu", torch.bfloat16, False, "cpu_flash"),
        ("native", "cpu", torch.float64, False, "cpu_flash"),
        ("_native_flash", "cpu", torch.float32, True, "cpu_flash"),
        (Backend._NATIVE_MATH, "cpu", torch.float32, True, "math"),
        (None, "cuda", torch.bfloat16, False, "cuda_flash"),
        ("native", "cuda", torch.float16, False, "cuda_flash"),
        (Backend.NATIVE, "cuda", torch.bfloat16, True, "cuda_efficient"),
        (None, "cuda", torch.float32, False, "cuda_efficient"),
        (None, "cuda", torch.float64, True, "math"),
        ("_native_flash", "cuda", torch.float16, False, "cuda_flash"),
        ("_native_efficient", "cuda", torch.bfloat16, False, "cuda_efficient"),
        ("_native_efficient", "cuda", torch.float32, True, "cuda_efficient"),
        ("_native_cudnn", "cuda", torch.bfloat16, True, "cuda_cudnn"),
        ("_native_math", "cuda", torch.float32, True, "math"),
        (None, "mps", torch.float32, True, "math"),
    ],
)
def test_choice(backend: str | None, device: str, dtype: torch.dtype, masked: bool, kernel: str) -> None:
    with FakeTensorMode():
        assert choose_kernel(backend, fake_query(device, dtype), masked) == kernel


def test_choice_by_head_dim() -> None:
    with FakeTensorMode():
        assert choose_kernel(None, fake_query("cuda", torch.bfloat16, 256), False) == "cuda_flash"
        assert choose_kernel(None, fake_query("cuda", torch.bfloat16, 264), False) == "cuda_efficient"


NO_LSE = "gives no log-sum-exp of attention to a part of the keys"


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "masked", "message"),
    [
        (Backend.FLASH, "cpu", torch.float32, False, f"'flash' {NO_LSE}, on cpu; .* native, _native_flash, _native_ma"),
        ("sage", "cuda", torch.bfloat16, True, f"'sage' {NO_LSE}, on cuda; .*: native, _native_efficient, _native_cud"),
        ("flex", "cuda", torch.float32, True, f"'flex' {NO_LSE}, on cuda; .*: native, _native_efficient, _native_ma"),
        ("_native_cudnn", "cpu", torch.float32, False, f"'_native_cudnn' {NO_LSE}, on cpu; .*: native, _native_flash"),
        ("_native_flash", "mps", torch.float32, False, f"{NO_LSE}, on mps; .*: native, _native_math$"),
        (
            "_native_flash",
            "cuda",
            torch.bfloat16,
            True,
            r"does not take torch\.bfloat16, head dim 64, with a mask, on cuda; backends that work here: "
            "native, _native_efficient, _native_cudnn, _native_math$",
        ),
        ("_native_flash", "cuda", torch.float32, False, r"does not take torch\.float32, head dim 64, no mask"),
        ("_native_cudnn", "cuda", torch.float32, False, r"does not take torch\.float32"),
        ("_native_efficient", "cuda", torch.float64, False, r"does not take torch\.float64.*: native, _native_math$"),
    ],
)
def test_refused(backend: str, device: str, dtype: torch.dtype, masked: bool, message: str) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        choose_kernel(backend, fake_query(device, dtype), masked)


@pytest.mark.parametrize(
    ("kernel", "mask_shape"),
    [("cuda_flash", None)]
    + [
        (kernel, shape)
        for kernel in ("cuda_efficient", "cuda_cudnn", "math")
        for shape in (None, (2, 1, 1, 13), (2, 4, 9, 13))
    ],
)
def test_fake_cuda(kernel: str, mask_shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CUDA device without their values.

    This proves that the operators exist with these arguments, and shapes, dtypes and devices as torch derives them. It
    doesn't run a kernel: no value and no check of alignment inside one.
    """
    # A torch without CUDA can't copy such tensors by this method, though it can clone them.
    monkeypatch.setattr(Tensor, "contiguous", lambda x: x.clone(memory_format=torch.contiguous_format))
    with FakeTensorMode():
        query = fake_query("cuda", torch.bfloat16).new_empty(2, 4, 9, 20)
        key = query.new_empty(2, 2, 13, 20)
        mask = None if mask_shape is None else query.new_empty(mask_shape, dtype=torch.bool)
        out, lse = attend(kernel, query, key, key, mask, False, SCALE)
        grads = attend_backward(kernel, out, query, key, key, mask, out, lse, False, SCALE)
    dtype = torch.float32 if kernel == "math" else torch.bfloat16
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
    assert [grad.dtype for grad in grads] == [dtype] * 3
    assert {x.device.type for x in (out, lse, *grads)} == {"cuda"}
