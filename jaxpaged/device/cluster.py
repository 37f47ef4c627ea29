"""The devices an engine runs on, in one process or in several that work as one."""

from __future__ import annotations

import logging

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError

_log = logging.getLogger(__name__)


def join(config: EngineConfig) -> None:
    """Meet the other processes, where there are any. Must come before anything opens a device.

    Raises `ConfigError` if the coordinator cannot be reached, or JAX has opened its devices
    already.
    """
    if config.num_processes == 1 or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
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
    everywhere = multihost_utils.process_allgather(np.asarray(value, np.int64))
    return int(np.min(everywhere))
