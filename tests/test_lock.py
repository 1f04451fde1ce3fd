"""What is installed is what was tested: every dependency, and theirs, has one version, and hashes in the lock file."""

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {canonical(package): version for package, version in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(package: str, extras: frozenset[str], seen: set[str]) -> set[str]:
    """All that a package needs here, and what that needs in turn, except what only CUDA builds of torch need."""
    for text in requires(package) or []:
        one = Requirement(text)
        if package == "torch" and re.match(r"cuda-|nvidia-|triton$", one.name):
            continue
        name = canonical(one.name)
        wanted = one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if wanted and name not in seen:
            seen.add(name)
            needed(name, frozenset(one.extras), seen)
    return seen


def test_every_dependency_of_a_dependency_has_one_version() -> None:
    constrained = pins("constraints.txt")
    closure = needed("paceline", frozenset({"dev"}), set())
    assert {"torch", "msgspec", "sympy", "markupsafe", "execnet"} <= closure  # it looks below the first level
    assert closure - {"paceline", "setuptools"} <= constrained.keys()


def test_the_lock_has_the_versions_of_the_constraints_and_hashes_of_all() -> None:
    constrained, locked = pins("constraints.txt"), pins("requirements.lock")
    assert {**locked, "torch": constrained["torch"]} == constrained
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.findall(r"^\S+==\S+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE)
    assert len(blocks) == len(locked)
    assert "://" not in text
