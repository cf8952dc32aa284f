"""The command line: `sparsam VERB`, one file per verb. An error is one line on stderr and a non-zero exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sparsam import __version__
from sparsam.cli import doctor, export, inspect, plan, report, train
from sparsam.cli.screen import Stopped, fail

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Trains PyTorch models on less, and proves what was saved against the dense original."""
    if version:
        print(f"sparsam {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("train")(train.train)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("export")(export.export)


def main(arguments: Sequence[str] | None = None) -> None:
    """What the `sparsam` command runs.

    Args:
        arguments: the command line without the program's name; None takes that of the process.

    Raises:
        SystemExit: always; 0 when all went well, 130 after Ctrl-C, 2 for a wrong command line, 1 for all else.
    """
    try:
        _main(arguments)
    except SystemExit as end:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        # gloo's threads may outlive the interpreter, which then aborts: a rank ends here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def _main(arguments: Sequence[str] | None) -> None:
    # Large pages for tensors: page faults are a good part of a step on CPUs. torch reads this at its first allocation,
    # and the dense twin inherits it, so that both have the same.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(given, prog_name="sparsam", standalone_mode=False)
    except Stopped as stopped:
        fail(str(stopped), status=130)
    except (KeyboardInterrupt, typer.Abort):
        fail("stopped.", status=130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has gone; so may we
        sys.exit(141)
    except Exception as error:
        if os.environ.get("SPARSAM_TRACEBACK") == "1":
            raise
        # Typer brings its own copy of click's exceptions or uses click's: known by what they can do.
        if hasattr(error, "format_message"):
            command = context.command_path if (context := getattr(error, "ctx", None)) is not None else "sparsam"
            fail(f"{' '.join(error.format_message().split()).rstrip('.')}. See: {command} --help", status=2)
        fail(_explained(error))
    if status == 130:
        fail("stopped.", status=130)  # Ctrl-C, as Typer hands it on
    sys.exit(status or 0)


def _explained(error: Exception) -> str:
    from sparsam.checkpoint import CheckpointError
    from sparsam.ranks import RankError
    from sparsam.run import RunError
    from sparsam.sparse.agreement import TopologyError

    text = " ".join(str(error).split())
    if isinstance(error, ValueError | RunError | CheckpointError | RankError | TopologyError) and text:
        return text
    if isinstance(error, OSError):
        return f"{error.filename or 'file'}: {error.strerror or text}."
    return f"a fault of Sparsam's: {type(error).__name__}: {text}. SPARSAM_TRACEBACK=1 shows where; please report it."
