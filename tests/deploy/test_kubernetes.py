"""The manifests: built by kubectl's own kustomize, old and new, and valid for the API that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtierd.config import daemon as config
from kvtierd.config import settings

from tests.deploy.tools import debian

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in sorted((KUBERNETES / "overlays").iterdir()))]
EXAMPLES = sorted((KUBERNETES / "examples").iterdir())
API_VERSIONS = ("1.29", "1.32")
"""Of the schemas to hold them against."""
VALIDATOR = "kubernetes-validate>=1.29"
GIB = 1 << 30


def kubectls() -> list[str]:
    """Debian's, and this machine's own if it is another one."""
    found = [str(debian("kubectl"))]
    if own := shutil.which("kubectl"):
        found.append(own)
    return found


def build(overlay: str, kubectl: str | None = None) -> str:
    command = [kubectl or kubectls()[0], "kustomize", str(KUBERNETES / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(overlay: str) -> dict[str, Any]:
    """What an overlay comes to, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(build(overlay))}


def validate(file: Path, version: str) -> tuple[int, str]:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
    command += [
        "--with",
        VALIDATOR,
        "kubernetes-validate",
        "--strict",
        "--kubernetes-version",
        version,
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def plain_bytes(quantity: str) -> int:
    """Of a Kubernetes quantity such as 16Gi."""
    return settings.size(re.sub(r"([KMGT]i)$", r"\1B", quantity))


def one(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [item for item in items if item["name"] == name]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_kubectl_builds_the_same(overlay: str) -> None:
    built = [
        sorted(
            yaml.safe_load_all(build(overlay, kubectl)),
            key=lambda each: (each["kind"], each["metadata"]["name"]),
        )
        for kubectl in kubectls()
    ]
    for other in built[1:]:
        for document in (*built[0], *other):  # the digest of a generated name has changed since
            if document["kind"] == "ConfigMap":
                document["metadata"]["name"] = "kvtierd"
        for daemonset in (each for each in (*built[0], *other) if each["kind"] == "DaemonSet"):
            one(daemonset["spec"]["template"]["spec"]["volumes"], "config")["configMap"]["name"] = "kvtierd"
        assert other == built[0]


@pytest.mark.parametrize("version", API_VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_has_every_field(overlay: str, version: str, tmp_path: Path) -> None:
    # A PodMonitor is of the Prometheus operator, whose schema is not Kubernetes'.
    documents = [each for each in yaml.safe_load_all(build(overlay)) if each["kind"] != "PodMonitor"]
    file = tmp_path / "built.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    status, said = validate(file, version)
    assert status == 0, said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_so_it_has_of_the_examples(example: Path) -> None:
    status, said = validate(example, API_VERSIONS[-1])
    assert status == 0, said


def test_a_field_that_the_api_lacks_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "built.yaml"
    file.write_text(build("base").replace("hostIPC: false", "hostIPX: false"))
    status, said = validate(file, API_VERSIONS[-1])
    assert status != 0
    assert "hostIPX" in said


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_memory_that_is_asked_for_is_enough_for_the_pool(overlay: str) -> None:
    found = objects(overlay)
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    container = one(spec["containers"], "kvtierd")
    environment = {each["name"]: each["value"] for each in container.get("env", ())}
    given = tomllib.loads(found["ConfigMap"]["data"]["kvtierd.toml"])
    pool_bytes = settings.size(environment.get("KVTIER_POOL_SIZE", given["pool"]["size"]))
    resources = container["resources"]
    on_huge_pages = "hugepages-2Mi" in resources["limits"]
    assert plain_bytes(resources["requests"]["memory"]) == plain_bytes(resources["limits"]["memory"])
    limit = plain_bytes(resources["limits"]["hugepages-2Mi" if on_huge_pages else "memory"])
    assert limit >= pool_bytes + (0 if on_huge_pages else GIB)
    pool = one(spec["volumes"], "pool")
    if "emptyDir" in pool:
        assert "hostPath" not in pool
        assert plain_bytes(pool["emptyDir"]["sizeLimit"]) >= pool_bytes
    assert "cpu" not in resources["limits"]


def test_a_stop_has_the_time_that_the_daemon_may_take() -> None:
    found = objects("base")
    given = tomllib.loads(found["ConfigMap"]["data"]["kvtierd.toml"])
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= given["server"]["drain_s"] + 30


def test_the_configuration_in_it_is_sound_and_the_pods_use_it(tmp_path: Path) -> None:
    found = objects("base")
    file = tmp_path / "kvtierd.toml"
    file.write_text(found["ConfigMap"]["data"]["kvtierd.toml"])
    config.load(file, environ={})
    volume = one(found["DaemonSet"]["spec"]["template"]["spec"]["volumes"], "config")
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_right_that_they_do_not_need(overlay: str) -> None:
    spec = objects(overlay)["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["hostPID"] is overlay.endswith("host-pid")
    assert (spec["hostIPC"], spec.get("hostNetwork", False)) == (False, False)
    assert spec["automountServiceAccountToken"] is False
    context = one(spec["containers"], "kvtierd")["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_image_and_the_manifests_agree() -> None:
    """Ports, folders and the user's number are said in both."""
    dockerfile = (KUBERNETES.parent / "container" / "Dockerfile").read_text()
    environment = dict(re.findall(r"(KVTIER_\w+)=(\S+)", dockerfile))
    spec = objects("base")["DaemonSet"]["spec"]["template"]["spec"]
    container = one(spec["containers"], "kvtierd")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert environment["KVTIER_METRICS_LISTEN"] == f"0.0.0.0:{ports['metrics']}"
    assert environment["KVTIER_SERVER_HEALTH_LISTEN"] == f"0.0.0.0:{ports['health']}"
    assert Path(environment["KVTIER_POOL_PATH"]).parent == Path(mounts["pool"])
    assert Path(environment["KVTIER_SOCKET"]).parent == Path(mounts["sockets"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == ports["health"]
    assert (
        f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in dockerfile
    )
    config.load(None, environ=environment)
