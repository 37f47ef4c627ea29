"""POST /v1/chat/completions, and what other endpoints that are chats inside build on.

    chat = await open_chat(context, request, request_id="chatcmpl-1")   # checks, renders, submits
    try:
        async for several in chat.news():      # lists of News, one a choice's news
            ...
        chat.usage()                           # ChatUsage
    finally:
        chat.close()

`request` may be made with `server.body.decode_body(msgspec.json.encode(fields), ChatRequest)`.
Beside the news there are `chat.run` (the raw pieces; read one or the other), `chat.prompt_text`,
`chat.role` and `chat.envelope` (id, created, model as they are told).
"""

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
from server.chat_input import Conversation, read_conversation
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
from server.errors import ApiError
from server.parts import Part
from server.prompts import tokens_to_keep, truncate
from server.protocol_chat import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChatUsage,
    ContentLogprob,
)
from server.protocol_common import CompletionTokensDetails
from server.request_log import RequestLog
from server.runs import Run, Usage, start_run
from server.submitted import SubmittedRun, reply


async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ChatRequest)
    return await until_disconnect(request, _answer(context, request, body))


async def _answer(context: Context, request: Request, body: ChatRequest) -> Response:
    wire_id = answer_id(request, "chatcmpl", body.request_id)
    chat = await open_chat(context, body, request_id=wire_id)
    return await reply(context, chat, stream=body.stream)


async def open_chat(context: Context, request: ChatRequest, *, request_id: str) -> ChatRun:
    """Check a request, render its messages and submit it. `request_id` is the `id` of the answer.

    Raises `ApiError` or `InvalidRequestError`; nothing runs then. Close what is returned, whatever
    happens.
    """
    envelope = Envelope(context, request_id, "chat.completion.chunk", request.model)
    sampling.check_supported(request)
    sampling.check_stream(request)
    sampling.check_choices(context, request)
    priority, salt = sampling.check_priority(context, request), sampling.check_salt(request)
    params = _params(context, request)
    asked = beams.search_params(context, request, params) or params
    keep = tokens_to_keep(context, request, params.max_tokens)
    conversation = read_conversation(context, request)
    text, ids = await context.engine.render_chat(
        conversation.messages,
        limit=context.engine.info.max_model_len if keep is None else None,
        **conversation.options,
    )
    log = RequestLog(context, request_id, asked, [text])
    run = await start_run(
        context,
        engine_id(request_id),
        [{"prompt_token_ids": truncate(ids, request, keep)}],
        asked,
        n=params.n,
        priority=priority,
        cache_salt=salt,
        stream_interval=None if request.stream else WHOLE,
    )
    return ChatRun(context, request, envelope, run, conversation, text, log)


def _params(context: Context, request: ChatRequest) -> SamplingParams:
    top, of_prompt = request.top_logprobs, request.prompt_logprobs
    if top is not None and top != 0 and not request.logprobs:
        raise ApiError(
            400, "When using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
        )
    sampling.check_logprobs(context, "top_logprobs", top)
    sampling.check_logprobs(context, "prompt_logprobs", of_prompt)
    limits = {
        name: getattr(request, name)
        for name in ("max_tokens", "max_completion_tokens")
        if getattr(request, name) is not None
    }
    for name, value in limits.items():
        scores = of_prompt is not None
        sampling.check_max_tokens(context, name, value, scores_prompt=scores)
    default = sampling.default_max_tokens(context)
    return sampling.sampling_params(
        context,
        request,
        max_tokens=limits.get("max_completion_tokens", limits.get("max_tokens", default)),
        logprobs=(top or 0) if request.logprobs else None,
        prompt_logprobs=of_prompt,
    )


@dataclass(slots=True)
class News:
    """What one chunk tells of a choice: its role first, then text, and the end apart from it."""

    index: int
    role: str | None = None
    text: str = ""
    logprobs: list[ContentLogprob] | None = None
    token_ids: list[int] | None = None
    finish_reason: Any = None
    """stop or length."""
    stop_reason: int | str | None = None


