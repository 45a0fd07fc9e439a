"""Opens a run on all ranks: one shared folder or one URL, and the same configuration, code and data on every rank."""

from __future__ import annotations

import functools
import json
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nestpipe.atomic_files import replace_file
from nestpipe.checkpoint.origin import InitFrom, Origin
from nestpipe.checkpoint.places import RemotePath
from nestpipe.config import Config
from nestpipe.data.remote_files import absolute_path
from nestpipe.data.sequences import Sequences
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.exchange import named_ranks
from nestpipe.distributed.process_group import Channel
from nestpipe.errors import CommError, ConfigError
from nestpipe.generative.text_encoder import installed
from nestpipe.generative.training_instructions import open_store
from nestpipe.models.config import EncDecConfig, ItemFeatureConfig
from nestpipe.pipeline.channels import Channels
from nestpipe.training.run_folder import FREE_KEYS, Run

RUN_FILES = ("run.json", "config.json")  # config.json last: it makes a folder a run
_SHARED_S = 5.0  # a network file system may show a new file this late


def with_absolute_paths(config: Config) -> Config:
    """The configuration with paths that stay valid in another working folder."""
    config = replace(config, data=replace(config.data, path=absolute_path(config.data.path)))
    if not isinstance(config.model, EncDecConfig):
        return config
    given = {name: getattr(config.model, name, "") for name in ("ids", "scenarios", "instructions", "start", "ranker")}
    paths: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in given.items() if path}
    return replace(config, model=replace(config.model, **paths))


def with_log_sizes(config: Config) -> Config:
    """With a scenario file and no number of scenarios: as many as the log names; likewise the width of instructions.

    The text encoder is the best that is installed, so that a run opens with the same one everywhere.
    """
    model = config.model
    if isinstance(model, ItemFeatureConfig) and model.item_features and model.text_encoder == "auto":
        return replace(config, model=replace(model, text_encoder="minilm" if installed() else "words"))
    if not isinstance(model, EncDecConfig):
        return config
    if model.instructions and Path(model.instructions).exists():
        dim = open_store(model.instructions).dim
        model = replace(model, reasoning_dim=model.reasoning_dim or dim)
    if not model.scenarios or model.num_scenarios:
        return replace(config, model=model)
    stored = Sequences.open(config.data.path).event_features.get("scenario")
    num = 0 if stored is None or not len(stored.values) else int(stored.values.max()) + 1
    return replace(config, model=replace(model, num_scenarios=num))


def open_run(config: Config, folder: Path, resume: bool, init_from: InitFrom | None, channels: Channels) -> Run:
    """The run of all ranks. Rank 0 decides whether it exists, which checkpoint it starts from and how many threads it uses."""
    control, leads = channels.control, channels.control.world.rank == 0
    all_ranks_or_none(channels.saves, "run fetched", lambda: _fetch_run(config, folder, resume))
    own = [int(resume and Run.exists(folder)), torch.get_num_threads()]
    exists, num_threads = control.all_gather_ints(own, name="run exists")[0]
    if exists and config.train.checkpoints:
        _share_files(folder, control)  # the folder of another rank may be lost, or never have been written
    if exists:
        return all_ranks_or_none(control, "run opened", lambda: _reopen(config, folder, init_from))
    config = replace(config, train=replace(config.train, num_threads=config.train.num_threads or num_threads))
    origin = all_ranks_or_none(
        channels.saves, "origin found", lambda: init_from.resolve() if init_from and leads else None
    )
    content = json.dumps(asdict(origin) if origin else None).encode()
    shared = json.loads(control.broadcast_bytes(content, 0, name="origin"))
    return all_ranks_or_none(
        control, "run created", lambda: _create(config, folder, Origin.from_json(shared) if shared else None)
    )


