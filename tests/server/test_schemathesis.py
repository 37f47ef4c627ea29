"""The server does what /openapi.json says: generated requests, valid ones and others, the limits of
every field, wrong methods and media types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from server.openapi import document
from tests.server.live import SECONDS, Live, live_server
from tests.server.scripted import Script

pytestmark = pytest.mark.slow

CONFIG = SchemathesisConfig()
CONFIG.projects.default.generation.deterministic = True
CONFIG.projects.default.phases.update(phases=["examples", "coverage", "fuzzing"])
SCHEMA = schemathesis.openapi.from_dict(document(), config=CONFIG)
VALID = schemathesis.GenerationMode.POSITIVE

WHY_NOT = re.compile(
    "|".join(
        [
            # What one field means for another.
            r"Stream options can only be defined when `stream=True`",
            r"When using `top_logprobs`, `logprobs` must be set",
            r"When using `tool_choice`, `tools` must be set",
            r"0 scores the prompt and needs echo",
            r"not available when `stream=True`",
            r"Cannot set both `continue_final_message`",
            r"needs a last message with content|needs a final message",
            r"Give either prompt or messages",
            r"Only the value of n is",
            r"(has no effect without|cannot be combined with) use_beam_search",
            r"is less than n=",
            r"min_tokens",
            # What this server and its model have.
            r"outside the model's vocabulary",
            r"cannot be greater than max_model_len=256",
            r"maximum context length",
            r"(at most|may have at most) \d+",
            r"has a word of \d+ tokens",
            r"--scheduling-policy priority",
            r"--trust-request-chat-template",
            # What the schemas leave open, as it would take pages: the items of a conversation.
            r"(messages|system)\[?.* (has type|must hold|needs|must be)",
            r"input\[.* (has type|must be|refers|needs)",
            # Some numbers are integers for JSON Schema only: 1.0 and 1e3.
            r"Expected `int( \| null)?`, got `float`",
        ]
    )
)
"""Reasons for which a request may be refused that follows the document."""
accepted: Counter[str] = Counter()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(Script(default="one two three")) as live:
        yield live
        live.settle()


@SCHEMA.parametrize()
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_it_says(case: schemathesis.Case[Any], live: Live) -> None:
    # Fields that the document does not know are accepted, and so they are said to be.
    answer = case.call_and_validate(
        base_url=live.base_url, excluded_checks=[positive_data_acceptance], timeout=SECONDS
    )
    if case.meta is not None and case.meta.generation.mode == VALID:
        if answer.status_code == 400:
            assert WHY_NOT.search(answer.text), f"refused, but valid: {answer.text}"
        accepted[case.operation.label] += answer.status_code == 200


def test_that_was_no_mock_trial() -> None:
    """Runs after the others, which prove little where all that was valid is refused."""
    tried = [operation.ok().label for operation in SCHEMA.get_all_operations()]
    assert len(tried) > 15
    for label in tried:
        # The name of a model that is served does not turn up by chance.
        least = 0 if "{id}" in label else 5 if label.startswith("POST /v1") else 1
        assert accepted[label] >= least, accepted
