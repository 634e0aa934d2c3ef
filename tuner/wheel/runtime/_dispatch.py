"""`matmul`: which kernel serves a product, and what happens to the others.

The way of a tuned product is written for little host time: checks that read flags, and one call into a module that
looks up the kernel, looks at the operands' memory, makes the output and launches. A kernel is on that way once it has
run. The way of all others, first calls among them, goes through a table here and ends with the reason why no kernel
serves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ._library import ALIGNMENT, DTYPES, Kernel, Loaded, Product, kernels_of, load

NO_KERNEL = "no kernel for this shape, dtype and device"
NO_CUDA = "not on a CUDA device"
LAYOUT = "not contiguous: a needs strides (K, 1), b strides (1, K)"
MISALIGNED = "does not start at a 16-byte aligned address"
AUTOGRAD = "a gradient is needed"
AUTOCAST = "autocast wants another dtype"
MIXED = "a and b differ in dtype or device"
SUBCLASS = "a tensor subclass or a function transform"
CAPTURE = "first call of its kernel inside a graph capture: call it once before"

_PLAIN = frozenset({Tensor, Parameter})
_MOST_UNSERVED = 4096  # shapes that are known to have no kernel; a network has few, a stray loop must not fill memory
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
# Of any kind of device: quicker than to ask for one by its name, and rarely true.
_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cuda"))


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the products since the last reset. Replays of a CUDA graph are not seen.

    tuned: products that a kernel of this package computed
    fallback: products that went to `torch.matmul`, by reason
    """

    tuned: int
    fallback: dict[str, int]


class _Ready:
    """A kernel that is loaded for one device.

    kernel, loaded: what it is, and its module
    called: whether it ran before, so that its code is on the device
    """

    __slots__ = ("called", "device", "kernel", "loaded")

    def __init__(self, kernel: Kernel, loaded: Loaded, device: torch.device) -> None:
        self.kernel, self.loaded, self.device, self.called = kernel, loaded, device, False

    def ran(self) -> None:
        """From now on it is on the quick way, where modules have one."""
        self.called = True
        if self.loaded.add_route is not None:
            _open_route(self)


class _Counter:
    """A count that threads share: `next` of an `itertools.count` is one step for the interpreter, `+= 1` is not.

    add: counts one
    """

    __slots__ = ("_looks", "add")

    def __init__(self) -> None:
        self.add = count().__next__
        self._looks = 0

    def value(self) -> int:
        """The count so far. Looking takes a number too, so the looks are taken off again."""
        with _lock:
            seen = self.add() - self._looks
            self._looks += 1
        return seen


def _no_route(a: Tensor, b: Tensor) -> Tensor | None:
    """Before any kernel has run."""
    return None


_route: Product = _no_route
_router: Loaded | None = None  # the module that knows all kernels which have run
_tuned = _Counter()
_fallbacks: dict[str, _Counter] = {}
_ready: dict[tuple[Any, ...], _Ready] = {}
_unserved: dict[tuple[Any, ...], None] = {}  # keys that have no kernel
_prepared: set[torch.device] = set()
_lock = Lock()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, as `torch.matmul` computes it.

    A kernel serves it where one was tuned for the shape, dtype and device, `a` has strides (K, 1) and `b` strides
    (1, K), that is, `b` is the transpose of a row-major (N, K) weight, and no gradient is needed. Leading dimensions of
    `a` are folded into M.
    """
    if is_dynamo_compiling():
        return _compiled(a, b)
    if (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and not (a.requires_grad or b.requires_grad)
        and not _autocasts()
        and forward_ad._current_level < 0
    ):
        try:
            d = _route(a, b)
        except RuntimeError:  # an operand of a function transform has no memory; any other error comes again below
            d = None
        if d is not None:
            _tuned.add()
            return d
    return _looked_up(a, b)


def _open_route(found: _Ready) -> None:
    global _route, _router
    kernel, loaded = found.kernel, found.loaded
    with _lock:
        router = _router or loaded
        assert router.add_route is not None
        assert router.route is not None
        is_bfloat16, index = DTYPES[kernel.dtype] is torch.bfloat16, found.device.index
        router.add_route(kernel.m, kernel.n, kernel.k, is_bfloat16, index, loaded.product)
        _router, _route = router, router.route


def _looked_up(a: Tensor, b: Tensor) -> Tensor:
    """The product of what has no route."""
    key = (a.shape, b.shape, a.dtype, a.device)
    found = _ready.get(key)
    if found is not None:
        return _product(found, a, b)
    if key in _unserved:
        return _fall_back(a, b, NO_KERNEL)
    return _unknown(a, b, key)


def _product(found: _Ready, a: Tensor, b: Tensor) -> Tensor:
    """The product of shapes that a kernel serves. What is true of nearly every call is asked in one go."""
    if (
        type(a) in _PLAIN
        and type(b) in _PLAIN
        and not _transforms_active()
        and not _needs_gradient(a, b)
        and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not a.dtype)
        and (found.called or not torch.cuda.is_current_stream_capturing())
    ):
        d = found.loaded.product(a.detach() if a.requires_grad else a, b.detach() if b.requires_grad else b)
        if d is not None:
            if not found.called:
                found.ran()
            _tuned.add()
            return d
    return _fall_back(a, b, _obstacle(a, b))


def _needs_gradient(a: Tensor, b: Tensor) -> bool:
    """Of reverse mode, or of forward mode, in which a tangent may hang on either operand."""
    return bool(forward_ad._current_level >= 0) or ((a.requires_grad or b.requires_grad) and torch.is_grad_enabled())


def _obstacle(a: Tensor, b: Tensor) -> str:
    """Which of the conditions of `_product` does not hold, the first in this order."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN or _transforms_active():
        return SUBCLASS
    obstacles = {
        MIXED: b.dtype is not a.dtype or b.device != a.device,
        LAYOUT: not (a.is_contiguous() and b.t().is_contiguous()),
        AUTOGRAD: _needs_gradient(a, b),
        AUTOCAST: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not a.dtype,
        MISALIGNED: bool((a.data_ptr() | b.data_ptr()) & (ALIGNMENT - 1)),
    }
    return next((reason for reason, holds in obstacles.items() if holds), CAPTURE)


