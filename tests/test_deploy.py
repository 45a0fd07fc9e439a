"""What stands in deploy/ was not run, so it is checked as far as that goes: its form, what its parts call each other, and
that the commands in it are commands of this package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from nestpipe.cli import main

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
TEXT, NUMBER, YES, LIST, MAP = (str,), (int,), (bool,), (list,), (dict,)

# The part of Kubernetes' schema that the manifests use: type of each field, '!' for those that must be there, a
# dictionary for fields of an object, a list with one entry for a list of such. Anything that is not listed is refused.
_META = {"name!": TEXT, "labels": MAP, "annotations": MAP}
_MOUNTS = [{"name!": TEXT, "mountPath!": TEXT, "readOnly": YES}]
_PROBE = {"httpGet!": {"path!": TEXT, "port!": TEXT + NUMBER}, "periodSeconds": NUMBER, "initialDelaySeconds": NUMBER}
_CONTAINER = {
    "name!": TEXT,
    "image!": TEXT,
    "command!": LIST,
    "ports": [{"name!": TEXT, "containerPort!": NUMBER}],
    "readinessProbe": _PROBE,
    "livenessProbe": _PROBE,
    "resources": {"requests!": MAP, "limits!": MAP},
    "volumeMounts": _MOUNTS,
}
_POD = {
    "metadata!": {"labels!": MAP},
    "spec!": {
        "subdomain": TEXT,
        "restartPolicy": TEXT,
        "automountServiceAccountToken!": YES,
        "terminationGracePeriodSeconds!": NUMBER,
        "securityContext!": {"runAsNonRoot!": YES, "runAsUser!": NUMBER, "fsGroup": NUMBER},
        "initContainers": [_CONTAINER],
        "containers!": [_CONTAINER],
        "volumes": [{"name!": TEXT, "persistentVolumeClaim!": {"claimName!": TEXT}}],
    },
}
_CLAIM = {"accessModes!": LIST, "resources!": {"requests!": {"storage!": TEXT}}}
_BACKEND = {"service!": {"name!": TEXT, "port!": {"name!": TEXT}}}
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): {
        "selector!": MAP,
        "ports!": [{"name!": TEXT, "port!": NUMBER, "targetPort": TEXT + NUMBER}],
        "clusterIP": TEXT,
        "publishNotReadyAddresses": YES,
    },
    ("v1", "PersistentVolumeClaim"): _CLAIM,
    ("batch/v1", "Job"): {
        "completionMode!": TEXT,
        "completions!": NUMBER,
        "parallelism!": NUMBER,
        "backoffLimit": NUMBER,
        "template!": _POD,
    },
    ("apps/v1", "StatefulSet"): {
        "serviceName!": TEXT,
        "replicas!": NUMBER,
        "selector!": {"matchLabels!": MAP},
        "template!": _POD,
        "volumeClaimTemplates": [{"metadata!": _META, "spec!": _CLAIM}],
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector!": {"matchLabels!": MAP},
        "policyTypes!": LIST,
        "ingress!": [{"ports!": [{"protocol!": TEXT, "port!": NUMBER}]}],
    },
    ("networking.k8s.io/v1", "Ingress"): {
        "ingressClassName!": TEXT,
        "tls!": [{"hosts!": LIST, "secretName!": TEXT}],
        "rules!": [{"host!": TEXT, "http!": {"paths!": [{"path!": TEXT, "pathType!": TEXT, "backend!": _BACKEND}]}}],
    },
}


def problems(content: Any, schema: Any, where: str) -> list[str]:
    """What is missing, unknown or of another type."""
    if isinstance(schema, tuple):
        fits = isinstance(content, schema) and (bool in schema or not isinstance(content, bool))
        return [] if fits else [f"{where} is {content!r}"]
    if isinstance(schema, list):
        if not isinstance(content, list) or not content:
            return [f"{where} is {content!r}"]
        return [found for place, one in enumerate(content) for found in problems(one, schema[0], f"{where}[{place}]")]
    if not isinstance(content, dict):
        return [f"{where} is {content!r}"]
    known = {name.rstrip("!"): one for name, one in schema.items()}
    found = [f"{where}.{name[:-1]} is missing" for name in schema if name.endswith("!") and name[:-1] not in content]
    found += [f"{where}.{name} is unknown" for name in content if name not in known]
    return found + [
        one for name in content if name in known for one in problems(content[name], known[name], f"{where}.{name}")
    ]


def objects_of(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def pods_of(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Objects that start pods, with the pod's specification."""
    found = [one for one in objects_of(path) if "template" in one["spec"]]
    return [(one, one["spec"]["template"]["spec"]) for one in found]


