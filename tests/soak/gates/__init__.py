"""Which gate catches which planted bug of the Hopper template, how often, in how many seconds: from real runs.

    python -m tests.soak.gates run OUT_DIR          on an H200; writes OUT_DIR/gates.json, and goes on where it stopped
    python -m tests.soak.gates table GATES_JSON     the table of docs/guides/trust.md

Each bug of `kernels.gemm_sm90.EVERY_FAULT` is built into one config that has the code it is planted in, at a long K
(where the epilogue race passes every plain comparison), and into its stress builds. Each is launched in processes of
its own, which are killed at a limit: some bugs hang. Before the bugs of a config stands its kernel without a bug: no
gate may complain.
"""
