"""/v1/responses: OpenAI's Responses API, answered by a chat completion. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.errors import InvalidRequestError
from server import sse
from server.body import decode_body, read_body, until_disconnect
from server.chat import ChatRun, open_chat
from server.chunks import answer_id, encode
from server.context import Context, context_of
from server.errors import ApiError, as_api_error, json_response
from server.protocol_chat import ChatRequest
from server.protocol_responses import ResponsesRequest
from server.responses_events import Event, ResponseEvents, new_response, usage_of
from server.responses_input import chat_fields, in_words_of_responses


async def create_response(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, ResponsesRequest)
    return await until_disconnect(request, _answer(context, request, body))


async def stored_response(request: Request) -> Response:
    raise ApiError(
        404,
        f"The response `{request.path_params['response_id']:.200}` does not exist: this server "
        "stores no responses. Each is only in the reply to its POST /v1/responses.",
        param="response_id",
    )


async def _answer(context: Context, request: Request, body: ResponsesRequest) -> Response:
    context.model_named(body.model)
    try:
        fields = await context.engine.run_in_pool(chat_fields, body)
        chat_request = decode_body(encode(fields), ChatRequest)
        wire_id = answer_id(request, "resp", body.request_id).replace("-", "_", 1)
        chat = await open_chat(context, chat_request, request_id=wire_id)
    except (ApiError, InvalidRequestError) as error:
        raise in_words_of_responses(as_api_error(error)) from error
    events = ResponseEvents(_begun(context, body, chat, fields.get("tools", [])))
    if body.stream:
        return await sse.event_response(
            _frames(chat, events),
            keep_alive=context.settings.sse_keep_alive_interval,
            close=chat.close,
            on_error=lambda error: _framed(events.failed(error.message, _usage(chat))),
            before_waiting=chat.before_waiting,
        )
    try:
        async with aclosing(_events(chat, events)) as several:
            async for _ in several:
                pass
    finally:
        chat.close()
    return json_response(events.response)


def _begun(
    context: Context, body: ResponsesRequest, chat: ChatRun, tools: list[dict[str, Any]]
) -> dict[str, Any]:
    defaults = context.engine.default_params
    return new_response(
        body,
        response_id=chat.envelope.id,
        model=chat.envelope.model,
        created=chat.envelope.created,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        tools=tools,
    )


async def _events(chat: ChatRun, events: ResponseEvents) -> AsyncGenerator[list[Event]]:
    async with aclosing(chat.news()) as all_news:
        async for several in all_news:
            made = []
            for news in several:
                if news.role is not None:
                    made += events.started()
                made += events.text(news.text, news.logprobs or ())
                if news.finish_reason is not None:
                    made += events.finished(news.finish_reason, _usage(chat))
            if made:
                yield made


async def _frames(chat: ChatRun, events: ResponseEvents) -> AsyncGenerator[bytes]:
    async with aclosing(_events(chat, events)) as all_events:
        async for several in all_events:
            yield _framed(several)


def _framed(events: list[Event]) -> bytes:
    return b"".join(sse.named(event["type"], encode(event)) for event in events)


def _usage(chat: ChatRun) -> dict[str, Any]:
    usage = chat.usage()
    details = usage.prompt_tokens_details
    return usage_of(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=0 if details is None else details.cached_tokens,
    )


_STORED = "/v1/responses/{response_id}"
ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route(_STORED, stored_response, methods=["GET", "DELETE"]),
    Route(f"{_STORED}/cancel", stored_response, methods=["POST"]),
    Route(f"{_STORED}/input_items", stored_response, methods=["GET"]),
]
