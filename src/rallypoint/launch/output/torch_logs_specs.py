"""torchrun's `--logs-specs`: a class of an installed package decides where the output of workers goes.

The package names the class in the entry points `torchrun.logs_specs`. The class is a subclass of PyTorch's LogsSpecs,
so PyTorch must be installed; it is imported only if the option is used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from rallypoint.errors import RallypointError, WithFields
from rallypoint.launch.job import Job
from rallypoint.launch.output.routes import OutputRoute
from rallypoint.launch.round_spec import RoundSpec, environment

__all__ = ["LogsSpecsFailed", "TorchLogsSpecs", "known_logs_specs"]

GROUP = "torchrun.logs_specs"
TORCH = "torch.distributed.elastic.multiprocessing"


class LogsSpecsFailed(WithFields, RallypointError):
    """The class of --logs-specs cannot be used, or has raised an exception."""

    name: str
    why: str

    def _sentence(self) -> str:
        return f"--logs-specs {self.name}: {self.why}"


def known_logs_specs(name: str) -> str:
    """Check that a package has registered this name; raise ValueError if none has, or without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError("needs PyTorch, which is not installed: see --log-dir, --redirects and --tee")
    found = importlib.metadata.entry_points(group=GROUP)
    if not found.select(name=name):
        known = ", ".join(sorted(found.names)) or "none"
        raise ValueError(f"no installed package registers {name!r} under {GROUP!r}; registered: {known}")
    return name


class TorchLogsSpecs:
    """An object of the class, made once for the agent."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._name = job.output.logs_specs
        self._dest: Any = None
        torch = importlib.import_module(TORCH)
        try:
            (entry,) = importlib.metadata.entry_points(group=GROUP, name=self._name)
            shown = None if job.shown_ranks is None else set(job.shown_ranks)
            self._specs = entry.load()(
                log_dir=job.log_dir,
                redirects=torch.Std.from_str(job.redirects),
                tee=torch.Std.from_str(job.tee),
                local_ranks_filter=shown,
            )
        except Exception as error:
            raise self._failed(error) from error

    def begin(self, spec: RoundSpec) -> None:
        """Have the class choose the files of the workers of a round."""
        variables = {
            rank - spec.first: environment(spec, rank, self._job.environment, error_file="") for rank in spec.ranks
        }
        try:
            self._dest = self._specs.reify(variables)
        except Exception as error:
            raise self._failed(error) from error

    def routes(self, local: int) -> tuple[OutputRoute, OutputRoute, Path]:
        """Return the routes of a worker's stdout and stderr, and its error file."""
        dest = self._dest
        return (
            _route(dest.stdouts.get(local, ""), local in dest.tee_stdouts),
            _route(dest.stderrs.get(local, ""), local in dest.tee_stderrs),
            Path(dest.error_files.get(local) or os.devnull),
        )

    @property
    def filtered(self) -> Path:
        """The directory of copies for --duplicate-stdout-filters."""
        return Path(self._dest.filtered_stdout).parent

    def _failed(self, error: Exception) -> LogsSpecsFailed:
        return LogsSpecsFailed(name=self._name, why=f"{type(error).__name__}: {error}")


def _route(path: str, teed: bool) -> OutputRoute:
    """Return the route for a path of LogsDest: empty is the console, and a teed file goes to both."""
    discards = path == os.devnull
    return OutputRoute(teed or not path, None if discards or not path else Path(path))