def _fetch_run(config: Config, folder: Path, resume: bool) -> None:
    """Restores a lost folder from the run's URL; raises ConfigError if a new run would overwrite another there."""
    if not config.train.checkpoints or Run.exists(folder):
        return
    remote = RemotePath.of(config.train.checkpoints)
    if not (remote / RUN_FILES[-1]).exists():
        return
    if not resume:
        raise ConfigError(
            f"{remote} already holds a run; add --resume to continue it, or give another --train.checkpoints."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in RUN_FILES:
        replace_file(folder / name, (remote / name).read_bytes())


def share_run(run: Run, control: Channel) -> None:
    """Stores what rank 0 has written about the run with its checkpoints, and in the folders of all ranks. Collective."""

    def store() -> None:
        remote = RemotePath.of(run.config.train.checkpoints)
        remote.mkdir()
        for name in RUN_FILES:
            (remote / name).write_last((run.folder / name).read_bytes())

    _share_files(run.folder, control)
    all_ranks_or_none(control, "run stored", lambda: store() if control.world.rank == 0 else None)


def _share_files(folder: Path, control: Channel) -> None:
    """Gives every rank's folder the run files of rank 0. Collective."""
    for name in RUN_FILES:
        content = (folder / name).read_bytes() if control.world.rank == 0 else b""
        shared = control.broadcast_bytes(content, 0, name=name)
        all_ranks_or_none(control, f"{name} shared", functools.partial(_write_if_other, folder / name, shared))


def _write_if_other(path: Path, content: bytes) -> None:
    """Ranks may share a folder: a file that has the content already is left alone."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def _create(config: Config, folder: Path, origin: Origin | None) -> Run:
    run = Run.create(config, folder, origin=origin)
    _ = run.sequences  # opened now, so that a rank without the data fails here
    return run


def agree(run: Run, control: Channel) -> None:
    """Raises CommError on every rank if code, versions, data or configuration differ, naming what differs on which ranks."""
    everyone = control.all_gather_bytes(json.dumps(run.identity()).encode(), name="identity")
    identities: list[dict[str, str]] = [json.loads(data) for data in everyone]
    lines, blamed = [], set()
    for key in {key: None for one in identities for key in one}:
        values = [one.get(key, "missing") for one in identities]
        if len(set(values)) > 1:
            holders = {value: [rank for rank, own in enumerate(values) if own == value] for value in values}
            lines.append(f"{key}: " + "; ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in holders.items()))
            blamed |= {rank for rank, value in enumerate(values) if value != values[0]}
    if lines:
        text = "\n".join(f"  - {line}" for line in lines)
        raise CommError(f"the ranks do not agree on what to train:\n{text}", ranks=tuple(sorted(blamed)))


def check_shared(run: Run, control: Channel) -> None:
    """Raises ConfigError on every rank if one does not see the files that rank 0 has just written."""
    folder, lock = run.folder, run.folder / "lock"
    mark = control.broadcast_bytes(lock.read_bytes() if control.world.rank == 0 else b"", 0, name="mark")

    def wait_for_lock() -> None:
        end = time.monotonic() + _SHARED_S
        while not lock.exists() or lock.read_bytes() != mark:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{folder.resolve()} on {socket.gethostname()} is not the folder that rank 0 writes to. "
                    "All ranks must see one run folder: set --run to a path on a shared file system, or save to a store: "
                    "--train.checkpoints s3://bucket/run."
                )
            time.sleep(0.1)

    all_ranks_or_none(control, "folder shared", wait_for_lock)


def _reopen(config: Config, folder: Path, init_from: InitFrom | None) -> Run:
    """The run in a folder with its new limits; raises ConfigError if a setting differs that affects the results."""
    saved = Run.open(folder, data_path=config.data.path)
    saved.check_same_data()
    if isinstance(saved.config.model, EncDecConfig) and isinstance(
        config.model, EncDecConfig
    ):  # the ids may have moved
        moved = replace(saved.config.model, ids=config.model.ids)
        moved = replace(moved, scenarios=config.model.scenarios, instructions=config.model.instructions)
        saved = replace(saved, config=replace(saved.config, model=moved))
    if init_from and (saved.origin is None or saved.origin.source != str(init_from.absolute())):
        history = f"was initialised from {saved.origin.source}" if saved.origin else "started without --init-from"
        raise ConfigError(
            f"{folder} {history}, not from {init_from.source}; continue without --init-from, or give another --run."
        )
    threads = config.train.num_threads or saved.config.train.num_threads
    run = Run(folder, replace(config, train=replace(config.train, num_threads=threads)), saved.origin)
    before, after = saved.settings, run.settings
    if changed := [key for key in before | after if before.get(key) != after.get(key)]:
        raise ConfigError(
            f"{folder} was started with another configuration; continuing would mix two runs:\n"
            + "\n".join(f"  - {key}: {before.get(key)} -> {after.get(key)}" for key in changed)
            + f"\nOnly these may change: {', '.join(FREE_KEYS)}."
        )
    return run
