"""All that is decided before a weight is read: the model, its place, the memory plan, the programs.

From a blueprint an engine is built (`startup`), or its programs are compiled ahead of time
(`compile_model`).
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxpaged import ahead_of_time
from jaxpaged.config import EngineConfig, cache_root, claim_device_memory
from jaxpaged.device.attention import AttentionSizes, PagedAttention
from jaxpaged.device.attention_choice import choose_backend, read_tuning_table
from jaxpaged.device.beam_candidates import num_candidates
from jaxpaged.device.buckets import Buckets, choose_buckets
from jaxpaged.device.cluster import agree, join, least
from jaxpaged.device.determinism import decide, tell
from jaxpaged.device.executables import Executables
from jaxpaged.device.kv_cache import KVLayout
from jaxpaged.device.manifest import NUM_BLOCKS, describe
from jaxpaged.device.memory_plan import (
    MemoryInputs,
    MemoryPlan,
    device_memory,
    host_memory,
    plan_memory,
    wanted_length,
)
from jaxpaged.device.model_loader import (
    LoadedModel,
    OpenedModel,
    Placement,
    open_model,
    place_model,
)
from jaxpaged.device.program_set import ProgramSet
from jaxpaged.device.programs import step_temporaries
from jaxpaged.device.sampling_state import slot_state_bytes
from jaxpaged.device.step import StepSettings
from jaxpaged.models.registry import find_model, supported_architectures
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.weights.source import ModelSource, resolve_source

_log = logging.getLogger(__name__)

DEFAULTS = {"cpu": (32, 1024)}
"""Platform -> (max_num_seqs, max_num_batched_tokens)."""
ACCELERATOR_DEFAULTS = (256, 8192)
_EXECUTABLES = "executables"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An engine before its weights."""

    source: ModelSource
    tokenizer: Tokenizer | None
    opened: OpenedModel
    backend: PagedAttention
    buckets: Buckets
    settings: StepSettings
    plan: MemoryPlan
    max_num_seqs: int
    max_num_batched_tokens: int
    programs: ProgramSet
    program_cache: Path | None
    """Where executables of earlier starts are; None: nowhere."""
    artefact: Executables | None
    """What the setting `compiled` names; it fits."""

    def manifest(self) -> dict[str, object]:
        return describe(
            self.opened.described,
            self.backend,
            self.buckets,
            self.settings,
            num_blocks=self.plan.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.plan.max_model_len,
        )


def draw_up(config: EngineConfig) -> Blueprint:
    """Raises `ConfigError` or `ModelLoadError`."""
    # Before anything opens the device.
    fraction = claim_device_memory(config.gpu_memory_utilization)
    join(config)
    # Before the files of a model are fetched.
    artefact = None if config.compiled is None else ahead_of_time.open_artefact(config.compiled)
    source = resolve_source(config, supported_architectures=supported_architectures())
    wanted_length(config, find_model(source.hf_config, str(source.path))[1])  # before the weights
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(source, config)
    program_cache = use_compile_cache(config)
    placement = place_model(config, source)
    device = placement.mesh.local_devices[0]
    determinism = decide(config.deterministic, config.attention_backend, device)
    # Refuses before the weights are read.
    backend = _choose_backend(config, placement, fixed=determinism.fixed_sizes)
    _log.info("%s", tell(determinism))
    opened = open_model(config, source, placement)
    model = opened.described
    agree("models", model.config)
    num_seqs, budget = _batch_limits(config)
    buckets = choose_buckets(
        num_seqs,
        budget,
        decode=config.decode_buckets,
        prefill=config.prefill_buckets,
        one_decode=determinism.fixed_sizes,
    )
    vocab = model.config.vocab_size
    drawable = vocab if tokenizer is None else min(vocab, tokenizer.vocab_size)
    settings = StepSettings(
        block_size=config.block_size,
        max_logprobs=vocab if config.max_logprobs == -1 else min(config.max_logprobs, vocab),
        valid_vocab=vocab,
        drawable=drawable,
        kv_layout=KVLayout.of(model.config),
        num_candidates=num_candidates(num_seqs, drawable),
        determinism=determinism,
    )
    inputs = _memory_inputs(
        config, model, backend, buckets, settings, num_seqs, budget, fraction, program_cache
    )
    plan = _plan(config, model, num_seqs, inputs, artefact)
    programs = ProgramSet(
        model,
        backend,
        buckets,
        settings,
        num_blocks=plan.num_blocks,
        max_num_seqs=num_seqs,
        max_model_len=plan.max_model_len,
    )
    made = Blueprint(
        source, tokenizer, opened, backend, buckets, settings, plan, num_seqs, budget, programs,
        program_cache, artefact,
    )  # fmt: skip
    if artefact is not None:
        ahead_of_time.check(artefact, made.manifest(), programs.names)
    return made


