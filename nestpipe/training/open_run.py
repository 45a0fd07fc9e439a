"""How the ranks of a run find together: one folder, one configuration, the same code and data on all of them."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from nestpipe.checkpoint.origin import InitFrom, Origin
from nestpipe.checkpoint.remote_copy import Mirror
from nestpipe.config import Config
from nestpipe.distributed.agreement import all_ranks_or_none
from nestpipe.distributed.exchange import named_ranks
from nestpipe.distributed.process_group import Channel
from nestpipe.errors import CommError, ConfigError
from nestpipe.models.config import EncDecConfig
from nestpipe.pipeline.channels import Channels
from nestpipe.training.run_folder import FREE_KEYS, Run

_SHARED_S = 5.0  # a network file system may show a new file this late


def open_run(config: Config, folder: Path, resume: bool, init_from: InitFrom | None, channels: Channels) -> Run:
    """The run of all ranks; rank 0 sees whether there is one already, what it starts from, how many threads to use."""
    control, leads = channels.control, channels.control.world.rank == 0
    all_ranks_or_none(channels.saves, "mirror", lambda: _look_at_mirror(config, folder, resume) if leads else None)
    seen = [int(resume and Run.exists(folder)), torch.get_num_threads()]
    exists, num_threads = control.all_gather_ints(seen, name="run exists")[0]
    if exists:
        return all_ranks_or_none(control, "run opened", lambda: _reopen(config, folder, init_from))
    config = replace(config, train=replace(config.train, num_threads=config.train.num_threads or num_threads))
    found = all_ranks_or_none(
        channels.saves, "origin found", lambda: init_from.resolve() if init_from and leads else None
    )
    said = json.loads(control.broadcast_bytes(json.dumps(asdict(found) if found else None).encode(), 0, name="origin"))
    return all_ranks_or_none(
        control, "run created", lambda: _create(config, folder, Origin.from_json(said) if said else None)
    )


def _look_at_mirror(config: Config, folder: Path, resume: bool) -> None:
    """A folder that was lost comes back from the mirror; raises ConfigError if a new run would overwrite another there."""
    if not config.train.mirror:
        return
    mirror = Mirror(config.train.mirror)
    if Run.exists(folder):
        return
    if resume:
        mirror.restore(folder)
    elif mirror.holds_run():
        raise ConfigError(
            f"{mirror.url} already holds a run; add --resume to go on with it, or name another --train.mirror."
        )


def _create(config: Config, folder: Path, origin: Origin | None) -> Run:
    run = Run.create(config, folder, origin=origin)
    _ = run.sequences  # opened now, so that a rank without the data is found
    return run


def agree(run: Run, control: Channel) -> None:
    """Raises CommError on every rank, naming what differs and where, unless all run the same on the same data."""
    everyone = control.all_gather_bytes(json.dumps(run.identity()).encode(), name="identity")
    found: list[dict[str, str]] = [json.loads(data) for data in everyone]
    lines, blamed = [], set()
    for key in {key: None for one in found for key in one}:
        values = [one.get(key, "missing") for one in found]
        if len(set(values)) > 1:
            holders = {value: [rank for rank, own in enumerate(values) if own == value] for value in values}
            lines.append(f"{key}: " + "; ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in holders.items()))
            blamed |= {rank for rank, value in enumerate(values) if value != values[0]}
    if lines:
        text = "\n".join(f"  - {line}" for line in lines)
        raise CommError(f"the ranks do not run the same training:\n{text}", ranks=tuple(sorted(blamed)))


def check_shared(folder: Path, control: Channel) -> None:
    """Raises on every rank if one does not see the files that rank 0 has just written."""
    lock = folder / "lock"
    mark = control.broadcast_bytes(lock.read_bytes() if control.world.rank == 0 else b"", 0, name="mark")

    def look() -> None:
        end = time.monotonic() + _SHARED_S
        while not lock.exists() or lock.read_bytes() != mark:
            if time.monotonic() > end:
                raise ConfigError(
                    f"{folder.resolve()} on {socket.gethostname()} is not the folder that rank 0 writes to. "
                    "All ranks must see one run folder: give --run a path on a shared file system."
                )
            time.sleep(0.1)

    all_ranks_or_none(control, "folder shared", look)


def _reopen(config: Config, folder: Path, init_from: InitFrom | None) -> Run:
    """The run in a folder with its new limits; raises ConfigError if a setting differs that decides the bits."""
    saved = Run.open(folder, data_path=config.data.path)
    if isinstance(saved.config.model, EncDecConfig) and isinstance(
        config.model, EncDecConfig
    ):  # the ids may have moved
        moved = replace(saved.config.model, ids=config.model.ids)
        saved = replace(saved, config=replace(saved.config, model=moved))
    if init_from and (saved.origin is None or saved.origin.source != str(init_from.absolute())):
        history = f"was initialised from {saved.origin.source}" if saved.origin else "started without --init-from"
        raise ConfigError(f"{folder} {history}, not from {init_from.source}; go on without it, or name another --run.")
    threads = config.train.num_threads or saved.config.train.num_threads
    run = Run(folder, replace(config, train=replace(config.train, num_threads=threads)), saved.origin)
    before, after = saved.settings, run.settings
    if changed := [key for key in before | after if before.get(key) != after.get(key)]:
        raise ConfigError(
            f"{folder} was started with another configuration; going on would mix two runs:\n"
            + "\n".join(f"  - {key}: {before.get(key)} -> {after.get(key)}" for key in changed)
            + f"\nOnly these may change: {', '.join(FREE_KEYS)}."
        )
    return run
