"""Registry of models: the package's own, those of installed packages, and any class written as `package.module:Class`.

    @nestpipe.register_backbone(config=GRUConfig)      forward(vectors [T, D], batch) -> hidden [T, D]; see `Backbone`
    @nestpipe.register_model(config=MyConfig)          lookups, weight, forward; see `Model`

`config` is a dataclass. Its fields become flags, are saved with the run and are compared on resume. An installed package offers
a class under a short name through an entry point in the group `nestpipe.models`. A run stores the name of its model; opening
the run imports that module. This module does not import torch, so configurations can be read without it.
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
from nestpipe.generative.config import AlignedConfig
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

    kind: str  # its name in a configuration
    config: type[Any]  # the dataclass of its settings
    role: Role
    target: type[Any] | str  # the class, or the path to import it from when a model is built

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
    ModelEntry("aligned", AlignedConfig, "model", "nestpipe.generative.policy_model:PolicyModel"),
)
_ENTRIES = {entry.kind: entry for entry in _OWN}


def register_backbone(*, config: type[Any]) -> Callable[[Class], Class]:
    """Registers a class as a backbone: built as `Class(config, max_len=...)`, called as `forward(vectors, batch[, rng])`.

    `config` is a dataclass with a default for every field and a field `dim`, the width of item vectors. The item table,
    negatives, loss, evaluation and recommendation are those of every next-item model. See `nestpipe.Backbone`.
    """
    if "dim" not in {field.name for field in _fields(config)}:
        raise ConfigError(
            f"{config.__name__} has no field 'dim'; the config of a backbone needs it for the width of item vectors."
        )
    return lambda cls: _register(cls, config, "backbone")


def register_model(*, config: type[Any]) -> Callable[[Class], Class]:
    """Registers a class as a model: built as `Class(config, data)` with a `ModelData`; it has the methods of `Model`.

    `config` is a dataclass with a default for every field. A model with `encode_lookups`, `encode` and `item_vectors`
    (see `nestpipe.Recommender`) can also be evaluated and recommend.
    """
    _fields(config)
    return lambda cls: _register(cls, config, "model")


def _fields(config: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ConfigError(f"config is {config!r}; it must be a dataclass.")
    found = dataclasses.fields(config)
    for field in found:
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{config.__name__}.{field.name} has no default; every field of a model's config needs one."
            )
    return found


def _register(cls: Class, config: type[Any], role: Role) -> Class:
    kind = f"{_module_name(cls)}:{cls.__qualname__}"
    other = next((entry for entry in _ENTRIES.values() if entry.config is config and entry.kind != kind), None)
    if other is not None:
        raise ConfigError(
            f"{config.__name__} is already the config of {other.kind}; define another dataclass for {kind}."
        )
    _ENTRIES[kind] = ModelEntry(kind, config, role, cls)
    return cls


def _module_name(cls: type[Any]) -> str:
    """The module to import when the run is opened; for '__main__' the name of the script."""
    if cls.__module__ != "__main__":
        return cls.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return str(spec.name) if spec is not None else Path(getattr(main, "__file__", "__main__")).stem


def own_kinds() -> dict[str, type[Any]]:
    """The models of this package with their configs."""
    return {entry.kind: entry.config for entry in _OWN}


def entry_named(kind: str) -> ModelEntry:
    """The model of a name: 'hstu', an entry point, or 'package.module:Class'. Raises ConfigError."""
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
    """The model of a config instance; raises ConfigError if its class is not registered."""
    for entry in _ENTRIES.values():
        if type(config) is entry.config:
            return entry
    raise ConfigError(f"{type(config).__name__} is not the config of a registered model; register the model first.")


def find(name: str) -> Any:
    """Imports 'package.module:Name' from the working folder or an installed package. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"'{name}' is not a name of the form package.module:Name.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # python does this for a script, but not for an installed command
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its own imports does not
        raise ConfigError(
            f"'{name}' cannot be imported: there is no module '{error.name}' in {here} or among the installed packages. "
            "Run the command in the folder of the module, or add that folder to PYTHONPATH."
        ) from None
    except AttributeError:
        raise ConfigError(f"'{name}' cannot be imported: module '{module}' has no '{attribute}'.") from None
    return found
