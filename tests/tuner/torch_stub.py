"""Just enough of torch and tvm_ffi, over numpy, to run the wheel's runtime where neither torch nor a GPU is.

A tensor knows shape, strides, dtype, device and whether it wants a gradient; `matmul` computes. Every product says who
computed it, so that a test can tell a tuned kernel from the fallback.
"""

from __future__ import annotations

import types
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ITEM_BYTES = 4  # the arrays are float32, whatever dtype they are said to have


class Size(tuple[int, ...]):
    """torch.Size."""


@dataclass(frozen=True)
class Device:
    """torch.device."""

    type: str
    index: int | None = None


@dataclass(frozen=True)
class Properties:
    """torch.cuda.get_device_properties."""

    name: str = "NVIDIA H200"
    multi_processor_count: int = 132
    major: int = 9
    minor: int = 0


class Tensor:
    """torch.Tensor, of a numpy array."""

    def __init__(
        self, array: Any, dtype: str = "bfloat16", device: Device | None = None, *, requires_grad: bool = False
    ) -> None:
        self.array, self.dtype, self.requires_grad = array, dtype, requires_grad
        self.device = device or Device("cuda", 0)
        self.computed_by = ""

    @property
    def shape(self) -> Size:
        return Size(self.array.shape)

    def dim(self) -> int:
        return int(self.array.ndim)

    def numel(self) -> int:
        return int(self.array.size)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def t(self) -> Tensor:
        return self._like(self.array.T)

    def detach(self) -> Tensor:
        return Tensor(self.array, self.dtype, self.device)

    def flatten(self, first: int, last: int) -> Tensor:
        assert (first, last) == (0, -2)
        return self._like(self.array.reshape(-1, self.array.shape[-1]))

    def unflatten(self, axis: int, sizes: Size) -> Tensor:
        assert axis == 0
        made = self._like(self.array.reshape(*sizes, self.array.shape[-1]))
        made.computed_by = self.computed_by
        return made

    def new_empty(self, size: tuple[int, ...]) -> Tensor:
        return self._like(np.empty(size, np.float32))

    def _like(self, array: Any) -> Tensor:
        return Tensor(array, self.dtype, self.device, requires_grad=self.requires_grad)


class Parameter(Tensor):
    """torch.nn.Parameter."""


@dataclass
class State:
    """What the stub's process-wide switches say; a test sets them."""

    grad: bool = True
    compiling: bool = False
    capturing: bool = False
    transforms: bool = False
    autocast: str | None = None
    forward_level: int = -1
    properties: Properties = Properties()


class Module(dict[str, Any]):
    """tvm_ffi.Module."""

    def implements_function(self, name: str) -> bool:
        return name in self


