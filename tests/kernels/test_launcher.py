"""The launcher against a driver that only notes what it is asked (`fake_driver.c`): what reaches the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compile import compile_kernel
from kernels.config import Sm90GemmConfig
from kernels.problem import GemmProblem
from kernels.stream_k import workspace_of
from kernels.toolchain import find_toolchain

pytest.importorskip("tvm")

STREAM_K = GemmProblem(m=256, n=192, k=2048)
STREAM_K_CONFIG = Sm90GemmConfig(scheduler="stream_k", num_consumers=1, blk_n=64, pipe_depth=4, epi_stages=1)
PLAIN = GemmProblem(m=100, n=136, k=72)
PLAIN_CONFIG = Sm90GemmConfig(num_consumers=1, blk_n=64, pipe_depth=4, epi_stages=1)

# Runs in a process of its own, whose loader finds the fake driver first.
PREAMBLE = """
import ctypes, sys
import tvm_ffi

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

KEPT = []

class Matrix:
    "A bfloat16 matrix in device memory that nobody reads."
    def __init__(self, rows, cols, *, stride=None, address=1 << 30):
        shape, strides = (ctypes.c_int64 * 2)(rows, cols), (ctypes.c_int64 * 2)(stride or cols, 1)
        self.tensor = Tensor(address, 2, 0, 2, 4, 16, 1, shape, strides, 0, None, None)
        KEPT.extend([self.tensor, shape, strides])
    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)
    def __dlpack_device__(self):
        return (2, 0)

gemm = tvm_ffi.load_module(sys.argv[1])["gemm"]
driver = ctypes.CDLL("libcuda.so.1")

def say(text):
    print(text, file=sys.stderr, flush=True)

def run(a, b, d, stream=1):
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
        gemm(*(tvm_ffi.from_dlpack(one) for one in (a, b, d)))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the fake libcuda."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_driver.c")
    compiler = find_toolchain().cxx
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-w", source, "-o", folder / "libcuda.so.1"]
    subprocess.run([str(part) for part in command], check=True)
    return folder


def _module(problem: GemmProblem, config: Sm90GemmConfig, folder: Path) -> Path:
    path = folder / "gemm.so"
    path.write_bytes(compile_kernel(problem, config, 132).module)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module without a workspace."""
    return _module(PLAIN, PLAIN_CONFIG, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def stream_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module with one."""
    return _module(STREAM_K, STREAM_K_CONFIG, tmp_path_factory.mktemp("stream_k"))


def noted(module: Path, driver: Path, code: str, **environment: str) -> list[str]:
    """What the driver was asked for while the code ran."""
    ran = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, str(module)],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stderr.splitlines()


def workspaces(stream_k: Path, driver: Path, code: str) -> list[str]:
    """As `noted`, of operands of the stream-K module."""
    operands = "A, B, D = Matrix(256, 2048), Matrix(192, 2048), Matrix(256, 192)\n"
    return noted(stream_k, driver, operands + code, FAKE_DRIVER_WORKSPACE_ARGUMENT="3")


SIZE = workspace_of(STREAM_K, STREAM_K_CONFIG, 132).size_bytes
NEW = [f"allocate {SIZE} bytes", f"clear {SIZE} bytes on a stream of its own"]


def test_each_stream_has_a_workspace_that_is_cleared_once(stream_k: Path, driver: Path) -> None:
    """Launches of one stream follow one another; those of another may run at the same time."""
    lines = workspaces(stream_k, driver, "for stream in (1, 1, 2, 1, 2): run(A, B, D, stream)\n")
    use = "launch with workspace"
    assert lines == [*NEW, f"{use} 0", f"{use} 0", *NEW, f"{use} 1", f"{use} 0", f"{use} 1"]


def test_captured_launches_share_no_workspace_with_others(stream_k: Path, driver: Path) -> None:
    """A graph may run beside its stream, and beside other graphs; its branches run beside each other."""
    code = """
graph = lambda number: number << 16
for stream in (1, graph(1) | 1, graph(1) | 1, graph(1) | 2, graph(2) | 1, 1): run(A, B, D, stream)
"""
    lines = [line[-1] for line in workspaces(stream_k, driver, code) if line.startswith("launch")]
    assert lines == ["0", "1", "1", "2", "3", "0"]


def test_stream_may_be_used_while_another_thread_captures(stream_k: Path, driver: Path) -> None:
    """What is unsafe then would end the other's capture."""
    operands = "A, B, D = Matrix(256, 2048), Matrix(192, 2048), Matrix(256, 192)\n"
    lines = noted(
        stream_k, driver, operands + "run(A, B, D)\n", FAKE_DRIVER_WORKSPACE_ARGUMENT="3", FAKE_DRIVER_CAPTURE="1"
    )
    assert lines == [*NEW, "launch with workspace 0"]


