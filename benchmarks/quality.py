"""Shared by quality benchmarks: comparable runs, recorded in the result file and not repeated."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import measure

from nestpipe.config import Config

STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 %, by the number of seeds
Record = dict[str, Any]
# Keys of old records, and their names today. Records are never edited.
_STORAGE = {"num_buckets", "tier", "files_folder", "buffer_bytes"}
# Settings that old records of a model lack, and what they meant.
_ADDED = {"scenarios": "", "instructions": "", "igr_texts": True, "past_scenarios": False, "tied": False}
RENAMED = {"q2i_spread": "q2i_variance", "q2i_apart": "q2i_orthogonality"}


def done(name: str, settings: Mapping[str, Any]) -> list[Record]:
    """The records of a result file with these settings; settings that a record lacks have their defaults."""
    path = measure.RESULTS / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    wanted = _compared(settings)
    alike = [one for one in map(json.loads, lines) if ("config" in one["settings"]) == ("config" in settings)]
    return [one for one in alike if _compared(_today(one["settings"], settings)) == wanted]


def settings_of(config: Config, model: str) -> dict[str, object]:
    """The settings that make two runs comparable: all but the seed and paths."""
    content = json.loads(config.to_json())
    content.pop("seed")
    content["data"].pop("path")
    return {"model": model, "config": content}


def _renamed(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        RENAMED.get(key, key): _renamed(value) if isinstance(value, dict) else value for key, value in content.items()
    }


def _today(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a record as they would be written today: without settings that are gone, with the defaults of later ones."""
    settings = _renamed(settings)
    if isinstance(model := settings.get("model"), dict):
        added = {key: value for key, value in wanted["model"].items() if key in _ADDED and key not in model}
        return {**settings, "model": {**model, **added}} if added.items() <= _ADDED.items() else settings
    if "config" not in settings or "config" not in wanted:
        return settings
    config = dict(settings["config"])
    if "advanced" not in config["pipeline"]:
        kept = {"sync_steps": config["pipeline"].get("sync_steps", 0)}
        config["pipeline"] = {"staleness": config["pipeline"].get("staleness", 0), "advanced": kept}
    known = _with_keys_of(wanted["config"], config)
    today = json.loads(Config.from_json(json.dumps(known)).to_json())
    return {**settings, "config": _with_keys_of(wanted["config"], today)}


def _with_keys_of(wanted: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _with_keys_of(wanted[key], value) if isinstance(value, dict) and isinstance(wanted[key], dict) else value
        for key, value in content.items()
        if key in wanted
    }


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that change no bit of a result: all of the pipeline but staleness, where rows are stored."""
    if "config" not in settings:
        return dict(settings)
    config = {section: dict(one) if isinstance(one, dict) else one for section, one in settings["config"].items()}
    pipeline = config["pipeline"]
    config["pipeline"] = {"staleness": pipeline["staleness"], "sync_steps": pipeline["advanced"]["sync_steps"]}
    config["embedding"] = {key: value for key, value in config["embedding"].items() if key not in _STORAGE}
    return {**settings, "config": config}


def collect(
    name: str,
    model: str,
    seeds: Sequence[int],
    settings: Mapping[str, object],
    run: Callable[[int], Mapping[str, object]],
) -> list[Record]:
    """One record per seed: from the file, or computed and appended."""
    found = {one["seed"]: one for one in done(name, settings)}
    for seed in seeds:
        if seed not in found:
            line = measure.record(seed=seed, figures=run(seed), settings=settings)
            measure.append(name, line)
            found[seed] = line
            print(f"{model}, seed {seed}: {json.dumps(line['figures'])}", flush=True)
    return [found[seed] for seed in seeds]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and half the width of its 95 % interval."""
    if len(values) < 2:
        return values[0], float("nan")
    return statistics.mean(values), STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; of one seed its value."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"
