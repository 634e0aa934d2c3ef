"""Tuned kernels as a Python wheel: `runtime` is what goes in, `build` puts it together."""
