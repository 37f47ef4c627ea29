"""The prompts of a completion request: texts, or token ids, one or many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from server import bounded
from server.context import Context
from server.errors import ApiError
from server.protocol_common import GenerationRequest

if TYPE_CHECKING:
    from jaxpaged.intake import Prompt

GivenPrompt = str | list[int]
_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)


def parse_prompts(
    context: Context, raw: msgspec.Raw, *, truncated: bool = False
) -> list[GivenPrompt]:
    """All prompts of the field, checked as far as that needs no tokenizer.

    `truncated`: too long a prompt will be cut. Raises `ApiError` 400 for anything but non-empty
    texts or lists of ids of the model's vocabulary, before any work is done for one of them.
    """
    if bounded.is_text(raw):
        return [_text(bounded.decode(raw, str, name="prompt"), "prompt")]
    data = bytes(raw)
    first = _FIRST_ITEM.match(data)
    limit = context.settings.max_prompts
    if first is None:
        raise _not_a_prompt()
    if first[1] == b"]":
        raise ApiError(400, "prompt is an empty list; give at least one prompt.", param="prompt")
    if first[1] == b'"':
        texts = bounded.items(raw, str, name="prompt", limit=limit, noun="prompts")
        return [_text(text, f"prompt[{i}]") for i, text in enumerate(texts)]
    if first[1] == b"[":
        lists = bounded.items(raw, list[int], name="prompt", limit=limit, noun="prompts")
        return [_ids(context, ids, f"prompt[{i}]") for i, ids in enumerate(lists)]
    # A list of numbers has one comma less than numbers.
    count, length = data.count(b",") + 1, context.engine.info.max_model_len
    if count > length and not truncated:
        raise too_long(count, length)
    return [_ids(context, bounded.decode(raw, list[int], name="prompt"), "prompt")]


async def fit_prompts(
    context: Context,
    request: GenerationRequest,
    prompts: Sequence[GivenPrompt],
    max_tokens: int | None,
) -> list[Prompt]:
    """The prompts as the engine takes them, after add_special_tokens and truncation.

    Texts that need neither stay texts; the engine tokenises them.
    """
    keep = tokens_to_keep(context, request, max_tokens)
    plain = request.add_special_tokens is not False and keep is None
    if plain:
        return list(prompts)

    async def fit(prompt: GivenPrompt) -> Prompt:
        ids = prompt
        if isinstance(ids, str):
            special = request.add_special_tokens is not False
            ids = await context.engine.tokenize(ids, add_special_tokens=special)
        return truncate(ids, request, keep)

    return await asyncio.gather(*(fit(prompt) for prompt in prompts))


def tokens_to_keep(
    context: Context, request: GenerationRequest, max_tokens: int | None
) -> int | None:
    """Most tokens of a prompt that truncate_prompt_tokens leaves; None: it is not cut."""
    asked, side = request.truncate_prompt_tokens, request.truncation_side
    if side not in (None, "left", "right"):
        raise ApiError(
            400,
            f"truncation_side must be left or right, got {side!r:.80}.",
            param="truncation_side",
        )
    if asked is None:
        return None
    if asked == 0 or asked < -1:
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be >= 1, or -1 for what fits, got {asked!r:.80}.",
            param="truncate_prompt_tokens",
        )
    if asked == -1:
        output = 1 if max_tokens is None else max_tokens
        return max(1, context.engine.info.max_model_len - output)
    return asked


def truncate(ids: list[int], request: GenerationRequest, keep: int | None) -> list[int]:
    if keep is None or len(ids) <= keep:
        return ids
    return ids[:keep] if request.truncation_side == "right" else ids[-keep:]


def too_long(count: int, limit: int) -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{count} input tokens, which exceeds this limit even without any output tokens. Please "
        "reduce the length of the input prompt.",
        param="input_tokens",
    )


def _text(text: str, name: str) -> str:
    if not text:
        raise ApiError(400, f"{name} is an empty text; give at least one character.", param=name)
    return text


def _ids(context: Context, ids: list[int], name: str) -> list[int]:
    if not ids:
        raise ApiError(400, f"{name} has no token ids; give at least one.", param=name)
    vocab_size = context.engine.info.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        place = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ApiError(
            400,
            f"{name}[{place}] is token id {ids[place]!r:.80}, outside the model's vocabulary "
            f"[0, {vocab_size}).",
            param=name,
        )
    return ids


def _not_a_prompt() -> ApiError:
    return ApiError(
        400,
        "1 validation error: prompt must be a text, a list of texts, a list of token ids or a list "
        "of lists of token ids.",
        param="prompt",
        type="Bad Request",
    )
