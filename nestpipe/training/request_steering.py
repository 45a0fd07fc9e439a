"""What steers `nestpipe recommend` with a generative run: a scenario, a trigger item and an instruction text, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nestpipe.errors import ConfigError, DataError
from nestpipe.generative.instruction_encoder import instruction_encoder
from nestpipe.generative.scenarios import scenario_numbers
from nestpipe.generative.semantic_ids import Registry
from nestpipe.generative.training_instructions import follows_instructions, untrained_message
from nestpipe.jagged import Batch, Jagged
from nestpipe.models.config import EncDecConfig
from nestpipe.models.instruction import present_rows
from nestpipe.training.run_folder import Run


def steering_of(run: Run, *, scenario: str = "", trigger: str = "", instruction: str = "") -> Callable[[Batch], Batch]:
    """A function that adds to requests what steers them, as the service does; raises ConfigError and DataError."""
    model = run.config.model
    if not isinstance(model, EncDecConfig):
        raise ConfigError(
            f"{run.folder} is not a generative run; --scenario, --trigger and --instruction steer those only."
        )
    number = _scenario(run, model, scenario)
    records = {} if run.scenarios is None else {one.name: one for one in run.scenarios}
    record, given = records.get(scenario), _item(run, trigger)
    text = " ".join(instruction.split())
    if text and not follows_instructions(model, run.sequences):
        raise ConfigError(untrained_message(run.folder, run.config))
    vector = instruction_encoder(Registry.load(model.ids).encoder)([text])[0] if text else None
    if vector is not None and len(vector) != model.reasoning_dim:
        raise ConfigError(f"texts have vectors of width {len(vector)}, but {run.folder} reads {model.reasoning_dim}.")

    def steered(batch: Batch) -> Batch:
        if record is not None:
            ends = zip(batch.items.offsets[:-1].tolist(), batch.items.offsets[1:].tolist(), strict=True)
            histories = [batch.items.values[first:last].tolist() for first, last in ends]
            triggers = [record.trigger_of(given, one) for one in histories]
        else:
            triggers = [given] * batch.num_samples
        own = {"trigger": present_rows(triggers)}
        if number is not None:
            own["scenario"] = present_rows([number] * batch.num_samples)
        if vector is not None:
            own["reasoning"] = Jagged.singles(vector.expand(batch.num_samples, -1).contiguous())
        return replace(batch, sample_features={**batch.sample_features, **own})

    return steered


def _scenario(run: Run, model: EncDecConfig, name: str) -> int | None:
    known = scenario_numbers(run.sequences, model.num_scenarios)
    if name and name not in known:
        raise ConfigError(f"there is no scenario {name!r}; {run.folder} has: {', '.join(known) or 'none'}.")
    return known[name] if name else None


def _item(run: Run, trigger: str) -> int | None:
    if not trigger:
        return None
    number = run.sequences.vocabulary("item").number_of(trigger)
    if number is None or number not in run.sequences.catalogue:
        raise DataError(f"{run.sequences.path} has no item {trigger!r}, so it cannot be the trigger.")
    return number
