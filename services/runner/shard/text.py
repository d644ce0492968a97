"""Between text and tokens: the first rank's tokenizer, and the text of an answer as it becomes certain.

Nothing is given out that a later token could still change: no half of a UTF-8 character, and no beginning
of what may become a stop string.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from ullage.v1 import runner_service_pb2

BROKEN_TOKENS_MAX: Final = 16
"""So many tokens without a whole character are no text. A character has four bytes at most, each at worst a token, and
bytes that are none may come before it."""
ROLES: Final = ("system", "user", "assistant")
"""Whose a chat's messages may be. Templates write any other word into the prompt, where no model has learnt it."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class TextError(Exception):
    """The folder has no usable tokenizer, or a prompt cannot be put into tokens; str() says what to do."""


class Text:
    """A model's tokenizer and its chat template."""

    def __init__(
        self, tokenizer: Tokenizer, config: dict[str, Any], template: str | None, end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._specials = {
            name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._template: jinja2.Template | None = None
        self._no_template = "this model has no chat template"
        if template is not None:
            try:
                self._template = _environment().from_string(template)
            except Exception as error:
                # The model runs all the same: text as it is needs no template.
                self._no_template = f"this model's chat template cannot be understood ({error})"
        self.end_ids = end_ids
        """The tokens that end an answer."""

    @classmethod
    def read(cls, folder: Path) -> Text:
        """The tokenizer in a model's folder. Raises TextError when there is none or it cannot be read."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TextError(
                f"{folder.name} has no tokenizer.json: run `ullage models add` with the model's whole folder"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise TextError(f"tokenizer.json in {folder.name} cannot be read: {error}") from error
        # A tokenizer made for training cuts and pads; a prompt is never cut in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _json(folder / "tokenizer_config.json")
        return cls(tokenizer, config, _template(folder, config), _end_ids(folder, config, tokenizer))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as it is, with what the tokenizer puts before every text."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def encode_chat(self, messages: Sequence[runner_service_pb2.ChatMessage]) -> list[int]:
        """The tokens of a conversation, ready for the assistant's turn. Raises TextError without a usable template,
        and for a role that is none.
        """
        if self._template is None:
            raise TextError(f"{self._no_template}: send the prompt as text")
        for message in messages:
            if message.role not in ROLES:
                raise TextError(f"{message.role!r} is no role: write {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered = self._template.render(messages=turns, add_generation_prompt=True, **self._specials)
        except Exception as error:
            # A template is a program of the model's makers, and fails in any way that one can.
            said = str(error) or type(error).__name__
            raise TextError(f"the model's chat template does not take this conversation: {said}") from error
        tokens: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special ones."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Detokenizer:
    """The text of one answer, token by token.

    A token's text may depend on the one before it, so each is decoded together with the last ones that gave
    text, and what these give alone is taken off. What is broken at the end may yet become a character.
    """

    def __init__(self, text: Text, before: Sequence[int] = ()) -> None:
        """`before` are tokens the answer continues, if it does."""
        self._text = text
        self._before = list(before)
        self._pending: list[int] = []
        self._shown = 0
        """Characters of the pending tokens that were given out: a token may end in the middle of the next one."""

    def add(self, token: int) -> str:
        """The text that became certain with `token`; may be empty."""
        self._pending.append(token)
        is_full = len(self._pending) >= BROKEN_TOKENS_MAX
        whole = self._text.decode(self._before + self._pending)
        certain = whole if is_full else whole.rstrip(REPLACEMENT)
        given = certain[len(self._text.decode(self._before)) + self._shown :]
        self._shown += len(given)
        if self._shown and certain == whole:
            self._before, self._pending, self._shown = self._pending, [], 0
        elif is_full:
            # Special tokens only: they have no text, and never will.
            self._pending.clear()
        return given


class StopStrings:
    """Cuts a text, as it comes, before the first of some strings, wherever they lie across its pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def add(self, piece: str) -> str:
        """What is certain now. What may be the beginning of a stop string is held back."""
        self._held += piece
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._take(min(found))
        return self._take(len(self._held) - self._possible_beginning())

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        return "" if self.is_stopped else self._take(len(self._held))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _possible_beginning(self) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path.name} in {path.parent.name} is no JSON: run `ullage models add` again") from error
    return values if isinstance(values, dict) else {}


def _content(token: object) -> str:
    """A special token's text: written as a string, or as an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise TextError(f"{path.name} in {folder.name} is no text: run `ullage models add` again") from error
    template = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _end_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """Every token one of the model's files calls an end."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        said = _json(folder / name).get("eos_token_id")
        found.update(id_ for id_ in (said if isinstance(said, list) else [said]) if isinstance(id_, int))
    named = tokenizer.token_to_id(_content(config.get("eos_token")))
    return frozenset(found if named is None else found | {named})


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What chat templates are written against: a model's file must not reach further than its own text."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _AnswerMarks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _AnswerMarks(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark the assistant's words for training; what stands in it is text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes characters for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
