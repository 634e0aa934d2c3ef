"""What a GEMM is and how a kernel for it is built.

The modules that describe (`problem`, `arch`, `devices`, `config`, `resources`, `rules`) import the standard library
only. TVM is imported by the two templates and by `lowering`, nowhere else.
"""
