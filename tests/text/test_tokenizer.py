"""The tokenizer surface: parity with the libraries below it, foreign ids, BOS, missing files."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxpaged.config import EngineConfig
from jaxpaged.errors import InvalidRequestError, ModelLoadError
from jaxpaged.text.pieces import byte_alphabet
from jaxpaged.text.tokenizer import _LONG_TEXT, Tokenizer, load_tokenizer
from jaxpaged.weights.source import resolve_source
from tests.text.support import TEXTS, byte_level, edit_json, from_path, metaspace, sentencepiece
from tests.tiny_models import BOS, EOS, PAD, tiny_gguf, tiny_llama, tiny_tokenizer

MAKERS = [byte_level, sentencepiece, metaspace]


@pytest.mark.parametrize("make", MAKERS)
def test_encode_and_decode_equal_the_library(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.backend.encode(text).ids
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
        if make is not metaspace:  # which has no tokens for most of these characters
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("special", [True, False])
def test_long_texts_are_encoded_alike(make: Callable[[], Tokenizer], special: bool) -> None:
    """They take another road, on which other threads go on."""
    tokenizer = make()
    for text in ("".join(TEXTS) * 30, "a" * 5000, " " * 4096, "é👩‍👩‍👧\n" * 2000):
        assert len(text) >= _LONG_TEXT
        expected = tokenizer.backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 5000"):
        tokenizer.encode("a" * 5000 + "\ud800")
    with pytest.raises(InvalidRequestError, match="A prompt must be text"):
        tokenizer.encode([1] * 5000)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", MAKERS)
def test_a_text_far_over_the_limit_is_refused_for_its_beginning(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make()
    longest = 0
    encode = tokenizer._encode

    def watched(text: str, special: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "_encode", watched)
    text = "The quick brown fox. " * 50_000
    with pytest.raises(InvalidRequestError, match=r"length is 20 tokens.*contains more than \d+"):
        tokenizer.encode(text, limit=20)
    assert longest < 10_000
    # Whoever is near the limit is told the exact number, by whoever knows what else must fit.
    count = len(encode(text[:2000], True))
    assert len(tokenizer.encode(text[:2000], limit=count - 1)) == count
    # Tokens may be long: then the whole text is looked at, and found to fit.
    assert tokenizer.encode(text, limit=len(text)) == encode(text, True)
    assert longest == len(text)


def test_a_long_text_blocks_no_other_thread() -> None:
    tokenizer = byte_level()
    text = "The quick brown fox. " * 50_000
    done = threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    thread.start()
    turns = 0
    while not done.wait(0.005):
        turns += 1
        assert turns < 10_000
    thread.join(timeout=10)
    assert turns > 5, "this thread hardly ran while the other one encoded a megabyte"


@pytest.mark.parametrize("text", ["ab " * 170_000, "a" * 500_000, " " * 500_000, "中" * 170_000])
def test_encoding_is_linear(text: str) -> None:
    """Twice as much text takes about twice as long, also where there is no space to cut at."""
    for tokenizer in (byte_level(), sentencepiece()):
        seconds = []
        for part in (text[: len(text) // 8], text):
            started = time.perf_counter()
            tokenizer.encode(part)
            seconds.append(time.perf_counter() - started)
        assert seconds[1] < 8 * 5 * seconds[0] + 0.5, "64 times as long would be quadratic"


def test_random_ids_decode_as_the_library_does() -> None:
    tokenizer = byte_level()
    rng = random.Random(1)
    for _ in range(3000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == tokenizer.backend.decode(ids, skip_special_tokens=skip)


def test_byte_alphabet_is_the_library_s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    table = byte_alphabet()
    assert set(table) == set(ByteLevel.alphabet()) and sorted(table.values()) == list(range(256))
    backend = Backend(BPE(vocab={c: i for i, c in enumerate(table)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in TEXTS:
        assert [table[t] for t in backend.encode(text).tokens] == list(text.encode())


@pytest.mark.parametrize("make", MAKERS)
def test_unknown_ids_are_silent(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    known = tokenizer.encode("ab")
    for foreign in (tokenizer.vocab_size, 10**6, 2**40, -1):
        assert tokenizer.token(foreign) == "" and tokenizer.token_bytes(foreign) == b""
        assert tokenizer.decode([foreign, *known, foreign]) == tokenizer.decode(known)


def test_single_token_text() -> None:
    spm, bytes_ = sentencepiece(), byte_level()
    assert spm.token(spm.backend.token_to_id("▁Hello")) == " Hello"
    assert spm.token_bytes(spm.backend.token_to_id("<0xEA>")) == b"\xea"
    assert spm.token(spm.backend.token_to_id("<0x41>")) == "A"
    assert spm.token(spm.backend.token_to_id("</s>")) == "</s>"
    space = bytes_.backend.token_to_id("Ġ")
    assert bytes_.token(space) == " "
    assert "".join(map(bytes_.token, bytes_.encode("naïve word"))).endswith("ve word")
    broken = bytes_.encode("𠮷")
    assert len(broken) > 1 and "\ufffd" in bytes_.token(broken[0])


def test_byte_fallback_pieces_never_appear() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in "가".encode()]
    ids += tokenizer.encode("a")[-1:]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "가a"


def test_no_clean_up_of_spaces(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    edit_json(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = from_path(folder)
    for text in (" ,", " do n't", "a . b", "   ", "\n \n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_second_bos() -> None:
    backend = tiny_tokenizer()
    backend.post_processor = TemplateProcessing(
        single=[BOS, "$A"], pair=None, special_tokens=[(BOS, 0)]
    )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": BOS, "eos_token": EOS})
    plain = tokenizer.encode("the end", add_special_tokens=False)
    assert tokenizer.encode("the end") == [0, *plain]
    assert tokenizer.encode(BOS + "the end") == [0, *plain]
    assert tokenizer.encode(BOS + BOS + "the end") == [0, 0, *plain]
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode(BOS, add_special_tokens=False) == [0]


def test_lone_surrogates_are_a_request_error() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 1"):
        byte_level().encode("a\ud800b")


def test_info(tmp_path: Path) -> None:
    folder = from_path(tiny_llama(tmp_path / "m"))
    info = folder.info()
    assert info == {
        "tokenizer_class": info["tokenizer_class"],
        **{"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": None},
        **{"bos_token_id": 0, "eos_token_id": 1, "vocab_size": folder.vocab_size},
        "chat_template": folder.chat_template,
    }
    assert "Tokenizer" in info["tokenizer_class"]
    json.dumps(info)
    file = from_path(tiny_gguf(tmp_path / "m.gguf")).info()
    assert file["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {k: file[k] for k in ("bos_token", "eos_token_id", "chat_template")} == {
        k: info[k] for k in ("bos_token", "eos_token_id", "chat_template")
    }


def test_folder_and_gguf_agree(tmp_path: Path) -> None:
    folder = from_path(tiny_llama(tmp_path / "m"))
    file = from_path(tiny_gguf(tmp_path / "m.gguf"))
    assert (folder.bos_token_id, folder.eos_token_id) == (0, 1)
    assert (folder.bos_token, folder.eos_token) == (file.bos_token, file.eos_token) == (BOS, EOS)
    assert folder.special_ids == file.special_ids == frozenset(range(6))
    assert folder.chat_template == file.chat_template is not None
    for text in [*TEXTS, f"{BOS}<|user|>hi{EOS}"]:
        assert folder.encode(text) == file.encode(text)


def test_another_tokenizer_by_setting(tmp_path: Path) -> None:
    folder, file = tiny_llama(tmp_path / "m"), tiny_gguf(tmp_path / "m.gguf")
    (folder / "tokenizer.json").unlink()
    assert from_path(folder, tokenizer=str(file)).encode("the") == from_path(file).encode("the")
    with pytest.raises(ModelLoadError, match="tokenizer='./no/where' is neither"):
        from_path(folder, tokenizer="./no/where")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=f"Cannot load the tokenizer in {folder}"):
        from_path(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="looked for tokenizer.json, tokenizer.model"):
        from_path(folder)


def test_more_ids_than_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "m")
    from_path(folder)
    assert not [r for r in caplog.records if "ids" in r.getMessage()]
    edit_json(folder / "config.json", vocab_size=300)
    with caplog.at_level(logging.WARNING):
        tokenizer = from_path(folder)
    assert f"has {tokenizer.vocab_size} ids but the model only 300" in caplog.text


def test_unsupported_decoders_are_refused() -> None:
    backend = tiny_tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="decoder 'WordPiece'"):
        Tokenizer(backend, special_tokens={})
    with pytest.raises(ModelLoadError, match="has no decoder"):
        Tokenizer(Backend(BPE(vocab={"a": 0}, merges=[])), special_tokens={})


def test_chat_template_setting(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    template = tmp_path / "t.jinja"
    template.write_text("T:{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": "x"}]
    for setting in (str(template), template.read_text()):
        config = EngineConfig(model=str(folder), chat_template=setting)
        tokenizer = load_tokenizer(resolve_source(config), config)
        assert tokenizer.apply_chat_template(messages) == "T:x"
    with pytest.raises(ModelLoadError, match="neither a file nor a Jinja template"):
        from_path(folder, chat_template="nowhere.jinja")


def test_named_templates(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = from_path(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "U"
    assert tokenizer.apply_chat_template(messages, chat_template="own") == "own"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        from_path(folder).apply_chat_template(messages)
