"""The protocol of an evaluation: what it says, and what it refuses to put side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from nestpipe.data.ingest import BuildOptions, write_sequences
from nestpipe.data.schema import Schema
from nestpipe.errors import DataError
from nestpipe.eval.protocol import Protocol, differences, protocol_of, require_same
from tests.small_runs import small_config, small_log


def test_protocol_says_how_the_figure_was_measured(tmp_path: Path) -> None:
    sequences = small_log(tmp_path / "log")
    config = small_config(sequences.path)
    found = protocol_of(sequences, config, "test")
    assert str(found) == (
        "split last event, all before trained on; ties file; seen all; candidates all 30 items; "
        "history all events before the target; targets test, one per user, all users"
    )
    assert Protocol.from_json(None) is None

    held = replace(config, data=replace(config.data, validation=True))
    assert differences([found, protocol_of(sequences, held, "test")], "ab") == [
        "split: last event, all before trained on in a, last event, the event before held out for validation in b"
    ]
    # A longer history is a model's own choice, unless it decides which items are removed.
    longer = replace(config, data=replace(config.data, max_len=9))
    assert not differences([found, protocol_of(sequences, longer, "test")], "ab")
    inputs = [replace(one, eval=replace(one.eval, seen="input")) for one in (config, longer)]
    (line,) = differences([protocol_of(sequences, one, "test") for one in inputs], "ab")
    assert "at most 8 events" in line
    assert "at most 9 events" in line


def test_every_difference_is_named() -> None:
    a = Protocol(split="last", ties="file", seen="all", candidates="3", history="all", targets="test")
    for name in ("split", "ties", "seen", "candidates", "history", "targets"):
        with pytest.raises(DataError, match=f"  - {name}: .* in a, other in b"):
            require_same([a, replace(a, **{name: "other"})], "ab")
    with pytest.raises(DataError, match="the protocol of b is not recorded"):
        require_same([a, None], "ab")
    require_same([a, a], "ab")
    require_same([None, None], "ab")


def test_folders_of_two_tie_rules_have_two_protocols(tmp_path: Path) -> None:
    log = pl.DataFrame({"user": [1] * 40, "item": list(range(40)), "time": [7] * 40})
    folders = [
        write_sequences(tmp_path / ties, schema=Schema(), log=log, options=BuildOptions(ties=ties))
        for ties in ("file", "meta")
    ]
    found = [protocol_of(one, small_config(one.path), "test") for one in folders]
    assert differences(found, ["runs/a", "runs/b"]) == ["ties: file in runs/a, meta in runs/b"]