def _choose_backend(config: EngineConfig, placement: Placement, *, fixed: bool) -> PagedAttention:
    sizes = AttentionSizes.of(
        placement.config,
        block_size=config.block_size,
        dtype=placement.dtype,
        cache_dtype=placement.cache_dtype,
        table=read_tuning_table(config.kernel_tuning_table),
        fixed=fixed,
    )
    device = placement.mesh.local_devices[0]
    backend, reason = choose_backend(config.attention_backend, sizes, device)
    _log.info("Attention backend: %s (%s).", backend.name, reason)
    agree("attention backends", backend.name)
    return backend


def _batch_limits(config: EngineConfig) -> tuple[int, int]:
    """max_num_seqs and the token budget, defaulted by the device and clipped to each other."""
    seqs, budget = DEFAULTS.get(jax.default_backend(), ACCELERATOR_DEFAULTS)
    if config.max_num_batched_tokens is not None:
        budget = config.max_num_batched_tokens
        seqs = min(seqs, budget)
    if config.max_num_seqs is not None:
        seqs = config.max_num_seqs
        if config.max_num_batched_tokens is None:
            budget = max(budget, seqs)
    return seqs, budget


def _memory_inputs(
    config: EngineConfig,
    model: LoadedModel,
    backend: PagedAttention,
    buckets: Buckets,
    settings: StepSettings,
    num_seqs: int,
    budget: int,
    fraction: float,
    program_cache: Path | None = None,
) -> MemoryInputs:
    asked = config.max_model_len
    length = asked if isinstance(asked, int) else model.config.max_position

    def step_bytes() -> int:
        """A compile of the largest program on its own, whose outcome later starts remember."""
        key = describe(
            model, backend, buckets, settings,
            num_blocks=0, max_num_seqs=num_seqs, max_model_len=length,
        )  # fmt: skip
        return ahead_of_time.remembered_bytes(
            program_cache,
            key,
            lambda: step_temporaries(model, backend, buckets, settings, num_seqs, length),
        )

    return MemoryInputs(
        weight_bytes=model.weight_bytes,
        step_bytes=step_bytes,
        slot_bytes=slot_state_bytes(num_seqs, length),
        device_bytes=device_memory(
            model.mesh.local_devices[0], config.gpu_memory_utilization, fraction
        ),
        host_bytes=host_memory(),
        max_tokens_in_step=budget,
        host_devices=len(model.mesh.local_devices),
    )


def _plan(
    config: EngineConfig,
    model: LoadedModel,
    num_seqs: int,
    inputs: MemoryInputs,
    artefact: Executables | None = None,
) -> MemoryPlan:
    plan = plan_memory(config, model.config, model.cache_dtype, num_seqs, inputs)
    made_for = None if artefact is None else artefact.manifest.get(NUM_BLOCKS)
    fits = isinstance(made_for, int) and 2 <= made_for < plan.num_blocks
    if fits and config.num_gpu_blocks_override is None:
        # There is room for what the programs were compiled for, and they take no other size.
        config = dataclasses.replace(config, num_gpu_blocks_override=made_for)
        plan = plan_memory(config, model.config, model.cache_dtype, num_seqs, inputs)
    # Processes with different memory must still agree.
    plan = dataclasses.replace(
        plan, num_blocks=least(plan.num_blocks), max_model_len=least(plan.max_model_len)
    )
    _log.info("Memory plan:\n%s", "\n".join(plan.lines))
    if config.max_model_len is None and plan.max_model_len < model.config.max_position:
        _log.warning(
            "max_model_len lowered from the model's %d to %d, the most that the KV blocks hold.",
            model.config.max_position,
            plan.max_model_len,
        )
    return plan


def use_compile_cache(config: EngineConfig) -> Path | None:
    """Point JAX at our persistent compilation cache, unless the process has one already.

    Returns the folder for executables in it, or None where the cache is off or not ours.
    """
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    if chosen and config.compile_cache_dir not in (None, chosen):
        _log.warning(
            "compile_cache_dir=%r has no effect: this process uses %s already.",
            config.compile_cache_dir,
            chosen,
        )
    if config.compile_cache_dir == "":
        return None
    folder = (
        cache_root() / "xla"
        if config.compile_cache_dir is None
        else Path(config.compile_cache_dir).expanduser()
    )
    if chosen:
        return folder / _EXECUTABLES if chosen == str(folder) else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():  # whoever writes here decides what later starts run
            folder.mkdir(mode=0o700)
    except OSError as error:
        _log.warning("No compilation cache: %s cannot be used (%s).", folder, error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder / _EXECUTABLES
