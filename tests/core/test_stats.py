from __future__ import annotations

import pytest

from jaxpaged.core.stats import PrefixHitWindow, SchedulerStats


def test_hit_rate_over_the_latest_requests() -> None:
    window = PrefixHitWindow(5)
    assert window.hit_rate == 0.0
    window.record(1, 20, 9)
    assert window.hit_rate == 0.45
    window.record(4, 80, 16)
    assert window.hit_rate == 0.25
    window.record(1, 10, 2)  # six requests: the first step drops out
    assert window.hit_rate == 18 / 90
    window.reset()
    assert window.hit_rate == 0.0


def test_empty_steps_are_ignored_and_the_newest_is_always_kept() -> None:
    window = PrefixHitWindow(5)
    window.record(0, 0, 0)
    window.record(0, 100, 50)
    assert window.hit_rate == 0.0
    window.record(2, 10, 1)
    window.record(9, 90, 45)
    assert window.hit_rate == 0.5
    window.record(0, 0, 0)
    assert window.hit_rate == 0.5


def test_the_default_window_holds_a_thousand_requests() -> None:
    window = PrefixHitWindow()
    for _ in range(1000):
        window.record(1, 10, 10)
    assert window.hit_rate == 1.0
    window.record(1, 10, 0)
    assert window.hit_rate == 9990 / 10000


def test_lookups_of_a_step_enter_the_window_with_the_step() -> None:
    stats = SchedulerStats()
    assert (stats.kv_waste, stats.mean_running) == (0.0, 0.0)
    stats.record_lookup(20, 4, resumed=False)
    stats.record_lookup(20, 12, resumed=False)
    stats.record_lookup(50, 40, resumed=True)
    assert stats.window.hit_rate == 0.0
    stats.record_step(running=3, tokens=44, blocks=9, waste=0.5)
    assert stats.window.hit_rate == 0.4
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (40, 16)
    assert (stats.preempted_query_tokens, stats.preempted_hit_tokens) == (50, 40)
    stats.record_step(running=1, tokens=1, blocks=2, waste=0.1)
    assert stats.window.hit_rate == 0.4
    assert stats.kv_waste == pytest.approx(0.3)
    assert (stats.peak_running, stats.mean_running, stats.peak_blocks_used) == (3, 2.0, 9)
    assert (stats.steps, stats.scheduled_tokens) == (2, 45)
