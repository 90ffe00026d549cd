"""House rules that ruff and mypy do not know, run as a test: layers, purity, exports, growth, names, honest tests.

The tables come first; a rule bends only there, with a reason. Each rule is a function from one parsed file to what
is wrong in it, and every rule is shown to bite on a few lines of bad code (`BITES`) and to leave good code alone.
Files are parsed, not imported, so modules that need torch are covered where there is none.

The limits on growth are a ratchet: a file past the soft limit stands in `LARGE` with today's size, rounded up. It may
not grow past that, and when it has shrunk well below, the test asks for the lower number. Rejected: a linter
plug-in for each rule; nobody would find where "no sleeps in tests" is written.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/rallypoint/"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAYERS = (
    ("text",),
    ("errors",),
    ("deadline", "in_thread", "readiness", "within"),
    ("core",),
    ("protocol",),
    ("liveness",),
    ("net",),
    ("unix_socket", "security"),
    ("process",),
    ("etcd",),
    ("storage",),
    ("client", "filestore"),
    ("store",),
    ("server", "recipes"),
    ("relay", "aio"),
    ("launch", "testing"),
    ("compat", "torch"),
    ("integrations",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""A module may import its own package and what stands in a row above its own; neighbours in a row are strangers."""

PURE = words(
    "__future__ abc base64 binascii bisect collections copy dataclasses enum functools hashlib heapq hmac itertools "
    "json math operator re string struct textwrap types typing typing_extensions zlib msgspec "
    "rallypoint.core rallypoint.errors rallypoint.text"
)
"""All that core/ (and errors, which it imports) may import. `rallypoint.deadline` is not here: it reads the clock.
`typing_extensions` is for type checkers alone: nobody installs it."""

IMPURE_CALLS = words("open print input breakpoint exec eval __import__")
PICKLERS = words("pickle _pickle cPickle pickletools cloudpickle dill joblib marshal shelve")
MAY_PICKLE: dict[str, str] = {
    "src/rallypoint/launch/functions/call_files.py": "between a process and its own children, in files of one user",
}
"""Modules that may pickle, and why; none of them reads from a network."""

HEAVY = words(
    "torch asyncio uvloop hpack h11 click cryptography ssl subprocess multiprocessing concurrent http urllib email"
)
"""What `import rallypoint` must not import."""

