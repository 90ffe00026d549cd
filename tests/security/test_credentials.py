"""Where a token and the files for TLS come from, what is refused, and that nothing shows a token."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.security.credentials import (
    MAX_TOKEN,
    MIN_TOKEN,
    OPEN,
    VARIABLES,
    Credentials,
    new_token,
    read_token,
    resolve,
)

TOKEN, OTHER = "a-token-of-the-tests-0123456789", "another-token-of-the-tests-9876"
NOBODY = 65534


def token_file(place: Path, text: str | bytes = TOKEN + "\n", mode: int = 0o600, name: str = "token") -> str:
    path = place / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_token(path)
    assert path in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Be another user for a moment; the tests run as root where this is used."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


# Tokens


def test_new_tokens_are_usable_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(resolve({}, token=token).token == token and len(token) == 43 for token in tokens)


@pytest.mark.parametrize("size", [MIN_TOKEN, MAX_TOKEN])
def test_the_shortest_and_the_longest_token_are_accepted(size: int, tmp_path: Path) -> None:
    assert resolve({}, token="x" * size).token == "x" * size
    for end in ("", "\n", "\r\n", "\n\n\n"):
        assert read_token(token_file(tmp_path, "x" * size + end)) == "x" * size


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("x" * (MIN_TOKEN - 1), "has 15 characters; it must have 16 to 1024"),
        ("x" * (MAX_TOKEN + 1), "has more than 1024 characters"),
        ("x" * 100_000, "has more than 1024 characters"),
        (f"{TOKEN} {TOKEN}", "characters other than"),
        (f" {TOKEN}", "characters other than"),
        (f"{TOKEN}\t", "characters other than"),
        (f"{TOKEN}\n{TOKEN}", "characters other than"),
        (f"{TOKEN}\x00", "characters other than"),
        (f"{TOKEN}\x1b[2J", "characters other than"),
        (f"{TOKEN}ü", "characters other than"),
        (f"\ufeff{TOKEN}", "characters other than"),
    ],
)
def test_an_unusable_token_is_refused_without_showing_it(token: str, says: str, tmp_path: Path) -> None:
    for source in ({"RALLYPOINT_TOKEN": token}, {"RALLYPOINT_TOKEN_FILE": token_file(tmp_path, token)}):
        with pytest.raises(ValueError, match="rallypoint token new") as caught:
            resolve(source)
        assert says in str(caught.value)
        assert "xxxx" not in str(caught.value) and TOKEN not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "\r\n\r\n"])
def test_a_blank_file_is_refused(text: str, tmp_path: Path) -> None:
    assert "has 0 characters" in refusal(token_file(tmp_path, text))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    assert "characters other than" in refusal(token_file(tmp_path, bytes(range(256))))


def test_what_follows_the_longest_token_is_not_ignored(tmp_path: Path) -> None:
    assert "characters other than" in refusal(token_file(tmp_path, "x" * MAX_TOKEN + "\n\nmore"))


@given(st.text())
def test_any_text_is_a_token_or_is_refused_without_showing_it(text: str) -> None:
    said, found = "", OPEN
    try:
        found = resolve({}, token=text)
    except ValueError as error:
        said = str(error)
    assert bool(said) is (found.token != text)
    assert len(text) < MIN_TOKEN or text not in said


# Files


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_ones_own_is_read(mode: int, tmp_path: Path) -> None:
    assert read_token(token_file(tmp_path, mode=mode)) == TOKEN


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602, 0o620, 0o601, 0o610, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    path = token_file(tmp_path, mode=mode)
    said = refusal(path)
    assert f"has mode {mode:o}" in said and said.endswith(f"chmod 600 {path}")
    os.chmod(path, 0o600)
    assert read_token(path) == TOKEN


@pytest.mark.needs("root")
def test_a_file_of_another_user_is_refused_even_to_root(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    os.chown(path, NOBODY, -1)
    assert f"belongs to user {NOBODY}; it must be your own, or root's" in refusal(path)


@pytest.mark.needs("root")
@pytest.mark.parametrize(("mode", "says"), [(0o440, ""), (0o640, ""), (0o660, "mode 660"), (0o444, "mode 444")])
def test_a_secret_of_root_may_be_given_to_a_user_by_a_group(mode: int, says: str) -> None:
    """Kubernetes mounts secrets so."""
    path = f"/tmp/rallypoint-token-{os.getpid()}-{mode:o}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, TOKEN.encode())
        os.fchown(descriptor, 0, os.getegid())
        os.fchmod(descriptor, mode)
        assert f"has mode {mode:o}" in refusal(path)  # to root itself the group is somebody else
        with as_user(NOBODY):
            assert says in refusal(path) if says else read_token(path) == TOKEN
    finally:
        os.close(descriptor)
        os.unlink(path)


def test_a_link_is_followed_and_its_target_judged(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(token_file(tmp_path))
    assert read_token(str(link)) == TOKEN
    os.chmod(link, 0o644)
    assert "has mode 644" in refusal(str(link))


@pytest.mark.needs("root")
def test_a_link_to_the_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    os.chown(path, NOBODY, -1)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert "belongs to user" in refusal(str(link))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    assert refusal(path) == f"cannot read the token file {path}: No such file or directory"
    (tmp_path / "dangling").symlink_to(path)
    assert "No such file" in refusal(str(tmp_path / "dangling"))


@pytest.mark.needs("root")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    with as_user(NOBODY):
        assert "Permission denied" in refusal(path)


def test_only_a_regular_file_is_read_and_nothing_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (str(tmp_path / "fifo"), str(tmp_path), "/dev/null"):
        assert refusal(path) == f"token file {path} is not a regular file"


def test_reading_leaves_nothing_open(tmp_path: Path) -> None:
    good, bad = token_file(tmp_path), tmp_path / "bad"
    bad.touch(0o644)
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        read_token(good)
        refusal(str(bad))
        refusal(str(tmp_path))
    assert os.listdir("/proc/self/fd") == before


# Precedence


def test_without_anything_a_store_is_open() -> None:
    empty = dict.fromkeys(VARIABLES.values(), "")
    assert resolve({}) == resolve(empty) == resolve({}, token=None, tls_ca="") == OPEN == Credentials()
    assert not (OPEN.protects or OPEN.authenticates or OPEN.serves_tls or OPEN.dials_tls)


def test_the_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert resolve() == OPEN
    monkeypatch.setenv("RALLYPOINT_TOKEN", TOKEN)
    assert resolve().token == TOKEN


def test_every_variable_is_read(tmp_path: Path) -> None:
    files = {name: f"/etc/{name}" for name in ("tls_cert", "tls_key", "tls_ca", "tls_client_ca")}
    environ = {VARIABLES[name]: path for name, path in files.items()}
    assert resolve({**environ, "RALLYPOINT_TOKEN": TOKEN}) == Credentials(token=TOKEN, **files)
    assert resolve({**environ, "RALLYPOINT_TOKEN_FILE": token_file(tmp_path)}) == Credentials(token=TOKEN, **files)


def test_options_come_before_the_environment(tmp_path: Path) -> None:
    environ = {"RALLYPOINT_TOKEN": OTHER, "RALLYPOINT_TOKEN_FILE": "/none", "RALLYPOINT_TLS_CA": "/theirs"}
    assert resolve(environ, token_file=token_file(tmp_path)).token == TOKEN
    assert resolve(environ, token=TOKEN).token == TOKEN
    assert resolve(environ, token=TOKEN, tls_ca="/ours").tls_ca == "/ours"
    assert resolve(environ, tls_ca="/ours") == Credentials(token=OTHER, tls_ca="/ours")


def test_in_the_environment_the_token_comes_before_its_file() -> None:
    assert resolve({"RALLYPOINT_TOKEN": TOKEN, "RALLYPOINT_TOKEN_FILE": "/none"}).token == TOKEN


def test_a_token_and_a_file_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="not both"):
        resolve({}, token=TOKEN, token_file="/none")


def test_a_misspelled_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="no such credentials: tls_cret"):
        resolve({}, tls_cret="x")


# Certificates


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tls_cert": "c"}, "--tls-cert (RALLYPOINT_TLS_CERT) needs --tls-key (RALLYPOINT_TLS_KEY)"),
        ({"tls_key": "k"}, "--tls-key (RALLYPOINT_TLS_KEY) needs --tls-cert (RALLYPOINT_TLS_CERT)"),
        ({"tls_client_ca": "a"}, "--tls-client-ca (RALLYPOINT_TLS_CLIENT_CA) needs --tls-cert (RALLYPOINT_TLS_CERT)"),
    ],
)
def test_incomplete_files_are_refused(given: dict[str, str], says: str) -> None:
    for environ, options in (({}, given), ({VARIABLES[name]: value for name, value in given.items()}, {})):
        with pytest.raises(ValueError, match=r".") as caught:
            resolve(environ, **options)
        assert str(caught.value) == says


def test_a_certificate_and_its_key_come_from_one_place() -> None:
    environ = {"RALLYPOINT_TLS_CERT": "/env/cert", "RALLYPOINT_TLS_KEY": "/env/key"}
    both = resolve(environ, tls_cert="c", tls_key="k")
    assert (both.tls_cert, both.tls_key) == ("c", "k")
    with pytest.raises(ValueError, match="needs --tls-key"):
        resolve(environ, tls_cert="c")


@pytest.mark.parametrize(
    ("given", "protects", "authenticates", "serves", "dials"),
    [
        ({"token": TOKEN}, True, True, False, False),
        ({"tls_cert": "c", "tls_key": "k"}, True, False, True, True),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, True, True, True, True),
        ({"tls_ca": "a"}, False, False, False, True),
    ],
)
def test_what_they_do(given: dict[str, str], protects: bool, authenticates: bool, serves: bool, dials: bool) -> None:
    found = resolve({}, **given)
    assert (found.protects, found.authenticates) == (protects, authenticates)
    assert (found.serves_tls, found.dials_tls) == (serves, dials)


# Handing them on


def test_the_environment_of_a_child_gives_it_exactly_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = {**dict.fromkeys(VARIABLES.values(), "/theirs"), "RALLYPOINT_TOKEN": OTHER}
    ours = resolve({}, token=TOKEN, tls_cert="c.pem", tls_key="k.pem", tls_ca="/ca.pem")
    child = {**theirs, **ours.environ()}
    monkeypatch.chdir("/")
    files = {"tls_cert": f"{tmp_path}/c.pem", "tls_key": f"{tmp_path}/k.pem", "tls_ca": "/ca.pem"}
    assert resolve(child) == Credentials(token=TOKEN, **files)
    assert resolve({**theirs, **OPEN.environ()}) == OPEN
    assert resolve(json.loads(json.dumps(child))) == resolve(child)  # through a pipe


def test_they_are_equal_by_value_and_do_not_change() -> None:
    one, same, other = Credentials(token=TOKEN), Credentials(token=TOKEN), Credentials(token=OTHER)
    assert one == same and hash(one) == hash(same) and one != other and one != TOKEN
    with pytest.raises(AttributeError, match="do not change"):
        one.token = OTHER
    with pytest.raises(AttributeError):
        one.password = OTHER
    assert one == same


# Nothing shows a token


def test_no_text_of_credentials_shows_the_token() -> None:
    found = Credentials(token=TOKEN, tls_ca="/ca.pem")
    assert repr(found) == str(found) == f"{found}" == "Credentials(token='…', tls_ca='/ca.pem')"
    assert repr(OPEN) == "Credentials()"
    assert TOKEN not in f"{[found]} { {1: found} }"


class Around(msgspec.Struct):
    """Settings that have credentials."""

    credentials: Credentials


def test_credentials_are_neither_pickled_nor_encoded() -> None:
    found = Credentials(token=TOKEN)
    encoders: list[Callable[[object], object]] = [json.dumps, msgspec.json.encode, msgspec.msgpack.encode]
    encoders += [msgspec.to_builtins, vars, copy.deepcopy]
    encoders += [functools.partial(pickle.dumps, protocol=protocol) for protocol in range(6)]
    for encode in encoders:
        for value in (found, [found], {"credentials": found}, Around(found)):
            if encode is vars and value is not found:
                continue
            with pytest.raises(TypeError) as caught:
                encode(value)
            assert TOKEN not in str(caught.value)
    assert not is_dataclass(found)
    with pytest.raises(TypeError):
        asdict(found)  # type: ignore[call-overload]
    assert TOKEN not in repr(Around(found))


def test_no_error_shows_the_token(tmp_path: Path) -> None:
    """Not even the whole traceback, with all of its causes."""
    broken = TOKEN + "\x07"
    attempts: list[dict[str, str]] = [
        {"token": broken},
        {"token_file": token_file(tmp_path, broken, name="broken")},
        {"token": TOKEN, "token_file": token_file(tmp_path)},
        {"token_file": token_file(tmp_path, mode=0o644, name="shared")},
        {"token": TOKEN, "tls_cert": "c"},
        {"token": TOKEN, "tls_client_ca": "a"},
    ]
    for options in attempts:
        shown = io.StringIO()
        with pytest.raises(ValueError, match=r".") as caught:
            resolve({"RALLYPOINT_TOKEN": OTHER}, **options)
        traceback.print_exception(caught.value, file=shown)
        assert TOKEN not in shown.getvalue() and OTHER not in shown.getvalue()
        assert TOKEN not in repr(caught.value) and caught.value.__cause__ is None
