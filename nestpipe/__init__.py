"""NestPipe turns interaction logs into recommendations, exactly and fast.

Names are imported on first use: `import nestpipe` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe import recipes
    from nestpipe.config import Config
    from nestpipe.data.schema import Feature, Schema
    from nestpipe.data.sequences import Sequences
    from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
    from nestpipe.embedding.lookup import Lookup, Rows, TableSpec
    from nestpipe.errors import NestPipeError
    from nestpipe.jagged import Batch, Cursor, Jagged
    from nestpipe.models.contract import Backbone, Model, ModelData, Output, Recommender
    from nestpipe.pipeline.build_state import build_state
    from nestpipe.pipeline.config import PipelineConfig
    from nestpipe.pipeline.train_batches import train_batches
    from nestpipe.registry import register_backbone, register_model
    from nestpipe.rng import Rng
    from nestpipe.training.fit import fit
    from nestpipe.training.loop import train
    from nestpipe.training.run_folder import Run
    from nestpipe.training.trained_run import TrainedRun, load

_MODULES = {
    "Backbone": "models.contract",
    "Batch": "jagged",
    "Config": "config",
    "Cursor": "jagged",
    "DenseConfig": "embedding.config",
    "EmbeddingConfig": "embedding.config",
    "Feature": "data.schema",
    "Jagged": "jagged",
    "Lookup": "embedding.lookup",
    "Model": "models.contract",
    "ModelData": "models.contract",
    "NestPipeError": "errors",
    "Output": "models.contract",
    "PipelineConfig": "pipeline.config",
    "Recommender": "models.contract",
    "Rng": "rng",
    "Rows": "embedding.lookup",
    "Run": "training.run_folder",
    "Schema": "data.schema",
    "Sequences": "data.sequences",
    "TableSpec": "embedding.lookup",
    "TrainedRun": "training.trained_run",
    "build_state": "pipeline.build_state",
    "fit": "training.fit",
    "load": "training.trained_run",
    "register_backbone": "registry",
    "register_model": "registry",
    "train": "training.loop",
    "train_batches": "pipeline.train_batches",
}
__all__ = [
    "Backbone",
    "Batch",
    "Config",
    "Cursor",
    "DenseConfig",
    "EmbeddingConfig",
    "Feature",
    "Jagged",
    "Lookup",
    "Model",
    "ModelData",
    "NestPipeError",
    "Output",
    "PipelineConfig",
    "Recommender",
    "Rng",
    "Rows",
    "Run",
    "Schema",
    "Sequences",
    "TableSpec",
    "TrainedRun",
    "build_state",
    "fit",
    "load",
    "recipes",
    "register_backbone",
    "register_model",
    "train",
    "train_batches",
]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("nestpipe.recipes")
    if name in _MODULES:
        return getattr(import_module(f"nestpipe.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'nestpipe' has no attribute '{name}'")
