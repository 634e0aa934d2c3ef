"""GemmProblem: what can be asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.errors import ProblemError
from kernels.problem import Dtype, GemmProblem, Layout


def test_flops_and_bytes_count_each_operand_once() -> None:
    """The roofline of a problem rests on these two numbers."""
    problem = GemmProblem(m=2, n=3, k=5)
    assert problem.flops == 60
    assert problem.min_bytes == 2 * (2 * 5 + 3 * 5 + 2 * 3)


@pytest.mark.parametrize(("field", "value"), [("m", 0), ("n", -8), ("k", 2**31), ("m", 1.0), ("n", True), ("k", "64")])
def test_impossible_extent_is_refused_and_named(field: str, value: object) -> None:
    """The error says which of m, n, k is wrong and shows the value."""
    with pytest.raises(ProblemError, match=field) as caught:
        GemmProblem(**{"m": 8, "n": 8, "k": 8, field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value).strip("'") in str(caught.value)


def test_dtype_aliases_become_one_spelling() -> None:
    """Equal problems have equal keys however the dtype was typed."""
    keys = {GemmProblem.parse("8x8x8", dtype=dtype).key for dtype in ("bf16", "bfloat16")}
    assert keys == {"8x8x8:bf16:NT"}


@pytest.mark.parametrize(
    ("arguments", "field"), [({"dtype": "fp8"}, "dtype"), ({"layout": "NN"}, "layout"), ({"dtype": "int8"}, "dtype")]
)
def test_unserved_dtype_or_layout_is_refused(arguments: dict[str, str], field: str) -> None:
    """Only what a template computes can be asked for."""
    with pytest.raises(ProblemError) as caught:
        GemmProblem.parse("8x8x8", **arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "8x8", "8x8x8x8", "axbxc", "8.0x8x8", "8 x 8 x 8", "9" * 5000 + "x8x8", "٣x8x8"])
def test_text_that_is_no_shape_is_refused(text: str) -> None:
    """The message shows how to write one."""
    with pytest.raises(ProblemError, match="write MxNxK"):
        GemmProblem.parse(text)


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_shape_text_reads_back(m: int, n: int, k: int) -> None:
    """`parse` undoes `shape` for every size."""
    problem = GemmProblem(m=m, n=n, k=k, dtype=Dtype.FP16, layout=Layout.NT)
    assert GemmProblem.parse(problem.shape, dtype="fp16") == problem
