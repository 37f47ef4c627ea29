"""Folders whose tokenizer.json is the whole tokenizer, read without transformers.

Importing transformers takes a second, and with torch installed three and 300 MB. Most of what it
knows is how to make a tokenizer out of other files; a folder of its plain class has it ready.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxpaged.text.gguf_tokenizer import TokenizerParts

CLASS_NAME = "TokenizersBackend"
"""What transformers calls its plain class, for `PreTrainedTokenizerFast` as well."""
_PLAIN = (CLASS_NAME, "PreTrainedTokenizerFast")
_OVERRULED = ("qwen", "mistral", "ministral", "pixtral", "voxtral", "siglip", "hyperclovax")
"""What model types begin with for which transformers takes another class than the folder names, or
looks twice at how text is split."""
_CHANGES = ("added_tokens.json", "additional_chat_templates", "tekken.json")
"""Files beside tokenizer.json that have a say."""
_OLD_MAP = "special_tokens_map.json"
"""Another, unless the settings have a table of added tokens."""
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_WITHOUT_EFFECT = {
    "tokenizer_class", "add_bos_token", "add_eos_token", "backend", "clean_up_tokenization_spaces",
    "is_local", "local_files_only", "max_length", "model_input_names", "model_max_length",
    "name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "stride",
    "truncation_side", "truncation_strategy",
}  # fmt: skip
"""Settings that transformers does not apply to a tokenizer.json, or only to what pads and cuts."""
_READ = {*_SPECIAL, "added_tokens_decoder", "additional_special_tokens", "chat_template"}
_READ.add("extra_special_tokens")


def read_plain_tokenizer(folder: Path) -> TokenizerParts | None:
    """What transformers would make of the folder; None where that may be more than tokenizer.json
    says, or where something is wrong with the files.
    """
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not _is_plain(folder, settings, str(model["model_type"])):
            return None
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if _adds_tokens(backend, settings):
            return None
        special = {
            name: _content(settings[name]) for name in _SPECIAL if settings.get(name) is not None
        }
        return TokenizerParts(backend, special, _templates(folder, settings))
    except Exception:  # `tokenizers` raises bare ones; transformers says what is wrong
        return None


def _is_plain(folder: Path, settings: dict[str, Any], model_type: str) -> bool:
    return (
        settings.get("tokenizer_class") in _PLAIN
        and settings.keys() <= _READ | _WITHOUT_EFFECT
        and not model_type.startswith(_OVERRULED)
        and not any((folder / name).exists() for name in _CHANGES)
        and ("added_tokens_decoder" in settings or not (folder / _OLD_MAP).exists())
    )


def _adds_tokens(backend: Tokenizer, settings: dict[str, Any]) -> bool:
    """Whether settings name tokens that tokenizer.json lacks, or has otherwise; or padding does."""
    if backend.padding is not None:
        return True
    there = backend.get_added_tokens_decoder()
    for index, token in settings.get("added_tokens_decoder", {}).items():
        if repr(AddedToken(**token)) != repr(there.get(int(index))):
            return True
    extra = [settings.get(f"{kind}_special_tokens") or [] for kind in ("additional", "extra")]
    named = [settings[name] for name in _SPECIAL if settings.get(name) is not None]
    texts = {token.content for token in there.values()}
    return not {_content(token) for token in [*named, *extra[0], *extra[1]]} <= texts


def _content(token: str | dict[str, Any]) -> str:
    if isinstance(token, str):
        return token
    if token["__type"] != "AddedToken":
        raise ValueError(f"no token: {token!r}")
    return str(token["content"])


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    named = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(named, str):
        return {"default": named} if named else {}
    return {one["name"]: one["template"] for one in named or ()}
