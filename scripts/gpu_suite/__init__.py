"""Sections of one blind measuring run on a GPU; `scripts/bench_kernels.py` starts it.

See docs/gpu_suite.md for what is measured and how to read it.
"""
