"""`deploy/kubernetes.yaml` and the guide of fleets: their parts agree with each other, and with what the server has."""

import argparse
import re
import shlex
import sys
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from places import PROJECT

from kvcache.commands.config_file import configured
from kvcache.commands.serve import add_serve
from kvcache.commands.shared_tiers import VARIABLE
from kvcache.prefix.events.kv_events import KvEvents

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.one_build
FILE = PROJECT / "deploy" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def parts():
    """The manifests by kind and name."""
    documents = list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def pod(part):
    return part["spec"]["template"]["spec"]


def container(part):
    (only,) = pod(part)["containers"]
    return only


def ports(part):
    return {each["name"]: each["containerPort"] for each in container(part)["ports"]}


WORKLOADS = [("StatefulSet", "kvcache"), ("Deployment", "router"), ("Deployment", "prefixes")]


@pytest.fixture
def options(parts, tmp_path):
    """The options of the server, as its command reads them from the configuration."""
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 reads no TOML")
    (tmp_path / "server.toml").write_text(parts["ConfigMap", "kvcache"]["data"]["server.toml"])
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_serve(parser)
    command = container(parts["StatefulSet", "kvcache"])["command"]
    assert command[:2] == ["kvcache", "serve"]
    said = parser.parse_args(command[2:])
    mounts = {each["mountPath"]: each for each in container(parts["StatefulSet", "kvcache"])["volumeMounts"]}
    assert mounts[said.config]["subPath"] == "server.toml"
    return configured(str(tmp_path / "server.toml"), parser, lambda: parser.parse_args(command[2:]))


@pytest.mark.parametrize("which", WORKLOADS)
def test_labels_services_and_policies_select_what_there_is(parts, which):
    part = parts[which]
    labels = part["spec"]["template"]["metadata"]["labels"]
    assert part["spec"]["selector"]["matchLabels"] == labels
    service = parts["Service", which[1]]["spec"]
    assert service["selector"] == labels
    assert {each["targetPort"] for each in service["ports"]} == set(ports(part))
    probes = [container(part)[f"{kind}Probe"] for kind in ("readiness", "liveness")]
    asked = [each.get("httpGet") or each["tcpSocket"] for each in probes]
    assert {each["port"] for each in asked} <= set(ports(part))


@pytest.mark.parametrize("which", WORKLOADS)
def test_no_container_has_more_rights_than_it_needs(parts, which):
    assert pod(parts[which])["securityContext"]["runAsNonRoot"] is True
    assert pod(parts[which])["automountServiceAccountToken"] is False
    own = container(parts[which])
    assert own["securityContext"]["allowPrivilegeEscalation"] is False
    assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert own["resources"]["limits"]["memory"]
    assert own["image"].partition(":")[2] not in ("", "latest")


def test_a_server_ends_within_its_grace(parts, options):
    grace = pod(parts["StatefulSet", "kvcache"])["terminationGracePeriodSeconds"]
    assert grace >= options.drain_delay + options.drain + 10


