"""The configuration of a run: frozen dataclasses, one section per package, read from and written to JSON.

Each package defines its section in its own `config.py`. A section's `problems()` yields everything wrong with it, so that one
error lists all problems.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nestpipe.data.config import DataConfig
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.errors import ConfigError
from nestpipe.eval.config import EvalConfig
from nestpipe.models.config import EncDecConfig, HSTUConfig, LossConfig
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.registry import entry_named, entry_of
from nestpipe.training.config import TrainConfig

_REPLACED = {"pipeline.split": ["pipeline.advanced.chunks shared"]}  # keys of earlier versions
FORMAT = 2  # of config.json; 2: adam on rows is exact, the former one is lazy_adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a run."""

    seed: int = 0
    """Seed of all random numbers: order of samples, initial weights, dropout, negatives."""
    data: DataConfig = field(default_factory=DataConfig)
    model: Any = field(default_factory=HSTUConfig)  # the config of a registered model (registry.py)
    loss: LossConfig = field(default_factory=LossConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def problems(self) -> Iterator[str]:
        """Problems of each section, then those between sections."""
        for name, section in _sections(self):
            check = getattr(section, "problems", None)  # optional in the config of a registered model
            yield from (f"{name}.{problem}" for problem in (check() if check else ()))
        if not 0 <= self.seed < 2**63:
            yield f"seed is {self.seed}; it must be in 0 .. 2**63 - 1"
        least = self.pipeline.protect_steps
        if self.embedding.max_rows and self.embedding.protect_steps < least:
            yield (
                f"embedding.protect_steps is {self.embedding.protect_steps}, but with pipeline.advanced.depth {self.pipeline.advanced.depth} rows "
                f"stay in use longer; set --embedding.protect-steps {least}"
            )
        if isinstance(self.model, EncDecConfig) and max(self.eval.ks) > self.model.beam:
            yield f"eval.ks goes up to {max(self.eval.ks)}, but model.beam {self.model.beam} finds fewer items; raise it or use shorter lists"
        if self.train.patience and not self.data.validation:
            yield "train.patience needs a validation metric, but data.validation is off; add --data.validation"
        if self.data.validation and int(self.train.metric.partition("@")[2] or 0) not in (0, *self.eval.ks):
            yield f"train.metric is {self.train.metric}, but eval.ks is {self.eval.ks}; add its list length to eval.ks"

    def validate(self) -> None:
        """Raises ConfigError with every problem at once."""
        if found := list(self.problems()):
            raise ConfigError("the configuration has problems:\n" + "\n".join(f"  - {problem}" for problem in found))

    def to_json(self) -> str:
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        content["model"] = {"kind": entry_of(self.model).kind, **content["model"]}
        return json.dumps(content, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Config:
        """Raises ConfigError for unknown keys, values of the wrong type and all `problems()`."""
        content = _upgraded(json.loads(text))
        section = content.get("model") if isinstance(content, dict) else None
        kind = section.pop("kind", None) if isinstance(section, dict) else None
        if not isinstance(kind, str):
            raise ConfigError(f"model.kind is {kind!r}; it must be the name of a model, such as 'hstu'.")
        if isinstance(section := content.get("pipeline"), dict):
            content["pipeline"] = PipelineConfig.moved(section)
        config: Config = read_object(Config, content, "", {"model": entry_named(kind).config})
        config.validate()
        return config

    @staticmethod
    def load(path: Path) -> Config:
        try:
            return Config.from_json(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist: is {path.parent} a run folder?") from None
        except (json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _upgraded(content: Any) -> Any:
    """A configuration of an earlier format in the words of this one."""
    if not isinstance(content, dict) or content.get("format", 1) == FORMAT:
        return {key: one for key, one in content.items() if key != "format"} if isinstance(content, dict) else content
    if content.pop("format", 1) != 1:
        raise ConfigError(f"the configuration has a format that this version does not know; it reads up to {FORMAT}.")
    rows = content.get("embedding")
    if isinstance(rows, dict):
        rows["optimizer"] = upgraded_optimizer(rows.get("optimizer", "adam"))
    model = content.get("model")
    if isinstance(model, dict) and (model.get("igr", "off") != "off" or model.get("q2i")):
        model.setdefault("igr_texts", False)  # which format 1 could not read
    return content


def upgraded_optimizer(name: str) -> str:
    """The name of a row optimizer of format 1: its `adam` was lazy."""
    return name.replace("adam", "lazy_adam") if "lazy_adam" not in name else name


def keys(config: Any, prefix: str = "") -> list[str]:
    """The dotted names of all settings."""
    names = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        names += keys(value, f"{prefix}{item.name}.") if dataclasses.is_dataclass(value) else [prefix + item.name]
    return names


def flat(config: Config) -> dict[str, Any]:
    """All settings by dotted name."""
    return {key: reduce(getattr, key.split("."), config) for key in keys(config)}


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """The error for an unknown key, with the nearest known one."""
    nearest = _REPLACED.get(key) or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else f"; there are: {', '.join(known)}"
    return ConfigError(f"unknown config key '{key}'{hint}")


def _sections(config: Config) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield item.name, value


def read_object(kind: type[Any], content: Any, prefix: str, chosen: dict[str, type[Any]] | None = None) -> Any:
    """A dataclass from a JSON object; `chosen` has the types of fields that are declared as Any."""
    if not isinstance(content, dict):
        raise ConfigError(f"'{prefix.rstrip('.') or 'the configuration'}' must be an object, got {content!r}")
    hints = get_type_hints(kind)
    for name in content:
        if name not in hints:
            raise unknown_key(prefix + name, [prefix + known for known in hints])
    values = {}
    for name, value in content.items():
        hint = (chosen or {}).get(name, hints[name])
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[name] = (
            read_object(hint, value, f"{prefix}{name}.") if is_section else _value(hint, value, prefix + name)
        )
    return kind(**values)


def _value(hint: Any, value: Any, key: str) -> Any:
    """A JSON value checked against the type of its field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], entry, key) for entry in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _value(arguments[1], entry, f"{key}.{name}") for name, entry in value.items()}
    if origin is Literal and value in arguments:
        return value
    allowed = arguments if origin in (Union, types.UnionType) else (hint,)
    if hint is float and type(value) is int:
        return float(value)
    if any(type(value) is one or (get_origin(one) is Literal and value in get_args(one)) for one in allowed):
        return value
    expected = " or ".join(map(_expected, allowed))
    raise ConfigError(f"config key '{key}' has the value {value!r}; expected {expected}")


def _expected(hint: Any) -> str:
    is_choice = get_origin(hint) is Literal
    return f"one of {', '.join(get_args(hint))}" if is_choice else getattr(hint, "__name__", str(hint))
