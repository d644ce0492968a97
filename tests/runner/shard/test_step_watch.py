"""Slow is told from stuck by what a process does, and by what its trial took."""

from __future__ import annotations

from services.runner.shard.step_watch import IDLE_LOOKS_MAX, LOOK_SECONDS, Effort, StepWatch, allowed_seconds

BEGAN = Effort(at=100.0, processor_seconds=5.0, pages_read=7)


def looks(watch: StepWatch, count: int, *, share: float, pages: int = 0, allowed: float | None = None) -> list[bool]:
    """Whether each of `count` looks at a step that began at BEGAN found it hindered; `share` of a core is used."""
    found = []
    for look in range(1, count + 1):
        seconds = look * LOOK_SECONDS
        now = Effort(BEGAN.at + seconds, BEGAN.processor_seconds + share * seconds, BEGAN.pages_read + look * pages)
        found.append(watch.hindrance(BEGAN, now, allowed) is not None)
    return found


def test_a_step_that_does_nothing_is_stuck_after_some_looks() -> None:
    found = looks(StepWatch(on_cpu=True), IDLE_LOOKS_MAX + 1, share=0.01)
    assert found == [False] * IDLE_LOOKS_MAX + [True]


def test_a_step_that_works_is_never_stuck_while_nothing_is_known_of_how_long_it_may() -> None:
    assert not any(looks(StepWatch(on_cpu=True), 1000, share=0.2))


def test_a_step_that_waits_for_pages_from_the_disk_is_slow() -> None:
    assert not any(looks(StepWatch(on_cpu=True), 1000, share=0.0, pages=1))


def test_a_step_that_takes_more_than_it_may_goes_in_circles() -> None:
    found = looks(StepWatch(on_cpu=True), 14, share=1.0, allowed=5.0)
    assert found.index(True) * LOOK_SECONDS == 5.0


def test_what_a_step_may_take_is_counted_in_what_it_got_of_a_busy_machine() -> None:
    assert not any(looks(StepWatch(on_cpu=True), 40, share=0.2, allowed=5.0))


def test_of_a_gpu_only_the_clock_tells() -> None:
    found = looks(StepWatch(on_cpu=False), 14, share=0.0, allowed=5.0)
    assert found.index(True) * LOOK_SECONDS == 5.0


def test_a_process_that_was_stopped_for_long_is_not_blamed_for_it() -> None:
    watch = StepWatch(on_cpu=True)
    assert watch.hindrance(BEGAN, BEGAN, None) is None
    assert watch.hindrance(BEGAN, BEGAN._replace(at=BEGAN.at + 3600), None) is None


def test_between_steps_nothing_is_counted() -> None:
    watch = StepWatch(on_cpu=True)
    looks(watch, IDLE_LOOKS_MAX, share=0.0)
    assert watch.hindrance(None, BEGAN, None) is None
    assert not any(looks(watch, IDLE_LOOKS_MAX, share=0.0))


def test_a_long_context_and_a_long_trial_allow_a_step_more() -> None:
    assert allowed_seconds(0.01, context_tokens=4096, hidden_size=1024) == 5.0
    assert allowed_seconds(1.0, context_tokens=0, hidden_size=1024) == 10.0
    assert allowed_seconds(1.0, context_tokens=4096, hidden_size=1024) == 20.0
