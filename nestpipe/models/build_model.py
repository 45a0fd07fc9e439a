"""Builds the model of a run's configuration, and says which inputs the loader must put into its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.batch_builder import ModelInputs
from nestpipe.data.features import NumberStats
from nestpipe.data.item_feature_rows import Embed, ItemFeatureRows, item_feature_rows
from nestpipe.data.schema import Feature, Schema
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split, train_mask
from nestpipe.errors import ConfigError
from nestpipe.models.backbone import initial_weights
from nestpipe.models.config import DCNConfig, EncDecConfig, RankingConfig
from nestpipe.models.content_retrieval import build_content_retrieval
from nestpipe.models.contract import Model, ModelData
from nestpipe.models.dcn import build_dcn
from nestpipe.models.encdec import SemanticIds, build_encdec
from nestpipe.models.ranking import build_ranking, named_labels
from nestpipe.models.retrieval import build_retrieval
from nestpipe.registry import entry_of


def build_model(
    config: Config,
    sequences: Sequences,
    *,
    ids: SemanticIds | None = None,
    igr_text: Tensor | None = None,
    texts: Mapping[str, Tensor] | None = None,
    embed: Embed | None = None,
    statistics: Mapping[str, NumberStats] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The model of a run; its initial dense weights are a function of the seed. Raises ConfigError.

    A generative model needs the semantic ids of the catalogue; one that compares items with instructions also reads `igr_text`,
    vectors [I, W] of their texts. A next-item model that reads item texts needs their vectors [I, D] by column and, if new
    items will come, how they are embedded. `statistics` of item numbers are those of an earlier fit [default: fitted].
    """
    schema, max_len = sequences.schema, config.data.max_len
    match config.model:
        case RankingConfig():
            return build_ranking(config.model, schema, max_len=max_len, seed=config.seed, dtype=dtype)
        case DCNConfig():
            return build_dcn(config.model, schema, seed=config.seed, dtype=dtype)
        case EncDecConfig():
            if ids is None:
                raise ValueError("a generative model needs semantic ids")
            return build_encdec(config.model, ids, max_len=max_len, seed=config.seed, dtype=dtype, text=igr_text)
        case _:
            catalogue = torch.from_numpy(np.array(sequences.catalogue))
            if entry_of(config.model).role == "model":
                data = ModelData(catalogue=catalogue, max_len=max_len, schema=schema)
                return _build_registered(config.model, data, seed=config.seed, dtype=dtype)
            names = getattr(config.model, "item_features", ())
            content = None
            if names:
                content = item_feature_rows(sequences, names, texts=texts, embed=embed, statistics=statistics)
            return _build_next_item(config, sequences, catalogue, content, dtype)


def _build_next_item(
    config: Config, sequences: Sequences, catalogue: Tensor, content: ItemFeatureRows | None, dtype: torch.dtype
) -> Model:
    """A next-item model around a backbone, with the content of items if its configuration names some."""
    max_len = config.data.max_len
    counts = _event_counts(config, sequences) if content is not None or config.loss.kind == "in_batch" else None
    if content is None or counts is None:
        return build_retrieval(
            config.model,
            config.loss,
            catalogue=catalogue,
            max_len=max_len,
            seed=config.seed,
            dtype=dtype,
            counts=counts,
        )
    return build_content_retrieval(
        config.model,
        config.loss,
        content,
        catalogue=catalogue,
        counts=counts,
        max_len=max_len,
        seed=config.seed,
        dtype=dtype,
    )


def _build_registered(config: Any, data: ModelData, *, seed: int, dtype: torch.dtype) -> Model:
    with initial_weights(seed):
        model = entry_of(config).load()(config, data)
    if absent := [name for name in ("tables", "coupling", "lookups", "weight", "forward") if not hasattr(model, name)]:
        raise ConfigError(f"{type(model).__name__} has no '{absent[0]}', which nestpipe.Model requires.")
    return cast(Model, model.to(dtype))


