"""Offline use: a model, prompts in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.device.cluster import agree
from jaxpaged.device.weight_update import trainer_parameters
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Prompt
from jaxpaged.models.base import CausalLM
from jaxpaged.models.exchange import as_tensors, parameters
from jaxpaged.outputs import EngineStats, RequestOutput
from jaxpaged.progress import progress_bar
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.startup import build_engine
from jaxpaged.text.tokenizer import Tokenizer
from jaxpaged.training import build_module

Message = Mapping[str, Any]
P = TypeVar("P", SamplingParams, BeamSearchParams)
OnFinished = Callable[[int, RequestOutput], None]
"""Called with the index of a prompt and its finished output."""


class LLM:
    """A loaded model with its engine.

    `LLM(model, **settings)` takes the fields of `EngineConfig`, or `LLM(config=EngineConfig(...))`.
    Raises `ConfigError` for bad settings and `ModelLoadError` for a checkpoint that cannot be used.
    Use it as a context manager, or call `close`, to give the device memory back.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, **settings: Any
    ) -> None:
        if config is None:
            named = settings if model is None else {"model": str(model), **settings}
            config = EngineConfig.from_dict(named)
        elif settings or model is not None:
            raise TypeError("give either config or model and settings, not both")
        self.config = config
        self.engine: Engine = build_engine(config)
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        A prompt is a text, a list of token ids, or a mapping with "prompt" or "prompt_token_ids"
        and optionally "cache_salt". One `SamplingParams` serves all prompts, a list gives one to
        each, None takes the model's defaults. Raises `InvalidRequestError` naming the first bad
        prompt before anything runs.
        """
        batch = _as_list(prompts)
        params = self._params_for(batch, sampling_params)
        return self._run(
            batch,
            params,
            _priorities(batch, priority),
            use_tqdm=use_tqdm,
            on_finished=on_finished,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[RequestOutput]:
        """Search for the likeliest completions of prompts, as given to `generate`; results come in
        their order.

        `outputs` of a result are its hypotheses, best first, each with its `score`: at most
        `beam_width`, and fewer only where the model has fewer tokens to go on with. One
        `BeamSearchParams` serves all prompts, a list gives one to each. The beams of a search share
        the KV blocks of what they have in common, run in one batch with those of the others, and
        compute one token a step.

        Hypotheses and scores are those of transformers' `generate(num_beams=beam_width,
        num_return_sequences=beam_width, do_sample=False)`. Raises `InvalidRequestError` naming the
        first bad prompt before anything runs, also for a beam_width above max_num_seqs.
        """
        batch = _as_list(prompts)
        given = _one_for_each(batch, params, BeamSearchParams, "params")
        return self._run(
            batch,
            given,
            _priorities(batch, priority),
            use_tqdm=use_tqdm,
            on_finished=on_finished,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several. Otherwise as `generate`."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            kind = type(messages).__name__
            raise InvalidRequestError(
                "messages must be a conversation (a list of messages) or a list of them, "
                f"got {kind}.",
                param="messages",
            )
        conversations = [messages] if _is_conversation(messages) else list(messages)
        prompts: list[Prompt] = []
        texts: list[str] = []
        for i, conversation in enumerate(conversations):
            try:
                text, ids = self.render_chat(
                    conversation,  # type: ignore[arg-type]
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                )
            except InvalidRequestError as error:
                where = f"conversation {i}: " if len(conversations) > 1 else ""
                raise InvalidRequestError(f"{where}{error}", error.param, i) from error
            texts.append(text)
            prompts.append({"prompt_token_ids": ids})
        params = self._params_for(prompts, sampling_params)
        results = self._run(prompts, params, [0] * len(prompts), use_tqdm=use_tqdm)
        for result, text in zip(results, texts, strict=True):
            result.prompt = text
        return results

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """One conversation as the model reads it: the template's text and its token ids.

        Raises `InvalidRequestError` if there is no template, or if it refuses the messages.
        """
        return self.get_tokenizer().render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams] | Sequence[BeamSearchParams],
        priority: Sequence[int],
        *,
        use_tqdm: bool,
        on_finished: OnFinished | None = None,
    ) -> list[RequestOutput]:
        if self.engine.has_unfinished_requests():
            raise InvalidRequestError(
                "The engine has unfinished requests, added through llm.engine, whose outputs this "
                "call would swallow; step them to their end or abort them first."
            )
        first = self._next_id
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for i, prompt in enumerate(prompts):
                request_id = str(self._next_id)
                self._next_id += 1
                try:
                    self.engine.add_request(request_id, prompt, params[i], priority=priority[i])
                except InvalidRequestError as error:
                    where = f"prompt {i}: " if len(prompts) > 1 else ""
                    raise InvalidRequestError(f"{where}{error}", error.param, i) from error
                ids.append(request_id)
            # Several processes plan the same steps only if they were given the same work.
            agree("prompts or sampling parameters", (prompts, params, priority))
            with _ProgressBar(len(ids), disable=not use_tqdm) as bar:
                while len(done) < len(ids):
                    for output in self.engine.step(ended_only=True):
                        if output.finished:
                            done[output.request_id] = output
                            bar.finished(output)
                            if on_finished is not None:
                                on_finished(int(output.request_id) - first, output)
        except BaseException:  # Ctrl-C too: nothing of this call may stay behind
            self.engine.discard(ids)
            raise
        return [done[request_id] for request_id in ids]

    def _params_for(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        return _one_for_each(prompts, params, SamplingParams, "sampling_params")

    def default_sampling_params(self) -> SamplingParams:
        """`SamplingParams()` with the sampling defaults that come with the model."""
        return self.engine.default_params

    def get_tokenizer(self) -> Tokenizer:
        """Raises `InvalidRequestError` if the engine was started with skip_tokenizer_init."""
        tokenizer = self.engine.intake.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "This engine has no tokenizer (skip_tokenizer_init); give token ids to generate."
            )
        return tokenizer

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests run."""
        return self.engine.reset_prefix_cache()

    # ------------------------------------------------------------------ training

    def update_weights(self, source: Any, *, running: str = "finish") -> None:
        """Swap the model's weights in place, without a compile; the prefix cache is emptied.

        `source` is a Flax module or `nnx.State` of the same model, a flat or nested mapping of its
        parameters' paths (or of the tensors' Hugging Face names) to arrays, or the path of an Orbax
        checkpoint, a .safetensors or .gguf file, or a folder of such files. All parameters must be
        there, in the model's shapes. Arrays are copied, and cast to the engine's dtype.

        `running` says what becomes of unfinished requests (added through `engine` only): "finish"
        runs them to their end with the old weights first, "recompute" keeps their tokens, computes
        their KV anew with the new weights and goes on, "abort" ends them. Their outputs come with
        the next `engine.step()`.

        Raises `ModelLoadError` naming what does not fit, before anything is changed: requests and
        old weights are as they were. Only should the device run out of memory later, or Ctrl-C
        come, the engine is left without weights, and refuses requests until it is given some.
        """
        self.engine.update_weights(source, running=running)

    def sleep(self, *, weights: bool | str = False, running: str = "refuse") -> None:
        """Give the KV cache's device memory back, until `wake`. Idempotent.

        With `weights=True` the weights go to host memory as well (on CPUs that gains nothing); with
        "discard" they are thrown away, and `update_weights` must bring others before `wake`.
        Unfinished requests are an `InvalidRequestError`, unless `running` is "finish", "recompute"
        (they go on after `wake`) or "abort". `generate` raises `UnavailableError` meanwhile.
        """
        self.engine.sleep(weights=weights, running=running)

    def wake(self) -> None:
        """Take the memory again and go on, without a compile. Idempotent.

        Raises `UnavailableError` if the weights were discarded, and `ConfigError` if there is no
        memory; the engine stays asleep then.
        """
        self.engine.wake()

    def flax_model(self, dtype: str | None = None) -> CausalLM:
        """The model as a Flax NNX module with a copy of the weights, for `jaxpaged.training`.

        It is whole (not cut over the engine's devices), on JAX's default device, in `dtype` (the
        engine's if None). Give it back with `update_weights`.
        """
        target = self.engine.runner.target
        params = trainer_parameters(target, self.engine.runner.weights_by_path())
        chosen = self.engine.runner.dtype_name if dtype is None else dtype
        return build_module(target.model, target.config.over(1), params, jnp.dtype(chosen))

    def checkpoint_tensors(self, model: Any = None) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors of a Hugging Face checkpoint, by name, of a Flax module, state or mapping as
        `update_weights` takes it by its paths; of the engine's own weights if None.
        """
        target = self.engine.runner.target
        given = self.flax_model() if model is None else model
        return as_tensors(target.model, target.config.over(1), parameters(given))

    def close(self) -> None:
        """Give the device memory back. Idempotent; any later call raises `EngineDeadError`."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list. A list whose first entry is an integer is one prompt of
    ids.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, Set)) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise InvalidRequestError(
            "prompts must be a prompt (text, token ids or a mapping) or a list of them, "
            f"got {kind}.",
            param="prompts",
        )
    items = list(prompts)
    integers = (int, np.integer)
    if items and all(isinstance(i, integers) and not isinstance(i, bool) for i in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _priorities(prompts: Sequence[Any], given: Sequence[int] | None) -> Sequence[int]:
    if given is None:
        return [0] * len(prompts)
    if len(given) != len(prompts):
        raise InvalidRequestError(
            f"{len(given)} priorities were given for {len(prompts)} prompts.", "priority"
        )
    return given


def _one_for_each(
    prompts: Sequence[Any], params: P | Sequence[P], kind: type[P], argument: str
) -> list[P]:
    """Parameters of every prompt, from those of all or from a list."""
    if isinstance(params, kind):
        return [params] * len(prompts)
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidRequestError(
            f"{argument} must be {kind.__name__} or a list of them, got {params!r}.",
            param=argument,
        )
    if len(params) != len(prompts):
        raise InvalidRequestError(
            f"{len(params)} {argument} were given for {len(prompts)} prompts; give one, or one for "
            "each.",
            param=argument,
        )
    for i, one in enumerate(params):
        if not isinstance(one, kind):
            raise InvalidRequestError(
                f"{argument} must be {kind.__name__} or a list of them, got "
                f"{type(one).__name__} at position {i}.",
                param=argument,
            )
    return list(params)


def _is_conversation(messages: Sequence[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping)


class _ProgressBar:
    """ "Processed prompts" with input and output tokens/s."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self._bar = progress_bar(
            total=total,
            desc="Processed prompts",
            unit="prompt",
            dynamic_ncols=True,
            disable=disable,
        )
        self._input = self._output = 0

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def finished(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"] or 0.0, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input / elapsed:.1f} toks/s, "
            f"output: {self._output / elapsed:.1f} toks/s",
            refresh=False,
        )
        self._bar.update(1)
