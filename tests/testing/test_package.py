"""The package from outside: nobody who does not test imports it, and its parts need only what they use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import rallypoint.testing

LOOK = "import sys; {}; import json; print(json.dumps(sorted(sys.modules)))"


def modules_after(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", LOOK.format(code)], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_importing_rallypoint_does_not_import_it() -> None:
    assert not [name for name in modules_after("import rallypoint") if name.startswith("rallypoint.testing")]


def test_importing_it_needs_neither_a_server_nor_pytest() -> None:
    """The extra `server` has h11; an extra that is not installed must not be needed."""
    found = modules_after("import rallypoint.testing")
    assert not {"h11", "uvloop", "click", "pytest", "hypothesis"}.intersection(found)
    assert not [name for name in found if name.startswith("rallypoint.server")]


def test_every_export_exists() -> None:
    for name in rallypoint.testing.__all__:
        assert getattr(rallypoint.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rallypoint.testing.Nothing
