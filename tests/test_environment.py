"""What tests import is here: a package that has gone would else look like tests that were skipped."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement


def test_every_package_of_every_extra_is_installed() -> None:
    extras = metadata("prge").get_all("Provides-Extra") or []
    problems = []
    for wanted in map(Requirement, requires("prge") or []):
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue  # of another Python
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            problems.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            problems.append(f"{wanted.name} is {found}, must be {wanted.specifier}")
    assert not problems
