"""What the wheel and the sdist contain, and what their metadata says."""

from __future__ import annotations

import email
import email.message
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from tests.packaging.built import ROOT, Distributions, build
from tests.test_tidy import kept_files

import rallypoint

VERSION = rallypoint.__version__
INFO = f"rallypoint-{VERSION}.dist-info"
PACKAGE = "src/rallypoint/"

FOR_USERS = {
    "server": {"h11", "uvloop"},
    "cli": {"h11", "uvloop", "click"},
    "etcd": {"h11", "uvloop", "hpack"},
    "tls": {"cryptography"},
    "torch": {"torch"},
    "pyspy": {"py-spy"},
    "all": {"h11", "uvloop", "click", "hpack", "cryptography"},
}
"""The extras for users, and the distributions that each adds."""


def unpacked(distributions: Distributions) -> dict[str, bytes]:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def metadata_of(distributions: Distributions) -> email.message.Message:
    return email.message_from_bytes(unpacked(distributions)[f"{INFO}/METADATA"])


def required(distributions: Distributions, extra: str | None = None) -> list[Requirement]:
    """Return the requirements of an extra, or those of a client."""
    found = map(Requirement, metadata_of(distributions).get_all("Requires-Dist") or [])
    if extra is None:
        return [one for one in found if one.marker is None]
    return [one for one in found if f'extra == "{extra}"' in str(one.marker)]


def test_the_wheel_has_the_package_and_nothing_else(distributions: Distributions) -> None:
    kept = {name.removeprefix("src/") for name in kept_files() if name.startswith(PACKAGE)}
    assert {"rallypoint/py.typed", "rallypoint/server/page_assets/page.js"} <= kept
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert set(unpacked(distributions)) == kept | about


def test_the_wheel_names_no_place_of_the_machine_that_built_it(distributions: Distributions) -> None:
    places = [str(place).encode() for place in (ROOT, Path(sys.prefix), Path.home()) if place != Path("/")]
    found = [name for name, text in unpacked(distributions).items() if any(place in text for place in places)]
    assert not found


def test_the_sdist_is_the_repository(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(one.name).parts[1:])) for one in archive.getmembers()}
    assert names - {"PKG-INFO"} == set(kept_files())


def test_the_sdist_builds_the_same_wheel(distributions: Distributions, tmp_path: Path) -> None:
    with tarfile.open(distributions.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / f"rallypoint-{VERSION}", tmp_path / "dist")
    assert again.wheel.name == distributions.wheel.name
    assert again.wheel.read_bytes() == distributions.wheel.read_bytes()


def test_the_version_has_one_source(distributions: Distributions) -> None:
    assert metadata_of(distributions)["Version"] == VERSION
    assert VERSION not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_client_needs_msgspec_alone(distributions: Distributions) -> None:
    assert {one.name for one in required(distributions)} == {"msgspec"}


def test_the_extras_for_users(distributions: Distributions) -> None:
    """They set lower limits only: a limit above, or a version, would get in the way of other packages."""
    extras = set(metadata_of(distributions).get_all("Provides-Extra") or [])
    assert extras - {"dev", "docs", "interop", "deploy", "bench"} == set(FOR_USERS)
    for extra, names in FOR_USERS.items():
        wanted = required(distributions, extra)
        assert {one.name for one in wanted} == names, extra
        assert {limit.operator for one in wanted for limit in one.specifier} <= {">="}, extra


def test_the_metadata_is_complete(distributions: Distributions) -> None:
    metadata = metadata_of(distributions)
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert metadata["Summary"] and metadata["Keywords"]
    entry_points = unpacked(distributions)[f"{INFO}/entry_points.txt"].decode()
    assert "[console_scripts]\nrallypoint = rallypoint.__main__:main" in entry_points
    assert "[torchrun.handlers]\nrallypoint = rallypoint.integrations.torchrun:handler" in entry_points
