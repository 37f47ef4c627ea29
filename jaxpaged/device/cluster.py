"""The devices an engine runs on, in one process or in several that work as one."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import socket
import time

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError

_log = logging.getLogger(__name__)

MEETING_SECONDS = 120
"""How long a process waits for the others at the start."""
_LOCAL_SETTINGS = (
    *("process_id", "disable_progress", "model", "tokenizer", "compile_cache_dir"),
    *("chat_template", "coordinator", "compiled"),
)
"""Settings that may differ between processes: paths, and what only this process shows."""


def join(config: EngineConfig) -> None:
    """Meet the other processes, where there are any. Must come before anything opens a device.

    Raises `ConfigError` if the coordinator cannot be reached, or JAX has opened its devices
    already.
    """
    if config.num_processes == 1 or jax.distributed.is_initialized():
        return
    if config.process_id > 0:
        _reach(str(config.coordinator))  # JAX aborts the process when nobody is there
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            initialization_timeout=MEETING_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Process {config.process_id} of num_processes={config.num_processes} could not meet "
            f"the others at coordinator={config.coordinator!r}: {error} All processes must be "
            "started with the same settings but process_id, before JAX is used."
        ) from error
    _log.info(
        "Process %d of %d: %d of %d devices are here.",
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
    )
    settings = dataclasses.asdict(config)
    for name in _LOCAL_SETTINGS:
        del settings[name]
    agree("settings", sorted(settings.items()))


def _reach(coordinator: str) -> None:
    """Wait until something listens at the coordinator's address."""
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + MEETING_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end or isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"coordinator={coordinator!r} cannot be reached: {error}. Start process 0 "
                    "there, or correct the address."
                ) from error
        time.sleep(0.5)


def agree(what: str, value: object) -> None:
    """Raises `ConfigError` unless the value looks the same (its `repr`) in every process. All of
    them must call it; a single process pays nothing.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(repr(value).encode()).digest(), np.int32)
    if not (_everywhere(digest) == digest).all():
        raise ConfigError(
            f"The processes were started with different {what}; they must be the same, since all "
            "of them compute the same steps."
        )


def choose_devices(config: EngineConfig) -> list[jax.Device]:
    """The devices to cut the model over.

    Raises `ConfigError` if there are fewer than tensor_parallel_size, or if several processes would
    leave some of theirs idle.
    """
    wanted, devices = config.tensor_parallel_size, jax.devices()
    if jax.process_count() > 1:
        if wanted not in (None, len(devices)):
            raise ConfigError(
                f"tensor_parallel_size={wanted}, but {jax.process_count()} processes have "
                f"{len(devices)} devices together and each must use all of its own; leave "
                f"tensor_parallel_size out or set it to {len(devices)}."
            )
        return list(devices)
    wanted = 1 if wanted is None else wanted
    if wanted > len(devices):
        kind = devices[0].platform
        hint = (
            f" On CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes as many "
            "virtual ones."
            if kind == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size={wanted} is more than the {len(devices)} {kind} devices that "
            f"JAX sees here; lower it, or make more visible.{hint}"
        )
    return list(devices[:wanted])


def least(value: int) -> int:
    """The smallest of the processes' values: what all of them have room for."""
    if jax.process_count() == 1:
        return value
    return int(np.min(_everywhere(np.asarray([value], np.int32))))


def _everywhere(value: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Every process's value, one a row."""
    try:
        return np.asarray(multihost_utils.process_allgather(value))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"Another process has ended or failed: {error}") from error