def check_object(one: dict[str, Any], where: str) -> list[str]:
    schema = SCHEMAS.get((one.get("apiVersion", ""), one.get("kind", "")))
    if schema is None:
        return [f"{where}: no schema for {one.get('apiVersion')} {one.get('kind')}"]
    return problems(one, {"apiVersion!": TEXT, "kind!": TEXT, "metadata!": _META, "spec!": schema}, where)


def test_there_are_manifests_for_training_and_serving() -> None:
    assert [path.name for path in MANIFESTS] == ["serve.yaml", "train.yaml"]


@pytest.mark.parametrize("path", [*MANIFESTS, ROOT / "deploy" / "Dockerfile"], ids=lambda path: path.name)
def test_it_says_first_that_it_was_not_run(path: Path) -> None:
    assert path.read_text().startswith("# not run: ")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_form_of_their_kind(path: Path) -> None:
    found = [problem for one in objects_of(path) for problem in check_object(one, f"{path.name}: {one.get('kind')}")]
    assert not found, "\n".join(found)


def test_the_schema_refuses_what_is_wrong() -> None:
    service = next(one for one in objects_of(MANIFESTS[0]) if one["kind"] == "Service")
    assert not check_object(service, "service")
    spec = service["spec"]
    for wrong, message in (
        ({**spec, "selektor": {}}, "spec.selektor is unknown"),
        ({name: one for name, one in spec.items() if name != "ports"}, "spec.ports is missing"),
        ({**spec, "ports": [{"name": "gateway", "port": "80"}]}, "ports[0].port is '80'"),
    ):
        assert any(message in problem for problem in check_object({**service, "spec": wrong}, "service"))
    assert check_object({**service, "kind": "Pod"}, "pod") == ["pod: no schema for v1 Pod"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_names_and_ports_that_parts_use_are_there(path: Path) -> None:
    everything = [one for manifest in MANIFESTS for one in objects_of(manifest)]
    services = {one["metadata"]["name"]: one["spec"] for one in everything if one["kind"] == "Service"}
    claims = {one["metadata"]["name"] for one in everything if one["kind"] == "PersistentVolumeClaim"}
    for owner, pod in pods_of(path):
        labels = owner["spec"]["template"]["metadata"]["labels"]
        assert owner["spec"].get("selector", {"matchLabels": labels})["matchLabels"] == labels
        assert services[owner["spec"].get("serviceName") or pod["subdomain"]]["selector"] == labels
        volumes = {one["name"] for one in pod.get("volumes", [])}
        assert {one["persistentVolumeClaim"]["claimName"] for one in pod.get("volumes", [])} <= claims
        volumes |= {one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", [])}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("readinessProbe", "livenessProbe"):
                assert probe not in container or container[probe]["httpGet"]["port"] in ports
    for one in objects_of(path):
        if one["kind"] == "NetworkPolicy":
            ((_, pod),) = pods_of(path)
            open_ports = {port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
            assert open_ports == {port["containerPort"] for port in pod["containers"][0]["ports"]}
        if one["kind"] == "Ingress":
            (backend,) = [
                entry["backend"]["service"] for rule in one["spec"]["rules"] for entry in rule["http"]["paths"]
            ]
            assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]["ports"]}


class Parsed(BaseException):
    """Raised where a command would begin to work."""


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_commands_of_pods_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tyro.cli

    def parse(*arguments: Any, **named: Any) -> Any:
        raise Parsed(real(*arguments, **named))

    monkeypatch.setattr(tyro, "cli", parse)
    for _, pod in pods_of(path):
        (container,) = pod["containers"]
        command = container["command"]
        assert all(isinstance(word, str) for word in command), "arguments are strings: quote the numbers"
        words = command[command.index("nestpipe") + 1 :]
        with pytest.raises(Parsed):
            main(words)
        if words[0] == "launch":  # and the command of its ranks
            with pytest.raises(Parsed):
                main(words[words.index("train") :])


def test_the_job_launches_on_as_many_hosts_as_it_has_pods() -> None:
    ((job, pod),) = pods_of(ROOT / "deploy" / "kubernetes" / "train.yaml")
    command = pod["containers"][0]["command"]
    name, subdomain, size = job["metadata"]["name"], pod["subdomain"], job["spec"]["completions"]
    assert job["spec"]["parallelism"] == size
    hosts = command[command.index("--hosts") + 1].split(",")
    assert hosts == [f"{name}-{number}.{subdomain}" for number in range(size)]


def test_the_image_is_that_of_the_version_and_copies_what_is_there() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for path in MANIFESTS:
        images = set(re.findall(r"image: (\S+)", path.read_text()))
        assert images == {f"nestpipe:{version[1]}"}
    for line in re.findall(r"^COPY (?!--from)(.+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE):
        *sources, _ = line.split()
        assert not [name for name in sources if not (ROOT / name).exists()]
