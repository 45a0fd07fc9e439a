"""Roll-outs of an aligned run: groups of paths that the frozen reference draws, with their gains, before the first step.

    RUN/rollouts/identity.json
    RUN/rollouts/pass-0-part-00000.npz      leaves [n, G]  log_probs [n, G, L]  rewards [n, G]  logged [n]  gains [n, G]

Pass p trains every user at their last training event but p, so passes see different contexts. The reference does not change
during a run, so its paths are a function of (reference, sample, pass). They are drawn once, in parts of a fixed size which the
ranks share: the files are the same for any number of ranks. The rows of the reference are read-only and sharded, as in
evaluation. A killed run continues with the parts that are missing.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from nestpipe.atomic_files import replace_file
from nestpipe.data.loader import Loader
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.process_group import World
from nestpipe.embedding.row_reader import RowReader, read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.candidate_values import CandidateValues
from nestpipe.eval.eval_ranks import dealt
from nestpipe.generative.config import AlignedConfig
from nestpipe.generative.logged_reward import LoggedColumn, LoggedReward
from nestpipe.generative.policy_model import GAINS, LEAVES, LOG_PROBS, last_targets, request_of
from nestpipe.generative.policy_optimisation import Policy, Rollout, draw_paths, path_log_probs
from nestpipe.generative.rewards import (
    RewardContext,
    Rewards,
    counted_columns,
    item_column,
    ranking_reward,
    reward_weights,
)
from nestpipe.generative.scenario_pools import pools_of, scenario_pools, scenarios_of
from nestpipe.generative.trie import Trie
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.build_model import inputs_of
from nestpipe.models.encdec import EncDec
from nestpipe.models.igr import keep_events
from nestpipe.pipeline.channels import Channels
from nestpipe.rng import Rng
from nestpipe.training.distributed_eval import ChannelRanks
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state

PART = 256  # contexts in a file
FOLDER = "rollouts"
_LINE_S = 15.0
_FIT_ROWS, _FIT_PASSES = 16384, 8  # logged events that a logged reward is fitted on


class ContextLoader(Loader):
    """Batches of contexts: histories that end where the logged item was the next one, an event earlier in each epoch."""

    def batch_of(self, samples: Tensor, cursor: Cursor) -> Batch:
        return replace(self.context(samples, cursor.epoch)[0], cursor=cursor)

    def context(self, samples: Tensor, number: int) -> tuple[Batch, NDArray[np.int64]]:
        """The contexts of a pass, and how many events of the user each one knows."""
        batch = Loader.batch_of(self, samples, Cursor(number, 0))
        lengths = batch.items.lengths()
        kept = lengths - number % lengths
        inside = batch.items.positions() < kept.index_select(0, batch.items.row_of_value())
        start = self._windows.pick(samples.numpy()).start
        return keep_events(batch, inside), start + kept.numpy()


class RolloutLoader(ContextLoader):
    """The same with the group of each context."""

    store: RolloutStore

    def batch_of(self, samples: Tensor, cursor: Cursor) -> Batch:
        batch = super().batch_of(samples, cursor)
        places = torch.searchsorted(self._samples, samples).numpy()
        groups = self.store.groups(cursor.epoch, places)
        rows = {name: _rows(torch.from_numpy(values)) for name, values in groups.items()}
        return replace(batch, sample_features={**batch.sample_features, **rows})


def _rows(values: Tensor) -> Jagged:
    """One row of flat values per sample."""
    flat = values.reshape(len(values), -1)
    return Jagged(flat.flatten(), torch.arange(len(flat) + 1) * flat.shape[1], flat.shape[1])


@dataclass(frozen=True)
class RolloutStore:
    """The files of a run's roll-outs."""

    folder: Path
    num_samples: int

    @property
    def num_parts(self) -> int:
        return math.ceil(self.num_samples / PART)

    def path(self, number: int, part: int) -> Path:
        return self.folder / f"pass-{number}-part-{part:05d}.npz"

    def missing(self, num_passes: int) -> list[tuple[int, int]]:
        """Pass and part of the files that do not exist."""
        every = ((number, part) for number in range(num_passes) for part in range(self.num_parts))
        return [one for one in every if not self.path(*one).exists()]

    def write(self, number: int, part: int, **columns: Tensor) -> None:
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: one.numpy() for name, one in columns.items()}
        np.savez(content, **arrays)
        replace_file(self.path(number, part), content.getvalue())

    def groups(self, number: int, places: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """What a batch carries, for the samples at some places of an epoch's list."""
        parts, rows = places // PART, places % PART
        names = {LEAVES: "leaves", LOG_PROBS: "log_probs", GAINS: "gains"}
        return {
            key: np.stack([self._part(number, int(part))[name][row] for part, row in zip(parts, rows, strict=True)])
            for key, name in names.items()
        }

    @cached_property
    def _part(self) -> Any:
        return lru_cache(maxsize=4096)(self._read)

    def _read(self, number: int, part: int) -> dict[str, NDArray[Any]]:
        path = self.path(number, part)
        try:
            with np.load(path) as content:
                return {name: content[name] for name in content.files}
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read ({error}): all ranks must see one run folder. Start 'nestpipe align' again, with --resume."
            ) from None

    def parts(self, num_passes: int) -> Iterator[dict[str, NDArray[Any]]]:
        for number in range(num_passes):
            yield from (self._read(number, part) for part in range(self.num_parts))


