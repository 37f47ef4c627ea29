"""Constants of the online softmax in base 2, which all kernels share."""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Stands for "nothing seen yet": below every score, yet finite, so that no difference of two of
them is NaN. Kernels that share a row say with it that their part of the context was empty."""
