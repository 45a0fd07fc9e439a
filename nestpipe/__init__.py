"""NestPipe turns interaction logs into recommendations, exactly and fast.

Names are imported when they are first used: `import nestpipe` alone costs nothing, and torch is loaded when needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe import recipes
    from nestpipe.config import Config
    from nestpipe.data.schema import Feature, Schema
    from nestpipe.data.sequences import Sequences
    from nestpipe.draw import Draw
    from nestpipe.embedding.spec import Lookup, Rows, TableSpec
    from nestpipe.errors import NestPipeError
    from nestpipe.jagged import Batch, Jagged
    from nestpipe.model import Model, Output
    from nestpipe.run import Run
    from nestpipe.trainer import train

_HOMES = {
    "Batch": "jagged",
    "Config": "config",
    "Draw": "draw",
    "Feature": "data.schema",
    "Jagged": "jagged",
    "Lookup": "embedding.spec",
    "Model": "model",
    "NestPipeError": "errors",
    "Output": "model",
    "Rows": "embedding.spec",
    "Run": "run",
    "Schema": "data.schema",
    "Sequences": "data.sequences",
    "TableSpec": "embedding.spec",
    "train": "trainer",
}
__all__ = [
    "Batch",
    "Config",
    "Draw",
    "Feature",
    "Jagged",
    "Lookup",
    "Model",
    "NestPipeError",
    "Output",
    "Rows",
    "Run",
    "Schema",
    "Sequences",
    "TableSpec",
    "recipes",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("nestpipe.recipes")
    if name in _HOMES:
        return getattr(import_module(f"nestpipe.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'nestpipe' has no attribute '{name}'")