def _event_counts(config: Config, sequences: Sequences) -> Tensor:
    """The number of training events of each item of the catalogue."""
    trained = sequences.items[train_mask(sequences, make_split(sequences, config.data))]
    places = np.searchsorted(sequences.catalogue, trained)
    return torch.from_numpy(np.bincount(places, minlength=len(sequences.catalogue)))


def inputs_of(config: Config, sequences: Sequences) -> ModelInputs:
    """The inputs of the model besides items and times; raises ConfigError if a feature would leak a label."""
    model, schema = config.model, sequences.schema
    if isinstance(model, EncDecConfig) and config.data.windows == "last":
        requests = _instruction_fields(model, sequences)
        past = ("scenario",) if model.past_scenarios and "scenario" in requests else ()
        return ModelInputs(
            features=(*(("user",) if model.user_rows else ()), *past),
            labels=(model.behaviour,) if model.behaviour else (),
            requests=requests,
        )
    if not isinstance(model, RankingConfig | DCNConfig):
        if config.data.windows == "all":
            raise ConfigError("data.windows 'all' is for models that rank; next-item models train on the last window.")
        return ModelInputs()
    labels = named_labels(schema, model.labels)
    names = tuple(label.name for label in labels)
    if isinstance(model, RankingConfig):
        return ModelInputs(features=model.features, labels=names)
    sources = {source: label.name for label in schema.labels for source in label.sources()}
    if leaking := [name for name in model.features if name in sources]:
        raise ConfigError(
            f"feature '{leaking[0]}' leaks the answer: label '{sources[leaking[0]]}' is computed from it, and it is known only "
            "after the event. Remove it from model.features."
        )
    return ModelInputs(features=model.features, labels=names, layout="events")


def _instruction_fields(model: EncDecConfig, sequences: Sequences) -> tuple[str, ...]:
    """The fields of an instruction that the log records per event; raises ConfigError for one that the model cannot read."""
    wanted = {"scenario": model.num_scenarios > 0, "trigger": True, "reasoning": model.reasoning_dim > 0}
    kinds = {"scenario": "id", "trigger": "id", "reasoning": "vector"}
    found = []
    for feature in sequences.schema.of_scope("event") if model.placement != "none" else ():
        if not wanted.get(feature.name):
            continue
        where = f"{sequences.path}: the event feature '{feature.name}'"
        if feature.kind != kinds[feature.name]:
            raise ConfigError(
                f"{where} is of kind '{feature.kind}'; an instruction takes kind '{kinds[feature.name]}'."
            )
        if feature.name == "reasoning" and feature.dim != model.reasoning_dim:
            raise ConfigError(f"{where} has width {feature.dim}, but model.reasoning_dim is {model.reasoning_dim}.")
        if feature.name == "trigger" and not _names_items(sequences.schema, feature):
            raise ConfigError(
                f"{where} names items, but has its own encoding '{feature.encoding}', so its numbers are not the items'. "
                "Ingest the log with --feature trigger:id:event:encoding=item."
            )
        values = sequences.event_features[feature.name].values
        if feature.name == "scenario" and len(values) and not 0 <= values.min() <= values.max() < model.num_scenarios:
            raise ConfigError(
                f"{where} has {values.min()} .. {values.max()}, but model.num_scenarios is {model.num_scenarios}: "
                "scenarios are numbered from 0. Texts are numbered by --feature scenario:id:event:encoding=dictionary; "
                "--model.num-scenarios is how many there are."
            )
        if feature.name == "trigger" and len(unknown := np.setdiff1d(values, sequences.catalogue)):
            raise ConfigError(
                f"{where} names items that no event has ({len(unknown):,}, for example {unknown[0]}); they have no vector. "
                "Leave the field empty there."
            )
        found.append(feature.name)
    return tuple(found)


def _names_items(schema: Schema, feature: Feature) -> bool:
    """Whether the numbers of a feature are those of items."""
    return feature.encoding == "item" or (schema.item_encoding == feature.encoding != "dictionary")