SOFT_LINES, HARD_LINES, FUNCTION_LINES, SLACK_LINES = 300, 500, 50, 60
LARGE: dict[str, tuple[int, str]] = {
    "src/rallypoint/protocol/native.py": (330, "one wire protocol, both directions"),
    "src/rallypoint/server/commit.py": (320, "one queue: commits, their items, a full disk"),
    "src/rallypoint/protocol/c10d.py": (375, "one wire protocol, both directions"),
    "src/rallypoint/core/engine.py": (
        1025,
        "all store semantics, once: operations, waits and wake-ups change the same few tables and are read together",
    ),
    "src/rallypoint/errors.py": (
        635,
        "the whole tree of errors, to be read as one: which class is under which is its point",
    ),
    "src/rallypoint/core/machines/rendezvous.py": (
        590,
        "one machine: its commands, its state, and what each command does to that state",
    ),
    "src/rallypoint/store/tcp.py": (440, "the client: its pool of links, its operations, the store"),
    "src/rallypoint/core/ops.py": (315, "every operation, once: a table to be read as one"),
    "src/rallypoint/core/session.py": (470, "every request of a client, and what makes a cut harmless"),
    "src/rallypoint/core/machines/exchange.py": (
        310,
        "one machine: its commands, its state, and what each does to that state",
    ),
    "src/rallypoint/core/state.py": (380, "every entry of the log, and what it does to the state"),
    "src/rallypoint/core/snapshot.py": (
        455,
        "writing and reading, side by side: each section must match its counterpart",
    ),
    "src/rallypoint/server/replication/replicated_server.py": (
        310,
        "one server of several: following, leading, and the turns between",
    ),
    "src/rallypoint/server/server.py": (405, "the state and its log: start and stop, changes, what is shown of it"),
    "src/rallypoint/relay/upstream/channel_connection.py": (
        315,
        "one connection with channels: frames, credit, turns, its end",
    ),
    "src/rallypoint/relay/torch/session.py": (305, "one session over as many channels as it takes, and its end"),
    "src/rallypoint/server/connections/multiplexed.py": (
        365,
        "one connection with channels: frames, turns, and who stands in line",
    ),
    "src/rallypoint/server/connections/native_connection.py": (
        475,
        "one protocol's end: requests, replies, the way to the log",
    ),
    "src/rallypoint/server/connections/c10d_connection.py": (
        440,
        "one protocol's end: requests, replies, the way to the log",
    ),
    "src/rallypoint/launch/round_loop.py": (315, "one loop: every event, and what each decision does"),
    "src/rallypoint/launch/node_run.py": (345, "one node's side of a run: joining, leaving, and what the agents share"),
    "src/rallypoint/core/objects.py": (320, "all machines of a namespace, and the calls that wait on them"),
    "src/rallypoint/core/machines/barrier.py": (310, "one machine: its commands, its state, and what each does to it"),
    "src/rallypoint/etcd/local/cluster.py": (310, "one cluster: its file, its members, and every step of up and down"),
    "src/rallypoint/server/connections/connection.py": (
        395,
        "one socket: reading, writing, TLS, and bytes held for it",
    ),
    "src/rallypoint/net.py": (410, "resolving, binding and connecting share their rules"),
    "src/rallypoint/recipes/rendezvous.py": (350, "the whole of the public class: joining, watching, leaving, closing"),
    "src/rallypoint/filestore/log_file.py": (310, "one file: its locks, its log, and every step of a compaction"),
    "src/rallypoint/store/base.py": (375, "the whole Store interface, with its docstrings"),
}
"""Modules past SOFT_LINES: how many lines each may have, and why it is not two modules."""

FORBIDDEN_WORDS = words("manager managers helper helpers util utils common misc")

METAPHORS = words(
    "alarm alarms asker bell bells bereft blob buried bury crew desk doorkeeper doubt doubts ear felt gang gatehouse "
    "guest guests heart house keeper keepers labour labourer ledger lodge losses mourner programme pulse pulses roster "
    "slot slots switchboard teller testator twin vigil visitor visitors warden whim whims wire wires"
)
"""Words that no name has as a part: nobody in the field would search for them."""

METAPHOR_CLASSES = words(
    "Board Bell Caller Conversation Face Felt Ground Home Life Link Meeting Space Split Ties Told World"
)
"""Words that are ordinary English, but say nothing as the whole name of a class."""

MAY_BE_NAMED: dict[str, str] = {
    "__slots__": "Python's word",
    "_doubts doubts _visitor": "sections of the snapshot, which are named so in it",
    "blob": "PyTorch's word for the state of a rendezvous",
    "BY_WIRE": "on the wire: the protocol's bytes",
    "alarm": "etcd's word",
}
"""Names with such a word that may stay, and why."""

STORE_INTERNALS = words("_add_dependent _backend _name _prefix _root _same_session_view _timed_out _value _wait_s")
"""Attributes of a store that only store/ uses; others have `store/internal.py`."""

SLEEPS: dict[tuple[str, str], str] = {
    ("tests/launch/test_run_hosts.py", "last"): "how long a cut lasts is what is tested",
    ("tests/interop/relayed_nodes.py", "cut"): "how long a cut lasts is what is tested",
}
"""(file, function) of a test that may sleep, and why no event can be waited for."""

SKIPPERS = words(
    "pytest.skip pytest.importorskip pytest.mark.skip pytest.mark.skipif "
    "unittest.skip unittest.skipIf unittest.skipUnless unittest.SkipTest"
)
MAY_SKIP = "tests/conftest.py"

OF_ONE_MACHINE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+|opt/(?:wheels|pypi[\w-]*))(?:/|\b(?![\w-]))"
    r"|\b(?:pypi\.org|pythonhosted\.org|(?:deb|security)\.debian\.org|registry\.npmjs\.org|download\.pytorch\.org)\b"
)