def test_workspace_of_a_destroyed_graph_is_used_again(stream_k: Path, driver: Path) -> None:
    """Memory does not grow with the number of graphs that a process captures."""
    code = """
for number in range(1, 6):
    run(A, B, D, number << 16 | 1)
    driver.destroy_graph(ctypes.c_uint64(number))
run(A, B, D, 9)
"""
    lines = workspaces(stream_k, driver, code)
    assert lines == [*NEW, *["launch with workspace 0"] * 6]


def test_graph_may_outlive_the_module(stream_k: Path, driver: Path) -> None:
    """What the driver calls when the graph goes must still be there."""
    code = """
import gc
run(A, B, D, 1 << 16 | 1)
del gemm
gc.collect()
driver.destroy_graph(ctypes.c_uint64(1))
say("gone")
"""
    assert workspaces(stream_k, driver, code)[-1] == "gone"


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ("Matrix(100, 72), Matrix(136, 72), Matrix(100, 136)", ["launch"]),
        ("Matrix(0, 72), Matrix(136, 72), Matrix(0, 136)", []),
        ("Matrix(100, 72), Matrix(0, 72), Matrix(100, 0)", []),
        ("Matrix(100, 0), Matrix(136, 0), Matrix(100, 136)", ["clear 27200 bytes"]),
        ("Matrix(100, 0), Matrix(136, 0), Matrix(100, 136, stride=144)", ["clear 100 rows of 272 bytes, 288 apart"]),
        ("Matrix(0, 0), Matrix(136, 0), Matrix(0, 136)", []),
    ],
)
def test_product_of_size_zero_is_empty_or_zero_without_a_launch(
    plain: Path, driver: Path, operands: str, expected: list[str]
) -> None:
    """No rows or no columns: nothing to do. No terms: D is cleared."""
    assert noted(plain, driver, f"run({operands})\n") == expected


@pytest.mark.parametrize(
    ("operands", "refused"),
    [
        ("Matrix(100, 72, stride=80), Matrix(136, 72, stride=4096), Matrix(100, 136, stride=152)", ""),
        ("Matrix(100, 72, stride=76), Matrix(136, 72), Matrix(100, 136)", "A must be row-major and contiguous or"),
        ("Matrix(100, 72), Matrix(136, 72, stride=73), Matrix(100, 136)", "B must be row-major and contiguous or"),
        ("Matrix(100, 72), Matrix(136, 72), Matrix(100, 136, stride=140)", "D must be row-major and contiguous or"),
        ("Matrix(100, 72), Matrix(136, 72), Matrix(100, 136, stride=128)", "D must be row-major and contiguous or"),
        ("Matrix(100, 72, address=(1 << 30) + 8), Matrix(136, 72), Matrix(100, 136)", "A must start at a 16-byte"),
    ],
)
def test_rows_may_lie_farther_apart_where_they_start_at_16_bytes(
    plain: Path, driver: Path, operands: str, refused: str
) -> None:
    """A leading dimension larger than the width; what is not aligned is refused before any launch."""
    code = f"""
try:
    run({operands})
except ValueError as error:
    say(f"refused: {{error}}")
"""
    lines = noted(plain, driver, code)
    if refused:
        assert len(lines) == 1
        assert lines[0].startswith(f"refused: {refused}")
    else:
        assert lines == ["launch"]


def test_route_asks_the_module_that_was_named_for_shape_dtype_and_device(plain: Path, driver: Path) -> None:
    """What was not named is nothing; the first to be named stays; what a product answers comes back."""
    code = """
module = tvm_ffi.load_module(sys.argv[1])
route, add_route = module["route"], module["add_route"]
a, b, other = (tvm_ffi.from_dlpack(one) for one in (Matrix(100, 72), Matrix(72, 136), Matrix(72, 137)))
served = []
def product(x, w):
    served.append((tuple(x.shape), tuple(w.shape)))
    return None if len(served) == 2 else a
say(route(a, b))
add_route(100, 136, 72, True, 1, product)
add_route(100, 136, 72, False, 0, product)
say(route(a, b))
add_route(100, 136, 72, True, 0, product)
add_route(100, 136, 72, True, 0, lambda x, w: 1 / 0)
say(tuple(route(a, b).shape))
say(route(a, b))
say(route(a, other))
say(served)
"""
    asked = [((100, 72), (72, 136))] * 2
    assert noted(plain, driver, code) == ["None", "None", "(100, 72)", "None", "None", str(asked)]


def test_what_a_routed_product_raises_reaches_the_caller(plain: Path, driver: Path) -> None:
    """A failed launch must not look like a product that nobody serves."""
    code = """
module = tvm_ffi.load_module(sys.argv[1])
def product(x, w):
    raise RuntimeError("the launch failed")
module["add_route"](100, 136, 72, True, 0, product)
try:
    module["route"](*(tvm_ffi.from_dlpack(one) for one in (Matrix(100, 72), Matrix(72, 136))))
except RuntimeError as error:
    say(error)
"""
    assert noted(plain, driver, code) == ["the launch failed"]
