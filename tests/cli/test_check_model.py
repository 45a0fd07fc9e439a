"""`nestpipe check-model`: flags of somebody's settings; tests/training checks the contracts."""

from nestpipe.cli import check_model

MODULE = """
from dataclasses import dataclass
import nestpipe

@dataclass
class MeanConfig:
    dim: int = 8
    decay: float = 0.5

@nestpipe.register_backbone(config=MeanConfig)
class Mean:
    pass
"""


def test_settings_of_a_class_that_is_not_frozen_are_flags(tmp_path, monkeypatch):
    (tmp_path / "outside_mean.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = check_model._parse(["outside_mean:Mean", "--model.decay", "0.25"])
    assert (arguments.name, arguments.model.dim, arguments.model.decay) == ("outside_mean:Mean", 8, 0.25)


def test_a_model_of_semantic_ids_is_refused(run):
    code, _, errors = run("check-model", "encdec")
    assert code == 2
    assert "needs a catalogue" in errors