def parsed(text: str, name: str = "<unknown>") -> ast.Module:
    """Parse a module; Python 3.11 may lose count of its depth when a garbage collection runs meanwhile, and says so."""
    try:
        return ast.parse(text, name)
    except SystemError:
        return ast.parse(text, name)


class File(NamedTuple):
    """One parsed Python file, named relative to the root of the repository."""

    path: str
    text: str
    tree: ast.Module

    @property
    def dotted(self) -> list[str]:
        """The module's name within src/, in parts; a package ends in `__init__` only at the top."""
        parts = self.path.removeprefix("src/").removesuffix(".py").split("/")
        return parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts

    @property
    def package(self) -> list[str]:
        """What a relative import starts from."""
        return self.path.removeprefix("src/").split("/")[:-1]


class Wrong(NamedTuple):
    """One finding; printed as editors and people like it."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


Findings = Iterator[Wrong]


def parse(path: str, text: str) -> File:
    return File(path, text, parsed(text, path))


@functools.cache
def kept_files() -> tuple[str, ...]:
    """All files that are, or are about to be, in the repository; without git, all that are not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        hidden = re.compile(r"(^|/)(\.(?!ci/)|__pycache__|dist/|.*\.egg-info/)")
        listed = [path.as_posix() for path in found if not hidden.search(path.as_posix())]
    return tuple(sorted(name for name in listed if name and (ROOT / name).is_file()))


@functools.cache
def python_files() -> tuple[File, ...]:
    names = [name for name in kept_files() if name.endswith(".py")]
    return tuple(parse(name, (ROOT / name).read_text(encoding="utf-8")) for name in names)


# Reading a syntax tree


def imports(file: File) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted target) of every import, wherever it stands: lazy and typing-only ones too."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = file.package[: len(file.package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def within(target: str, modules: frozenset[str]) -> bool:
    """Say whether a dotted name is one of these modules or inside one."""
    parts = target.split(".")
    return any(".".join(parts[:n]) in modules for n in range(1, len(parts) + 1))


