import json
from dataclasses import replace

import pytest

from nestpipe.config import Config, keys
from nestpipe.errors import ConfigError
from nestpipe.pipeline.config import PipelineConfig
from nestpipe.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid_and_survive_json(name):
    config = RECIPES[name]()
    config.validate()
    assert Config.from_json(config.to_json()) == config
    assert RECIPES[name].__doc__


def test_all_problems_are_reported_at_once():
    config = RECIPES["tiny"]()
    config = replace(
        config,
        data=replace(config.data, max_len=0),
        model=replace(config.model, dropout=1.0, num_heads=5),
        embedding=replace(config.embedding, lr=-1.0),
        train=replace(config.train, epochs=0, metric="auc"),
    )
    with pytest.raises(ConfigError) as error:
        config.validate()
    text = str(error.value)
    for part in (
        "data.max_len is 0",
        "model.dropout is 1.0",
        "model.num_heads 5 does not divide dim 64",
        "embedding.lr is -1.0",
        "nothing would end the run",
        "train.metric is 'auc'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"step": 5}}, "unknown config key 'train.step'; did you mean 'train.steps'?"),
        ({"trian": {}}, "unknown config key 'trian'; did you mean 'train'?"),
        ({"train": {"steps": "many"}}, "config key 'train.steps' has the value 'many'; expected int"),
        ({"train": {"steps": True}}, "config key 'train.steps' has the value True; expected int"),
        ({"loss": {"kind": "hinge"}}, "config key 'loss.kind' has the value 'hinge'"),
        (
            {"model": {"kind": "bert"}},
            "unknown model 'bert'; there are: sasrec, hstu, fuxi, ranking, dcn, encdec, aligned, and package.module:Class",
        ),
        ({"data": 3}, "'data' must be an object, got 3"),
        ({"seed": -1}, "seed is -1"),
        (
            {"pipeline": {"advanced": {"chunks": "hot"}}},
            "config key 'pipeline.advanced.chunks' has the value 'hot'; expected int or one of shared",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_reason(tmp_path, change, message):
    content = json.loads(RECIPES["tiny"]().to_json())
    for name, value in change.items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        Config.load(tmp_path / "config.json")
    assert message in str(error.value)


def test_a_whole_number_is_a_legal_float():
    content = json.loads(RECIPES["tiny"]().to_json())
    content["dense"]["lr"] = 1
    assert Config.from_json(json.dumps(content)).dense.lr == 1.0


@pytest.mark.parametrize(("split", "chunks", "expected"), [(True, 1, "shared"), (False, 4, 4), (False, 1, 1)])
def test_split_of_an_older_run_is_a_kind_of_chunks(split, chunks, expected):
    content = json.loads(RECIPES["tiny"]().to_json())
    content["pipeline"] |= content["pipeline"].pop("advanced") | {"mode": "nested", "split": split, "chunks": chunks}
    assert Config.from_json(json.dumps(content)).pipeline.advanced.chunks == expected


def test_keys_are_dotted():
    assert {"seed", "data.max_len", "model.num_blocks", "eval.ks"} <= set(keys(RECIPES["tiny"]()))


def test_every_setting_is_explained():
    import ast
    from pathlib import Path

    import nestpipe

    package = Path(nestpipe.__file__).parent
    for file in (
        "data/config.py",
        "embedding/config.py",
        "models/config.py",
        "training/config.py",
        "eval/retrieval_eval.py",
    ):
        for node in ast.walk(ast.parse((package / file).read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if isinstance(field, ast.AnnAssign):
                        assert isinstance(after, ast.Expr), (
                            f"{file}: {node.name}.{ast.unparse(field.target)} has no docstring"
                        )


def test_older_files_are_read_where_settings_have_moved():
    content = json.loads(Config().to_json())
    advanced = content["pipeline"].pop("advanced")
    content["pipeline"] |= advanced | {
        "depth": 2,
        "ramp": 0.5,
        "cluster": False,
        "tune": False,
        "adapt": 0,
        "follow": "",
    }
    found = Config.from_json(json.dumps(content))
    assert found.pipeline == PipelineConfig().changed(depth=2, ramp=0.5)
    content = json.loads(found.to_json())
    assert Config.from_json(json.dumps(content)) == found
    content["pipeline"]["cluster"] = True
    with pytest.raises(ConfigError, match=r"pipeline\.cluster was in use"):
        Config.from_json(json.dumps(content))
