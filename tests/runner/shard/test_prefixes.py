"""Which beginnings of prompts are kept, and which of them another prompt can go on from."""

from __future__ import annotations

from services.runner.shard.prefixes import Prefix, Prefixes

PROMPT = list(range(100, 110))


def test_whole_chunks_of_a_prompt_are_kept() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    assert prefixes.keep("a", PROMPT) == 8
    assert prefixes.keep("b", PROMPT[:3]) == 0
    assert len(prefixes) == 1


def test_a_prompt_that_goes_on_begins_with_what_was_kept_and_takes_it() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    prefixes.keep("a", PROMPT)
    assert prefixes.take([*PROMPT, 7, 8]) == Prefix("a", 8)
    assert prefixes.take([*PROMPT, 7, 8]) is None


def test_a_prompt_that_differs_begins_with_the_chunks_before() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    prefixes.keep("a", PROMPT)
    assert prefixes.take([*PROMPT[:6], 7, 8, 9]) == Prefix("a", 4)


def test_the_longest_beginning_is_taken() -> None:
    prefixes = Prefixes(chunk_tokens=2)
    prefixes.keep("short", PROMPT[:4])
    prefixes.keep("long", [*PROMPT[:6], 1, 2])
    assert prefixes.take(PROMPT) == Prefix("long", 6)


def test_the_last_token_is_always_computed_anew() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    prefixes.keep("a", PROMPT)
    assert prefixes.take(PROMPT[:8]) == Prefix("a", 4)


def test_a_prompt_with_another_beginning_takes_nothing() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    prefixes.keep("a", PROMPT)
    assert prefixes.take([1, *PROMPT]) is None
    assert len(prefixes) == 1


def test_what_was_kept_longest_goes_first() -> None:
    prefixes = Prefixes(chunk_tokens=4)
    prefixes.keep("a", PROMPT)
    prefixes.keep("b", PROMPT)
    assert prefixes.oldest() == "a"
    assert prefixes.drop("a")
    assert not prefixes.drop("a")
    assert prefixes.oldest() == "b"