def training_loader(run: Run, channels: Channels, *, quiet: bool) -> Loader:
    """The loader of a run on this rank; an aligned run draws the roll-outs that it lacks. Collective."""
    world, config = channels.control.world, run.config
    settings: dict[str, Any] = {
        "seed": config.seed,
        "rank": world.rank,
        "world_size": world.size,
        "inputs": inputs_of(config, run.instructed),
    }
    if not isinstance(config.model, AlignedConfig):
        # A model that trains one event of a history would otherwise never see the others as targets.
        kind = ContextLoader if getattr(config.model, "queries", "all") == "last" else Loader
        return kind(run.instructed, run.split, config.data, **settings)
    loader = RolloutLoader(run.instructed, run.split, config.data, **settings)
    loader.store = RolloutStore(run.folder / FOLDER, loader.num_samples)
    all_ranks_or_none(channels.control, "roll-outs begun", lambda: _begin(run, world))
    num_passes = config.train.epochs
    todo = all_ranks_or_none(channels.control, "roll-outs listed", lambda: loader.store.missing(num_passes))
    # Rank 0 looks: others may see files later.
    ((num_missing,), *_) = channels.control.all_gather_ints([len(todo)], name="roll-outs missing")
    if num_missing:
        _draw_all(run, channels, loader, quiet=quiet or world.rank > 0)
    if world.rank == 0:
        report = summary(loader.store, num_passes, policy=config.model)
        Console(stderr=True, highlight=False, markup=False, quiet=quiet).print(report, soft_wrap=True)
    return loader


def _begin(run: Run, world: World) -> None:
    """Rank 0 makes the folder, or empties one that holds the roll-outs of other settings."""
    if world.rank:
        return
    model, folder = run.config.model, run.folder / FOLDER
    if run.origin is None:
        raise ConfigError(f"{run.folder} is an aligned run without a start; use 'nestpipe align RUN'.")
    ranker = Run.open(model.ranker).checkpoint()[1].digest if model.ranker else ""
    identity = {**run.settings, "reference": run.origin.digest, "ranker": ranker, "data": run.sequences.digest}
    path = folder / "identity.json"
    if folder.exists() and (not path.exists() or json.loads(path.read_text()) != identity):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(identity, indent=1).encode())


def _draw_all(run: Run, channels: Channels, loader: RolloutLoader, *, quiet: bool) -> None:
    """All ranks look at the same list; each draws its share of the missing parts."""
    ranks = ChannelRanks(channels.control)
    drawing = Drawing.open(run, channels, loader)
    missing = json.loads(channels.control.broadcast_bytes(json.dumps(_missing(loader, run)).encode(), 0, name="parts"))
    said = time.monotonic()
    for turn, (place, is_own) in enumerate(dealt(len(missing), ranks)):
        drawing.draw(*missing[place], write=is_own)
        if not quiet and time.monotonic() - said > _LINE_S:
            said = time.monotonic()
            done = min((turn + 1) * ranks.size, len(missing))
            print_line(f"align: paths of {done * PART:,} of {len(missing) * PART:,} contexts drawn")
    all_ranks_or_none(channels.control, "roll-outs drawn", lambda: None)


