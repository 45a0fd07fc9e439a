"""Cost of a sample by its length, fitted to steps of long and of short samples: what `nestpipe tune balance` prints."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from nestpipe.config import Config
from nestpipe.data.load_balance import Ints, SampleCost, fit
from nestpipe.data.loader import Loader
from nestpipe.data.remote_files import absolute_path
from nestpipe.distributed.process_group import World
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import inputs_of
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.sequential import step
from nestpipe.pipeline.stages import Rates
from nestpipe.training.process import exact_arithmetic, keep_freed_memory
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import new_state


@dataclass(frozen=True, slots=True)
class Fitted:
    """The coefficients in microseconds, the constant of a step in seconds, and how far steps are from them."""

    cost: SampleCost
    constant_s: float
    worst_error: float  # |said - taken| / taken


def report(config: Config, *, num_events: int, as_json: bool) -> None:
    """Measures on one rank and prints the coefficients, and the flags that use them."""
    fitted = tuned(config, num_events=num_events)
    cost = fitted.cost
    flags = f"--data.balance --data.cost-linear {cost.linear:.4g} --data.cost-square {cost.square:.4g}"
    if as_json:
        content = {"linear_us": cost.linear, "square_us": cost.square, "constant_s": fitted.constant_s}
        print(json.dumps({**content, "worst_error": fitted.worst_error, "flags": flags}))
        return
    print(
        f"a sample of L events takes {cost.linear:.4g}·L + {cost.square:.4g}·L² microseconds, and a step "
        f"{1e3 * fitted.constant_s:.1f} ms more. Largest error of a measured step: {fitted.worst_error:.0%}.\n{flags}\n"
        "The run's configuration keeps these values."
    )


def tuned(config: Config, *, num_events: int, num_steps: int = 3) -> Fitted:
    """Fits the cost to processor time of whole steps on one rank. Samples of a step are of similar length."""
    config.validate()
    keep_freed_memory()
    config = replace(config, data=replace(config.data, path=absolute_path(config.data.path)))
    run = Run(Path(), config)
    loader = Loader(run.sequences, run.split, config.data, seed=config.seed, inputs=inputs_of(config, run.sequences))
    chosen = _choose(loader.samples, loader.lengths(), num_events)
    with exact_arithmetic(config.train.num_threads or torch.get_num_threads()):
        state = new_state(run, Channels.of(World.single()))
        times: list[list[float]] = [[] for _ in chosen]
        for _ in range(num_steps + 1):  # one after the other, so that a busy minute does not meet one length alone
            for taken, samples in zip(times, chosen, strict=True):
                batch = loader.batch_of(samples, Cursor(0, 0))
                start = time.process_time()
                step(state, replace(batch, groups=torch.zeros_like(samples)), Rates(dense=1e-9, rows=1e-9))
                taken.append(time.process_time() - start)
    lengths: list[Ints] = [loader.lengths(samples).numpy() for samples in chosen]
    seconds = np.array([median(taken[1:]) for taken in times])  # the first step of each grows tables and buffers
    cost, constant = fit(lengths, seconds)
    said = np.array([cost.of(one).sum() * 1e-6 + constant for one in lengths])
    return Fitted(cost, constant, float((np.abs(said - seconds) / seconds).max()))


def _choose(samples: Tensor, lengths: Tensor, num_events: int) -> list[Tensor]:
    """Samples of about so many events, and of half as many, near five quantiles of the lengths."""
    order = lengths.argsort(stable=True)
    chosen = []
    for quantile in (0.1, 0.4, 0.7, 0.9, 1.0):
        for events in (num_events // 2, num_events):
            middle = round(quantile * (len(order) - 1))
            count = max(1, min(events // max(int(lengths[order[middle]]), 1), len(order)))
            first = min(max(middle - count // 2, 0), len(order) - count)
            chosen.append(samples[order[first : first + count]])
    return chosen