class Stub:
    """The modules to put into `sys.modules`, and what happened through them."""

    def __init__(self) -> None:
        self.state = State()
        self.has_product = self.has_route = True  # whether kernels are built as they are today
        self.routed = 0  # products that took the quick way
        self.loaded: list[str] = []
        self.operators: dict[str, Callable[..., Tensor]] = {}
        torch = types.ModuleType("torch")
        torch.Tensor, torch.Size, torch.device = Tensor, Size, Device  # type: ignore[attr-defined]
        torch.bfloat16, torch.float16, torch.float32 = "bfloat16", "float16", "float32"  # type: ignore[attr-defined]
        torch._C = types.SimpleNamespace(  # type: ignore[attr-defined]
            _are_functorch_transforms_active=lambda: self.state.transforms,
            _is_any_autocast_enabled=lambda: self.state.autocast is not None,
        )
        torch.empty = lambda size, dtype, device: Tensor(aligned(size), dtype, device)  # type: ignore[attr-defined]
        torch.matmul = self._matmul  # type: ignore[attr-defined]
        torch.is_grad_enabled = lambda: self.state.grad  # type: ignore[attr-defined]
        torch.is_autocast_enabled = lambda kind: self.state.autocast is not None  # type: ignore[attr-defined]
        torch.get_autocast_dtype = lambda kind: self.state.autocast  # type: ignore[attr-defined]
        torch._check = self._check  # type: ignore[attr-defined]
        torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            is_current_stream_capturing=lambda: self.state.capturing,
            get_device_properties=lambda device: self.state.properties,
        )
        torch.library = types.SimpleNamespace(custom_op=self._custom_op)  # type: ignore[attr-defined]
        compiler, nn = types.ModuleType("torch.compiler"), types.ModuleType("torch.nn")
        compiler.is_dynamo_compiling = lambda: self.state.compiling  # type: ignore[attr-defined]
        autograd, self.forward_ad = types.ModuleType("torch.autograd"), types.ModuleType("torch.autograd.forward_ad")
        self.forward_ad._current_level = -1  # type: ignore[attr-defined]
        autograd.forward_ad = self.forward_ad  # type: ignore[attr-defined]
        nn.Parameter = Parameter  # type: ignore[attr-defined]
        tvm_ffi = types.ModuleType("tvm_ffi")
        tvm_ffi.load_module = self._load_module  # type: ignore[attr-defined]
        self.modules = {"torch": torch, "torch.compiler": compiler, "torch.nn": nn, "tvm_ffi": tvm_ffi}
        self.modules |= {"torch.autograd": autograd, "torch.autograd.forward_ad": self.forward_ad}

    @contextmanager
    def set(self, **changes: Any) -> Iterator[None]:
        """Set switches for the length of a block."""
        before = {name: getattr(self.state, name) for name in changes}
        self._assign(changes)
        try:
            yield
        finally:
            self._assign(before)

    def _assign(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.state, name, value)
        self.forward_ad._current_level = self.state.forward_level  # type: ignore[attr-defined]

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        made = Tensor(a.array @ b.array, a.dtype, a.device)
        made.computed_by = "torch"
        return made

    def _load_module(self, path: str) -> Module:
        self.loaded.append(path)

        def gemm(a: Tensor, b: Tensor, d: Tensor) -> None:
            assert a.is_contiguous()
            assert b.is_contiguous()
            assert d.is_contiguous()
            assert not a.requires_grad
            d.array[:] = a.array @ b.array.T
            d.computed_by = path

        def product(a: Tensor, b: Tensor) -> Tensor | None:
            """As kernels/launcher/launcher.cc has it."""
            assert not a.requires_grad
            assert not b.requires_grad
            alike = (a.dtype, a.device) == (b.dtype, b.device)
            if not (alike and a.is_contiguous() and b.t().is_contiguous() and not (a.data_ptr() | b.data_ptr()) % 16):
                return None
            d = Tensor(aligned((a.shape[0], b.shape[1])), a.dtype, a.device)
            gemm(a, b.t(), d)
            return d

        routes: dict[tuple[Any, ...], Callable[[Tensor, Tensor], Tensor | None]] = {}

        def add_route(*key: Any) -> None:
            m, n, k, is_bfloat16, index, other = key
            routes.setdefault((m, n, k, "bfloat16" if is_bfloat16 else "float16", Device("cuda", index)), other)

        def route(a: Tensor, b: Tensor) -> Tensor | None:
            """As the launcher has it; what a function transform has wrapped has no memory."""
            if self.state.transforms:
                raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
            if a.dim() != 2 or b.dim() != 2:
                return None
            found = routes.get((a.shape[0], b.shape[1], a.shape[1], a.dtype, a.device))
            d = found(a, b) if found else None
            self.routed += d is not None
            return d

        functions = {"gemm": gemm}
        if self.has_product:
            functions["product"] = product  # type: ignore[assignment]
        if self.has_route:
            functions |= {"route": route, "add_route": add_route}  # type: ignore[dict-item]
        return Module(functions)

    @staticmethod
    def _check(holds: bool, message: Callable[[], str]) -> None:
        if not holds:
            raise RuntimeError(message())

    def _custom_op(self, name: str, *, mutates_args: tuple[str, ...]) -> Callable[..., Any]:
        assert mutates_args == ()

        def register(function: Callable[..., Tensor]) -> Any:
            def operator(*args: Tensor) -> Tensor:
                """What runs when a compiled graph runs: nothing is traced any more."""
                with self.set(compiling=False):
                    return function(*args)

            self.operators[name] = operator

            def register_fake(fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
                self.operators[f"{name} fake"] = fake
                return fake

            operator.register_fake = register_fake  # type: ignore[attr-defined]
            return operator

        return register


def aligned(size: tuple[int, ...]) -> Any:
    """An empty array at a 16-byte aligned address."""
    raw = np.empty(int(np.prod(size)) + 16 // ITEM_BYTES, np.float32)
    skip = (-raw.ctypes.data % 16) // ITEM_BYTES
    return raw[skip : skip + int(np.prod(size))].reshape(size)


def tensor(*size: int, offset: int = 0, **options: Any) -> Tensor:
    """Random values at a 16-byte aligned address, `offset` elements behind it."""
    array = (
        aligned((*size[:-1], size[-1]))
        if not offset
        else aligned((int(np.prod(size)) + offset,))[offset:].reshape(size)
    )
    array[:] = np.random.default_rng(sum(size)).standard_normal(size)
    return Tensor(array, **options)
