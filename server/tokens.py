"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.errors import InvalidRequestError
from server import bounded
from server.body import read_body, until_disconnect
from server.chat_input import parse_tools, read_conversation
from server.context import Context, context_of
from server.errors import ApiError, json_response
from server.protocol_chat import ChatRequest
from server.protocol_tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)

if TYPE_CHECKING:
    from jaxpaged.text.tokenizer import Tokenizer

_CHAT_FIELDS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    context.model_named(body.model)
    tokens = await until_disconnect(request, _tokens(context, body))
    tokenizer = _tokenizer(context)
    names = None
    if body.return_token_strs:
        names = [tokenizer.token(token) for token in tokens]
    length = context.engine.info.max_model_len
    return json_response(TokenizeResponse(len(tokens), length, tokens, names))


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    context.model_named(body.model)
    tokens = bounded.decode(body.tokens, list[int], name="tokens")
    vocab_size = context.engine.info.vocab_size
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        place = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise ApiError(
            400,
            f"tokens[{place}] is {tokens[place]!r:.80}, outside the model's vocabulary "
            f"[0, {vocab_size}).",
            param="tokens",
        )
    decode = _tokenizer(context).decode
    text = await context.engine.run_in_pool(lambda: decode(tokens, skip_special_tokens=False))
    return json_response(DetokenizeResponse(text))


async def tokenizer_info(request: Request) -> Response:
    context = context_of(request)
    if not context.settings.enable_tokenizer_info_endpoint:
        raise ApiError(404, "/tokenizer_info is switched off on this server.")
    tokenizer = _tokenizer(context)
    return json_response(
        TokenizerInfo(
            tokenizer_class=type(tokenizer.backend.model).__name__,
            vocab_size=tokenizer.vocab_size,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token=tokenizer.pad_token,
            chat_template=tokenizer.chat_template,
            add_bos_token=tokenizer.encode("a")[:1] == [tokenizer.bos_token_id],
            model_max_length=context.engine.info.max_model_len,
        )
    )


async def _tokens(context: Context, body: TokenizeRequest) -> list[int]:
    has_messages = not bounded.is_absent(body.messages)
    if has_messages == (body.prompt is not None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        parse_tools(context, body.tools)  # of no use here, but a mistake all the same
        special = body.add_special_tokens is not False
        return await context.engine.tokenize(body.prompt, add_special_tokens=special)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _CHAT_FIELDS}
    conversation = read_conversation(context, ChatRequest(messages=body.messages, **fields))
    _, ids = await context.engine.render_chat(conversation.messages, **conversation.options)
    return ids


def _tokenizer(context: Context) -> Tokenizer:
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("This server has no tokenizer (--skip-tokenizer-init).")
    return tokenizer


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
]
