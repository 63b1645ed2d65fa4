"""The examples of `deploy/`: a unit of systemd, an image and options, read and given to the parser of the command."""

import argparse
import configparser
import json
import re
import shlex
import sys

import pytest
from places import PROJECT

from kvcache.commands.config_file import configured
from kvcache.commands.serve import add_serve

pytestmark = pytest.mark.one_build

DEPLOY = PROJECT / "deploy"


def parser():
    made = argparse.ArgumentParser(exit_on_error=False)
    add_serve(made)
    return made


def the_options():
    made = parser()
    return vars(configured(str(DEPLOY / "server.toml"), made, lambda: made.parse_args([])))


def served(command):
    """The options of a command that serves."""
    place = command.index("serve")
    assert command[place - 1].rpartition("/")[2] == "kvcache"
    return parser().parse_args(command[place + 1 :])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_the_file_of_options():
    found, names = the_options(), ("port", "host", "log_format", "drain_delay", "tables")
    assert [found[name] for name in names] == [8000, "0.0.0.0", "json", 5.0, []]


def test_the_unit():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    assert unit.read(DEPLOY / "kvcache.service") == [str(DEPLOY / "kvcache.service")]
    service = unit["Service"]
    options = served(shlex.split(service["ExecStart"]))
    assert options.config == "/etc/kvcache/server.toml"
    assert options.api_keys == "${CREDENTIALS_DIRECTORY}/keys"
    assert service["LoadCredential"].startswith("keys:")
    assert options.autosave == "${STATE_DIRECTORY}"
    assert service["StateDirectory"]
    assert service["KillSignal"] == "SIGTERM"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    if sys.version_info >= (3, 11):
        found = the_options()
        assert float(service["TimeoutStopSec"]) > float(found["drain_delay"]) + float(found["drain"]) + 10


def test_the_image():
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text()).splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert words[0] == "FROM"
    assert set(words) <= {"FROM", "RUN", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    assert words.index("USER") < words.index("ENTRYPOINT"), "it does not run as root"
    found = dict(steps)  # of the last stage: the other one makes the wheel
    source, place = found["COPY"].split()
    assert (PROJECT / source).exists()
    (wheels,) = re.findall(r"-w (\S+) /src", dict(steps[: words.index("FROM", 1)])["RUN"])
    assert ("COPY", f"--from=build {wheels} {wheels}") in steps
    options = served(json.loads(found["ENTRYPOINT"]))
    assert options.config == place
    probe = json.loads(found["HEALTHCHECK"].removeprefix("CMD "))
    compile(probe[2], "probe", "exec")
    assert "/ready" in probe[2]
    assert found["STOPSIGNAL"] == "SIGTERM"
    extras = re.search(rf"{wheels}/\*\.whl\)\[(.*?)\]", found["RUN"])[1].split(",")
    declared = re.findall(r"(?m)^(\w+) = \[", (PROJECT / "pyproject.toml").read_text())
    assert set(extras) <= set(declared)