def test_probes_ask_what_the_server_answers(parts):
    own = container(parts["StatefulSet", "kvcache"])
    paths = {kind: own[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/live", "liveness": "/health", "readiness": "/ready"}
    routes = (PROJECT / "kvcache" / "server" / "server_reports.py").read_text()
    assert all(f'Route("{path}"' in routes for path in paths.values())


def seconds_to_learn(command):
    """How long the router of a command takes until it sends nothing to a server that ends."""
    said = dict(pairwise(part for each in command for part in each.split("=", 1)))
    return float(said["--health-check-interval-secs"]) * float(said["--health-failure-threshold"])


def test_a_drain_is_seen_before_the_server_closes(parts, options):
    probe = container(parts["StatefulSet", "kvcache"])["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < options.drain_delay
    assert seconds_to_learn(container(parts["Deployment", "router"])["command"]) < options.drain_delay
    assert parts["Service", "kvcache"]["spec"]["publishNotReadyAddresses"], "the router asks a server that is not ready"


def test_the_options_are_those_of_the_ports(parts, options):
    told = {"http": options.port}
    for name, address in (("events", options.kv_events), ("replay", options.kv_events_replay)):
        told[name] = urlsplit(KvEvents(address).address).port
    assert told == ports(parts["StatefulSet", "kvcache"])
    assert options.host == "0.0.0.0"
    cores = container(parts["StatefulSet", "kvcache"])["resources"]["requests"]["cpu"]
    assert options.threads == int(cores)
    gib = {text: int(re.match(r"(\d+)Gi", text)[1]) for text in (options.max_memory, "40Gi")}
    assert gib[options.max_memory] < gib["40Gi"]


def test_secrets_lie_where_the_options_say(parts, options):
    spec = pod(parts["StatefulSet", "kvcache"])
    (volume,) = [each["secret"] for each in spec["volumes"] if "secret" in each]
    mounts = container(parts["StatefulSet", "kvcache"])["volumeMounts"]
    (mount,) = [each for each in mounts if each["name"] == "secrets"]
    files = {f"{mount['mountPath']}/{item['path']}" for item in volume["items"]}
    assert files == {options.api_keys, options.tier_secret}
    made = re.search(r"kubectl create secret generic (\w+) (.*)", FILE.read_text())
    keys = {each.split("=")[1] for each in made[2].split()}
    assert made[1] == volume["secretName"]
    used = {item["key"] for item in volume["items"]}
    for which in WORKLOADS:
        for variable in container(parts[which]).get("env", ()):
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["name"] == made[1]
                used.add(reference["key"])
    assert used == keys
    assert "Secret" not in {kind for kind, _ in parts}, "no secret is committed"


def test_the_store_is_where_the_servers_look(parts):
    own = container(parts["StatefulSet", "kvcache"])
    variables = {each["name"]: each.get("value") for each in own["env"]}
    url = urlsplit(variables[VARIABLE])
    (port,) = parts["Service", url.hostname]["spec"]["ports"]
    assert url.port == port["port"] == ports(parts["Deployment", url.hostname])["redis"]
    store = container(parts["Deployment", url.hostname])
    assert url.password == "$(REDIS_PASSWORD)" == store["command"][-1]
    names = [each["name"] for each in own["env"]]
    assert names.index("REDIS_PASSWORD") < names.index(VARIABLE), "a reference needs the variable before it"
    command = store["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "allkeys-lru"
    most, limit = command[command.index("--maxmemory") + 1], store["resources"]["limits"]["memory"]
    assert int(most.removesuffix("gb")) < int(limit.removesuffix("Gi"))


def test_the_router_knows_every_server(parts, options):
    command = container(parts["Deployment", "router"])["command"]
    spec = parts["StatefulSet", "kvcache"]["spec"]
    hosts = [f"kvcache-{i}.{spec['serviceName']}" for i in range(spec["replicas"])]
    urls = [f"http://{host}:{options.port}" for host in hosts]
    start = command.index("--worker-urls") + 1
    assert command[start : start + len(urls)] == urls
    own = ports(parts["StatefulSet", "kvcache"])
    for option, name in (("--kv-event-source", "events"), ("--kv-event-replay-source", "replay")):
        said = [each.partition("=")[2] for each in command if each.startswith(option + "=")]
        assert said == [f"{url}=tcp://{host}:{own[name]}" for url, host in zip(urls, hosts, strict=True)]
    assert f"--kv-event-model={options.name}" in command
    assert "--kv-event-block-size=16" in command
    assert options.kv_events_unsalted, "each key has a namespace, and vllm-router reads no salts"


def test_events_reach_the_router_alone(parts):
    callers = {"kvcache": ("router", {"http", "events", "replay"}), "prefixes": ("kvcache", {"redis"})}
    for name, (caller, allowed) in callers.items():
        spec = parts["NetworkPolicy", name]["spec"]
        assert spec["podSelector"]["matchLabels"] == {"app": name}
        (rule,) = spec["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"app": caller}}}]
        assert {each["port"] for each in rule["ports"]} == allowed


def test_the_commands_of_the_guide():
    """The parser reads those of this library; those of the router name servers and their events in pairs."""
    text = (PROJECT / "kvcache" / "guides" / "fleet.md").read_text(encoding="utf-8")
    blocks = [block.replace("\\\n", " ") for block in re.findall(r"(?s)```sh\n(.*?)```", text)]
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    assert any(command[0] == "export" and command[1].startswith(VARIABLE + "=") for command in commands)
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_serve(parser)
    (served,) = [command for command in commands if command[:2] == ["kvcache", "serve"]]
    options = parser.parse_args(served[2:])
    events = KvEvents(options.kv_events, options.kv_events_replay)
    (router,) = [command for command in commands if command[0] == "vllm-router"]
    start = router.index("--worker-urls") + 1
    urls = [each for each in router[start : start + 2] if each.startswith("http")]
    assert f"http://{options.host}:{options.port}" in urls
    for option, address in (("--kv-event-source", events.address), ("--kv-event-replay-source", events.replay)):
        said = [router[i + 1] for i, each in enumerate(router) if each == option]
        port = urlsplit(address).port
        assert said == [f"{url}=tcp://{urlsplit(url).hostname}:{port}" for url in urls]
    assert router[router.index("--kv-event-model") + 1] == options.name
    assert seconds_to_learn(router) < options.drain_delay
    assert options.kv_events_unsalted
    extras = re.search(r"pip install '\.\[(.*?)\]'", text)[1].split(",")
    assert set(extras) <= set(re.findall(r"(?m)^(\w+) = \[", (PROJECT / "pyproject.toml").read_text()))
    assert ["kubectl", "apply", "-f", FILE.relative_to(PROJECT).as_posix()] in commands
