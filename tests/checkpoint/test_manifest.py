import json

import pytest
import torch

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint import reader as checkpoint_reader
from nestpipe.checkpoint import writer as checkpoint_writer
from nestpipe.checkpoint.writer import SaveContent
from nestpipe.embedding.row_snapshot import TableSection
from nestpipe.errors import CheckpointError
from nestpipe.jagged import Cursor

DENSE = {"w": torch.arange(6.0).reshape(2, 3).T}
TABLE = TableSection(
    range(2), {"ids": torch.tensor([-(2**63), 5])}, {"rows": torch.ones(2, 3), "state.sum": torch.ones(2, 1)}
)


def save(parent, step=5):
    content = SaveContent(DENSE, {"item": [TABLE]}, {"item": 2})
    return checkpoint_writer.save_checkpoint(parent, step, Cursor(1, 2), {"seconds": 1.5}, content)


def part(folder):
    """The only packed file of a checkpoint."""
    (path,) = folder.glob("part-*-0.pack")
    return path


def test_what_is_saved_comes_back(tmp_path):
    manifest, content = checkpoint_reader.load_checkpoint(save(tmp_path))
    assert (manifest.step, manifest.cursor, manifest.progress) == (5, Cursor(1, 2), {"seconds": 1.5})
    assert content.keys() == {"dense", "item"}
    assert torch.equal(content["dense"]["w"], DENSE["w"])
    assert content["item"].keys() == {"ids", "rows", "state.sum"}
    assert all(torch.equal(content["item"][name], one) for name, one in {**TABLE.index, **TABLE.rows}.items())
    assert not list(tmp_path.glob(".tmp*"))


def test_every_flipped_byte_is_found(tmp_path):
    folder = save(tmp_path)
    path = part(folder)
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=r"part-.*-0\.pack is not what was saved"):
            checkpoint_reader.load_checkpoint(folder)
    path.write_bytes(good)
    checkpoint_reader.load_checkpoint(folder)


def test_an_edited_manifest_is_refused(tmp_path):
    folder = save(tmp_path)
    path = folder / "manifest.json"
    good = path.read_text()
    for edited in (
        good.replace('"step": 5', '"step": 6'),
        good.replace("1.5", "2.5"),
        good.replace('.pack", 0, ', '.pack", 1, ', 1),
    ):
        assert edited != good
        path.write_text(edited)
        with pytest.raises(CheckpointError, match=r"manifest\.json does not match its digest"):
            checkpoint_reader.load_checkpoint(folder)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="format None"):
        checkpoint_reader.load_checkpoint(folder)


def test_a_folder_that_lost_its_manifest_is_set_aside_not_deleted(tmp_path):
    folder = save(tmp_path)
    (folder / "manifest.json").unlink()
    checkpoint_reader.load_checkpoint(save(tmp_path))
    (aside,) = tmp_path.glob("damaged-step-000005-*")
    assert part(aside).exists()


def test_other_damage_has_its_own_message(tmp_path):
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(
        CheckpointError, match=r"format 99; this version reads format 4.* Train again, or use the version that wrote it"
    ):
        checkpoint_reader.load_checkpoint(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        checkpoint_reader.load_checkpoint(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    part(folder).unlink()
    with pytest.raises(CheckpointError, match=r"lacks part-.*-0\.pack"):
        checkpoint_reader.load_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="the save did not finish"):
        checkpoint_reader.load_checkpoint(folder)


def test_steps_are_found_and_pruned(tmp_path):
    for step in (5, 10, 15, 20, 1_000_000):
        save(tmp_path, step)
    (tmp_path / "step-000025").mkdir()
    assert checkpoint_folders.complete_steps(tmp_path) == [5, 10, 15, 20, 1_000_000]
    checkpoint_folders.prune_checkpoints(tmp_path, keep_last=2, keep=10)
    assert checkpoint_folders.complete_steps(tmp_path) == [10, 20, 1_000_000]
    assert checkpoint_folders.checkpoint_folder(tmp_path).name == "step-1000000"
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 5; it has \[10, 20, 1000000\]"):
        checkpoint_folders.checkpoint_folder(tmp_path, 5)
    with pytest.raises(CheckpointError, match="has no complete checkpoint; train first"):
        checkpoint_folders.checkpoint_folder(tmp_path / "nowhere")


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / ".tmp-step-000003-1").mkdir(parents=True)
    save(tmp_path)
    checkpoint_folders.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005"]
