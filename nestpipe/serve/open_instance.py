"""Opens a run of any kind as an instance: its engine, its HTTP handlers, and how other models of its kind are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nestpipe.errors import ConfigError
from nestpipe.ops.named_device import named_device
from nestpipe.rules.rule_book import RuleBook
from nestpipe.serve.api import Instance
from nestpipe.serve.generation_api import GenerativeInstance
from nestpipe.serve.generation_engine import GenerativeVersion
from nestpipe.serve.known_items import CandidateSearch
from nestpipe.serve.live_attributes import LiveSource
from nestpipe.serve.model_versions import Load, VersionFile, VersionRecord, load_version, open_version
from nestpipe.serve.next_item_api import NextItemInstance
from nestpipe.serve.next_item_model import NextItemModel, open_next_item
from nestpipe.serve.open_service import (
    generative_version,
    kind_of,
    open_engine,
    open_generator,
    open_next_item_engine,
    open_pointwise_engine,
    open_search,
)
from nestpipe.serve.pointwise_api import PointwiseInstance
from nestpipe.serve.pointwise_model import PointwiseModel, open_pointwise
from nestpipe.serve.prefill import ServedModel
from nestpipe.serve.recommending import RecommendingInstance
from nestpipe.serve.serve_flags import ServeArguments
from nestpipe.serve.service_folder import EVENTS, kept_secret
from nestpipe.serve.stored_prefixes import open_stored
from nestpipe.serve.versioned_worker import VersionedWorker
from nestpipe.training.run_folder import Run

_SAMPLE = 8  # events, or items, of a self-test


class OpenedInstance(NamedTuple):
    """An instance that has loaded its models, before its engine is started."""

    engine: VersionedWorker[Any]
    instance: RecommendingInstance
    load: Load
    file: VersionFile


def open_instance(run: Run, arguments: ServeArguments, *, name: str) -> OpenedInstance:
    """The instance of a run, with the models that its file of versions and the command line name. Raises NestPipeError."""
    kind = kind_of(run)
    check_flags(run, arguments)
    open_kind = {
        "ranker": _open_ranker,
        "pointwise": _open_pointwise,
        "next_item": _open_next_item,
        "generative": _open_generative,
    }[kind]
    engine, load, make = open_kind(run, arguments)
    other = str(arguments.compare) if arguments.compare else None
    file = VersionFile(arguments.notes, first=VersionRecord(compared=other, share=arguments.share if other else 0.0))
    file.follow(engine, load)
    instance = make(name)
    instance.rules = RuleBook.open(
        LiveSource(lambda: engine.histories.sequences, engine.histories.living), arguments.rules
    )
    return OpenedInstance(engine, instance, load, file)


def check_flags(run: Run, arguments: ServeArguments) -> None:
    """Raises ConfigError for flags that are for other kinds of runs, or a device that is not there."""
    kind = kind_of(run)
    if kind != "ranker" and arguments.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device is {arguments.device!r}, but {run.folder} has no histories with candidates to rank, and only such runs "
            "are served on a device; leave it out."
        )
    named_device(arguments.device, flag="--device")
    if kind in ("ranker", "pointwise"):
        return
    if arguments.retrieval is not None:
        raise ConfigError(f"{run.folder} finds items itself, and --retrieval is for runs that rank; leave it out.")
    if arguments.label:
        raise ConfigError(f"{run.folder} has no labels to order by, and --label is for runs that rank; leave it out.")


def ranking_device(arguments: ServeArguments) -> torch.device:
    """Where a ranker is served. Raises ConfigError for a device that is not there or that the device tier does not fit."""
    device = named_device(arguments.device, flag="--device")
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        if (wanted := arguments.engine.device_bytes) > free:
            raise ConfigError(
                f"--engine.device-bytes is {wanted:,}, but {device} has {free:,} of {total:,} bytes free; give it less."
            )
    return device


_Opened = tuple[VersionedWorker[Any], Load, Callable[[str], RecommendingInstance]]


def _open_ranker(run: Run, arguments: ServeArguments) -> _Opened:
    folder, label = run.folder / "serve", arguments.label
    is_used = arguments.trigger.mode in ("on", "always")
    stored = open_stored(folder, folder=arguments.prefix_store, cap=arguments.prefix_store_bytes if is_used else 0)
    device = ranking_device(arguments)
    engine = open_engine(
        run,
        engine=arguments.engine,
        trigger=arguments.trigger,
        step=arguments.step,
        label=label,
        state=arguments.state,
        stored=stored,
        device=device,
    )
    search, secret = _search(run, arguments), kept_secret(folder / "secret").encode()

    def load(other: Path, step: int | None) -> ServedModel:
        return load_version(
            engine.histories,
            other,
            step=step,
            label=label,
            tables=folder,
            chunk=arguments.engine.chunk,
            store=stored.store if stored else None,
            device=device,
        )

    def make(name: str) -> Instance:
        return Instance(
            engine, name=name, secret=secret, limits=arguments.limits, search=search, stages=arguments.stages
        )

    return engine, load, make


def _open_pointwise(run: Run, arguments: ServeArguments) -> _Opened:
    folder, label = run.folder / "serve", arguments.label
    engine = open_pointwise_engine(
        run, folder / EVENTS, config=arguments.engine, step=arguments.step, label=label, state=arguments.state
    )
    search = _search(run, arguments)

    def load(other: Path, step: int | None) -> PointwiseModel:
        own = engine.histories
        served = open_pointwise(open_version(other, own), step=step, label=label, folder=folder)
        items = own.sequences.catalogue[:_SAMPLE].tolist()
        (scores,) = served.scores([served.prepare(own.sample(_SAMPLE), items, own.sequences)])
        _require_finite(served.name, scores.numpy())
        return served

    def make(name: str) -> PointwiseInstance:
        budget_ms, limits = arguments.trigger.budget_ms, arguments.limits
        return PointwiseInstance(
            engine, name=name, budget_ms=budget_ms, limits=limits, search=search, stages=arguments.stages
        )

    return engine, load, make


def _open_next_item(run: Run, arguments: ServeArguments) -> _Opened:
    folder = run.folder / "serve"
    engine = open_next_item_engine(
        run, folder / EVENTS, config=arguments.engine, step=arguments.step, state=arguments.state
    )

    def load(other: Path, step: int | None) -> NextItemModel:
        served = open_next_item(open_version(other, engine.histories), step=step, folder=folder)
        events = engine.histories.sample(min(_SAMPLE, served.max_len))
        last = 0 if events.times is None else int(events.times[-1] // 1000)
        scores = served.scores([events], served.known.items[:_SAMPLE].tolist(), query_time=last)
        _require_finite(served.name, scores.numpy())
        engine.follow(served)
        return served

    def make(name: str) -> NextItemInstance:
        return NextItemInstance(engine, name=name, budget_ms=arguments.trigger.budget_ms, limits=arguments.limits)

    return engine, load, make


def _open_generative(run: Run, arguments: ServeArguments) -> _Opened:
    folder = run.folder / "serve"
    generator = open_generator(
        run,
        folder / EVENTS,
        config=arguments.engine,
        step=arguments.step,
        state=arguments.state,
        request_instructions=arguments.request_instructions,
    )

    def load(other: Path, step: int | None) -> GenerativeVersion:
        own = generator.versions.main.served.model.config
        histories = generator.histories
        new = generative_version(
            open_version(other, histories),
            histories,
            folder,
            step=step,
            request_instructions=arguments.request_instructions,
        )
        config = new.served.model.config
        if (config.num_scenarios, config.beam) != (own.num_scenarios, own.beam):
            raise ConfigError(
                f"{other} has {config.num_scenarios} scenarios and a beam of {config.beam}, but this instance answers "
                f"requests for {own.num_scenarios} and {own.beam}. Start another instance for it."
            )
        return new

    def make(name: str) -> GenerativeInstance:
        return GenerativeInstance(generator, name=name, budget_ms=arguments.trigger.budget_ms, limits=arguments.limits)

    return generator, load, make


def _search(run: Run, arguments: ServeArguments) -> CandidateSearch | None:
    """Retrieval by another run, if one is named."""
    return open_search(arguments.retrieval, run) if arguments.retrieval else None


def _require_finite(name: str, scores: Any) -> None:
    if not np.isfinite(scores).all():
        raise ConfigError(f"{name} gives scores that are not finite: it has diverged. Name an earlier step.")
