"""From a config to a running engine: files, weights, memory plan, programs."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax

from jaxpaged.config import (
    EngineConfig,
    cache_root,
    claim_device_memory,
    integrity_checks_forced,
)
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.device.attention import AttentionSizes, PagedAttention
from jaxpaged.device.attention_choice import choose_backend, read_tuning_table
from jaxpaged.device.beam_candidates import num_candidates
from jaxpaged.device.buckets import Buckets, choose_buckets
from jaxpaged.device.cluster import agree, join, least
from jaxpaged.device.determinism import decide, tell
from jaxpaged.device.kv_cache import KVLayout
from jaxpaged.device.memory_plan import (
    MemoryInputs,
    MemoryPlan,
    device_memory,
    host_memory,
    plan_memory,
    wanted_length,
)
from jaxpaged.device.model_loader import LoadedModel, Placement, load_model, place_model
from jaxpaged.device.programs import step_temporaries
from jaxpaged.device.runner import Progress, Runner
from jaxpaged.device.sampling_state import slot_state_bytes
from jaxpaged.device.step import StepSettings
from jaxpaged.engine import Engine
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.intake import Intake, Limits
from jaxpaged.models.registry import find_model, supported_architectures
from jaxpaged.progress import progress_bar
from jaxpaged.record.header import header
from jaxpaged.record.recording import Recording
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.weights.source import ModelSource, resolve_source

_log = logging.getLogger(__name__)

DEFAULTS = {"cpu": (32, 1024)}
"""Platform -> (max_num_seqs, max_num_batched_tokens)."""
ACCELERATOR_DEFAULTS = (256, 8192)
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model and start an engine. `progress` is told of each program compiled.

    Raises `ConfigError` or `ModelLoadError` before anything is compiled.
    """
    _show_log(config)
    recording = None if config.record is None else Recording(config.record)
    try:
        return _build(config, progress, recording)
    except BaseException:
        if recording is not None:
            recording.stop()
        raise


def _build(config: EngineConfig, progress: Progress | None, recording: Recording | None) -> Engine:
    # Before anything opens the device.
    fraction = claim_device_memory(config.gpu_memory_utilization)
    join(config)
    source = resolve_source(config, supported_architectures=supported_architectures())
    wanted_length(config, find_model(source.hf_config, str(source.path))[1])  # before the weights
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(source, config)
    use_compile_cache(config)
    placement = place_model(config, source)
    device = placement.mesh.local_devices[0]
    determinism = decide(config.deterministic, config.attention_backend, device)
    # Refuses before the weights are read.
    backend = _choose_backend(config, placement, fixed=determinism.fixed_sizes)
    _log.info("%s", tell(determinism))
    loaded = load_model(config, source, placement)
    agree("models", loaded.config)
    num_seqs, budget = _batch_limits(config)
    buckets = choose_buckets(
        num_seqs,
        budget,
        decode=config.decode_buckets,
        prefill=config.prefill_buckets,
        one_decode=determinism.fixed_sizes,
    )
    vocab = loaded.config.vocab_size
    drawable = vocab if tokenizer is None else min(vocab, tokenizer.vocab_size)
    settings = StepSettings(
        block_size=config.block_size,
        max_logprobs=vocab if config.max_logprobs == -1 else min(config.max_logprobs, vocab),
        valid_vocab=vocab,
        drawable=drawable,
        kv_layout=KVLayout.of(loaded.config),
        num_candidates=num_candidates(num_seqs, drawable),
        determinism=determinism,
    )
    plan = _plan(config, loaded, backend, buckets, settings, num_seqs, budget, fraction)
    scheduler = Scheduler(_scheduler_config(config, loaded, plan, num_seqs, budget))
    runner = Runner(
        config,
        loaded,
        backend,
        buckets,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=num_seqs,
        settings=settings,
    )
    if not config.enforce_eager:
        _warm_up(runner, config, progress)
    limits = Limits(
        vocab_size=vocab,
        max_model_len=plan.max_model_len,
        max_logprobs=settings.max_logprobs,
        eos_token_ids=eos_token_ids(source, tokenizer, vocab),
        num_candidates=settings.num_candidates,
    )
    engine = Engine(
        scheduler,
        runner,
        Intake(limits, tokenizer, config.seed),
        default_params(config, source),
        async_scheduling=config.async_scheduling,
        check_integrity=config.check_integrity or integrity_checks_forced(),
        eager=config.enforce_eager,
    )
    if recording is not None:
        recording.begin(header(config, source, engine))
        engine.observer = recording
    return engine


def _show_log(config: EngineConfig) -> None:
    """Show our messages (the memory plan among them) where the program has not set up logging."""
    logger = logging.getLogger("jaxpaged")
    if config.disable_progress or logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


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