class ChatRun(SubmittedRun[ChatRequest]):
    """A chat completion that has been submitted; made by `open_chat`."""

    def __init__(
        self,
        context: Context,
        request: ChatRequest,
        envelope: Envelope,
        run: Run,
        conversation: Conversation,
        prompt_text: str,
        log: RequestLog,
    ) -> None:
        super().__init__(context, request, envelope, run, log, needs_prompt=False)
        self.prompt_text = prompt_text
        """The conversation as the template printed it."""
        self.role = conversation.role
        """Of the answer."""
        self._echo = conversation.continued if request.echo else ""

    def usage(self) -> ChatUsage:
        """So far."""
        return self._usage_of(self.run.usage())

    async def news(self) -> AsyncGenerator[list[News]]:
        """All that is told, in order. The roles of all choices come first, when the engine has
        computed something. Raises `ApiError` where the run fails.
        """
        begun = False
        async for piece in self.run:
            several = []
            if not begun:
                begun = True
                several = [News(index, role=self.role) for index in range(self.run.n)]
                if self._echo:
                    several += [News(index, text=self._echo) for index in range(self.run.n)]
            several += [self._told(part) for part in self._splitter.feed(piece)]
            if several:
                yield several

    async def events(self) -> AsyncGenerator[bytes]:
        more = self._prompt_members()
        async with aclosing(self.news()) as all_news:
            async for several in all_news:
                usage = self._usage.member()
                events = [self._chunk(several[0], usage, more)]
                events += [self._chunk(news, usage) for news in several[1:]]
                yield b"".join(events)
                more = b""
        yield self._last_events()

    async def whole(self) -> ChatResponse:
        texts: list[list[str]] = [[] for _ in range(self.run.n)]
        ends: dict[int, News] = {}
        scores: list[list[ContentLogprob]] = [[] for _ in range(self.run.n)]
        ids: list[list[int]] = [[] for _ in range(self.run.n)]
        async with aclosing(self.news()) as all_news:
            async for several in all_news:
                for news in several:
                    texts[news.index].append(news.text)
                    scores[news.index] += news.logprobs or ()
                    ids[news.index] += news.token_ids or ()
                    if news.finish_reason is not None:
                        ends[news.index] = news
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessage(role=self.role, content="".join(texts[i])),
                logprobs=ChatLogprobs(scores[i]) if self._request.logprobs else None,
                finish_reason=ends[i].finish_reason,
                stop_reason=ends[i].stop_reason,
                token_ids=ids[i] if self._request.return_token_ids else None,
            )
            for i in range(self.run.n)
        ]
        scored = self._splitter.prompt_logprobs.get(0)
        envelope = self.envelope
        return ChatResponse(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            system_fingerprint=envelope.fingerprint,
            usage=self.usage(),
            prompt_logprobs=None if scored is None else shapes.prompt(scored),
            prompt_token_ids=self._shown_ids(),
            prompt_text=self.prompt_text if self._request.return_prompt_text else None,
        )

    def _told(self, part: Part) -> News:
        self._log.output(part)
        news = News(
            part.index,
            text=part.text,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
        if self._request.return_token_ids:
            news.token_ids = part.token_ids
        if part.logprobs:
            top = self._request.top_logprobs or 0
            news.logprobs = shapes.content(self._names, part.token_ids, part.logprobs, top)
        return news

    def _shown_ids(self) -> list[int] | None:
        return self.run.prompts[0].prompt_token_ids if self._request.return_token_ids else None

    def _prompt_members(self) -> bytes:
        """What the first chunk tells of the prompt."""
        members = b""
        ids = self._shown_ids()
        if ids is not None:
            members += b',"prompt_token_ids":' + encode(ids)
        if self._request.return_prompt_text:
            members += b',"prompt_text":' + text_json(self.prompt_text)
        return members

    def _chunk(self, news: News, usage: bytes, more: bytes = b"") -> bytes:
        if news.role is not None:
            delta = b'{"role":%b,"content":""}' % text_json(news.role)
        elif news.text or news.finish_reason is None:
            delta = b'{"content":%b}' % text_json(news.text)
        else:
            delta = b"{}"
        scores = b"null"
        if news.logprobs is not None:
            scores = b'{"content":%b}' % sse.one_line(encode(news.logprobs))
        ids = b""
        if news.token_ids is not None:
            ids = b',"token_ids":' + encode(news.token_ids)
        choice = b'%b,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            index_member(news.index),
            delta,
            scores,
            ending_json(news.finish_reason, news.stop_reason),
            ids,
        )
        return self.envelope.chunk(choice, usage, more)

    def _usage_of(self, usage: Usage) -> ChatUsage:
        return ChatUsage(
            usage.prompt_tokens,
            usage.prompt_tokens + usage.completion_tokens,
            usage.completion_tokens,
            self._prompt_details(usage),
            CompletionTokensDetails(0),
        )


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
