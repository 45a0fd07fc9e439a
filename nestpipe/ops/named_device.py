"""A device by the name that a flag gives it; one that is not there is refused."""

from __future__ import annotations

import torch

from nestpipe.errors import ConfigError


def named_device(name: str, *, flag: str) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU. Raises ConfigError for a device that is not there."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if found is None else found.type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{flag} is {name!r}, which this torch does not know: {first}") from error
    if device.type != "cpu" and not _is_available(device):
        raise ConfigError(
            f"{flag} is {name!r}, but this machine has no such device ('nestpipe doctor' shows what it has); "
            f"use {flag} auto or cpu."
        )
    return device if device.type != "cpu" else torch.device("cpu")


def _is_available(device: torch.device) -> bool:
    try:
        return bool(torch.get_device_module(device).is_available())
    except RuntimeError:  # no module: torch was built without it
        return False
