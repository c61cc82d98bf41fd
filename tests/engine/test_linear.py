"""The matrix product: right, and the same for a row whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvcache.engine.layers import Linear

SHAPES = [(960, 576), (576, 1536), (259, 48), (1, 8), (7, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_linear_equals_a_matrix_product(shape: tuple[int, int], dtype: torch.dtype, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(shape, dtype=dtype), torch.randn(rows, shape[1], dtype=dtype)
    added = torch.randn(shape[0], dtype=dtype) if bias else None
    wanted = functional.linear(x.double(), weight.double(), None if added is None else added.double())
    with torch.inference_mode():
        found = Linear(weight, added)(x)
    assert found.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, atol=2 * shape[1] * eps, rtol=eps)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear, x = Linear(torch.randn(shape)), torch.randn(300, shape[1])
    if not linear.packed:
        pytest.skip("this build of torch has no oneDNN: the plain product promises less")
    with torch.inference_mode():
        together = linear(x)
        for rows in (1, 2, 3, 5, 7, 16, 31, 100):
            assert torch.equal(linear(x[11 : 11 + rows]), together[11 : 11 + rows])
