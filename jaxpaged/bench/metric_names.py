"""What is measured, and what it is called. Without numpy, so that help is quick."""

from __future__ import annotations

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Key -> what it is called in a line, and above its block."""
GOALS = ("ttft", "tpot", "e2el")
"""What a goodput can ask of a request."""
