"""How each byte-level vocabulary cuts text before merging, by `tokenizer.ggml.pre`.

These are facts about how the vocabularies were trained. An expression that is not in the table
cannot be guessed: a wrong one gives other tokens without any error.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(number: str, *, marks: bool = False) -> str:
    """Llama 3's expression and its relatives: `marks` counts accents among the letters."""
    letters, sign = (
        (r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]") if marks else (r"\p{L}", r"[^\s\p{L}\p{N}]")
    )
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{number}| ?{sign}+[\r\n]*|{_REST}"


def _cased_words(number: str, short: str) -> str:
    """Tekken's and GPT-4o's expression: a capital begins a new word."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{short}|{before}{_UPPER}+{_LOWER}*{short}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


_DIGIT = r"\p{N}"
# Characters, not escapes: the regex engine has its own escapes for those beyond U+FFFF.
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# DeepSeek LLM lists the letters with case of an old Unicode version one by one. These are the
# blocks whose letters it lacks.
_NEWER = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d8f\U00016e40-\U00016eff\U0001d400-\U0001d7ff"
    "\U0001df00-\U0001dfff"
)
_CASED = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NEWER}]]"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True)
class Split:
    """How text is cut before merging."""

    regexes: tuple[str, ...] = ()
    """Applied one after the other, each to the pieces of the one before."""
    gpt2: bool = False
    """GPT-2's own expression at the end; the `tokenizers` library has it built in."""
    ignore_merges: bool = False
    """A stretch that is a vocabulary entry is taken whole, even if no merges lead to it."""
    nfc: bool = False
    adds_bos: bool = False
    """What holds when the file does not say."""


_GPT2 = Split(gpt2=True)
_DIGITS = Split((_DIGIT,), gpt2=True)
_LLAMA = Split((_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_DBRX = Split(_LLAMA.regexes)
_QWEN2 = Split((_words(_DIGIT),), nfc=True)
_QWEN35 = Split((_words(_DIGIT, marks=True),), nfc=True)
_TEKKEN = Split((_cased_words(_DIGIT, ""),), ignore_merges=True, adds_bos=True)
_GPT4O = Split((_cased_words(r"\p{N}{1,3}", _SHORT + "?"),))
_DEEPSEEK_LLM = Split(
    (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        rf"\s?{_SIGNS}",
        r"\s+$",
        _CJK,
        _DIGIT,
    )
)
_DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT))
_DEEPSEEK_V3 = Split(
    (
        r"\p{N}{1,3}",
        _KANA,
        rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
    )
)

SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "pixtral": _LLAMA,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
"""`tokenizer.ggml.pre` -> rule."""
