"""The gauge prints what a step and a request enter; it has no limit, a reader judges."""

from tests import code_gauge


def test_what_a_step_and_a_request_enter(tmp_path, capsys):
    found = code_gauge.measure(tmp_path)
    with capsys.disabled():
        print("\n" + code_gauge.table(found))
    names = {title: {str(path.relative_to(code_gauge.ROOT)) for path in files} for title, files in found.items()}
    assert {"pipeline/sequential.py", "embedding/window.py"} <= names["one sequential step"]
    assert {"pipeline/runner.py", "embedding/window.py"} <= names["two nested steps"]
    assert {"serve/api.py", "serve/engine.py"} <= names["one ranking request"]
    assert not any(name.startswith(("training/", "pipeline/")) for name in names["one ranking request"])
