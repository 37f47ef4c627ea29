"""Parts of scripts/bench_paging.py."""
