"""Offline use: a model, prompts in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.device.cluster import agree
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Prompt
from jaxpaged.outputs import EngineStats, RequestOutput
from jaxpaged.progress import progress_bar
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.startup import build_engine
from jaxpaged.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
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
        if priority is not None and len(priority) != len(batch):
            raise InvalidRequestError(
                f"{len(priority)} priorities were given for {len(batch)} prompts.", "priority"
            )
        return self._run(
            batch,
            params,
            priority or [0] * len(batch),
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
        params: Sequence[SamplingParams],
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
                    for output in self.engine.step():
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
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_sampling_params()] * len(prompts)
        if isinstance(params, str) or not isinstance(params, Sequence):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {params!r}.",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling_params were given for {len(prompts)} prompts; give one, "
                "or one for each.",
                param="sampling_params",
            )
        return list(params)

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
