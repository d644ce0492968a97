"""Text into tokens and back, piece by piece."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.runner.shard.text import Detokenizer, StopStrings, Text, TextError
from tests.runner.shard import tiny_configs, tiny_weights
from ullage.v1 import runner_service_pb2

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_weights.write(tmp_path_factory.mktemp("text") / "tiny", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def text(folder: Path) -> Text:
    return Text.read(folder)


@pytest.mark.parametrize("written", ["plain", "naïve café", "日本語", "a 🛶 b", "ends in 🛶"])
def test_a_character_is_given_whole_or_not_yet(written: str, text: Text) -> None:
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.add(token) for token in text.encode(written)]
    assert "".join(pieces) == written
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_bytes_that_are_no_text_are_given_out_in_the_end(text: Text) -> None:
    broken = text.encode("🛶")[:1]
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.add(token) for token in broken * 8 + text.encode("ok")]
    assert "".join(pieces).endswith("ok")
    assert "\N{REPLACEMENT CHARACTER}" in "".join(pieces)


def test_half_a_character_at_the_end_is_never_given(text: Text) -> None:
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.add(token) for token in text.encode("a🛶")[:-1]]
    assert "".join(pieces) == "a"


def test_a_character_is_whole_after_a_special_token_and_after_bytes_that_are_none(text: Text) -> None:
    canoe = text.encode("🛶")
    for before, shown in ([tiny_configs.END] * 3, ""), (canoe[:1], "\N{REPLACEMENT CHARACTER}"):
        detokenizer = Detokenizer(text)
        assert "".join(detokenizer.add(token) for token in before + canoe) == f"{shown}🛶"


def test_the_pieces_are_the_text_of_all_tokens_whatever_these_are(text: Text) -> None:
    chance = random.Random(7)  # noqa: S311 - no secret
    for _ in range(300):
        tokens = [
            token
            for _ in range(8)
            for token in chance.choice([text.encode("🛶é"), [chance.randrange(256)], [tiny_configs.END]])
        ]
        detokenizer = Detokenizer(text)
        given = "".join(detokenizer.add(token) for token in tokens)
        whole = text.decode(tokens)
        assert whole.startswith(given)
        assert not whole[len(given) :].strip("\N{REPLACEMENT CHARACTER}")


def test_special_tokens_have_no_text(text: Text) -> None:
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.add(token) for token in [tiny_configs.END] * 10 + text.encode("x")]
    assert "".join(pieces) == "x"


def test_a_conversation_goes_through_the_template(text: Text) -> None:
    tokens = text.encode_chat([runner_service_pb2.ChatMessage(role="user", content="hi")])
    user, assistant = tiny_configs.END + 1, tiny_configs.END + 2
    assert tokens == [user, *text.encode("hi"), tiny_configs.END, assistant]


@pytest.mark.parametrize("role", ["", "User", "wizard"])
def test_a_role_that_is_none_is_refused(role: str, text: Text) -> None:
    with pytest.raises(TextError, match=f"'{role}' is no role: write system, user or assistant"):
        text.encode_chat([runner_service_pb2.ChatMessage(role=role, content="hi")])


def test_the_end_of_an_answer_is_what_the_files_say(text: Text) -> None:
    assert text.end_ids == {tiny_configs.END}


def test_a_template_cannot_reach_out_of_its_text(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(TextError, match="chat template does not take this conversation"):
        Text.read(folder).encode_chat([runner_service_pb2.ChatMessage(role="user", content="hi")])


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="roles must alternate"):
        Text.read(folder).encode_chat([runner_service_pb2.ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_fails_in_any_way_refuses_the_conversation(template: str, tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", chat_template=template)
    with pytest.raises(TextError, match=r"does not take this conversation: .+"):
        Text.read(folder).encode_chat([runner_service_pb2.ChatMessage(role="user", content="hi")])


def test_a_template_that_cannot_be_understood_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    text = Text.read(tiny_weights.write(tmp_path / "tiny", chat_template="{% if %}"))
    assert text.decode(text.encode("plain")) == "plain"
    with pytest.raises(TextError, match=r"cannot be understood \(Expected an expression.*: send the prompt as text"):
        text.encode_chat([runner_service_pb2.ChatMessage(role="user", content="hi")])


def test_marks_of_the_assistants_words_are_no_words(tmp_path: Path) -> None:
    # As in the template of SmolLM3-3B.
    template = (
        "{% set said = 'no' %}{% for message in messages %}\n"
        "{%- if message.role == 'assistant' -%}\n"
        "    {% generation %}\n"
        "    {%- set said = 'yes' -%}\n"
        "    {{ loop.index }} {{ message.content }} {{ said }}\n"
        "    {% endgeneration %}\n"
        "{%- else -%}{{ message.content }} {{ said }};{%- endif -%}{% endfor %}"
    )
    text = Text.read(tiny_weights.write(tmp_path / "tiny", chat_template=template))
    turns = [
        runner_service_pb2.ChatMessage(role="user", content="hi"),
        runner_service_pb2.ChatMessage(role="assistant", content="hello"),
        runner_service_pb2.ChatMessage(role="user", content="bye"),
    ]
    assert text.decode(text.encode_chat(turns)) == "hi no;2 hello yes\nbye no;"


def test_json_in_a_template_takes_what_transformers_takes(tmp_path: Path) -> None:
    template = "{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    text = Text.read(tiny_weights.write(tmp_path / "tiny", chat_template=template))
    said = text.encode_chat([runner_service_pb2.ChatMessage(role="user", content="é")])
    assert text.decode(said) == '{"content":"\\u00e9","role":"user"}'


def test_a_template_that_is_no_text_is_said_to_be_damaged(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(TextError, match=r"chat_template\.jinja in tiny is no text: run `ullage models add` again"):
        Text.read(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"has no tokenizer\.json: run `ullage models add`"):
        Text.read(tmp_path)


def test_a_stop_string_is_found_across_pieces() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.add(piece) for piece in ("one S", "TO", "P two")] == ["one ", "", ""]
    assert stops.is_stopped
    assert stops.rest() == ""


def test_what_only_began_like_a_stop_string_is_given_after_all() -> None:
    stops = StopStrings(["STOP"])
    assert [stops.add(piece) for piece in ("ST", "A", "ST")] == ["", "STA", ""]
    assert stops.rest() == "ST"


def test_the_first_of_several_stop_strings_ends_the_text() -> None:
    stops = StopStrings(["later", "now"])
    assert stops.add("end now or later") == "end "


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).add("all of it") == "all of it"
