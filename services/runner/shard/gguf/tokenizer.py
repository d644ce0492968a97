"""The tokenizer a GGUF file describes, as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from services.runner.shard.gguf.file import GgufError, GgufFile

_CONTROL, _USER_DEFINED = 3, 4

PRE_TOKENIZERS: Final[Mapping[str, Callable[[], PreTokenizer]]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
"""By tokenizer.ggml.pre: how text is cut before pairs are merged. Another cut would give other tokens, silently."""


def tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer. Raises GgufError for a kind that is not understood."""
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise GgufError(
            f"the tokenizer of {file.path.name} is {kind!r}/{pre!r}, and only 'gpt2' with "
            f"{' or '.join(map(repr, sorted(PRE_TOKENIZERS)))} is understood: "
            "add the model from its Hugging Face or MLX folder instead"
        )
    tokens = _texts(file, "tokens")
    pairs = [merge.partition(" ") for merge in _texts(file, "merges")]
    try:
        bpe = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in pairs],
        )
    except Exception as error:  # what the library raises is undocumented; whatever it is, the file is at fault
        raise GgufError(f"the tokenizer of {file.path.name} is damaged ({error}): download it again") from error
    built = Tokenizer(bpe)
    built.pre_tokenizer = PRE_TOKENIZERS[pre]()
    built.decoder = decoders.ByteLevel()
    _add_special_tokens(built, tokens, file.metadata.get("tokenizer.ggml.token_type") or [])
    _add_first_token(built, file, tokens)
    return built


def settings(file: GgufFile, context_tokens: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = _texts(file, "tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _id(file, key, tokens) for name, key in names.items()}
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        values["chat_template"] = template
    return values


def generation(file: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: the tokens an answer begins and ends with."""
    tokens = _texts(file, "tokens")
    ends = [index for key in ("eos", "eot") if (index := _id(file, key, tokens)) is not None]
    ids = {
        "bos_token_id": _id(file, "bos", tokens),
        "eos_token_id": list(dict.fromkeys(ends)),
        "pad_token_id": _id(file, "padding", tokens),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _texts(file: GgufFile, key: str) -> list[str]:
    texts = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise GgufError(f"{file.path.name} has no tokenizer.ggml.{key}: download it again")
    return texts


def _id(file: GgufFile, key: str, tokens: list[str]) -> int | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return index if type(index) is int and 0 <= index < len(tokens) else None


def _add_special_tokens(built: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            built.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            built.add_tokens([AddedToken(token, normalized=False, special=False)])


def _add_first_token(built: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    first = _id(file, "bos", tokens)
    if file.metadata.get("tokenizer.ggml.add_bos_token") is not True or first is None:
        return
    built.post_processor = processors.TemplateProcessing(
        single=f"{tokens[first]} $A", pair=f"{tokens[first]} $A $B", special_tokens=[(tokens[first], first)]
    )
