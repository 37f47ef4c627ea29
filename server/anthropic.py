"""/v1/messages: Anthropic's Messages API, answered by a chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server import anthropic_events, sse
from server.answers import state_of
from server.anthropic_errors import error_body, new_request_id
from server.anthropic_events import Event
from server.anthropic_input import chat_fields, prompt_fields
from server.body import decode_body, read_body, until_disconnect
from server.chat import ChatRun, open_chat
from server.chat_input import read_conversation
from server.chunks import answer_id, encode
from server.context import Context, context_of
from server.errors import ApiError, json_response
from server.protocol_anthropic import CountTokensRequest, MessagesRequest
from server.protocol_chat import ChatRequest


async def create_message(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, MessagesRequest)
    return await until_disconnect(request, _answer(context, request, body))


async def count_tokens(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, CountTokensRequest)
    return await until_disconnect(request, _count(context, request, body))


async def _count(context: Context, request: Request, body: CountTokensRequest) -> Response:
    context.model_named(body.model)
    fields = await context.engine.run_in_pool(prompt_fields, body)
    chat_request = decode_body(encode(fields), ChatRequest)
    conversation = read_conversation(context, chat_request)
    _, ids = await context.engine.render_chat(conversation.messages, **conversation.options)
    return _with_id(request, json_response({"input_tokens": len(ids)}))


async def _answer(context: Context, request: Request, body: MessagesRequest) -> Response:
    context.model_named(body.model)
    limit = context.engine.info.max_model_len
    fields = await context.engine.run_in_pool(chat_fields, body, limit)
    chat_request = decode_body(encode(fields), ChatRequest)
    wire_id = answer_id(request, "msg", body.request_id).replace("-", "_", 1)
    chat = await open_chat(context, chat_request, request_id=wire_id)
    if body.stream:
        response = await sse.event_response(
            _frames(chat, body),
            keep_alive=context.settings.sse_keep_alive_interval,
            close=chat.close,
            on_error=lambda error: _error_frame(request, error),
            before_waiting=chat.before_waiting,
        )
        return _with_id(request, response)
    told: list[Event] = []
    try:
        async with aclosing(_events(chat, body)) as all_events:
            async for several in all_events:
                told += several
    finally:
        chat.close()
    return _with_id(request, json_response(anthropic_events.message_of(told)))


async def _events(chat: ChatRun, body: MessagesRequest) -> AsyncGenerator[list[Event]]:
    async with aclosing(chat.news()) as all_news:
        async for several in all_news:
            made: list[Event] = []
            for news in several:
                if news.role is not None:
                    envelope = chat.envelope
                    made += anthropic_events.started(envelope.id, envelope.model, _usage(chat))
                made += anthropic_events.text(news.text)
                if news.finish_reason is not None:
                    reason, sequence = anthropic_events.stop_reason_of(
                        news.finish_reason,
                        news.stop_reason,
                        max_tokens_reached=chat.usage().completion_tokens >= body.max_tokens,
                    )
                    made += anthropic_events.finished(reason, sequence, _usage(chat))
            if made:
                yield made


async def _frames(chat: ChatRun, body: MessagesRequest) -> AsyncGenerator[bytes]:
    async with aclosing(_events(chat, body)) as all_events:
        async for several in all_events:
            yield b"".join(sse.named(event["type"], encode(event)) for event in several)


def _usage(chat: ChatRun) -> dict[str, int]:
    usage = chat.usage()
    details = usage.prompt_tokens_details
    return anthropic_events.usage_of(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=0 if details is None else details.cached_tokens,
    )


def _error_frame(request: Request, error: ApiError) -> bytes:
    return sse.named("error", encode(error_body(error, _request_id(request))))


def _with_id(request: Request, response: Response) -> Response:
    """Anthropic's clients show this header's value with what they report."""
    response.headers["request-id"] = _request_id(request)
    return response


def _request_id(request: Request) -> str:
    return str(state_of(request.scope).get("request_id") or new_request_id())


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
