"""From a config to a running engine: the blueprint, then weights, programs and pools at once."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxpaged import ahead_of_time
from jaxpaged.blueprint import Blueprint, draw_up
from jaxpaged.config import EngineConfig, integrity_checks_forced
from jaxpaged.core.scheduler import Scheduler, SchedulerConfig
from jaxpaged.device.executables import UnusableExecutables
from jaxpaged.device.host_memory import give_back_freed
from jaxpaged.device.kv_cache import KVLayout
from jaxpaged.device.model_loader import LoadedModel
from jaxpaged.device.program_set import INIT, Progress
from jaxpaged.device.runner import Runner, first_state
from jaxpaged.device.step import EngineState
from jaxpaged.engine import Engine
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.intake import Intake, Limits
from jaxpaged.progress import progress_bar
from jaxpaged.record.header import header
from jaxpaged.record.recording import Recording
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.weights.source import ModelSource

_log = logging.getLogger(__name__)

_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model and start an engine. `progress` is told of each program that is ready.

    Raises `ConfigError` or `ModelLoadError`; what can be known from settings and the names and
    shapes in a checkpoint, before anything is compiled.
    """
    show_log(config)
    recording = None if config.record is None else Recording(config.record)
    try:
        return _build(config, progress, recording)
    except BaseException:
        if recording is not None:
            recording.stop()
        raise


def _build(config: EngineConfig, progress: Progress | None, recording: Recording | None) -> Engine:
    made = draw_up(config)
    plan, num_seqs = made.plan, made.max_num_seqs
    scheduler_config = _scheduler_config(config, made)
    if config.enforce_eager:
        loaded, state = made.opened.load(), None
    else:
        loaded, state = _load_and_prepare(config, made, progress)
    scheduler = Scheduler(scheduler_config)
    runner = Runner(
        config,
        loaded,
        made.backend,
        made.buckets,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=num_seqs,
        settings=made.settings,
        programs=made.programs,
        state=state,
    )
    if not config.enforce_eager:
        runner.warm_up(progress or _ignore)
    give_back_freed()  # what compiling or loading programs took, on threads that are gone
    limits = Limits(
        vocab_size=loaded.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_logprobs=made.settings.max_logprobs,
        eos_token_ids=eos_token_ids(made.source, made.tokenizer, loaded.config.vocab_size),
        num_candidates=made.settings.num_candidates,
    )
    engine = Engine(
        scheduler,
        runner,
        Intake(limits, made.tokenizer, config.seed),
        default_params(config, made.source),
        async_scheduling=config.async_scheduling,
        check_integrity=config.check_integrity or integrity_checks_forced(),
        eager=config.enforce_eager,
    )
    if recording is not None:
        recording.begin(header(config, made.source, engine))
        engine.observer = recording
    return engine


def _ignore(done: int, total: int, program: str) -> None: ...


def show_log(config: EngineConfig) -> None:
    """Show our messages (the memory plan among them) where the program has not set up logging."""
    logger = logging.getLogger("jaxpaged")
    if config.disable_progress or logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _load_and_prepare(
    config: EngineConfig, made: Blueprint, tell: Progress | None
) -> tuple[LoadedModel, EngineState]:
    """The weights and the first state, made on another thread while the programs get ready."""
    states: list[Future[EngineState]] = []
    # Its threads have names by which the server knows what must not be waited for.
    loader = ThreadPoolExecutor(1, thread_name_prefix="jaxpaged-load")
    try:
        loading = loader.submit(made.opened.load)

        def progress(done: int, total: int, program: str) -> None:
            if loading.done():
                loading.result()  # raises what made it fail
            if not states and INIT in made.programs.prepared:
                states.append(loader.submit(first_state, made.programs))
            if tell is not None:
                tell(done, total, program)

        prepare(config, made, progress)
        return loading.result(), states[0].result()
    finally:
        loader.shutdown(wait=False, cancel_futures=True)


def prepare(config: EngineConfig, made: Blueprint, tell: Progress) -> None:
    """Get all programs: from the artefact, from the executables of an earlier start, or by
    compiling them; what is compiled is kept for the next start.
    """
    stored, manifest = made.artefact, None
    if stored is None and made.program_cache is not None:
        manifest = made.manifest()
        stored = ahead_of_time.find(made.program_cache, manifest)
    programs, start = made.programs, time.perf_counter()
    with progress_bar(
        total=len(programs.names),
        desc="Compiling" if stored is None else "Loading programs",
        unit="program",
        disable=config.disable_progress,
    ) as bar:

        def progress(done: int, total: int, program: str) -> None:
            bar.n = done
            bar.set_postfix_str(program)
            tell(done, total, program)

        try:
            programs.prepare(progress, stored)
        except UnusableExecutables as error:
            if made.artefact is not None:
                raise ConfigError(
                    f"compiled={config.compiled!r} cannot be used: {error}."
                ) from error
            _log.warning("Executables of an earlier start are not used: %s.", error)
            stored = None  # and they are written anew
            programs.prepare(progress)
        progress(len(programs.names), len(programs.names), "ready")
    hits = sum(record.cache_hit for record in programs.ledger.records)
    _log.info(
        "init engine (create kv cache, warmup model) took %.2f s: %d programs, %d from %s.",
        time.perf_counter() - start,
        programs.ledger.compiles,
        hits,
        "the cache" if made.artefact is None else made.artefact.folder,
    )
    if stored is None and manifest is not None and made.program_cache is not None:
        ahead_of_time.keep(made.program_cache, manifest, programs.compiled_here)


def _scheduler_config(config: EngineConfig, made: Blueprint) -> SchedulerConfig:
    plan, model = made.plan, made.opened.described.config
    if config.long_prefill_token_threshold > plan.max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} is beyond "
            f"max_model_len={plan.max_model_len}; lower it, or set 0 for no limit."
        )
    return SchedulerConfig(
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=made.max_num_seqs,
        max_num_batched_tokens=made.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        policy=config.scheduling_policy,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        windows=KVLayout.of(model).windows,
        rope_rule=model.rope.rule,
        rope_threshold=model.rope.threshold,
    )


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
