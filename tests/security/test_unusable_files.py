"""Files for TLS that a client cannot use: it says so at once, whether or not its server is up."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ports import reserve_port

import rallypoint


def test_an_unusable_ca_is_reported_while_the_server_is_down(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ValueError, match=f"cannot read --tls-ca {missing}"):
        rallypoint.connect(f"tcps://127.0.0.1:{reserve_port()}", 0, credentials=rallypoint.Credentials(tls_ca=missing))