def references(file: File) -> Iterator[tuple[ast.expr, str]]:
    """Yield every `a.b.c` with its dotted name, its first part resolved through the file's imports."""
    known: dict[str, str] = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            known.update((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, dot, rest = ast.unparse(node).partition(".")
            yield node, known.get(head, head) + dot + rest


def functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def function_at(file: File, line: int) -> str:
    """Return the name of the innermost function around a line."""
    around = [node for node in functions(file) if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name if around else "<module>"


def statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Yield each statement at module level with the one after it, those under `if`, `try` and `with` included."""
    for node, after in itertools.zip_longest(body, body[1:]):
        yield node, after
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def bindings(file: File) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Yield (name, statement, has a docstring) for what a module binds; an imported name has its own elsewhere."""
    for node, after in statements(file.tree.body):
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node, ast.get_docstring(node) is not None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], node, True) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from ((name, node, described) for name in names)


def exports(file: File) -> tuple[int, list[str]] | None:
    """Return (line, names) of `__all__`, or None where there is none that can be read."""
    for name, node, _ in bindings(file):
        if name == "__all__" and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            try:
                return node.lineno, list(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


# The rules


def imports_go_one_way(file: File) -> Findings:
    rank = {name: row for row, names in enumerate(LAYERS) for name in names}
    own = file.dotted[1]
    if own not in rank:
        yield Wrong(file.path, 1, f"`{own}` has no place in the layers: give it a row in LAYERS, tests/test_tidy.py")
        return
    for line, target in imports(file):
        parts = target.split(".")
        if parts[0] != "rallypoint":
            continue
        layer = parts[1] if len(parts) > 1 and parts[1] in rank else "__init__"
        if layer != own and rank[layer] >= rank[own]:
            whole = "the package itself" if layer == "__init__" else f"`{layer}`"
            yield Wrong(file.path, line, f"imports go one way, and {whole} is not below `{own}` (it imports {target})")


def core_is_pure(file: File) -> Findings:
    if file.dotted[1] not in ("core", "errors"):
        return
    for line, target in imports(file):
        if not within(target, PURE):
            yield Wrong(file.path, line, f"core/ is pure, and {target} is not in its list (PURE, tests/test_tidy.py)")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield Wrong(file.path, node.lineno, f"core/ is pure: no {node.func.id}(); return it and let the host do it")


def nothing_pickles(file: File) -> Findings:
    for line, target in imports(file):
        if within(target, PICKLERS) and file.path not in MAY_PICKLE:
            yield Wrong(file.path, line, f"no pickle anywhere ({target}): use msgspec for what leaves the process")


def exports_are_real(file: File) -> Findings:
    if any(part.startswith("_") for part in file.dotted if part != "__init__"):
        return
    if all(isinstance(node, ast.Expr) for node in file.tree.body):
        return  # a package that is only a docstring
    said = exports(file)
    if said is None:
        yield Wrong(file.path, 1, "a public module has `__all__`, a plain list of names")
        return
    line, names = said
    found = {name: node.lineno for name, node, _ in bindings(file)}
    described = {name for name, _, has_docstring in bindings(file) if has_docstring}
    for name in names:
        if name not in found and "__getattr__" not in found:
            yield Wrong(file.path, line, f"`__all__` names {name}, which does not exist")
        elif name in found and name not in described:
            yield Wrong(file.path, found[name], f"{name} is public and has no docstring (a constant: right below it)")
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Wrong(file.path, line, f"`__all__` names {name} twice")


def modules_open_with_words(file: File) -> Findings:
    if file.text.strip() and ast.get_docstring(file.tree) is None:
        yield Wrong(file.path, 1, "a module opens with a docstring: what it is, its rules, what was rejected")


def modules_stay_small(file: File) -> Findings:
    lines = len(file.text.splitlines())
    if file.path not in LARGE:
        if lines > SOFT_LINES:
            advice = "split it, or give it a line in LARGE, tests/test_tidy.py, with the reason"
            yield Wrong(file.path, 1, f"{lines} lines, and {SOFT_LINES} is the limit: {advice}")
        return
    limit, reason = LARGE[file.path]
    if lines > limit:
        yield Wrong(file.path, 1, f"{lines} lines, and its limit is {limit} ({reason}): it was to shrink, not to grow")
    elif lines <= SOFT_LINES:
        yield Wrong(file.path, 1, f"{lines} lines, well done: remove its line from LARGE, tests/test_tidy.py")
    elif lines < limit - SLACK_LINES:
        yield Wrong(file.path, 1, f"{lines} lines, well done: lower its {limit} in LARGE, tests/test_tidy.py")


def functions_stay_small(file: File) -> Findings:
    for node in functions(file):
        lines = height(node) - (height(node.body[0]) if ast.get_docstring(node) is not None else 0)
        if lines > FUNCTION_LINES:
            yield Wrong(file.path, node.lineno, f"{node.name} has {lines} lines, and {FUNCTION_LINES} is the limit")


def stores_are_opaque(file: File) -> Findings:
    """Find uses of a store's private attributes outside store/; an object's own attributes may have the same names."""
    if file.dotted[1] == "store":
        return
    for node in ast.walk(file.tree):
        name = ""
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = next((str(one.value) for one in node.args[1:2] if isinstance(one, ast.Constant)), "")
        if isinstance(node, ast.expr) and name in STORE_INTERNALS:
            yield Wrong(file.path, node.lineno, f"`{name}` of a store is internal: use store/internal.py")


def names_say_something(file: File) -> Findings:
    defined = [(1, part) for part in file.path.removesuffix(".py").split("/")]
    defined += [(node.lineno, node.name) for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
    defined += [(node.lineno, node.name) for node in functions(file) if not node.name.startswith("test_")]  # sentences
    for line, name in defined:
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        if FORBIDDEN_WORDS.intersection(map(str.lower, parts)):
            yield Wrong(file.path, line, f"`{name}`: not Manager, Helper, utils, common or misc, but what it does")


def names_are_the_fields(file: File) -> Findings:
    """Find home-made metaphors in the names that a file defines; names of tests are sentences."""
    allowed = words(" ".join(MAY_BE_NAMED))
    for line, name in dict.fromkeys(_defined(file)):
        parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
        if name not in allowed and (METAPHORS & parts or name in METAPHOR_CLASSES):
            yield Wrong(
                file.path, line, f"`{name}` is a metaphor: take the word of the field (docs/design.md, Glossary)"
            )


def _defined(file: File) -> Iterator[tuple[int, str]]:
    yield from ((1, part) for part in file.path.removesuffix(".py").split("/") if not part.startswith("test_"))
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
            "test_"
        ):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def no_sleeps(file: File) -> Findings:
    advice = "wait for the event, or give it a line in SLEEPS, tests/test_tidy.py, with the reason"
    names = dict(references(file))
    for node in ast.walk(file.tree):
        name = names.get(node.func) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or name not in ("time.sleep", "asyncio.sleep"):
            continue
        only_yields = name == "asyncio.sleep" and [ast.unparse(argument) for argument in node.args] == ["0"]
        if not only_yields and (file.path, function_at(file, node.lineno)) not in SLEEPS:
            yield Wrong(file.path, node.lineno, f"a test does not sleep: {advice}")


def no_skips(file: File) -> Findings:
    for node, name in references(file):
        if file.path != MAY_SKIP and name in SKIPPERS:
            yield Wrong(file.path, node.lineno, f"no {name}: mark it needs(part), so that CI can insist on it")


def no_select(file: File) -> Findings:
    for node, name in references(file):
        if name == "select.select":
            yield Wrong(file.path, node.lineno, "select fails for descriptors of 1,024 and above: use readiness.py")


class Rule(NamedTuple):
    """A rule, and where in the tree it holds."""

    check: Callable[[File], Findings]
    where: str


RULES = (
    Rule(imports_go_one_way, PACKAGE),
    Rule(core_is_pure, PACKAGE),
    Rule(nothing_pickles, PACKAGE),
    Rule(exports_are_real, PACKAGE),
    Rule(modules_stay_small, PACKAGE),
    Rule(modules_open_with_words, ""),
    Rule(functions_stay_small, ""),
    Rule(stores_are_opaque, PACKAGE),
    Rule(names_say_something, ""),
    Rule(names_are_the_fields, ""),
    Rule(no_sleeps, "tests/"),
    Rule(no_skips, "tests/"),
    Rule(no_select, ""),
)


def expect_none(wrong: list[Wrong]) -> None:
    if wrong:
        pytest.fail(f"{len(wrong)} found\n" + "\n".join(map(str, wrong)), pytrace=False)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    files = [file for file in python_files() if file.path.startswith(rule.where)]
    assert files, f"no Python file under {rule.where or ROOT}: the rule looks in the wrong place"
    expect_none([finding for file in files for finding in rule.check(file)])


def test_exceptions_are_about_something() -> None:
    lengthy = [path for path, (limit, reason) in LARGE.items() if limit > HARD_LINES and len(reason.split()) < 8]
    assert not lengthy, f"past {HARD_LINES} lines LARGE owes a whole sentence of reason: {lengthy}"
    assert not [path for path in LARGE if path not in kept_files()], "LARGE names a file that is gone"
    assert not [path for path in MAY_PICKLE if path not in kept_files()], "MAY_PICKLE names a file that is gone"
    sleepers = {(file.path, node.name) for file in python_files() for node in functions(file)}
    assert not set(SLEEPS) - sleepers, "SLEEPS names a function that is gone"


def test_nothing_names_one_machine_or_registry() -> None:
    wrong = []
    for name in kept_files():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            for line, text in enumerate(data.decode(errors="replace").splitlines(), 1):
                for hit in OF_ONE_MACHINE.finditer(text):
                    wrong.append(Wrong(name, line, f"`{hit[0]}`: no path of one machine, no host of a registry"))
    expect_none(wrong)


# The package from outside

LOOK = """
import json, sys
before = set(sys.modules)
import rallypoint
loaded = sorted(set(sys.modules) - before)
names = list(getattr(rallypoint, "__all__", []))
print(json.dumps({"loaded": loaded, "names": names, "absent": [n for n in names if not hasattr(rallypoint, n)]}))
"""


@functools.cache
def seen_from_outside() -> dict[str, list[str]]:
    """Import the package in a fresh interpreter, and return what that loaded, what it names and what is not there."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, f"`import rallypoint` fails:\n{done.stderr}"
    seen: dict[str, list[str]] = json.loads(done.stdout)
    return seen


def test_importing_the_package_is_light() -> None:
    heavy = HEAVY.intersection(seen_from_outside()["loaded"])
    assert not heavy, f"`import rallypoint` imports {sorted(heavy)}: import them where they are used"


def test_the_package_exports_what_it_says() -> None:
    (front,) = [file for file in python_files() if file.path == PACKAGE + "__init__.py"]
    said = set(seen_from_outside()["names"])
    assert not seen_from_outside()["absent"], "`rallypoint.__all__` names what cannot be had"
    ours = {name for name, node, _ in bindings(front) if not isinstance(node, ast.Import) and not is_foreign(node)}
    unsaid = sorted(name for name in ours - said if not name.startswith("_"))
    assert not unsaid, f"rallypoint/__init__.py has public names that its `__all__` does not say: {unsaid}"


def is_foreign(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("rallypoint")


# The rules bite

NET, CORE, STORE, TEST = f"{PACKAGE}net.py", f"{PACKAGE}core/new.py", f"{PACKAGE}store/new.py", "tests/test_new.py"
LONG = "def f():\n    '''Say.\n\n    More.\n    '''\n" + "    x = 1\n" * FUNCTION_LINES

BITES: list[tuple[Callable[[File], Findings], str, str, list[int]]] = [
    (imports_go_one_way, NET, "from rallypoint.store.base import Store", [1]),
    (imports_go_one_way, NET, "import rallypoint.store\nimport rallypoint.errors", [1]),
    (imports_go_one_way, NET, "def f():\n    from .store import base", [2]),
    (imports_go_one_way, STORE, "from ..server import app\nfrom ..net import connect\nfrom . import base", [1]),
    (imports_go_one_way, STORE, "if TYPE_CHECKING:\n    from rallypoint import server", [2]),
    (imports_go_one_way, STORE, "from rallypoint import HashStore", [1]),
    (imports_go_one_way, STORE, "importlib.import_module('rallypoint.cli')", [1]),
    (imports_go_one_way, f"{PACKAGE}recipes/lock.py", "from rallypoint.server import app", [1]),
    (imports_go_one_way, f"{PACKAGE}store/__init__.py", "from .base import Store\nfrom ..cli import main", [2]),
    (imports_go_one_way, f"{PACKAGE}__init__.py", "from .compat import x\nfrom .cli import main", [2]),
    (imports_go_one_way, f"{PACKAGE}cli/up.py", "from rallypoint import HashStore, server", []),
    (names_are_the_fields, NET, "class Keeper:\n    def ring_bell(self, slot): ...", [1, 2, 2]),
    (names_are_the_fields, NET, "class World: ...\nself._pulse = ear = 1", [1, 2, 2]),
    (names_are_the_fields, f"{PACKAGE}store/wire.py", "class Early:\n    __slots__ = ()", [1]),
    (names_are_the_fields, "tests/test_net.py", "def test_who_rings_the_bell(): ...", []),
    (imports_go_one_way, f"{PACKAGE}attic.py", "", [1]),
    (core_is_pure, CORE, "import re, time\nfrom os import path\nimport collections.abc\nimport msgspec", [1, 2]),
    (core_is_pure, CORE, "from rallypoint.errors import StoreFull\nfrom . import records\nfrom ..net import x", [3]),
    (core_is_pure, CORE, "from rallypoint.deadline import Deadline\nprint(open('x'))\nlog.open()", [1, 2, 2]),
    (core_is_pure, NET, "import time\nprint()", []),
    (nothing_pickles, STORE, "import pickle\nfrom pickle import loads\nimport pickleball", [1, 2]),
    (no_select, STORE, "import select\nselect.select([], [], [])\nselect.poll()", [2]),
    (exports_are_real, STORE, "x = 1", [1]),
    (exports_are_real, STORE, "'''Only words.'''", []),
    (exports_are_real, f"{PACKAGE}store/_wire.py", "x = 1", []),
    (exports_are_real, STORE, "__all__ = ['A', 'B']\nclass A:\n    '''A.'''", [1]),
    (exports_are_real, STORE, "__all__ = ['f', 'N']\ndef f(): ...\nN = 1\n'''N.'''", [2]),
    (exports_are_real, STORE, "__all__ = ['x', 'x']\nfrom y import x", [1]),
    (exports_are_real, STORE, "if z:\n    N = 1\n    '''N.'''\nelse:\n    N = 2\n__all__ = ['N']", []),
    (modules_open_with_words, TEST, "x = 1", [1]),
    (modules_stay_small, STORE, "\n" * (SOFT_LINES + 1), [1]),
    (modules_stay_small, CORE, "\n" * SOFT_LINES, []),
    (functions_stay_small, TEST, LONG, [1]),
    (functions_stay_small, TEST, LONG.removesuffix("    x = 1\n"), []),
    (stores_are_opaque, NET, "store._backend\nself._store._name('k')\nself._backend\nself._name('k')", [1, 2]),
    (stores_are_opaque, NET, "getattr(store, '_backend', store)\ngetattr(store, 'host')", [1]),
    (stores_are_opaque, STORE, "store._backend", []),
    (names_say_something, f"{PACKAGE}net_utils.py", "class SocketManager: ...\ndef common(): ...", [1, 1, 2]),
    (names_say_something, STORE, "class HTTPHelper: ...\ndef commonly(): ...\nmanager = 1", [1]),
    (no_sleeps, TEST, "import time as t\nt.sleep(1)\nstore.sleep(1)", [2]),
    (no_sleeps, TEST, "from time import sleep\nsleep(1)\nbite = sleep", [2]),
    (no_sleeps, TEST, "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0.1)", [3]),
    (no_skips, TEST, "import pytest\n@pytest.mark.skipif(x)\ndef test(): pytest.skip()", [2, 3]),
    (no_skips, TEST, "from pytest import importorskip as i, mark\ni('torch')\n@mark.skip\ndef t(): ...", [2, 3]),
    (no_skips, MAY_SKIP, "import pytest\npytest.skip('no torch')", []),
]


@pytest.mark.parametrize(("rule", "path", "text", "lines"), BITES)
def test_the_rule_bites(rule: Callable[[File], Findings], path: str, text: str, lines: list[int]) -> None:
    wrong = list(rule(parse(path, text)))
    assert sorted(finding.line for finding in wrong) == lines, wrong


@pytest.mark.parametrize(
    ("lines", "says"), [(451, "its limit is 450"), (389, "lower its 450"), (300, "remove its line")]
)
def test_the_ratchet_turns_one_way(lines: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LARGE, STORE, (450, "a reason"))
    (wrong,) = modules_stay_small(parse(STORE, "\n" * lines))
    assert says in wrong.rule
    assert not list(modules_stay_small(parse(STORE, "\n" * 400)))


@pytest.mark.parametrize(
    "text", ["/" + "work/main/x", "file:///" + "root/.cache", "a /" + "home/me", "https://pypi" + ".org/"]
)
def test_a_place_of_one_machine_is_seen(text: str) -> None:
    assert OF_ONE_MACHINE.search(text)


@pytest.mark.parametrize("text", ["src/work/x", "/workers/1", "~/work", "/rooted", "/tmp/x", "prefix/root/key", "pypi"])
def test_an_ordinary_path_is_not(text: str) -> None:
    assert not OF_ONE_MACHINE.search(text)


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for file in python_files():
        for node in ast.walk(file.tree):
            if file.path.startswith(PACKAGE) and isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file.path}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
