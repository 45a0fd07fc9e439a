"""Models by name: the package's own, those of installed packages, and any class written as `package.module:Class`.

    @nestpipe.register_backbone(config=GRUConfig)      vectors [T, D], batch -> hidden [T, D]; the rest is ours
    @nestpipe.register_model(config=MyConfig)          the whole contract: lookups, weight, forward

A registered class has a dataclass of settings, which become flags, are saved with a run and compared on resume. An installed
package offers a class under a short name by an entry point in the group `nestpipe.models`. A run stores the name; opening the run
imports the module that it names. This module imports no torch: configurations are read without it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from nestpipe.errors import ConfigError
from nestpipe.models.config import (
    DCNConfig,
    EncDecConfig,
    FuXiConfig,
    HSTUConfig,
    RankingConfig,
    SASRecConfig,
)

Role = Literal["backbone", "model"]
Class = TypeVar("Class", bound=type)
_GROUP = "nestpipe.models"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be named in a configuration."""

    kind: str  # its name there
    config: type[Any]  # the dataclass of its settings
    role: Role
    target: type[Any] | str  # the class, or where it is imported from when a model is built

    @property
    def is_own(self) -> bool:
        """Whether it belongs to this package."""
        return isinstance(self.target, str)

    def load(self) -> type[Any]:
        """The class; imports torch."""
        return self.target if not isinstance(self.target, str) else find(self.target)


_OWN = (
    ModelEntry("sasrec", SASRecConfig, "backbone", "nestpipe.models.sasrec:SASRec"),
    ModelEntry("hstu", HSTUConfig, "backbone", "nestpipe.models.hstu:HSTU"),
    ModelEntry("fuxi", FuXiConfig, "backbone", "nestpipe.models.fuxi:FuXi"),
    ModelEntry("ranking", RankingConfig, "model", "nestpipe.models.ranking:Ranking"),
    ModelEntry("dcn", DCNConfig, "model", "nestpipe.models.dcn:DCN"),
    ModelEntry("encdec", EncDecConfig, "model", "nestpipe.models.encdec:EncDec"),
)
_ENTRIES = {entry.kind: entry for entry in _OWN}


def register_backbone(*, config: type[Any]) -> Callable[[Class], Class]:
    """Makes a class a backbone: `Class(config, max_len=...)`, `forward(vectors, batch[, rng])`. See `Backbone`.

    `config` is a dataclass with defaults and a field `dim`, the width of item vectors. Loss, negatives, evaluation and
    recommendation are those of every next-item model.
    """
    if "dim" not in {field.name for field in _fields(config)}:
        raise ConfigError(f"{config.__name__} has no field 'dim'; a backbone's settings say how wide item vectors are.")
    return lambda cls: _register(cls, config, "backbone")


def register_model(*, config: type[Any]) -> Callable[[Class], Class]:
    """Makes a class a model: `Class(config, data)` with a `ModelData`, and the methods of `Model`.

    With `encode_lookups`, `encode` and `item_vectors` (`Recommender`) it is also evaluated and recommends. `config` is a
    dataclass with defaults.
    """
    _fields(config)
    return lambda cls: _register(cls, config, "model")


def _fields(config: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"config is {config!r}, but the settings of a model are a dataclass.")
    found = dataclasses.fields(config)
    for field in found:
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{config.__name__}.{field.name} has no default; every setting of a model needs one.")
    return found


def _register(cls: Class, config: type[Any], role: Role) -> Class:
    kind = f"{_module_name(cls)}:{cls.__qualname__}"
    other = next((entry for entry in _ENTRIES.values() if entry.config is config and entry.kind != kind), None)
    if other is not None:
        raise ConfigError(
            f"{config.__name__} holds the settings of {other.kind} already; {kind} needs a class of its own."
        )
    _ENTRIES[kind] = ModelEntry(kind, config, role, cls)
    return cls


def _module_name(cls: type[Any]) -> str:
    """The module to import later; a program's own file instead of '__main__'."""
    if cls.__module__ != "__main__":
        return cls.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return str(spec.name) if spec is not None else Path(getattr(main, "__file__", "__main__")).stem


def own_kinds() -> dict[str, type[Any]]:
    """The models of this package with their settings."""
    return {entry.kind: entry.config for entry in _OWN}


def entry_named(kind: str) -> ModelEntry:
    """The model of a name: 'hstu', that of an entry point, or 'package.module:Class'. Raises ConfigError."""
    if kind in _ENTRIES:
        return _ENTRIES[kind]
    if ":" in kind:
        cls = find(kind)
        found = next((entry for entry in _ENTRIES.values() if entry.target is cls), None)
        if found is None:
            raise ConfigError(
                f"{kind} is not registered as a model; put @nestpipe.register_backbone(config=...) or "
                "@nestpipe.register_model(config=...) above the class."
            )
        return found
    offered = {point.name: point for point in entry_points(group=_GROUP)}
    if kind in offered:
        return dataclasses.replace(entry_named(offered[kind].value), kind=kind)
    known = [*own_kinds(), *offered]
    nearest = difflib.get_close_matches(kind, known, n=1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"there are: {', '.join(known)}, and package.module:Class"
    raise ConfigError(f"unknown model '{kind}'; {hint}")


def entry_of(config: Any) -> ModelEntry:
    """The model that an instance of settings belongs to; raises ConfigError if it is nobody's."""
    for entry in _ENTRIES.values():
        if type(config) is entry.config:
            return entry
    raise ConfigError(f"{type(config).__name__} is no model's settings; register the model that reads them.")


def find(name: str) -> Any:
    """What 'package.module:Name' means, imported from the working folder or an installed package. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"'{name}' names no object; write package.module:Name.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as python does for a script; the installed program does not
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise ConfigError(
            f"'{name}' cannot be imported: there is no module '{error.name}' in {here} or among the installed packages. "
            "Start the command where the module is, or add its folder to PYTHONPATH."
        ) from None
    except AttributeError:
        raise ConfigError(f"'{name}' cannot be imported: module '{module}' has no '{attribute}'.") from None
    return found
