"""Attention kernels for CPUs: C++, compiled where they run, and called by XLA.

`build.load` makes them ready, and `ops` has the functions.
"""
