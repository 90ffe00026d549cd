"""Fixtures of every test here."""

from __future__ import annotations

from tests.etcd.fixtures import cluster, url

__all__ = ["cluster", "url"]
