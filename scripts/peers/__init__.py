"""Measures this engine and others on the same work; see scripts/bench_peers.py."""
