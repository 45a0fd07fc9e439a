"""Flags for the settings of whatever model was named: `--model package.module:Class --model.hidden 64`."""

from __future__ import annotations

import dataclasses
from dataclasses import field, make_dataclass
from typing import Any

from nestpipe.config import Config


def typed_field(kind: type[Any], name: str, value: Any, *markers: Any) -> type[Any]:
    """A subclass of a dataclass of flags in which a field has the type and the default of a value."""
    from typing import Annotated

    hint = Annotated[(type(value), *markers)] if markers else type(value)
    made: type[Any] = make_dataclass(
        kind.__name__, [(name, hint, field(default=value))], bases=(kind,), frozen=True, kw_only=True
    )
    made.__doc__ = kind.__doc__
    return made


def typed_config(config: Config) -> Config:
    """The same configuration as an instance of a class that knows the type of its model's settings."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    made: Config = typed_field(Config, "model", config.model)(**values)
    return made


def plain_config(config: Config) -> Config:
    """The way back from `typed_config`."""
    return Config(**{item.name: getattr(config, item.name) for item in dataclasses.fields(Config)})
