"""Tokenizers that are read without transformers are those that transformers would make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxpaged.text.plain_tokenizer import _OVERRULED, _PLAIN, CLASS_NAME, read_plain_tokenizer
from jaxpaged.text.tokenizer import Tokenizer, _from_folder
from tests.text.support import TEXTS, edit_json
from tests.tiny_models import BOS, EOS, PAD, tiny_llama, tiny_tokenizer

TABLE = {"0": AddedToken(BOS, normalized=False, special=True)}
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]


def as_settings(token: AddedToken) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", **as_settings(TABLE["0"])}, "eos_token": None},
        {"added_tokens_decoder": {i: as_settings(t) for i, t in TABLE.items()}},
        {"additional_special_tokens": [EOS, PAD], "padding_side": "left"},
        {"extra_special_tokens": [BOS]},
        {"chat_template": NAMED},
        {"chat_template": None},
        {"chat_template": ""},
    ],
    ids=str,
)
def test_equals_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    edit_json(folder / "tokenizer_config.json", **settings)
    check_equal(folder)


def test_equals_transformers_with_bos_and_a_template_file(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    backend = tiny_tokenizer()
    backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    backend.enable_truncation(7)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("T\n")
    tokenizer = check_equal(folder)
    assert tokenizer.encode("the") == [0, *tokenizer.encode("the", add_special_tokens=False)]


def test_equals_transformers_with_a_table_of_added_tokens(tmp_path: Path) -> None:
    """As Llama 3 has it: the table comes before the old map."""
    folder = tiny_llama(tmp_path / "m")
    there = tiny_tokenizer().get_added_tokens_decoder()
    table = {str(index): as_settings(token) for index, token in there.items()}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=table)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": EOS}))
    check_equal(folder)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma3_text", "mixtral", "opt", "phi3"])
def test_equals_transformers_for_other_models(model_type: str, tmp_path: Path) -> None:
    """Some have tokenizer classes of their own, which the folder does not name."""
    folder = tiny_llama(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    check_equal(folder)


def check_equal(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    plain = read_plain_tokenizer(folder)
    assert plain is not None
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = _from_folder(folder, {})
    assert type(theirs).__name__ == CLASS_NAME == ours.info()["tokenizer_class"]
    assert plain.special_tokens == theirs.special_tokens_map
    named = theirs.chat_template or {}
    assert plain.chat_templates == ({"default": named} if isinstance(named, str) else named)
    theirs.backend_tokenizer.no_truncation()
    for text in [*TEXTS, f"{BOS}<|user|>hi{EOS}{PAD}"]:
        for special in (True, False):
            encoded = theirs.backend_tokenizer.encode(text, add_special_tokens=special)
            assert ours._encode(text, special) == encoded.ids
    read = [json.loads(b.to_str()) for b in (ours.backend, theirs.backend_tokenizer)]
    for parts in read:
        del parts["post_processor"]  # what puts nothing around a text may be there or not
    assert read[0] == read[1]
    return ours


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": None},
        {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"fix_mistral_regex": True},
        {"image_token": BOS},
        {"eos_token": "<another>"},
        {"eos_token": {"content": EOS}},
        {"additional_special_tokens": ["<another>"]},
        {"extra_special_tokens": {"image": BOS}},
        {"added_tokens_decoder": {"0": {**as_settings(TABLE["0"]), "rstrip": True}}},
        {"added_tokens_decoder": {"9999": as_settings(TABLE["0"])}},
        {"split_special_tokens": True},
    ],
    ids=str,
)
def test_settings_that_transformers_knows_more_of(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    assert read_plain_tokenizer(folder) is not None
    edit_json(folder / "tokenizer_config.json", **settings)
    assert read_plain_tokenizer(folder) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "qwen2"}'),
        ("config.json", '{"model_type": "mistral"}'),
        ("special_tokens_map.json", "{}"),
        ("added_tokens.json", "{}"),
        ("tekken.json", "{}"),
        ("additional_chat_templates", None),
    ],
)
def test_files_that_transformers_knows_more_of(
    file: str, content: str | None, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "m")
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_text(content)
    assert read_plain_tokenizer(folder) is None


def test_padding_names_a_token(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    backend = tiny_tokenizer()
    backend.enable_padding(pad_token=PAD)
    backend.save(str(folder / "tokenizer.json"))
    assert read_plain_tokenizer(folder) is None


def test_model_types_whose_class_transformers_overrules() -> None:
    from transformers.models.auto import tokenization_auto as theirs

    own = {
        name
        for name in theirs.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if theirs.TOKENIZER_MAPPING_NAMES[name] not in (None, *_PLAIN)
    }
    assert "qwen2" in own and all(name.startswith(_OVERRULED) for name in own)


def test_transformers_stays_out_of_the_process(tmp_path: Path) -> None:
    """A second of a start, and with torch three and 300 MB."""
    folder = tiny_llama(tmp_path / "m")
    code = (
        "import sys; from tests.text.support import from_path; from pathlib import Path;"
        f"from_path(Path({str(folder)!r})).encode('the');"
        "print(sorted({'transformers', 'torch', 'huggingface_hub'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
