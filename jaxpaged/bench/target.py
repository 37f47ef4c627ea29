"""The server that is measured: what it serves, and how it counts tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from jaxpaged.bench.stream import failure_text
from jaxpaged.bench.wire import Client, WireError
from jaxpaged.errors import JaxpagedError

AT_ONCE = 16
"""Requests for token counts under way at once."""
POLL_SECONDS = 0.5


class TargetError(JaxpagedError, RuntimeError):
    """The server is not there, or not what was asked for."""


class Target:
    """One endpoint of an OpenAI server: `endpoint` is the path of its completions or chats."""

    def __init__(self, client: Client, endpoint: str) -> None:
        self._client = client
        self.endpoint = endpoint
        self.chat = endpoint.endswith("/chat/completions")
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def served_model(self, wanted: str | None, patience: float) -> tuple[str, int | None]:
        """The model's name, and its context length in tokens where the server tells it.

        Without a `wanted` name it is the first that the server lists. Asks again for `patience`
        seconds while there is no answer. Raises `WireError` and `TargetError`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            try:
                cards = await self._cards()
                break
            except (WireError, TargetError) as error:
                if wanted is not None and isinstance(error, TargetError):
                    return wanted, None  # it may not list its models, and yet serve them
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(POLL_SECONDS)
        if wanted is None and not cards:
            raise TargetError("the server lists no model; name one with --model.")
        for card in cards:
            if wanted in (None, card["id"]):
                length = card.get("max_model_len")
                return card["id"], length if isinstance(length, int) else None
        assert wanted is not None
        return wanted, None  # an alias, perhaps

    async def _cards(self) -> list[dict[str, Any]]:
        root = self.endpoint.removesuffix("/completions").removesuffix("/chat")
        answer = await self._client.request("GET", f"{root}/models")
        if answer.status != 200:
            text = failure_text(answer.status, answer.body)
            raise TargetError(f"{self._client.base_url}{root}/models: {text}")
        try:
            cards = msgspec.json.decode(answer.body)["data"]
            return [card for card in cards if isinstance(card["id"], str)]
        except (msgspec.DecodeError, LookupError, TypeError):
            raise TargetError(f"{self._client.base_url}{root}/models: no list of models.") from None

    async def count_tokens(self, model: str, text: str) -> int:
        """What the server's /tokenize counts: what the endpoint adds to a text, but for the chat
        template. Raises `TargetError` where the server cannot say.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": not self.chat}
        async with self._gate:
            try:
                answer = await self._client.request("POST", "/tokenize", msgspec.json.encode(body))
            except WireError as error:
                raise TargetError(f"/tokenize: {error}") from error
        if answer.status != 200:
            raise TargetError(f"/tokenize: {failure_text(answer.status, answer.body)}")
        try:
            count = msgspec.json.decode(answer.body)["count"]
        except (msgspec.DecodeError, LookupError, TypeError):
            count = None
        if not isinstance(count, int):
            raise TargetError("/tokenize: the answer has no count.")
        return count

    async def takes_token_ids(self, model: str, ids: list[int]) -> bool:
        """Whether a prompt of these ids is answered; the answer is one token long."""
        if self.chat:
            return False
        body = {"model": model, "prompt": ids, "max_tokens": 1}
        try:
            answer = await self._client.request("POST", self.endpoint, msgspec.json.encode(body))
        except WireError:
            return False
        return answer.status == 200
