"""`nestpipe data`: a log in, a description out, damage found."""

from nestpipe.data.sequences import Sequences

LOG = "user,item,time,rating\n1,10,100,3\n1,11,50,5\n2,10,70,x\n2,12,71,4\n"


def test_a_log_is_ingested_described_and_verified(run, tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    out = tmp_path / "out"
    flags = ["--feature", "rating:number:event", "--max-quarantine-share", "0.5"]
    code, shown, _ = run("data", "ingest", tmp_path / "log.csv", *flags, "--out", out)
    assert code == 0
    assert "4 records read = 3 kept + 1 quarantined" in shown
    code, shown, _ = run("data", "inspect", out)
    assert code == 0
    assert "2 users, 3 items, 3 events" in shown
    assert "rating" in shown
    code, shown, _ = run("data", "verify", out)
    assert code == 0
    assert "files are as ingested" in shown
    array = max(out.glob("*.npy"), key=lambda path: path.stat().st_size)
    array.write_bytes(array.read_bytes()[:-1] + b"?")
    code, _, errors = run("data", "verify", out)
    assert code == 2
    assert array.name in errors


def test_a_folder_grows_and_a_file_is_taken_once(run, tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "new.csv").write_text("user;item;time;rating\n1;13;90;3\n3;10;50;5\n")
    flags = ["--feature", "rating:number:event", "--max-quarantine-share", "0.5"]
    assert run("data", "ingest", tmp_path / "log.csv", *flags, "--out", tmp_path / "out")[0] == 0
    code, shown, errors = run("data", "append", tmp_path / "out", "--from", tmp_path / "new.csv", "--delimiter", ";")
    assert code == 0, errors
    assert "6 records read = 5 kept + 1 quarantined" in shown
    assert "3 users, 4 items, 5 events" in shown
    again = ["append", tmp_path / "out", "--from", tmp_path / "new.csv", "--delimiter", ";"]
    code, _, errors = run("data", *again)
    assert code == 2
    assert "new.csv is in" in errors
    code, shown, _ = run("data", *again, "--force")
    assert code == 0
    assert "7 events" in shown


def test_shards_are_merged(run, tmp_path):
    for number in (1, 2):
        (tmp_path / f"log{number}.csv").write_text(LOG)
    log = [str(tmp_path / "log*.csv"), "--feature", "rating:number:event", "--max-quarantine-share", "0.5"]
    for number in (1, 2):
        out = ["--shard", f"{number}/2", "--out", tmp_path / f"shard{number}"]
        code, shown, errors = run("data", "ingest", *log, *out)
        assert code == 0, errors
        assert f"shard {number}/2 of the log" in shown
    code, shown, errors = run("data", "merge", tmp_path / "shard1", tmp_path / "shard2", "--out", tmp_path / "out")
    assert code == 0, errors
    assert "8 records read = 6 kept + 2 quarantined" in shown
    assert run("data", "ingest", *log, "--out", tmp_path / "whole")[0] == 0
    own, whole = (Sequences.open(tmp_path / name) for name in ("out", "whole"))
    assert own.meta == whole.meta
    for text in ("0/2", "3/2", "1", "a/b"):
        code, _, errors = run("data", "ingest", *log, "--shard", text, "--out", tmp_path / "no")
        assert code == 2
        assert "is not of the form I/N" in errors


def test_generated_logs_take_their_sizes_from_flags(run, tmp_path):
    for kind, flags in (("synthetic", []), ("clicks", ["--num-events", "500"])):
        code, shown, errors = run("data", kind, "--num-users", "40", *flags, "--out", tmp_path / kind)
        assert code == 0, errors
        assert "40 users" in shown
        assert run("data", kind, "--num-users", "40", *flags, "--out", tmp_path / kind)[0] == 2, "it exists already"


def test_mistakes_are_one_message(run, tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    out = ["--out", tmp_path / "out"]
    for arguments, message in [
        (["ingest", *out], "no log was given"),
        (["ingest", tmp_path / "none.csv", *out], "none.csv"),
        (["ingest", tmp_path / "log.csv", "--feature", "rating", *out], "is not of the form name:kind:scope"),
        (["synthetic", "--signal", "2", *out], "signal is 2.0"),
        (["inspect", tmp_path / "none"], "there is no sequence folder"),
    ]:
        code, _, errors = run("data", *arguments)
        assert code == 2
        assert message in errors
        assert not (tmp_path / "out").exists()
