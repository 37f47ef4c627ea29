"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.sampling_params import SamplingParams
from server import beams, sampling, sse
from server import logprobs as shapes
from server.body import read_body, until_disconnect
from server.chunks import (
    WHOLE,
    Envelope,
    answer_id,
    encode,
    ending_json,
    engine_id,
    index_member,
    text_json,
)
from server.context import Context, context_of
from server.logprobs import TextOffsets
from server.parts import Part
from server.prompts import GivenPrompt, fit_prompts, parse_prompts
from server.protocol_common import UsageInfo
from server.protocol_completions import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    LegacyLogprobs,
)
from server.request_log import RequestLog
from server.runs import Run, Usage, start_run
from server.submitted import SubmittedRun, reply


async def completions(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    return await until_disconnect(request, _answer(context, request, body))


async def _answer(context: Context, request: Request, body: CompletionRequest) -> Response:
    wire_id = answer_id(request, "cmpl", body.request_id)
    completion = await open_completion(context, body, request_id=wire_id)
    return await reply(context, completion, stream=body.stream)


async def open_completion(
    context: Context, request: CompletionRequest, *, request_id: str
) -> CompletionRun:
    """Check a request and submit it. Raises `ApiError` or `InvalidRequestError`; nothing runs then.

    `request_id` is the `id` of the answer. Close what is returned, whatever happens.
    """
    envelope = Envelope(context, request_id, "text_completion", request.model)
    sampling.check_supported(request)
    sampling.check_stream(request)
    sampling.check_choices(context, request)
    priority, salt = sampling.check_priority(context, request), sampling.check_salt(request)
    params = _params(context, request)
    asked = beams.search_params(context, request, params) or params
    truncated = request.truncate_prompt_tokens is not None
    given = parse_prompts(context, request.prompt, truncated=truncated)
    sampling.check_choices(context, request, len(given))
    prompts = await fit_prompts(context, request, given, params.max_tokens)
    log = RequestLog(context, request_id, asked, given)
    run = await start_run(
        context,
        engine_id(request_id),
        prompts,
        asked,
        n=params.n,
        priority=priority,
        cache_salt=salt,
        stream_interval=None if request.stream else WHOLE,
    )
    return CompletionRun(context, request, envelope, run, given, log)


def _params(context: Context, request: CompletionRequest) -> SamplingParams:
    logprobs, of_prompt = request.logprobs, request.prompt_logprobs
    echo = bool(request.echo)
    sampling.check_logprobs(context, "logprobs", logprobs)
    sampling.check_logprobs(context, "prompt_logprobs", of_prompt)
    scores = echo or of_prompt is not None
    sampling.check_max_tokens(context, "max_tokens", request.max_tokens, scores_prompt=scores)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = context.engine.default_params.max_tokens
    if echo and of_prompt is None:
        of_prompt = logprobs
        if max_tokens == 0 and of_prompt is None:
            of_prompt = 0  # the engine draws no token only where it scores the prompt
    return sampling.sampling_params(
        context, request, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=of_prompt
    )


@dataclass(slots=True)
class News:
    """What one chunk tells of a choice."""

    index: int
    text: str = ""
    logprobs: LegacyLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: Any = None
    stop_reason: int | str | None = None


class CompletionRun(SubmittedRun[CompletionRequest]):
    """A request that has been submitted."""

    def __init__(
        self,
        context: Context,
        request: CompletionRequest,
        envelope: Envelope,
        run: Run,
        given: list[GivenPrompt],
        log: RequestLog,
    ) -> None:
        scored = bool(request.echo) and request.logprobs is not None
        super().__init__(context, request, envelope, run, log, needs_prompt=scored)
        self._hides_special = request.skip_special_tokens is not False
        self._given = given
        self._echo = bool(request.echo)
        self._echo_texts: dict[int, str] = {}
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._news()) as all_news:
            async for several in all_news:
                usage = self._usage.member()
                yield b"".join([self._chunk(news, usage) for news in several])
        yield self._last_events()

    async def whole(self) -> CompletionResponse:
        count = len(self.run.prompts) * self.run.n
        texts: list[list[str]] = [[] for _ in range(count)]
        choices = [
            CompletionChoice(i, "", None, None, None, None, None, None) for i in range(count)
        ]
        async for several in self._news():
            for news in several:
                texts[news.index].append(news.text)
                _merge(choices[news.index], news)
        for choice, pieces in zip(choices, texts, strict=True):
            choice.text = "".join(pieces)
            scored = self._splitter.prompt_logprobs.get(choice.index // self.run.n)
            if self._request.prompt_logprobs is not None and scored is not None:
                choice.prompt_logprobs = shapes.prompt(scored)
        envelope = self.envelope
        return CompletionResponse(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            system_fingerprint=envelope.fingerprint,
            usage=self._usage_of(self.run.usage()),
        )

    async def _news(self) -> AsyncGenerator[list[News]]:
        async for piece in self.run:
            several = []
            for part in self._splitter.feed(piece):
                if part.index not in self._begun:
                    self._begun.add(part.index)
                    several += self._first(part.index)
                several.append(self._told(part))
            if several:
                yield several

    def _first(self, index: int) -> list[News]:
        """What comes before a choice's output: the prompt."""
        place = index // self.run.n
        ids = self.run.prompts[place].prompt_token_ids
        shown = ids if self._request.return_token_ids else None
        if self._request.logprobs is not None:
            self._offsets[index] = TextOffsets(
                self._names.tokenizer, ids, skip_special_tokens=self._hides_special
            )
        if not self._echo:
            return [] if shown is None else [News(index, prompt_token_ids=shown)]
        text = self._echo_text(place)
        news = News(index, text, prompt_token_ids=shown)
        if self._request.logprobs is not None:
            offsets = self._offsets[index].echo(
                ids,
                text,
                shows_special_tokens=isinstance(self._given[place], str) or not self._hides_special,
            )
            entries = self._splitter.prompt_logprobs[place]
            news.logprobs = shapes.legacy(self._names, ids, entries, offsets)
        return [news] if text or shown is not None or news.logprobs is not None else []

    def _echo_text(self, place: int) -> str:
        """The prompt as it was given, or the text of its ids; cut as the prompt was cut."""
        text = self._echo_texts.get(place)
        if text is None:
            given, tokenizer = self._given[place], self._names.tokenizer
            if isinstance(given, str) and self._request.truncate_prompt_tokens is None:
                text = given
            elif tokenizer is None:
                text = ""
            else:
                ids = self.run.prompts[place].prompt_token_ids
                text = tokenizer.decode(ids, skip_special_tokens=self._hides_special)
            self._echo_texts[place] = text
        return text

    def _told(self, part: Part) -> News:
        self._log.output(part)
        news = News(
            part.index,
            part.text,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if self._request.return_token_ids:
            news.token_ids = part.token_ids
        if part.logprobs:
            offsets = map(self._offsets[part.index].next, part.token_ids)
            news.logprobs = shapes.legacy(self._names, part.token_ids, part.logprobs, offsets)
        return news

    def _chunk(self, news: News, usage: bytes) -> bytes:
        scores = b"null" if news.logprobs is None else sse.one_line(encode(news.logprobs))
        ids = b""
        if news.token_ids is not None:
            ids += b',"token_ids":' + encode(news.token_ids)
        if news.prompt_token_ids is not None:
            ids += b',"prompt_token_ids":' + encode(news.prompt_token_ids)
        choice = b'%b,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index_member(news.index),
            text_json(news.text),
            scores,
            ending_json(news.finish_reason, news.stop_reason),
            ids,
        )
        return self.envelope.chunk(choice, usage)

    def _usage_of(self, usage: Usage) -> UsageInfo:
        return UsageInfo(
            usage.prompt_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            usage.completion_tokens,
            self._prompt_details(usage),
        )


def _merge(choice: CompletionChoice, news: News) -> None:
    if news.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = LegacyLogprobs([], [], [], [])
        shapes.extend(choice.logprobs, news.logprobs)
    if news.token_ids is not None:
        choice.token_ids = (choice.token_ids or []) + news.token_ids
    if news.prompt_token_ids is not None:
        choice.prompt_token_ids = news.prompt_token_ids
    if news.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = news.finish_reason, news.stop_reason


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
