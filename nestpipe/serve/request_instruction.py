"""Instructions that come with a request: a text of the caller, embedded like those of the near-line job.

Only an encoder runs here, in a thread of its own; no language model is called on the request path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.generative.instruction_encoder import instruction_encoder
from nestpipe.generative.prompt_builder import Encode
from nestpipe.serve.request_errors import BadRequestError

SWITCHED_OFF = "instructions in requests are switched off here (nestpipe serve --no-request-instructions)."
UNTRAINED = (
    "the run never saw an instruction in training, so one would steer nothing. Write some for its log and train with them: "
    "nestpipe think DATA --for-training --ids IDS --store instructions.sqlite, then "
    "nestpipe train scenarios --data.path DATA --model.ids IDS --instructions instructions.sqlite."
)
_KEPT = 1024  # texts whose vectors are kept


@dataclass(frozen=True, slots=True, eq=False)
class RequestInstruction:
    """A text on one line, and its vector [D]."""

    text: str
    vector: Tensor


class RequestTexts:
    """Turns texts of requests into instructions, or refuses all of them for a reason."""

    def __init__(self, encode: Encode | None, *, refusal: str = ""):
        self._encode, self._refusal = encode, refusal
        self._vector = lru_cache(_KEPT)(self._encoded)

    @staticmethod
    def open(encoder: str, *, dim: int) -> RequestTexts:
        """With the encoder of a run's instructions, of width `dim`; refuses all texts if there is none."""
        try:
            encode = instruction_encoder(encoder)
        except ConfigError as error:
            return RequestTexts(None, refusal=f"texts cannot be embedded here: {error}")
        width = encode(["width"]).shape[1]
        if width != dim:
            return RequestTexts(
                None,
                refusal=f"texts have vectors of width {width} here, but the run reads {dim} (--model.reasoning-dim).",
            )
        return RequestTexts(encode)

    def of(self, text: str) -> RequestInstruction:
        """Raises BadRequestError for a text that cannot be used."""
        if self._encode is None:
            raise BadRequestError(f"field 'instruction': {self._refusal}", code="bad_instruction")
        line = " ".join(text.split())
        if not line or not line.isprintable():
            raise BadRequestError("field 'instruction' has no printable text.", code="bad_instruction")
        return RequestInstruction(line, self._vector(line))

    def _encoded(self, text: str) -> Tensor:
        assert self._encode is not None
        return self._encode([text])[0]
