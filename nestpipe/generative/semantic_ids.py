"""Registry of semantic ids: the codes of each item, and how they were made.

    vectors [I, D] -> residual K-means -> codes [I, levels] -> collision policy -> registry

Collision policies: `keep` shares one id among an ordered list of items (production), `suffix` adds a level that numbers them
(as TIGER does), `reassign` takes the nearest free id. The version of a registry is a hash of codebooks, encoder, preprocessing
and policy. A new item is encoded with the frozen codebooks and changes neither the version nor the codes of other items.
Models, tries, pools and stores carry the version and reject any other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from nestpipe.data.array_files import file_entry, publish_folder
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative import residual_kmeans
from nestpipe.generative.config import SidConfig
from nestpipe.generative.trie import Trie, check_version

FORMAT = "nestpipe-semantic-ids"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Registry:
    """Items [I] by ascending id, their codes [I, levels], codebooks [K-means levels, codes, D], and their origin."""

    encoder: str  # encoder of the vectors
    preprocessing: str  # applied to the vectors before the first level
    config: SidConfig
    codebooks: Tensor
    items: Tensor
    codes: Tensor
    names: str = ""  # digest of the items' own ids, where their numbers depend on the log

    @staticmethod
    def build(items: Tensor, vectors: Tensor, config: SidConfig, *, encoder: str) -> Registry:
        """Semantic ids for items [I] from vectors [I, D] of any length; raises ConfigError and DataError."""
        if problems := list(config.problems()):
            raise ConfigError("semantic ids: " + "; ".join(problems) + ".")
        _check_items(items, vectors)
        items, order = items.sort()
        vectors = _unit(vectors.index_select(0, order))
        codebooks = residual_kmeans.fit(
            vectors,
            num_levels=config.levels,
            num_codes=config.codes,
            iterations=config.iterations,
            balanced=config.balanced,
            seed=config.seed,
        )
        codes = residual_kmeans.encode(vectors, codebooks, balanced=config.balanced)
        if config.policy == "suffix" and not config.suffix_size:
            most = int(codes.unique(dim=0, return_counts=True)[1].max())
            config = replace(config, suffix_size=2 * most)
        empty = Registry(
            encoder=encoder,
            preprocessing="unit length",
            config=config,
            codebooks=codebooks,
            items=items[:0],
            codes=torch.empty(0, config.levels + (config.policy == "suffix"), dtype=torch.int64),
        )
        return empty._with(items, vectors, codes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of codes of each level."""
        suffix = (self.config.suffix_size,) if self.config.policy == "suffix" else ()
        return (self.config.codes,) * self.config.levels + suffix

    @property
    def version(self) -> str:
        """A hash of codebooks, encoder, preprocessing and policy."""
        content = hashlib.sha256(self.codebooks.contiguous().numpy().tobytes())
        facts = {"encoder": self.encoder, "preprocessing": self.preprocessing, "config": asdict(self.config)}
        content.update(json.dumps(facts, sort_keys=True).encode())
        return content.hexdigest()[:16]

    def extend(self, items: Tensor, vectors: Tensor, *, encoder: str) -> Registry:
        """The same version with more items, encoded by the frozen codebooks; raises DataError if one already has an id."""
        if encoder != self.encoder:
            raise DataError(f"the vectors are from encoder '{encoder}', but the codebooks belong to '{self.encoder}'.")
        _check_items(items, vectors)
        if bool((known := torch.isin(items, self.items)).any()):
            raise DataError(
                f"item {int(items[known][0])} already has a semantic id, which never changes within a version."
            )
        items, order = items.sort()
        vectors = _unit(vectors.index_select(0, order))
        return self._with(items, vectors, residual_kmeans.encode(vectors, self.codebooks))

    def trie(self, catalogue: Tensor | None = None) -> Trie:
        """The trie of a catalogue (ascending ids, default: all items); raises DataError for an item without codes."""
        if catalogue is None:
            return Trie(self.items, self.codes, self.sizes, version=self.version)
        places = torch.searchsorted(self.items, catalogue).clamp(max=len(self.items) - 1)
        missing = self.items.index_select(0, places) != catalogue
        if bool(missing.any()):
            raise DataError(
                f"{int(missing.sum()):,} of {len(catalogue):,} items have no semantic id of version {self.version}, for "
                f"example item {int(catalogue[missing][0])}; add them with 'nestpipe sid extend'."
            )
        return Trie(catalogue, self.codes.index_select(0, places), self.sizes, version=self.version)

    def named_by(self, sequences: Sequences) -> Registry:
        """The same ids with the names of their items in a log, which `trie_of` compares."""
        return replace(self, names=_names(sequences, self.items))

    def trie_of(self, sequences: Sequences) -> Trie:
        """The trie of a log's catalogue; raises DataError if the log gives the numbers of the items to others."""
        self.check_names(sequences)
        return self.trie(torch.from_numpy(np.array(sequences.catalogue)))

    def check_names(self, sequences: Sequences) -> None:
        """Raises DataError if the log gives the numbers of the items to others."""
        if (own := _names(sequences, self.items)) != self.names:
            raise DataError(
                f"{sequences.path} numbers other items than those that these semantic ids (version {self.version}) were made "
                f"for ({own or 'no'} and {self.names or 'no'} digest of names): each would get another's codes. Build ids from "
                f"this folder with 'nestpipe sid build {sequences.path} --out FOLDER'."
            )

    def _with(self, items: Tensor, vectors: Tensor, codes: Tensor) -> Registry:
        """Adds items and applies the collision policy to them."""
        if self.config.policy == "suffix":
            codes = self._add_suffix(items, codes)
        elif self.config.policy == "reassign":
            codes = self._reassign(items, vectors, codes)
        joined, order = torch.cat([self.items, items]).sort(stable=True)
        return replace(self, items=joined, codes=torch.cat([self.codes, codes]).index_select(0, order))

    def _add_suffix(self, items: Tensor, codes: Tensor) -> Tensor:
        """Adds the suffix: the number of each item among those with its codes, old items first."""
        every = torch.cat([self.codes[:, :-1], codes])
        group = every.unique(dim=0, return_inverse=True)[1]
        order = group.argsort(stable=True)
        ordered = group[order]
        place = torch.arange(len(ordered)) - torch.searchsorted(ordered, ordered)
        number = torch.empty_like(place).index_copy_(0, order, place)[len(self.codes) :]
        if len(codes) and int(number.max()) >= self.config.suffix_size:
            item = int(items[int(number.argmax())])
            raise DataError(
                f"item {item} is number {int(number.max()) + 1} with its codes, but suffix_size is {self.config.suffix_size}. Build "
                "new ids with a larger --suffix-size."
            )
        return torch.cat([codes, number.unsqueeze(1)], 1)

    def _reassign(self, items: Tensor, vectors: Tensor, codes: Tensor) -> Tensor:
        """All but the first item with equal codes get the nearest free id: another last code, else another earlier code."""
        taken = {tuple(row) for row in self.codes.tolist()}
        collided = []
        for row, found in enumerate(map(tuple, codes.tolist())):
            collided += [row] if found in taken else []
            taken.add(found)
        moved = codes.clone()
        for row in collided:
            free = self._free(vectors[row], taken, ())
            if free is None:
                total = self.config.codes**self.config.levels
                raise DataError(
                    f"all {total:,} ids are taken; there is none for item {int(items[row])}. Build ids with more levels or codes."
                )
            moved[row] = torch.tensor(free)
            taken.add(free)
        return moved

    def _free(self, rest: Tensor, taken: set[tuple[int, ...]], prefix: tuple[int, ...]) -> tuple[int, ...] | None:
        """The first free id in the order of distance, level by level."""
        book = self.codebooks[len(prefix)]
        for code in residual_kmeans.distances(rest.unsqueeze(0), book)[0].argsort(stable=True).tolist():
            path = (*prefix, code)
            if len(path) < len(self.codebooks):
                found = self._free(rest - book[code], taken, path)
                if found is not None:
                    return found
            elif path not in taken:
                return path
        return None

    def save(self, folder: str | Path) -> None:
        """Writes the folder atomically; raises DataError if it exists."""
        with publish_folder(Path(folder), overwrite=False) as draft:
            tensors = {"codebooks": self.codebooks, "items": self.items, "codes": self.codes}
            save_file({name: one.contiguous() for name, one in tensors.items()}, draft / "ids.safetensors")
            facts = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "version": self.version,
                "encoder": self.encoder,
                "preprocessing": self.preprocessing,
                "config": asdict(self.config),
                "names": self.names,
                "files": {"ids.safetensors": file_entry(draft / "ids.safetensors")},
            }
            (draft / "ids.json").write_text(json.dumps(facts, indent=1) + "\n")

    @staticmethod
    def load(folder: str | Path, *, version: str | None = None) -> Registry:
        """Reads a registry; raises DataError if it is missing, damaged or not of the given version."""
        path = Path(folder) / "ids.json"
        facts = _read_facts(path)
        file = Path(folder) / "ids.safetensors"
        if not file.is_file() or file_entry(file) != facts["files"]["ids.safetensors"]:
            raise DataError(f"{file} is missing or does not match {path}; copy the folder again.")
        tensors = load_file(file)
        registry = Registry(
            encoder=facts["encoder"],
            preprocessing=facts["preprocessing"],
            config=SidConfig(**facts["config"]),
            names=facts.get("names", ""),
            **tensors,
        )
        if registry.version != facts["version"]:
            raise DataError(
                f"{path} says version {facts['version']}, but its content has version {registry.version}; copy the folder again."
            )
        if version is not None:
            check_version(str(folder), registry.version, version)
        return registry


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"there are no semantic ids in {path.parent}; create them with 'nestpipe sid build DATA --out {path.parent}'."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); build the ids again.") from None
    if (facts.get("format"), facts.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise DataError(f"{path} is not {FORMAT} version {FORMAT_VERSION}; build the ids again.")
    return facts


def _check_items(items: Tensor, vectors: Tensor) -> None:
    if len(items) != len(vectors) or not len(items):
        raise DataError(
            f"{len(items):,} items with {len(vectors):,} vectors; there must be at least one item, and one vector per item."
        )
    if len(items.unique()) != len(items):
        raise DataError("an item is listed twice; list each item once.")
    if not bool(vectors.isfinite().all()):
        row = int((~vectors.isfinite().all(1)).nonzero()[0])
        raise DataError(f"the vector of item {int(items[row])} is not finite.")


def _names(sequences: Sequences, items: Tensor) -> str:
    """A digest of the own ids of numbered items; empty where a number is the id itself or a hash of it."""
    vocabulary = sequences.vocabulary("item")
    if vocabulary.encoding != "dictionary":
        return ""
    known = items[torch.isin(items, torch.from_numpy(np.array(vocabulary.table["id"])))]
    texts = [*map(str, vocabulary.own_ids(known.tolist())), *["?"] * (len(items) - len(known))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.float(), dim=1)
