"""`nestpipe sid ...`: builds, extends and inspects semantic ids of a catalogue."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from nestpipe.cli.arguments import BuildSid, ExtendSid, InspectSid
from nestpipe.data.config import DataConfig
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.config import Encoder
from nestpipe.generative.cooccurrence import DIM as BEHAVIOUR_DIM
from nestpipe.generative.cooccurrence import behaviour_vectors, fuse
from nestpipe.generative.item_vectors import text_vectors
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.sid_stats import Diagnostics, diagnose


def build(flags: BuildSid) -> None:
    if not 0 <= flags.behaviour < 1:
        raise ConfigError(f"--behaviour is {flags.behaviour}; it must be at least 0 and below 1.")
    sequences = Sequences.open(flags.data)
    items, vectors, encoder = item_vectors(
        sequences, encoder=flags.encoder, column=flags.column, behaviour=flags.behaviour
    )
    registry = Registry.build(items, vectors, flags.sid, encoder=encoder)
    registry.named_by(sequences).save(flags.out)
    Console().print(diagnose(registry, items, vectors))


def extend(flags: ExtendSid) -> None:
    registry, sequences = Registry.load(flags.ids), Sequences.open(flags.data)
    registry.check_names(sequences)
    items, vectors, encoder = vectors_as(registry, sequences)
    new = (~torch.isin(items, registry.items)).nonzero().flatten()
    if not len(new):
        raise DataError(f"{flags.data} has no items beyond those of {flags.ids}; nothing was written.")
    items, vectors = items.index_select(0, new), vectors.index_select(0, new)
    extended = registry.extend(items, vectors, encoder=encoder)
    extended.named_by(sequences).save(flags.out)
    Console().print(f"{len(new):,} items added; the version stays {extended.version}", highlight=False)


def inspect(flags: InspectSid) -> None:
    registry = Registry.load(flags.ids)
    stats = _diagnose(registry, flags.data)
    if flags.json:
        print(json.dumps(asdict(stats)))
    else:
        Console().print(stats)


def _diagnose(registry: Registry, data: Path | None) -> Diagnostics:
    if data is None:
        return diagnose(registry)
    sequences = Sequences.open(data)
    registry.check_names(sequences)
    items, vectors, _ = vectors_as(registry, sequences)
    both = torch.isin(items, registry.items).all() and len(items) == len(registry.items)
    return diagnose(registry, items, vectors if bool(both) else None)


def item_vectors(
    sequences: Sequences, *, encoder: Encoder = "auto", column: str = "title", behaviour: float = 0.0
) -> tuple[Tensor, Tensor, str]:
    """Ids [I] of the catalogue, vectors [I, D] from text and behaviour, and the name of the encoder."""
    items, vectors, name = text_vectors(sequences, encoder=encoder, column=column)
    if not behaviour:
        return items, vectors, f"{name}/{column}"
    split = make_split(sequences, DataConfig(validation=True))
    return items, fuse(vectors, behaviour_vectors(sequences, split), behaviour), f"{name}/{column}+{behaviour:g}"


def vectors_as(registry: Registry, sequences: Sequences) -> tuple[Tensor, Tensor, str]:
    """Likewise, with the registry's encoder; behaviour is left zero, because it has changed since the codebooks were fitted."""
    made_by, _, rest = registry.encoder.partition("/")
    column, _, share = rest.partition("+")
    kind: Encoder = "minilm" if made_by.startswith("minilm") else "words"
    items, vectors, name = text_vectors(sequences, encoder=kind, column=column)
    if share:
        vectors = fuse(vectors, torch.zeros(len(items), BEHAVIOUR_DIM), float(share))
    return items, vectors, f"{name}/{rest}"
