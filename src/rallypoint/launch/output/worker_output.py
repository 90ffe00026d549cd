"""The output of one agent's workers: which console, files and prefix each of them has.

Folded lines need a prefix that names their ranks, and wait for each other, so by default they are for terminals, where
lines have a prefix anyway, and for nodes with many workers. Progress bars of a single worker are left alone unless the
console is a terminal: its output is forwarded byte for byte.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from rallypoint.launch.job import Job
from rallypoint.launch.output.folding import FOLD_FROM
from rallypoint.launch.output.line_filter import LineFilter
from rallypoint.launch.output.log_files import LogFiles
from rallypoint.launch.output.pump import OutputPump, Std, WorkerStreams, parse_std, route
from rallypoint.launch.output.routes import OutputRoute
from rallypoint.launch.round_spec import RoundSpec

if TYPE_CHECKING:
    from rallypoint.launch.output.torch_logs_specs import TorchLogsSpecs

__all__ = ["WorkerOutput"]

MIN_COLUMNS = 20


class WorkerOutput:
    """Opens the streams of workers, and owns the pump that forwards them."""

    def __init__(self, job: Job, logs: LogFiles) -> None:
        self._job, self._logs = job, logs
        self._redirects, self._tee = parse_std(job.redirects), parse_std(job.tee)
        self._specs = _logs_specs(job) if job.output.logs_specs else None
        self._on_terminal = os.isatty(1)
        folds = job.output.fold == "on" or (
            job.output.fold == "auto" and self._on_terminal and job.workers >= FOLD_FROM
        )
        self._prefix = self._on_terminal or folds
        self._bars = job.output.progress_bars == "auto" and (self._prefix or job.workers > 1)
        self._pump = OutputPump(folds=folds)

    def begin(self, spec: RoundSpec) -> None:
        """Choose the files of the workers that are started next."""
        self._logs.begin(spec.restarts)
        if self._specs is not None:
            self._specs.begin(spec)

    def open(self, spec: RoundSpec, rank: int) -> tuple[WorkerStreams, Path]:
        """Create the streams of a worker; return them and the path of its error file."""
        local, job = rank - spec.first, self._job
        if self._specs is not None:
            out, err, errors = self._specs.routes(local)
            copies = self._specs.filtered
        else:
            directory = self._logs.of(local)
            errors, copies = directory / "error.json", directory.parent
            out, err = (
                route(stream, local, self._redirects, self._tee, job.shown_ranks, directory)
                for stream in (Std.OUT, Std.ERR)
            )
        if job.output.shown_ranks is not None and rank not in job.output.shown_ranks:
            out, err = out._replace(console=False), err._replace(console=False)
        names = {"role_name": job.role, "rank": rank, "local_rank": local}
        header = Template(job.line_prefix).safe_substitute(names)
        copied = header or f"[{job.role}{local}]:"
        streams = self._pump.open(
            self._label(spec, rank),
            out,
            err,
            filters=(
                _filter(out, copies / "filtered_stdout.log", job.output.stdout_filters, copied),
                _filter(err, copies / "filtered_stderr.log", job.output.stderr_filters, copied),
            ),
            rank=rank,
            prefix=self._prefix,
            header=header,
            bars=self._bars,
        )
        return streams, errors

    def variables(self, spec: RoundSpec, rank: int) -> dict[str, str]:
        """Return the width that a worker has for its lines, on a terminal; bars of another width would be cut."""
        if not self._on_terminal:
            return {}
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(1).columns - len(self._label(spec, rank)) - len("[] ") - 1
            return {"COLUMNS": str(columns)} if columns >= MIN_COLUMNS else {}
        return {}

    def say(self, line: str) -> None:
        """Show a line of the agent between the lines of workers."""
        self._pump.say(line)

    def close(self) -> None:
        """Forward the remaining output, and stop."""
        self._pump.close()

    def _label(self, spec: RoundSpec, rank: int) -> str:
        return f"{spec.node}:{rank}"


def _logs_specs(job: Job) -> TorchLogsSpecs:
    from rallypoint.launch.output.torch_logs_specs import TorchLogsSpecs  # it imports what few jobs need

    return TorchLogsSpecs(job)


def _filter(shown: OutputRoute, path: Path, texts: tuple[str, ...], prefix: str) -> LineFilter | None:
    """Return the filter of a teed stream, if there are texts to look for."""
    return LineFilter(path, texts, prefix) if texts and shown.console and shown.path is not None else None
