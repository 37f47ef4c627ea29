"""Several choices of one prompt over HTTP: each with its index and one end, whoever is faster;
usage; and clients that leave a group, in every phase and in any way.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.apps import Json, Server, drive, ends_of, parse_events, texts_of
from tests.server.live import Live, live_server
from tests.server.scripted import Script
from tests.server.test_clients_leave import Watch, in_any_way, with_and_without_stream
from tests.server.wire import Wire

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
INPUT: dict[str, Json] = {PATH: {"prompt": "Hi"}, CHAT: {"messages": HI}}
at_both = pytest.mark.parametrize("path", [PATH, CHAT])
SAMPLES = [[f"a{i} " for i in range(9)], ["b"], [f"c{i} " for i in range(4)]]
"""Of different lengths: the second one ends first, the first one last."""
TEXTS = {i: "".join(pieces) for i, pieces in enumerate(SAMPLES)}


def differing(**more: Any) -> Script:
    return Script(default=["x"], samples=SAMPLES, **more)


def indices(chunks: list[Json]) -> list[int]:
    return [choice["index"] for chunk in chunks for choice in chunk["choices"]]


# ---------------------------------------------------------------- vllm#16863, #24029, #43764


@pytest.mark.parametrize("interval", [1, 3])
@at_both
def test_each_choice_has_its_index_and_one_end(path: str, interval: int) -> None:
    async def test(server: Server) -> None:
        body = {**INPUT[path], "n": 3, "max_tokens": 30}
        whole = await server.ok(path, body)
        choices = whole["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [c["text"] if "text" in c else c["message"]["content"] for c in choices]
        assert dict(enumerate(texts)) == TEXTS
        chunks = await server.chunks(path, body)
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        assert texts_of(chunks) == TEXTS
        assert ends_of(chunks) == dict.fromkeys(range(3), ("stop", None))
        order = [
            choice["index"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"] is not None
        ]
        assert order == [1, 2, 0], "each is told when it ends, not when all have"
        for index in range(3):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        told = indices([c for c in chunks if "role" not in str(c)])
        assert told != sorted(told), "they come as they are made, not one after the other"

    drive(test, differing(), settings={"stream_interval": interval})


@at_both
def test_a_client_that_reads_late_gets_each_choice_whole(path: str) -> None:
    gate = threading.Event()
    gate.set()

    async def test(server: Server) -> None:
        body = {**INPUT[path], "n": 3, "max_tokens": 30, "stream": True}
        call = server.call(path, body)
        await call.until(b"data: ")
        call.send_gate.clear()
        await server.ok(PATH, {"prompt": "other", "max_tokens": 3, "n": 2})
        call.send_gate.set()
        await call.ended()
        chunks = parse_events(call.body)
        assert texts_of(chunks) == TEXTS
        assert ends_of(chunks) == dict.fromkeys(range(3), ("stop", None))

    drive(test, differing(gate=gate))


@at_both
def test_samples_of_several_requests_at_once(path: str) -> None:
    async def test(server: Server) -> None:
        body = {**INPUT[path], "n": 3, "max_tokens": 30, "stream": True}
        calls = [server.call(path, body) for _ in range(5)]
        for call in calls:
            await call.ended()
            chunks = parse_events(call.body)
            assert texts_of(chunks) == TEXTS and len(ends_of(chunks)) == 3

    drive(test, differing(), max_num_seqs=4)


@at_both
def test_n_at_temperature_0(path: str) -> None:
    async def test(server: Server) -> None:
        body = {**INPUT[path], "n": 4, "temperature": 0, "max_tokens": 3}
        answer = await server.ok(path, body)
        assert len({str(c.get("text") or c.get("message")) for c in answer["choices"]}) == 1
        assert server.engine.stats().forks == 3
        assert server.engine.stats().prompt_tokens == answer["usage"]["prompt_tokens"]

    drive(test, Script(default="one two three four"))


# ---------------------------------------------------------------- usage: AP-07


@at_both
def test_usage_of_choices_that_end_in_different_ways(path: str) -> None:
    async def test(server: Server) -> None:
        body = {**INPUT[path], "n": 3, "max_tokens": 6, "stop": "c2", "return_token_ids": True}
        whole = await server.ok(path, body)
        ends = [(c["finish_reason"], c["stop_reason"]) for c in whole["choices"]]
        assert ends == [("length", None), ("stop", None), ("stop", "c2")]
        usage = whole["usage"]
        # Six tokens, "b" with its EOS, and what it took to say c2.
        assert usage["completion_tokens"] == 6 + 2 + 3
        ids = [choice["token_ids"] for choice in whole["choices"]]
        assert usage["completion_tokens"] == sum(map(len, ids))
        prompt = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]
        prompt = prompt if path == CHAT else prompt["prompt_token_ids"]
        assert usage["prompt_tokens"] == len(prompt)
        again = await server.ok(path, body)
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": len(prompt) - 1}
        unlike = {"prompt_tokens_details": None}
        assert again["usage"] | unlike == usage | unlike
        options = {"include_usage": True}
        *_, last = await server.chunks(path, {**body, "stream_options": options})
        assert last["usage"] == again["usage"]

    drive(test, differing())


def test_usage_where_nothing_is_drawn() -> None:
    async def test(server: Server) -> None:
        prompts = ["aa", "bbb c"]
        counts = [len(await server.engine.tokenize(prompt)) for prompt in prompts]
        body = {"prompt": prompts, "n": 3, "max_tokens": 0, "echo": True, "logprobs": 1}
        whole = await server.ok(PATH, body)
        assert [c["text"] for c in whole["choices"]] == ["aa"] * 3 + ["bbb c"] * 3
        usage = whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(counts), 0)
        assert usage["total_tokens"] == sum(counts)

    drive(test, Script())


# ---------------------------------------------------------------- clients that leave

PROMPT = [7] * 41
KINDS: dict[str, Json] = {"samples": {}, "beams": {"use_beam_search": True}}
of_any_kind = pytest.mark.parametrize("kind", KINDS)


def group(kind: str, *, stream: bool, **more: Any) -> Json:
    common: Json = {"n": 3, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    return {"prompt": PROMPT, **common, **KINDS[kind], **more}


def ends(kind: str) -> dict[str, int]:
    return {"abort": 3 if kind == "samples" else 1}


def waits(live: Live, watch: Watch) -> None:
    live.wait_until(lambda: live.engine.stats().num_waiting == 3)


def reads(live: Live, watch: Watch) -> None:
    live.wait_until(lambda: watch.prompt_tokens() > 8)
    assert watch.prompt_tokens() < len(PROMPT) + 8


def goes_on(live: Live, watch: Watch) -> None:
    live.wait_until(lambda: watch.generated() > 30)


def is_set_back(live: Live, watch: Watch) -> None:
    def waits_again() -> bool:
        stats = live.engine.stats()
        return stats.preemptions > 0 and stats.num_waiting >= 3

    live.wait_until(waits_again)


PHASES: dict[str, tuple[Callable[[Live, Watch], None], dict[str, int]]] = {
    "waiting": (waits, {"max_num_seqs": 3}),
    "prompt": (reads, {"max_num_batched_tokens": 8}),
    "mid-decode": (goes_on, {}),
    "preempted": (is_set_back, {"num_blocks": 40}),
}


@in_any_way
@with_and_without_stream
@pytest.mark.parametrize("phase", PHASES)
@of_any_kind
def test_leaving_a_group(
    kind: str, phase: str, leave: Callable[[Wire], None], *, stream: bool
) -> None:
    reach, limits = PHASES[phase]
    script = Script(default=["a"], end=False, step_seconds=0.01)
    other = {"prompt": [9] * 7, "max_tokens": 120, "ignore_eos": True}
    with live_server(script, **limits) as live, Wire(live) as first, Wire(live) as wire:
        watch = Watch(live)
        first.post(PATH, other)
        live.wait_until(lambda: live.engine.stats().num_running == 1)
        wire.post(PATH, group(kind, stream=stream))
        reach(live, watch)
        leave(wire)
        live.wait_until(lambda: live.context.in_flight == 1)
        live.wait_until(lambda: live.engine.num_unfinished == 1)
        stats = live.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (1, 0), "who runs is not touched"
        answer = first.answer()
        assert answer.status == 200
        [choice] = answer.json()["choices"]
        assert (choice["finish_reason"], choice["text"]) == ("length", "a" * 120)
        assert watch.ends() == ends(kind) | {"length": 1}


@in_any_way
@with_and_without_stream
def test_leaving_after_one_choice_has_ended(leave: Callable[[Wire], None], *, stream: bool) -> None:
    samples = [["a"] * 200, ["b"], ["c"] * 200]
    script = Script(default=["a"], samples=samples, step_seconds=0.01)
    with live_server(script) as live, Wire(live) as wire:
        watch = Watch(live)
        body = {"prompt": PROMPT, "n": 3, "max_tokens": 150, "stream": stream}
        wire.post(PATH, body)
        if stream:
            wire.until(b'"finish_reason":"stop"')
        live.wait_until(lambda: live.engine.stats().requests_finished == {"stop": 1})
        leave(wire)
        assert watch.ends() == {"stop": 1, "abort": 2}


def test_many_groups_that_come_and_go() -> None:
    # So slow that no group ends before it has been seen.
    script = Script(default=["a"], end=False, step_seconds=0.02)
    with live_server(script, num_blocks=60) as live:
        watch = Watch(live)
        asked: Counter[str] = Counter()
        for number in range(60):
            kind = "beams" if number % 3 == 0 else "samples"
            asked.update(ends(kind))
            with Wire(live) as wire:
                wire.post(PATH, group(kind, stream=bool(number % 2), prompt=[number + 3] * 9))
                if number % 4:
                    live.wait_until(lambda: live.engine.stats().num_running > 0)
        found = watch.ends()
        # Some had left before the engine knew of them.
        assert found.keys() == {"abort"} and 0 < found["abort"] <= asked["abort"]
