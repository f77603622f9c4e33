"""Packages that tests import are installed: a missing one would look like skipped tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement


def test_every_package_of_every_extra_is_installed() -> None:
    # Only scripts/test.sh --all installs what builds the site of the documents.
    extras = [extra for extra in metadata("prge").get_all("Provides-Extra") or [] if extra != "docs"]
    problems = []
    for requirement in map(Requirement, requires("prge") or []):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue  # for another Python
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"{requirement.name} is {installed}, must be {requirement.specifier}")
    assert not problems
