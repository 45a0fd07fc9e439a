"""What others build on does not change by accident: public names, commands, settings, formats, calls and metrics."""

from __future__ import annotations

import json
from typing import Any

from tests.public_snapshot import SNAPSHOT, public

HOW = (
    "If this is wanted: say so in docs/project/stability.md (a removed or renamed entry needs a new version number, a changed file "
    "a new format number), then run 'python -m tests.public_snapshot' and commit tests/snapshots/public.json."
)


def flat(content: Any, prefix: str = "") -> set[str]:
    """Every leaf with the way to it."""
    if isinstance(content, dict):
        return set().union(*(flat(one, f"{prefix}{key} / ") for key, one in content.items())) | {prefix}
    if isinstance(content, list):
        return {f"{prefix}{one}" for one in content} | {prefix}
    return {f"{prefix}{content}"}


def test_public_things_are_those_of_the_snapshot() -> None:
    now, before = flat(json.loads(json.dumps(public()))), flat(json.loads(SNAPSHOT.read_text()))
    gone, new = sorted(before - now), sorted(now - before)
    assert not gone, f"others may use what is gone: {gone}; new: {new}. {HOW}"
    assert not new, f"not in the snapshot: {new}. {HOW}"


def test_a_removed_a_renamed_and_a_new_entry_are_seen() -> None:
    before = {"names": {"train": ["config", "folder="]}, "recipes": ["tiny"]}
    after = {"names": {"train": ["config", "path="]}, "recipes": ["tiny", "large"]}
    assert flat(before) - flat(after) == {"names / train / folder="}
    assert flat(after) - flat(before) == {"names / train / path=", "recipes / large"}
