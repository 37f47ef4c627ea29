"""One tokenizer surface for Hugging Face folders and GGUF files."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxpaged.config import EngineConfig
from jaxpaged.errors import InvalidRequestError, ModelLoadError
from jaxpaged.text.chat import ChatTemplate
from jaxpaged.text.gguf_tokenizer import build_gguf_tokenizer
from jaxpaged.text.pieces import PieceDecoder
from jaxpaged.text.plain_tokenizer import CLASS_NAME, read_plain_tokenizer
from jaxpaged.text.template_worker import render_in_worker
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.source import ModelSource, locate

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LONG_TEXT = 4096
"""Characters from which a text is encoded without holding Python's lock."""
_CHARS_PER_TOKEN = 8
_CUT_WORD = 256
"""Tokens that the cut at the end of a text's beginning may add, at the very most."""
_HUB_PATTERNS = ["tokenizer*", "vocab*", "merges.txt", "*tokens*.json", "config.json", "*.jinja"]


class Tokenizer:
    """Text to ids and back. Ids that the vocabulary does not have decode to nothing.

    `encode` follows the model's own rules. Decoding joins the tokens' bytes; no clean-up of spaces
    is ever applied. Safe to use from several threads at once: what is filled in later (bytes of
    tokens, compiled templates) is the same whoever does it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str] | None = None,
        class_name: str = "PreTrainedTokenizerFast",
    ) -> None:
        """`special_tokens` maps bos_token, eos_token, ... to their text, as templates see them.

        `chat_templates` are by name; "default" is used, and "tool_use" when tools are given.
        `class_name` is only for `info`.
        """
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._pieces = PieceDecoder(backend)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._shown_texts: dict[int, str] = {}
        """The same for those who skip special tokens, whose text is "" here."""
        self._special_tokens = dict(special_tokens)
        self._class_name = class_name
        self._own_templates: dict[str, ChatTemplate] = {}
        self._templates = {
            name: ChatTemplate(text, self._special_tokens)
            for name, text in (chat_templates or {}).items()
        }
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out."""
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id, added tokens included."""
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.strips_leading_space = self._pieces.strips_leading_space

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special_tokens.get("pad_token")

    @property
    def chat_template(self) -> str | None:
        template = self._templates.get("default")
        return template.text if template is not None else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Ids of a text. A text that already starts with the BOS token does not get a second one.

        With `limit`, a text of many more tokens is refused for what it begins with, before time
        and memory go into the whole of it. Raises `InvalidRequestError` for that, and for text that
        is not valid Unicode (lone surrogates).
        """
        if limit is not None:
            self._refuse_far_too_long(text, limit)
        ids = self._encode(text, add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            # More than the tokenizer's own one: only drop what it added, never what the text has.
            plain = self._encode(text, False)
            if plain[:1] == [bos] and len(ids) > len(plain):
                ids = ids[1:]
        return ids

    def _refuse_far_too_long(self, text: str, limit: int) -> None:
        # A beginning may end within a word, and then has a few tokens that the whole has not.
        most = limit + _CUT_WORD
        size = _CHARS_PER_TOKEN * most
        while size < len(text):
            count = len(self._encode(text[:size], False))
            if count > most:
                raise InvalidRequestError(
                    f"This model's maximum context length is {limit} tokens. However, your prompt "
                    f"of {len(text)} characters contains more than {count - _CUT_WORD} input "
                    "tokens, which exceeds this limit even without any output tokens. Please "
                    "reduce the length of the input prompt.",
                    param="input_tokens",
                )
            size *= 4

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                # Unlike `encode` this lets other threads run meanwhile: a second for some MB.
                (encoding,) = self.backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except TypeError as error:  # all that the library says about lone surrogates
            raise _not_unicode(text) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 read as U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id, its leading space included; b"" for ids that do not exist."""
        piece = self._bytes.get(token_id)
        if piece is None:
            text = self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            piece = self._pieces.piece_bytes(text) if text is not None else b""
            if text is not None:  # foreign ids are unbounded, so they are not remembered
                self._bytes[token_id] = piece
        return piece

    def whole_text(self, token_id: int) -> str | None:
        """Text of one id ("" for those that do not exist); None for parts of characters."""
        text = self._texts.get(token_id)
        if text is not None:
            return text
        try:
            text = self.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None
        if token_id in self._bytes:
            self._texts[token_id] = text
            self._shown_texts[token_id] = "" if token_id in self.special_ids else text
        return text

    def known_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str]:
        """What `whole_text` has told so far, by id; grows with it."""
        return self._shown_texts if skip_special_tokens else self._texts

    def token(self, token_id: int) -> str:
        """Text of one id, for logprobs; "" for ids that do not exist, U+FFFD for partial ones."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        untrusted: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to text, to be encoded with `add_special_tokens=False`.

        Other keywords are variables of the template, as `chat_template_kwargs` are. `untrusted`
        says that `chat_template` comes from a stranger: it then runs in a process of its own.
        `chat_template_content_format` is "auto", "string" or "openai" (contents as lists of parts).
        Raises `InvalidRequestError` when there is no template, the messages are malformed, or the
        template refuses them.
        """
        extra = chat_template_kwargs or {}
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "variables": {**kwargs, **extra} if kwargs else extra,
            "content_format": chat_template_content_format,
        }
        if untrusted and chat_template is not None:
            return render_in_worker(chat_template, self._special_tokens, messages, options)
        return self._template(chat_template, tools).render(messages, **options)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        add_special_tokens: bool = False,
        limit: int | None = None,
        untrusted: bool = False,
    ) -> tuple[str, list[int]]:
        """One conversation as the model reads it: the template's text and its token ids.

        Options and errors are those of `apply_chat_template` and `encode`. Templates write BOS
        themselves, so `add_special_tokens` is off; with it on, a text that starts with BOS gets no
        second one.
        """
        text = self.apply_chat_template(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
            untrusted=untrusted,
        )
        return text, self.encode(text, add_special_tokens=add_special_tokens, limit=limit)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of `render_chat`."""
        return self.render_chat(messages, **options)[1]

    def info(self) -> dict[str, Any]:
        """What clients ask about a tokenizer, in the words of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": self._class_name,
            **{name: self._special_tokens.get(name) for name in names},
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "vocab_size": self.vocab_size,
            "chat_template": self.chat_template,
        }

    def _template(self, own: str | None, tools: object) -> ChatTemplate:
        if own is not None:
            template = self._own_templates.get(own)
            if template is None:
                template = ChatTemplate(own, self._special_tokens)
                # Replaced, not changed, as other threads read it; a batch gives one text often.
                self._own_templates = {own: template}
            return template
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequestError(
                "This model has no chat template. Give one with chat_template (a Jinja file), "
                "or use plain prompts.",
                param="messages",
            )
        return self._templates[name]

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        found: int | None = self.backend.token_to_id(text) if text is not None else None
        return found


def load_tokenizer(source: ModelSource, config: EngineConfig) -> Tokenizer:
    """The tokenizer of a resolved model, or of `config.tokenizer`; `config.chat_template` wins.

    Raises `ModelLoadError` when files are missing or damaged, naming them.
    """
    templates = {}
    if config.chat_template is not None:
        templates["default"] = _template_text(config.chat_template)
        try:
            ChatTemplate(templates["default"], {}).check()
        except InvalidRequestError as error:
            raise ModelLoadError(f"chat_template: {error}") from error
    if config.tokenizer is None:
        path, file = source.path, source.gguf
    else:
        path = locate(config.tokenizer, revision=None, patterns=_HUB_PATTERNS, setting="tokenizer")
        file = GGUFFile.open(path) if path.is_file() else None
    tokenizer = _from_gguf(file, templates) if file else _from_folder(path, templates)
    rows = source.hf_config.get("vocab_size")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        logger.warning(
            "The tokenizer has %d ids but the model only %d; prompts with the ids above are "
            "refused.",
            tokenizer.vocab_size,
            rows,
        )
    return tokenizer


def _not_unicode(text: object) -> InvalidRequestError:
    if not isinstance(text, str):
        return InvalidRequestError(f"A prompt must be text, got {text!r:.80}.", param="prompt")
    at = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
    return InvalidRequestError(
        f"The text is not valid Unicode: lone surrogate at character {at}.", param="prompt"
    )


def _template_text(value: str) -> str:
    path = Path(value).expanduser()
    if "{" not in value and "\n" not in value:
        if not path.is_file():
            raise ModelLoadError(f"chat_template={value!r} is neither a file nor a Jinja template.")
        return path.read_text(encoding="utf-8")
    return value


def _from_gguf(file: GGUFFile, templates: dict[str, str]) -> Tokenizer:
    parts = build_gguf_tokenizer(file)
    return Tokenizer(
        parts.backend,
        special_tokens=parts.special_tokens,
        chat_templates=parts.chat_templates | templates,
    )


def _from_folder(folder: Path, templates: dict[str, str]) -> Tokenizer:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelLoadError(
            f"{folder} has no tokenizer: looked for {', '.join(TOKENIZER_FILES)}. Give another "
            "folder with tokenizer=..., or set skip_tokenizer_init to work on token ids only."
        )
    only_model = not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    if only_model and importlib.util.find_spec("sentencepiece") is None:
        # transformers would try others of its converters, and blame a package that cannot help.
        raise ModelLoadError(
            f"{folder} has a tokenizer.model but no tokenizer.json; reading it needs the package "
            "sentencepiece: `pip install sentencepiece`, or add the model's tokenizer.json."
        )
    plain = read_plain_tokenizer(folder)
    if plain is not None:
        return Tokenizer(
            plain.backend,
            special_tokens=plain.special_tokens,
            chat_templates=plain.chat_templates | templates,
            class_name=CLASS_NAME,
        )
    # Without torch transformers warns that models are unavailable; none of ours come from there.
    logging.getLogger("transformers").addFilter(_is_not_torch_advice)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = loaded.backend_tokenizer
    except Exception as error:  # broken JSON, missing packages, unknown classes: all kinds
        raise ModelLoadError(
            f"Cannot load the tokenizer in {folder}: {error} "
            "(only tokenizers with a tokenizer.json, or convertible to one, are supported)."
        ) from error
    named = loaded.chat_template or {}
    own = {"default": named} if isinstance(named, str) else dict(named)
    special = {k: str(v) for k, v in loaded.special_tokens_map.items() if isinstance(v, str)}
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_templates=own | templates,
        class_name=type(loaded).__name__,
    )


def _is_not_torch_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