def _plan(
    config: EngineConfig,
    loaded: LoadedModel,
    backend: PagedAttention,
    buckets: Buckets,
    settings: StepSettings,
    num_seqs: int,
    budget: int,
    fraction: float,
) -> MemoryPlan:
    asked = config.max_model_len
    length = asked if isinstance(asked, int) else loaded.config.max_position
    inputs = MemoryInputs(
        weight_bytes=loaded.weight_bytes,
        step_bytes=lambda: step_temporaries(loaded, backend, buckets, settings, num_seqs, length),
        slot_bytes=slot_state_bytes(num_seqs, length),
        device_bytes=device_memory(
            loaded.mesh.local_devices[0], config.gpu_memory_utilization, fraction
        ),
        host_bytes=host_memory(),
        max_tokens_in_step=budget,
        host_devices=len(loaded.mesh.local_devices),
    )
    plan = plan_memory(config, loaded.config, loaded.cache_dtype, num_seqs, inputs)
    # Processes with different memory must still agree.
    plan = dataclasses.replace(
        plan, num_blocks=least(plan.num_blocks), max_model_len=least(plan.max_model_len)
    )
    _log.info("Memory plan:\n%s", "\n".join(plan.lines))
    if config.max_model_len is None and plan.max_model_len < loaded.config.max_position:
        _log.warning(
            "max_model_len lowered from the model's %d to %d, the most that the KV blocks hold.",
            loaded.config.max_position,
            plan.max_model_len,
        )
    return plan


def _scheduler_config(
    config: EngineConfig, loaded: LoadedModel, plan: MemoryPlan, num_seqs: int, budget: int
) -> SchedulerConfig:
    if config.long_prefill_token_threshold > plan.max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} is beyond "
            f"max_model_len={plan.max_model_len}; lower it, or set 0 for no limit."
        )
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=plan.max_model_len,
        policy=config.scheduling_policy,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        windows=KVLayout.of(loaded.config).windows,
        rope_rule=loaded.config.rope.rule,
        rope_threshold=loaded.config.rope.threshold,
    )


def _warm_up(runner: Runner, config: EngineConfig, tell: Progress | None) -> None:
    with progress_bar(
        total=runner.num_programs,
        desc="Compiling",
        unit="program",
        disable=config.disable_progress,
    ) as bar:

        def progress(done: int, total: int, program: str) -> None:
            bar.n = done
            bar.set_postfix_str(program)
            if tell is not None:
                tell(done, total, program)

        seconds = runner.warm_up(progress)
    hits = sum(record.cache_hit for record in runner.ledger.records)
    _log.info(
        "init engine (create kv cache, warmup model) took %.2f s: %d programs, %d from the cache.",
        seconds,
        runner.ledger.compiles,
        hits,
    )


def use_compile_cache(config: EngineConfig) -> None:
    """Point JAX at our persistent compilation cache, unless the process has one already."""
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    if chosen and config.compile_cache_dir not in (None, chosen):
        _log.warning(
            "compile_cache_dir=%r has no effect: this process uses %s already.",
            config.compile_cache_dir,
            chosen,
        )
    if config.compile_cache_dir == "" or chosen:
        return
    folder = (
        cache_root() / "xla"
        if config.compile_cache_dir is None
        else Path(config.compile_cache_dir).expanduser()
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():  # whoever writes here decides what later starts run
            folder.mkdir(mode=0o700)
    except OSError as error:
        _log.warning("No compilation cache: %s cannot be used (%s).", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def eos_token_ids(
    source: ModelSource, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """All ids that end a text: of generation_config, of config, and the tokenizer's EOS."""
    found: list[Any] = []
    for fields in (source.generation_config, source.hf_config):
        value = fields.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    good = [i for i in found if type(i) is int and 0 <= i < vocab_size]
    bad = [i for i in found if i is not None and i not in good]
    if bad:
        _log.warning("EOS ids outside the vocabulary are ignored: %s.", bad)
    return tuple(dict.fromkeys(good))


def default_params(config: EngineConfig, source: ModelSource) -> SamplingParams:
    """SamplingParams() with the sampling defaults of generation_config.json, unless they are
    ignored.
    """
    if config.generation_config != "auto":
        return SamplingParams()
    given = source.generation_config
    fields = {name: given[name] for name in _SAMPLING_DEFAULTS if given.get(name) is not None}
    if given.get("max_new_tokens") is not None:
        fields["max_tokens"] = given["max_new_tokens"]
    for name in list(fields):
        try:
            SamplingParams(**{name: fields[name]})
        except InvalidRequestError as error:
            _log.warning("In generation_config.json this is ignored: %s", error)
            del fields[name]
    if not fields:
        return SamplingParams()
    params = SamplingParams(**fields)
    _log.info(
        "Default sampling parameters from generation_config.json: %s. "
        'generation_config="none" ignores them.',
        ", ".join(f"{name}={value}" for name, value in fields.items()),
    )
    return params
