"""Everything that touches a GPU: a child process per card, the referee, the clock, the vendor-library baselines.

A parent uses `host`. It and `inventory`, `jobs`, `limits`, `nvml`, `process`, `rounds`, `watch`, `wire` need no torch.
The others run in the child, or in a process that may create a CUDA context.
"""
