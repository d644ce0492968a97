"""What is kept of a process's stderr."""

from __future__ import annotations

from services.runner.stderr_tail import LINE_BYTES_MAX, LINES_MAX, StderrTail


def test_lines_are_put_together_from_pieces() -> None:
    tail = StderrTail()

    assert tail.feed(b"one\ntw") == ["one"]
    assert tail.feed(b"o\r\nthree") == ["two"]
    assert tail.lines() == ["one", "two", "three"]


def test_only_the_last_lines_are_kept() -> None:
    tail = StderrTail()
    tail.feed(b"".join(b"%d\n" % number for number in range(LINES_MAX + 5)))

    assert tail.lines() == [str(number) for number in range(5, LINES_MAX + 5)]


def test_a_line_without_end_does_not_grow() -> None:
    tail = StderrTail()
    for _ in range(10):
        tail.feed(b"x" * LINE_BYTES_MAX)

    assert tail.lines() == ["x" * LINE_BYTES_MAX]


def test_bytes_that_are_no_text_are_replaced() -> None:
    tail = StderrTail()
    tail.feed(b"caf\xe9\n")

    assert tail.lines() == ["caf\N{REPLACEMENT CHARACTER}"]
