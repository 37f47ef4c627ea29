"""/v1/models: what goes out."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelPermission(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    """What requests call the model."""
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxpaged"
    root: str
    """The model as the server was started with it."""
    parent: None = None
    max_model_len: int
    """Tokens of prompt and output together."""
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
