"""What the suite shares with tests/: the parts that a machine may lack."""

from __future__ import annotations

from tests.conftest import pytest_configure, pytest_runtest_setup, pytest_terminal_summary

__all__ = ["pytest_configure", "pytest_runtest_setup", "pytest_terminal_summary"]