def _unknown(a: Tensor, b: Tensor, key: tuple[Any, ...]) -> Tensor:
    """A product that the table does not hold: of a device seen for the first time, of folded dimensions, or of none."""
    if a.device.type != "cuda":
        return _fall_back(a, b, NO_CUDA)
    if a.device not in _prepared:
        _prepare(a.device)
        return matmul(a, b)
    if a.dim() > 2 and b.dim() == 2 and a.is_contiguous() and a.shape[-1] == b.shape[0]:
        found = _ready.get((torch.Size((a.numel() // a.shape[-1], a.shape[-1])), b.shape, a.dtype, a.device))
        if found is not None:
            return _product(found, a.flatten(0, -2), b).unflatten(0, a.shape[:-1])
    if len(_unserved) < _MOST_UNSERVED and (a.dim() <= 2 or a.is_contiguous()):
        _unserved[key] = None  # whatever lies there: no strides decided it
    return _fall_back(a, b, NO_KERNEL)


def _prepare(device: torch.device) -> None:
    """Load the kernels of a device. Raises CorruptPackage."""
    with _lock:
        if device in _prepared:
            return
        for kernel in kernels_of(device):
            _ready[_key(kernel, device)] = _Ready(kernel, load(kernel), device)
        _prepared.add(device)


def _key(kernel: Kernel, device: torch.device) -> tuple[Any, ...]:
    a_shape, b_shape = torch.Size((kernel.m, kernel.k)), torch.Size((kernel.k, kernel.n))
    return a_shape, b_shape, DTYPES[kernel.dtype], device


def _fall_back(a: Tensor, b: Tensor, reason: str) -> Tensor:
    counter = _fallbacks.get(reason)
    if counter is None:
        with _lock:
            counter = _fallbacks.setdefault(reason, _Counter())
    counter.add()
    return torch.matmul(a, b)


def counts() -> Counts:
    """What became of the products so far."""
    return Counts(tuned=_tuned.value(), fallback={reason: one.value() for reason, one in _fallbacks.items()})


def reset_counts() -> None:
    """Start counting anew."""
    global _tuned  # noqa: PLW0603  (one counter for the whole process)
    with _lock:
        _tuned = _Counter()
        _fallbacks.clear()


# ------------------------------------------------------------------------------------------------ torch.compile


def _compiled(a: Tensor, b: Tensor) -> Tensor:
    """Traced: what can be told from the tensors' descriptions is decided now, the rest when the graph runs."""
    if a.device.type != "cuda" or b.dim() != 2 or a.dim() < 2 or (a.requires_grad or b.requires_grad):
        return torch.matmul(a, b)  # the compiler knows it and may fuse it
    return _operator(a, b)


@torch.library.custom_op("tuned_gemms::matmul", mutates_args=())  # type: ignore[untyped-decorator]
def _operator(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b)


@_operator.register_fake  # type: ignore[untyped-decorator]
def _(a: Tensor, b: Tensor) -> Tensor:
    torch._check(a.shape[-1] == b.shape[0], lambda: f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    return a.new_empty((*a.shape[:-1], b.shape[1]))
