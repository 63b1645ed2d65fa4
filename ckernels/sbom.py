"""The bill of materials of a wheel: CycloneDX 1.6, in `.dist-info/sboms` (PEP 770). It has no date: builds repeat."""

import json
import subprocess
from importlib.metadata import version
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel

from ckernels.levels import compiler_of_kernels

PACKAGE = "pkg:pypi/"


def part(name, number, what, licence, kind="library", **more):
    """A component that is in the wheel, or that made it."""
    found = {"type": kind, "name": name, "version": number, "description": what}
    return found | {"bom-ref": f"{name}@{number}", "licenses": [{"license": {"id": licence}}], **more}


def compiler():
    """The first line that the compiler of the kernels says of itself; "unknown" if it says nothing."""
    try:
        said = subprocess.run([*compiler_of_kernels(), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return next(iter(said.splitlines()), "unknown")


def bill(name, number, summary):
    """The bill of materials of this distribution: its own C and Python, Cython's code in its modules, the demo's model.

    NumPy is no part of the wheel: it is there as what the wheel requires, with the version whose headers built it.
    """
    cython, numpy = version("Cython"), version("numpy")
    own = part(name, number, summary, "MIT", purl=f"{PACKAGE}{name}@{number}")
    inside = [
        part("Cython", cython, "code in the compiled modules", "Apache-2.0", purl=f"{PACKAGE}cython@{cython}"),
    ]
    if Path("kvcache/demo/model.safetensors").exists():  # else a wheel of its own brings them
        what = "weights in kvcache/demo, trained for it"
        inside.append(part("kvcache-demo", number, what, "MIT", "machine-learning-model"))
    beside = part("numpy", numpy, "required; its headers built this", "BSD-3-Clause", purl=f"{PACKAGE}numpy@{numpy}")
    tools = [{"type": "application", "name": "C compiler", "version": compiler()}]
    tools += [{"type": "application", "name": each, "version": version(each)} for each in ("Cython", "setuptools")]
    parts = [*inside, beside | {"scope": "required"}]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own, "tools": {"components": tools}},
        "components": parts,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in parts]}],
    }


class wheel_with_sbom(bdist_wheel):
    """A wheel whose metadata have `sboms/kvcache.cdx.json`."""

    def write_wheelfile(self, wheelfile_base, *arguments, **options):
        super().write_wheelfile(wheelfile_base, *arguments, **options)
        about = self.distribution.metadata
        folder = Path(wheelfile_base) / "sboms"
        folder.mkdir(exist_ok=True)
        made = bill(about.get_name(), about.get_version(), about.get_description())
        (folder / "kvcache.cdx.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
