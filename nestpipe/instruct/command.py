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

from nestpipe.data.sequences import Sequences
from nestpipe.errors import DataError
from nestpipe.instruct.diagnostics import Diagnostics, diagnose
from nestpipe.instruct.item_text import Encoder, encode_texts
from nestpipe.instruct.semantic_ids import Registry, SidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
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
    sid: SidConfig = field(default_factory=SidConfig)

    def run(self) -> None:
        sequences = Sequences.open(self.data)
        items, vectors, encoder = text_vectors(sequences, encoder=self.encoder, column=self.column)
        registry = Registry.build(items, vectors, self.sid, encoder=f"{encoder}/{self.column}")
        registry.save(self.out)
        Console().print(diagnose(registry, items, vectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
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
        made_by, _, column = registry.encoder.partition("/")
        kind: Encoder = "minilm" if made_by.startswith("minilm") else "words"
        items, vectors, encoder = text_vectors(sequences, encoder=kind, column=column)
        new = (~torch.isin(items, registry.items)).nonzero().flatten()
        if not len(new):
            raise DataError(f"{self.data} has no item that {self.ids} has not; nothing was written.")
        items, vectors = items.index_select(0, new), vectors.index_select(0, new)
        extended = registry.extend(items, vectors, encoder=f"{encoder}/{column}")
        extended.save(self.out)
        Console().print(f"{len(new):,} items added; the version stays {extended.version}", highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
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
        made_by, _, column = registry.encoder.partition("/")
        sequences = Sequences.open(self.data)
        kind: Encoder = "minilm" if made_by.startswith("minilm") else "words"
        items, vectors, _ = text_vectors(sequences, encoder=kind, column=column)
        both = torch.isin(items, registry.items).all() and len(items) == len(registry.items)
        return diagnose(registry, items, vectors if bool(both) else None)


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
    vectors, name = encode_texts([texts.get(item, "") for item in catalogue.tolist()], encoder=encoder)
    return torch.from_numpy(catalogue), vectors, name


def main(argv: list[str]) -> int:
    chosen = tyro.extras.subcommand_cli_from_dict(
        {"build": Build, "extend": Extend, "inspect": Inspect},
        prog="nestpipe sid",
        description="Semantic ids: items as short sequences of codes.",
        args=argv,
    )
    chosen.run()
    return 0