def print_line(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


def _missing(loader: RolloutLoader, run: Run) -> list[tuple[int, int]]:
    return loader.store.missing(run.config.train.epochs)


@dataclass(frozen=True, eq=False)
class Drawing:
    """The reference and the rewards, opened."""

    model: EncDec
    rows: RowReader
    rewards: Rewards
    run: Run
    loader: RolloutLoader

    @staticmethod
    def open(run: Run, channels: Channels, loader: RolloutLoader) -> Drawing:
        """Collective."""
        return Drawing(*open_rewards(run, loader, channels), run, loader)

    @torch.no_grad()
    def draw(self, number: int, part: int, *, write: bool) -> None:
        """One part; its lookups are collective, so a rank without work of its own repeats a part and drops it."""
        samples = self.loader.samples[part * PART : (part + 1) * PART]
        batch, ends = self.loader.context(samples, number)
        request, config = self.model.select(request_of(batch), None), self.run.config.model
        trie: Trie = self.run.semantic_ids  # type: ignore[assignment]
        pool = pools_of(scenario_pools(self.run.scenario_records, self.run.sequences, trie), request)
        decoding = self.model.decoding(read_rows(self.rows, self.model.encode_lookups(request)), request)
        drawn = draw_paths(
            decoding,
            trie,
            num=config.policy.group_size,
            rng=Rng(self.run.config.seed, number),
            samples=samples,
            pool=pool,
            softmax=config.softmax,
        )
        context = RewardContext(
            users=samples.numpy(), ends=ends, scenarios=scenarios_of(request), given=request.sample_features
        )
        logged_leaves = trie.item_nodes[:, -1].index_select(0, trie.positions(last_targets(batch))).unsqueeze(1)
        own = torch.cat([drawn.leaves, logged_leaves], 1)
        logs = log_probs_of(self.model, self.rows, request, trie, own)
        rewards = self.rewards.of(context, Rollout(drawn.leaves, logs[:, :-1]))
        logged = self.rewards.of(context, Rollout(logged_leaves, logs[:, -1:]), group=drawn.leaves).squeeze(1)
        gains = Policy(config.policy).gains(rewards, logged)
        if write:
            self.loader.store.write(
                number,
                part,
                leaves=drawn.leaves,
                log_probs=drawn.log_probs,
                rewards=rewards,
                logged=logged,
                gains=gains,
            )


def open_rewards(run: Run, loader: ContextLoader, channels: Channels) -> tuple[EncDec, RowReader, Rewards]:
    """The reference of an aligned run, its rows, and the rewards. Collective; raises ConfigError."""
    config, trie = run.config.model, run.semantic_ids
    assert run.origin is not None
    assert trie is not None
    model, rows = reader_of(Run.open(config.start), run.origin.step, channels)
    weights = reward_weights(run.scenario_records, run.sequences, model, has_ranker=bool(config.ranker))
    ranking = _Ranking.open(run, loader, channels) if config.ranker else None
    names = counted_columns(weights)
    columns: dict[str, Tensor | LoggedReward] = {
        name: item_column(run.sequences, name) for name in names if name in run.sequences.item_features
    }
    if logged := [name for name in names if name not in columns]:
        columns |= _fit_logged(run, loader, model, rows, logged)
    return model, rows, Rewards(model, trie, weights, columns=columns, ranking=ranking)


@torch.no_grad()
def _fit_logged(
    run: Run, loader: ContextLoader, model: EncDec, rows: RowReader, names: list[str]
) -> dict[str, LoggedReward]:
    """Fits logged numbers on some contexts, the same on every rank. Collective."""
    trie = cast(Trie, run.semantic_ids)
    events, scenarios, items, logs = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    num_passes = max(1, min(_FIT_PASSES, _FIT_ROWS // loader.num_samples))
    for number in range(num_passes):
        for samples in loader.samples[:_FIT_ROWS].split(PART):
            batch, ends = loader.context(samples, number)
            request = model.select(request_of(batch), None)
            positions = trie.positions(last_targets(batch))
            leaves = trie.item_nodes[:, -1].index_select(0, positions).unsqueeze(1)
            found = log_probs_of(model, rows, request, trie, leaves)
            events.append(torch.from_numpy(run.sequences.offsets[samples.numpy()] + ends))
            items.append(positions)
            scenarios.append(scenarios_of(request))
            logs.append(found.squeeze(1))
    at, which, numbers = (torch.cat(one).numpy() for one in (events, items, scenarios))
    num_scenarios, codes = len(run.scenario_records), torch.cat(logs).double().numpy()
    return {
        name: LoggedColumn.read(run.sequences, run.split, name, num_scenarios).fit(at, which, numbers, codes)
        for name in names
    }


@torch.no_grad()
def log_probs_of(model: EncDec, rows: RowReader, request: Batch, trie: Trie, leaves: Tensor) -> Tensor:
    """Log-probabilities [N, K, L] of leaves [N, K] in the whole catalogue. Collective."""
    decoding = model.decoding(read_rows(rows, model.encode_lookups(request)), request)
    return path_log_probs(decoding, trie, leaves, softmax=model.config.softmax)


class _Ranking:
    """The reward 'ranking': values of a trained run as quantiles among those of logged items."""

    def __init__(self, values: CandidateValues, reference: Tensor):
        self._values, self._reference = values, reference

    @staticmethod
    def open(run: Run, loader: ContextLoader, channels: Channels) -> _Ranking:
        """Collective. The logged items of the first part are the reference, on every rank."""
        ranker = Run.open(run.config.model.ranker)
        if ranker.sequences.digest != run.sequences.digest:
            raise ConfigError(
                f"{ranker.folder} was trained on {ranker.sequences.path}, not on {run.sequences.path}; a ranker must know the "
                "same users and items. Train it on the data of the run."
            )
        _, manifest = ranker.checkpoint()
        model, rows = reader_of(ranker, manifest.step, channels)
        values = CandidateValues(model, rows, ranker.sequences, ranker.split, ranker.config)
        samples = loader.samples[:PART]
        batch, ends = loader.context(samples, 0)
        logged = torch.from_numpy(np.searchsorted(run.sequences.catalogue, last_targets(batch).numpy())).unsqueeze(1)
        return _Ranking(values, values.of(samples.numpy(), ends, logged).flatten().sort().values)

    def __call__(self, context: RewardContext, items: Tensor) -> Tensor:
        return ranking_reward(self._values.of(context.users, context.ends, items), self._reference)


def reader_of(run: Run, step: int, channels: Channels) -> tuple[Any, RowReader]:
    """The model of a checkpoint and its rows, sharded over the ranks. Collective."""
    if channels.control.world.size == 1:
        loaded = run.load_model(step)
        return loaded.model, loaded.rows
    state, _ = all_ranks_or_none(channels.saves, "loaded", lambda: load_state(run, step, channels.on_host()))
    return state.model, state.embedding


def summary(store: RolloutStore, num_passes: int, *, policy: AlignedConfig) -> str:
    """One line about the roll-outs, and a warning where the threshold leaves little to learn."""
    num, drawn, logged, positive, suppressed = 0, 0.0, 0.0, 0, 0
    for part in store.parts(num_passes):
        rewards = part["rewards"]
        above = rewards - rewards.mean(1, keepdims=True) > 1e-6
        num += len(rewards)
        drawn += float(rewards.mean(1).sum())
        logged += float(part["logged"].sum())
        positive += int(above.sum())
        suppressed += int((above & (part["gains"] == 0)).sum())
    share = suppressed / max(positive, 1)
    text = (
        f"align: {num:,} contexts of {policy.policy.group_size} paths, mean reward {drawn / max(num, 1):.4f} "
        f"(logged items {logged / max(num, 1):.4f}), {share:.0%} of the positive advantages suppressed"
    )
    if share > policy.policy.warn_share:
        text += (
            "\nwarning: the logged items are out of reach of the paths, so little is learned beyond the supervised loss. "
            "Train longer on the log first, or use --no-threshold."
        )
    if not positive:
        text += "\nwarning: all paths of a group have equal rewards, so there is nothing to learn; see reward_weights."
    return text
