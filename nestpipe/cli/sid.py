"""`nestpipe sid ...`: semantic ids of a catalogue, made from item texts, and a look at them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import torch
import tyro
from rich.console import Console
from torch import Tensor

from nestpipe.data.config import DataConfig
from nestpipe.data.sequences import Sequences
from nestpipe.data.splits import make_split
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.config import Encoder, SidConfig
from nestpipe.generative.cooccurrence import DIM as BEHAVIOUR_DIM
from nestpipe.generative.cooccurrence import behaviour_vectors, fuse
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.sid_stats import Diagnostics, diagnose
from nestpipe.generative.text_encoder import cache_folder, encode_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSid:
    """Semantic ids for all items of a sequence folder, from the titles in its text.parquet.

    Example: nestpipe sid build data/beauty --out data/beauty-ids --sid.policy keep --sid.balanced
    """

    data: Annotated[Path, tyro.conf.Positional]
    """Sequence folder with item texts, such as 'nestpipe data amazon --texts' writes."""
    out: Path
    """Folder to write."""
    encoder: Encoder = "auto"
    """What makes vectors of the texts: MiniLM, hashed words, or the better one that is installed."""
    column: str = "title"
    """Column of text.parquet to encode."""
    behaviour: float = 0.0
    """Share of a vector that comes from which items stand near each other in histories, beside the text: 0 for text alone.
    The last two events of a user, which validation and test ask for, are not looked at."""
    sid: SidConfig = field(default_factory=SidConfig)

    def run(self) -> None:
        if not 0 <= self.behaviour < 1:
            raise ConfigError(f"behaviour is {self.behaviour}; it must be at least 0 and below 1.")
        sequences = Sequences.open(self.data)
        items, vectors, encoder = item_vectors(
            sequences, encoder=self.encoder, column=self.column, behaviour=self.behaviour
        )
        registry = Registry.build(items, vectors, self.sid, encoder=encoder)
        registry.save(self.out)
        Console().print(diagnose(registry, items, vectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSid:
    """The same version of semantic ids with the items that a sequence folder has in addition.

    Example: nestpipe sid extend data/beauty-ids data/beauty-june --out data/beauty-ids-june
    """

    ids: Annotated[Path, tyro.conf.Positional]
    """Folder of semantic ids."""
    data: Annotated[Path, tyro.conf.Positional]
    """Sequence folder with item texts."""
    out: Path
    """Folder to write."""

    def run(self) -> None:
        registry, sequences = Registry.load(self.ids), Sequences.open(self.data)
        items, vectors, encoder = vectors_as(registry, sequences)
        new = (~torch.isin(items, registry.items)).nonzero().flatten()
        if not len(new):
            raise DataError(f"{self.data} has no item that {self.ids} has not; nothing was written.")
        items, vectors = items.index_select(0, new), vectors.index_select(0, new)
        extended = registry.extend(items, vectors, encoder=encoder)
        extended.save(self.out)
        Console().print(f"{len(new):,} items added; the version stays {extended.version}", highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectSid:
    """Coverage, collisions and balance of semantic ids; with the data they were made from, also purity.

    Example: nestpipe sid inspect data/beauty-ids --data data/beauty
    """

    ids: Annotated[Path, tyro.conf.Positional]
    """Folder of semantic ids."""
    data: Path | None = None
    """Sequence folder: how much of its catalogue is covered, and how pure prefixes are."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        registry = Registry.load(self.ids)
        found = self._diagnose(registry)
        if self.json:
            print(json.dumps(asdict(found)))
        else:
            Console().print(found)

    def _diagnose(self, registry: Registry) -> Diagnostics:
        if self.data is None:
            return diagnose(registry)
        items, vectors, _ = vectors_as(registry, Sequences.open(self.data))
        both = torch.isin(items, registry.items).all() and len(items) == len(registry.items)
        return diagnose(registry, items, vectors if bool(both) else None)


def item_vectors(
    sequences: Sequences, *, encoder: Encoder = "auto", column: str = "title", behaviour: float = 0.0
) -> tuple[Tensor, Tensor, str]:
    """Ids [I] of the catalogue, vectors [I, D] from text and behaviour, and what made them."""
    items, vectors, name = text_vectors(sequences, encoder=encoder, column=column)
    if not behaviour:
        return items, vectors, f"{name}/{column}"
    split = make_split(sequences, DataConfig(validation=True))
    return items, fuse(vectors, behaviour_vectors(sequences, split), behaviour), f"{name}/{column}+{behaviour:g}"


def vectors_as(registry: Registry, sequences: Sequences) -> tuple[Tensor, Tensor, str]:
    """Likewise, as the registry's were made; behaviour counts as unknown: it has moved on since the codebooks were made."""
    made_by, _, rest = registry.encoder.partition("/")
    column, _, share = rest.partition("+")
    kind: Encoder = "minilm" if made_by.startswith("minilm") else "words"
    items, vectors, name = text_vectors(sequences, encoder=kind, column=column)
    if share:
        vectors = fuse(vectors, torch.zeros(len(items), BEHAVIOUR_DIM), float(share))
    return items, vectors, f"{name}/{rest}"


def text_vectors(
    sequences: Sequences, *, encoder: Encoder = "auto", column: str = "title"
) -> tuple[Tensor, Tensor, str]:
    """Ids [I] of the catalogue, vectors [I, D] of their texts, and what made them. An item without text has an empty one."""
    path = sequences.path / "text.parquet"
    if not path.is_file():
        raise DataError(f"{sequences.path} has no text.parquet; ingest the item texts with the log.")
    table = pl.read_parquet(path)
    if column not in table.columns:
        raise DataError(f"{path} has no column '{column}'; it has {table.columns}.")
    texts = dict(zip(table["item"].to_list(), table[column].fill_null("").to_list(), strict=True))
    catalogue = np.array(sequences.catalogue)
    vectors, name = encode_texts(
        [texts.get(item, "") for item in catalogue.tolist()], encoder=encoder, cache=cache_folder()
    )
    return torch.from_numpy(catalogue), vectors, name


def main(argv: list[str]) -> int:
    chosen = tyro.extras.subcommand_cli_from_dict(
        {"build": BuildSid, "extend": ExtendSid, "inspect": InspectSid},
        prog="nestpipe sid",
        description="Semantic ids: items as short sequences of codes.",
        args=argv,
    )
    chosen.run()
    return 0
