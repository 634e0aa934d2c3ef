"""What verifying and measuring allocates is counted before a problem is accepted."""

from __future__ import annotations

import re

import pytest

from kernels.devices import profile_named
from kernels.problem import GemmProblem
from search_space.memory import CACHED_REFERENCE_BYTES, device_memory, keeps_references, shortage
from search_space.request import RequestError, TuneRequest
from search_space.rotation import set_count

H200, H100 = profile_named("h200"), profile_named("h100")


def test_each_part_is_counted() -> None:
    """Inputs of five cases, four float32 products, D and the finalists' outputs, operand sets beyond the first."""
    problem = GemmProblem(m=4096, n=2048, k=8192)
    found = device_memory(problem, H200.l2_bytes)
    a, b, d = (2 * rows * columns for rows, columns in ((4096, 8192), (2048, 8192), (4096, 2048)))
    assert found.inputs == 5 * (a + b)
    assert found.references == 4 * 2 * d
    assert found.outputs > 13 * d
    assert found.rotating == (set_count(problem, H200.l2_bytes) - 1) * (a + b + d)
    assert found.temporaries >= 3 * max(a, b)
    assert found.total == sum(
        (found.inputs, found.references, found.outputs, found.rotating, found.temporaries, found.beside)
    )


def test_products_that_are_too_large_to_keep_are_not_counted() -> None:
    """The inputs of one more product are kept in their place."""
    small, large = GemmProblem(m=32768, n=32768, k=64), GemmProblem(m=32768, n=32769, k=64)
    assert keeps_references(small)
    assert not keeps_references(large)
    assert device_memory(small, H200.l2_bytes).references == CACHED_REFERENCE_BYTES
    assert device_memory(large, H200.l2_bytes).references == 2 * (32768 + 32769) * 64


@pytest.mark.parametrize("shape", ["4096x4096x4096", "16384x16384x16384", "8192x57344x8192", "1x131072x16384"])
def test_shapes_of_real_models_fit_an_80_gb_card(shape: str) -> None:
    """Nothing that was tuned so far is refused."""
    assert shortage(GemmProblem.parse(shape), H100) == ""


def test_problem_whose_operands_fit_and_whose_checks_do_not_is_refused_with_the_figures() -> None:
    """25.8 GB of operands would have run out of memory on the card, an hour later."""
    problem = GemmProblem.parse("65536x65536x65536")
    assert problem.min_bytes < H200.memory_bytes / 5
    with pytest.raises(RequestError) as raised:
        TuneRequest(problem=problem, arch="sm_90a", device="h200")
    text = str(raised.value)
    assert re.search(r"takes \d+\.\d GB \(\d+\.\d inputs, \d+\.\d references, .* rotating, ", text)
    assert "NVIDIA H200 has 141.0 GB" in text
    assert "split the product into several, or ask for mode 'model'" in text
    assert TuneRequest(problem=problem, arch="sm_90a", device="h200", mode="model").problem == problem
