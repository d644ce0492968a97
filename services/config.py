"""What a process goes by: the options of its command line, read off the command itself so that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ullage.v1 import config_service_pb2

if TYPE_CHECKING:
    import typer

_SOURCES: Final = {
    "COMMANDLINE": config_service_pb2.SETTING_SOURCE_COMMAND_LINE,
    "ENVIRONMENT": config_service_pb2.SETTING_SOURCE_ENVIRONMENT,
}
"""By the name of click's ParameterSource; all others are defaults."""


class Setting(NamedTuple):
    """One option as it stands, in what JSON can hold: a probe passes its own on to another program."""

    flag: str
    value: str | None
    """As it would be typed; None where nothing was said, and nothing stands for it."""
    source: config_service_pb2.SettingSource.ValueType
    environment_variable: str | None


def settings(context: typer.Context, **standing: object) -> tuple[Setting, ...]:
    """The options of the command that runs, in the order of its help.

    `standing` says, by the option's name, what the process goes by where nothing was said.
    """
    return tuple(_settings(context, standing))


def _settings(context: typer.Context, standing: dict[str, object]) -> Iterator[Setting]:
    for option in context.command.params:
        if option.name is None:
            continue
        source, value = context.get_parameter_source(option.name), context.params.get(option.name)
        yield Setting(
            flag=option.opts[0],
            value=_text(standing.get(option.name) if value is None else value),
            source=_SOURCES.get(source.name if source else "", config_service_pb2.SETTING_SOURCE_DEFAULT),
            environment_variable=option.envvar if isinstance(option.envvar, str) else None,
        )


def _text(value: object) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
