"""Errors of this package.

ValueError
  x ProblemError      no GEMM can have these sizes, dtype or layout
  x ConfigError       not a config of this architecture, or one that the hardware or the template cannot run
RuntimeError
  x ToolchainError    no usable CUDA or C++ compiler
  x CompileError      a compiler ran and refused the kernel
"""


class ProblemError(ValueError):
    """The problem cannot exist or be served. `field` names the offending field, or is empty for a rule of several."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ConfigError(ValueError):
    """The knobs do not form a legal configuration. `knob` names the offending knob where there is one."""

    def __init__(self, message: str, *, knob: str = "") -> None:
        super().__init__(message)
        self.knob = knob


class ToolchainError(RuntimeError):
    """No usable compiler was found; the message says which and how to get it."""


class CompileError(RuntimeError):
    """A compiler refused the kernel. `log_tail` holds the end of what it printed."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail
