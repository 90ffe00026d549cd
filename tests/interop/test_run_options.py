"""Command lines and variables that torchrun understands, given to it and to `rallypoint run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rallypoint.cli import main
from rallypoint.cli.run import command as run_command
from rallypoint.compat.rendezvous.endpoint import _parse_rendezvous_config

from .torch_processes import AMPLE_S

pytestmark = pytest.mark.needs("torch")

PRINTS = (
    "import os; [os.write(n, f'{name} {os.environ[\"RANK\"]}\\n'.encode()) for n, name in ((1, 'out'), (2, 'err'))]\n"
)
LAUNCHERS = (["-m", "torch.distributed.run"], ["-m", "rallypoint", "run"])


SAME = ("redirects", "tee", "rdzv_endpoint", "rdzv_id", "max_restarts", "standalone", "no_python", "role", "node_rank")
"""Options whose values both parsers leave as they are."""


def ours(*words: str) -> dict[str, Any]:
    return run_command.make_context("run", [*words, "script.py", "--redirect"]).params


@pytest.mark.parametrize(
    "words",
    [
        "--redirect 3",
        "--redi=1 --te 2",
        "--rdzv-e h:1 --rdzv_i x --max-r 2",
        "--standal --no-p",
        "--re 3",
        "--local-r 0,1 --local-a h --rol r",
        "--node-r 1 --master-a h --master-p 7",
    ],
)
def test_abbreviated_options_mean_the_same_as_for_torchrun(words: str) -> None:
    from torch.distributed.run import get_args_parser

    theirs = vars(get_args_parser().parse_args([*words.split(), "script.py", "--redirect"]))
    mine = ours(*words.split())
    assert mine["arguments"] == ("--redirect",) and theirs["training_script_args"] == ["--redirect"]
    given = [name for name in SAME if theirs[name] != get_args_parser().get_default(name)]
    assert given and {name: mine[name] for name in given} == {name: theirs[name] for name in given}


@pytest.mark.parametrize("word", ["--rdzv", "--m", "--no", "--redirectss"])
def test_options_ambiguous_or_unknown_to_torchrun_are_refused(word: str, capsys: Any) -> None:
    from torch.distributed.run import get_args_parser

    with pytest.raises(SystemExit) as caught:
        get_args_parser().parse_args([word, "1", "script.py"])
    told = CliRunner().invoke(main, ["run", word, "1", "script.py"])
    assert caught.value.code == told.exit_code == 2
    assert word in told.output and "--" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "option"),
    [
        ("[${role_name}-${rank}/${local_rank}]: ", "--tee=3"),
        ("<$rank> $$ ${unknown} $", "--tee=1"),
        ("[${rank}]: ", "--redirects=0"),
    ],
)
def test_the_template_of_a_line_is_torchruns(tmp_path: Path, template: str, option: str) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    env = {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template, "PYTHONUNBUFFERED": "1"}
    seen = []
    for launcher in LAUNCHERS:
        words = [*launcher, "--role=trainer", "--nproc-per-node=2", option, f"--log-dir={tmp_path}", "prints.py"]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, timeout=AMPLE_S)
        assert done.returncode == 0, done.stderr
        lines = (done.stdout + done.stderr).decode().splitlines()
        seen.append(sorted(line for line in lines if line.endswith(("out 0", "out 1", "err 0", "err 1"))))
    assert seen[0] == seen[1] and len(seen[1]) == 4


CONFS = ["a='1'", 'a="1"', "'a=1,b=2'", "a='x,b=y'", "a=' 1 '", "a=1'", "'a'=1", "a=''", "a = 1 , b=x=y"]


@pytest.mark.parametrize("conf", CONFS)
def test_quotes_are_part_of_a_value_as_for_torchrun(conf: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config as theirs

    assert _parse_rendezvous_config(conf) == theirs(conf)


@pytest.mark.parametrize("value", ["1", "true", "T", "yes", "Y", "0", "False", "f", "no", "n", "on", "'true'", "2", ""])
def test_is_host_takes_the_same_values_as_torchruns(value: str) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    told = CliRunner().invoke(main, ["run", "--rdzv-conf", f"is_host={value}", "--nnodes=2", "script.py"])
    try:
        assert value
        RendezvousParameters("c10d", "h:1", "id", 1, 1, is_host=value).get_as_bool("is_host")
    except (AssertionError, ValueError):
        assert told.exit_code == 2 and "'is_host'" in told.output
    else:
        assert told.exit_code == 2 and "needs a server" in told.output
