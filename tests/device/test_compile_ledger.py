from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.device.compile_ledger import CompileLedger


def program(ledger: CompileLedger) -> Callable[[jax.Array], jax.Array]:
    """A new jitted function each time: only a cache on disk knows it again."""

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        ledger.traced()
        return jnp.sin(x) * 2.0

    return double


@pytest.fixture
def fresh_cache(tmp_path: Path) -> Iterator[Path]:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path / "xla"), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "xla"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_one_record_per_program() -> None:
    ledger = CompileLedger()
    run = program(ledger)
    for size in (3, 3, 4, 3, 4):
        with ledger.watch(f"size[{size}]"):
            run(jnp.ones(size))
    assert [record.program for record in ledger.records] == ["size[3]", "size[4]"]
    assert ledger.compiles == 2 and ledger.after_warmup == 0
    assert all(record.milliseconds > 0 for record in ledger.records)
    assert not any(record.after_warmup for record in ledger.records)


def test_one_deprecation_is_silent_where_programs_are_lowered_and_nowhere_else() -> None:
    ours = "The Pallas Triton backend is deprecated and will be removed in a future JAX version."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CompileLedger().watch("decode[8]"):
            warnings.warn(ours, DeprecationWarning, stacklevel=1)
            for text, kind in ((ours, UserWarning), ("It is deprecated.", DeprecationWarning)):
                with pytest.raises(kind):
                    warnings.warn(text, kind, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn(ours, DeprecationWarning, stacklevel=1)


def test_a_compile_after_warm_up_is_counted_and_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = CompileLedger()
    run = program(ledger)
    with caplog.at_level(logging.WARNING, logger="jaxpaged"):
        with ledger.watch("first"):
            run(jnp.ones(5))
        ledger.warm = True
        with ledger.watch("first"):
            run(jnp.ones(5))
        assert caplog.records == [] and ledger.after_warmup == 0
        with ledger.watch("second"):
            run(jnp.ones(6))
    assert [record.after_warmup for record in ledger.records] == [False, True]
    assert (ledger.compiles, ledger.after_warmup) == (2, 1)
    assert len(caplog.records) == 1
    assert "second after warm-up" in caplog.records[0].getMessage()


def test_the_disk_cache_is_seen(fresh_cache: Path) -> None:
    hits = []
    for _ in range(2):
        ledger = CompileLedger()
        with ledger.watch("double"):
            program(ledger)(jnp.ones(77))
        hits.append(ledger.records[0].cache_hit)
    assert hits == [False, True]
    assert any(fresh_cache.iterdir())


def test_a_hit_belongs_to_the_program_that_had_it(fresh_cache: Path) -> None:
    first = CompileLedger()
    with first.watch("warms the disk"):
        program(first)(jnp.ones(78))
    second = CompileLedger()
    run = program(second)
    for size in (78, 79):
        with second.watch(str(size)):
            run(jnp.ones(size))
    assert [record.cache_hit for record in second.records] == [True, False]


def test_listeners_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One while a call may compile, none after it, failed or not; none at all once warm."""
    active: list[object] = []
    most = 0
    register, unregister = monitoring.register_event_listener, monitoring.unregister_event_listener

    def count_in(listener: Callable[..., None]) -> None:
        nonlocal most
        register(listener)
        active.append(listener)
        most = max(most, len(active))

    def count_out(listener: Callable[..., None]) -> None:
        unregister(listener)
        active.remove(listener)

    monkeypatch.setattr(monitoring, "register_event_listener", count_in)
    monkeypatch.setattr(monitoring, "unregister_event_listener", count_out)
    ledger = CompileLedger()
    with pytest.raises(ZeroDivisionError), ledger.watch("fails"):
        raise ZeroDivisionError
    assert active == [] and most == 1 and ledger.records == []
    with ledger.watch("works"):
        program(ledger)(jnp.ones(80))
    assert active == [] and most == 1
    ledger.warm = True
    with ledger.watch("warm"):
        assert active == []
