"""The manifests of examples/kubernetes: valid, and true of kvflow and of each other."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from docs.scripts import reference
from kvflow.http.authorization import ROUTES, Access
from kvflow.serve.config.catalog import FIELDS_OF_ROLE
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from tests.shells import ROOT

FOLDER = ROOT / "examples/kubernetes"
KUSTOMIZATION = FOLDER / "kustomization.yaml"  # the client reads it, the server has no schema of it
FILES = sorted(set(FOLDER.glob("*.yaml")) - {KUSTOMIZATION})
DOCUMENTS: list[Any] = [
    document for path in FILES for document in yaml.safe_load_all(path.read_text())
]
AUTOSCALER = "HorizontalPodAutoscaler"
VERSIONS = ("1.29", "1.37")
DEPLOYMENTS = {
    document["metadata"]["name"].removeprefix("kvflow-"): document
    for document in DOCUMENTS
    if document["kind"] == "Deployment"
}


ROLES = ("router", "prefill", "decode")


def pod_in(deployment: Any) -> Any:
    return deployment["spec"]["template"]["spec"]


def pod_of(role: str) -> Any:
    return pod_in(DEPLOYMENTS[role])


def container_in(deployment: Any) -> Any:
    (container,) = pod_in(deployment)["containers"]
    return container


def container_of(role: str) -> Any:
    return container_in(DEPLOYMENTS[role])


def name_of(document: Any) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def valid(document: Any, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_manifest_is_valid_and_has_no_unknown_field(document: Any, version: str) -> None:
    valid(document, version)


@pytest.mark.parametrize(
    "wrong",
    [
        {"livenesProbe": {}},
        {"ports": [{"containerPort": "http"}]},
        {"livenessProbe": {"httpGet": {"path": "/"}}},
    ],
)
def test_what_is_not_valid_is_found(wrong: Any) -> None:
    broken = copy.deepcopy(DEPLOYMENTS["prefill"])
    broken["spec"]["template"]["spec"]["containers"][0].update(wrong)
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(broken, VERSIONS[-1])


def settings_of(role: str) -> Any:
    return settings_in(role, DEPLOYMENTS[role])


def settings_in(role: str, deployment: Any) -> Any:
    container = container_in(deployment)
    args = container["args"]
    given = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(args[::2], args[1::2], strict=True)
    }
    assert given.keys() <= set(FIELDS_OF_ROLE[role])
    assert {entry["name"] for entry in container["env"]} >= {
        "KVFLOW_API_KEY",
        "KVFLOW_ADMIN_API_KEY",
    }
    given |= {"api_key": "k", "admin_api_key": "a"} | (
        {"model_path": str(DEMO_MODEL_DIR)} if role != "router" else {}
    )
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    return resolve(role, given, env=env)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ROLES)
def test_the_flags_are_those_of_the_role_and_say_what_the_manifest_says(role: str) -> None:
    settings, container = settings_of(role), container_of(role)
    assert container["command"] == ["kvflow", role]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    wanted = {"http": settings.port}
    if role != "router":
        wanted["bootstrap"] = settings.disaggregation_bootstrap_port
    if role == "prefill":
        wanted["control"] = settings.control_port
    assert ports == wanted
    grace_s = pod_of(role)["terminationGracePeriodSeconds"]
    before_s = int(
        container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1]
    )
    assert grace_s >= before_s + settings.drain_timeout_s + 10
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        # A kubelet has no key.
        assert asked["port"] in ports and f"GET {asked['path']}" in ROUTES[Access.OPEN]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_joins_the_router_and_finds_its_files(role: str) -> None:
    settings, pod = settings_of(role), pod_of(role)
    (service,) = [one for one in DOCUMENTS if name_of(one) == "Service kvflow-router"]
    assert settings.join == (
        f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}",
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(role)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    (item,) = volumes["control-key"]["secret"]["items"]
    assert settings.control_key_file == f"{mounts['control-key']}/{item['path']}"
    assert container_of(role)["args"][1] == mounts["model"]
    page = (ROOT / "examples/kubernetes/README.md").read_text()
    assert f"--from-file={item['key']}=" in page and all(
        f"--from-literal={key}=" in page for key in ("api-key", "admin-api-key")
    )


def test_prefill_and_decode_would_fit_together() -> None:
    prefill, decode = settings_of("prefill"), settings_of("decode")
    same = (
        "disaggregation_transfer_backend",
        "control_key_file",
        "page_size",
        "dtype",
        "model_name",
        "verify_transfers",
    )
    assert [getattr(prefill, name) for name in same] == [getattr(decode, name) for name in same]


@pytest.mark.parametrize(
    "document",
    [one for one in DOCUMENTS if one["kind"] not in ("Deployment", AUTOSCALER)],
    ids=name_of,
)
def test_what_selects_pods_selects_some(document: Any) -> None:
    spec = document["spec"]
    selector = spec.get("podSelector", spec.get("selector"))
    wanted = selector.get("matchLabels", selector)
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in DEPLOYMENTS.values()]
    assert wanted and any(wanted.items() <= found.items() for found in labels)


def test_no_manifest_names_a_registry() -> None:
    images = {container_of(role)["image"] for role in DEPLOYMENTS}
    assert images == {"REGISTRY/kvflow:VERSION"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_autoscaler_knows_its_workers_and_asks_for_metrics_that_they_have(role: str) -> None:
    spec = next(one for one in DOCUMENTS if name_of(one) == f"{AUTOSCALER} kvflow-{role}")["spec"]
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", f"kvflow-{role}")
    budget = next(o for o in DOCUMENTS if name_of(o) == f"PodDisruptionBudget kvflow-{role}")[
        "spec"
    ]
    # Otherwise no node could be drained while the load is least.
    assert spec["maxReplicas"] > spec["minReplicas"] > budget["minAvailable"]
    assert DEPLOYMENTS[role]["spec"]["replicas"] == spec["minReplicas"]
    names = [metric["pods"]["metric"]["name"] for metric in spec["metrics"]]
    assert names and all(name.startswith("kvflow_") for name in names)
    assert None not in map(reference.place_of, names)
    if role == "decode":
        wanted = float(spec["metrics"][0]["pods"]["target"]["averageValue"])
        assert names[0] == "kvflow_running_requests"
        assert wanted < settings_of(role).max_running_requests


def with_https(role: str) -> Any:
    """Apply the patches of the kustomization to a Deployment, as RFC 6902 says."""
    made = copy.deepcopy(DEPLOYMENTS[role])
    for patch in yaml.safe_load(KUSTOMIZATION.read_text())["patches"]:
        target = patch["target"]
        if target["kind"] != "Deployment" or not re.fullmatch(target["name"], f"kvflow-{role}"):
            continue
        for step in yaml.safe_load(patch["patch"]):
            *parents, last = step["path"].strip("/").split("/")
            place = made
            for parent in parents:
                place = place[int(parent) if isinstance(place, list) else parent]
            match step["op"], place:
                case "add", list() if last == "-":
                    place.append(step["value"])
                case "add", dict() if last not in place:
                    place[last] = step["value"]
                case "replace", list():
                    place[int(last)] = step["value"]
                case "test", list():
                    assert place[int(last)] == step["value"]
                case other:
                    raise AssertionError(f"{other}: {step}")
    return made


@pytest.mark.parametrize("role", ROLES)
def test_with_https_every_role_has_its_files_and_is_asked_by_https(role: str) -> None:
    made = with_https(role)
    for version in VERSIONS:
        valid(made, version)
    settings, container = settings_in(role, made), container_in(made)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_in(made)["volumes"]}
    assert mounts.keys() == volumes.keys()
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    assert files == tuple(f"{mounts['tls']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt"))
    # A process that is not root reads them by its group.
    assert pod_in(made)["securityContext"]["fsGroup"] == 1000
    assert volumes["tls"]["secret"]["defaultMode"] == 0o440
    assert settings.join == (() if role == "router" else ("https://kvflow-router:8000",))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    page = (FOLDER / "README.md").read_text()
    assert volumes["tls"]["secret"]["secretName"] in page and settings.tls_server_name in page


def test_the_kustomization_has_every_manifest() -> None:
    names = yaml.safe_load(KUSTOMIZATION.read_text())["resources"]
    assert sorted(names) == [path.name for path in FILES]
