"""NestPipe turns interaction logs into recommendations, exactly and fast."""

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
