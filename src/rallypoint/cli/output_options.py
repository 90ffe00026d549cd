"""The options of `rallypoint run` for the output of workers."""

from __future__ import annotations

import click

from rallypoint.cli.option_groups import OptionGroup, checked, parsed
from rallypoint.launch.job import directory
from rallypoint.launch.output.line_filter import parse_filters
from rallypoint.launch.output.routes import parse_global_ranks, parse_ranks, parse_std

__all__ = ["output_options"]

HANDLERS = ("null", "console", "dynamic_rendezvous")
"""The handlers of --event-log-handler that torchrun knows."""


def output_options() -> OptionGroup:
    """Return the options, in a group."""
    group = OptionGroup("Output")
    group.add("log-dir", metavar="DIRECTORY", callback=parsed(directory, machine=True),
              help="Directory for the workers' output and failure.json.")  # fmt: skip
    group.add("redirects", "-r", metavar="STREAMS", default="0", default_text="0", callback=checked(parse_std),
              help="Streams written to files only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank, for example "
                   "0:1,1:3.")  # fmt: skip
    group.add("tee", "-t", metavar="STREAMS", default="0", default_text="0", callback=checked(parse_std),
              help="Streams written to files and to the terminal, in the same notation.")  # fmt: skip
    group.add("local-ranks-filter", metavar="RANK,…", default_text="all", callback=parsed(parse_ranks),
              help="Local ranks whose output is shown on the terminal.")  # fmt: skip
    group.add("ranks-filter", ours=True, metavar="RANK,…", default_text="all", callback=parsed(parse_global_ranks),
              help="Ranks, of all nodes, whose output is shown on the terminal, for example 0,8-15.")  # fmt: skip
    group.add("fold", ours=True, type=click.Choice(["auto", "on", "off"]), default="auto",
              default_text="on a terminal, for more than 4 workers",
              help="Show equal lines of several ranks once, as [node:0-63]. Files are not affected.")  # fmt: skip
    group.add("progress-bars", ours=True, type=click.Choice(["auto", "raw"]), default="auto", default_text="auto",
              help="auto: one line per rank that is redrawn on a terminal, the last state elsewhere. raw: carriage "
                   "returns are left as they are.")  # fmt: skip
    group.add("duplicate-stdout-filters", metavar="TEXT,…", callback=parsed(parse_filters),
              help="Copy teed lines of stdout that contain one of these texts to filtered_stdout.log.")  # fmt: skip
    group.add("duplicate-stderr-filters", metavar="TEXT,…", callback=parsed(parse_filters),
              help="The same for stderr, to filtered_stderr.log.")  # fmt: skip
    group.add("logs-specs", metavar="NAME",
              help="Class of an installed package that chooses the log files (entry points torchrun.logs_specs). Needs "
                   "PyTorch.")  # fmt: skip
    group.add("event-log-handler", type=click.Choice(HANDLERS), default="null", default_text="null",
              help="console: print torchrun's events on standard error. --json has more.")  # fmt: skip
    group.add("quiet", "-q", ours=True, is_flag=True, help="Print only the workers' output and failures.")
    group.add("json", ours=True, is_flag=True,
              help="Print events as JSON objects, one per line, on standard error.")  # fmt: skip
    group.add("log-format", ours=True, type=click.Choice(["text", "json"]), default="text", default_text="text",
              help="Format of events; json is the same as --json.")  # fmt: skip
    return group
