"""The command line: `sparsam VERB`, one file per verb. An error is one line on stderr and a non-zero exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
import typer

from sparsam.cli import doctor, inspect, report, train
from sparsam.cli.screen import fail

__all__ = ["app", "main"]

app = typer.Typer(
    help="Trains PyTorch models on less, and proves what was saved against the dense original.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)


def main(arguments: Sequence[str] | None = None) -> None:
    """What the `sparsam` command runs.

    Args:
        arguments: the command line without the program's name; None takes that of the process.

    Raises:
        SystemExit: always; 0 when all went well, 130 after Ctrl-C, 2 for a wrong command line, 1 for all else.
    """
    # Large pages for tensors: page faults are a good part of a step on CPUs. torch reads this at its first allocation,
    # and the dense twin inherits it, so that both have the same.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(app(given, prog_name="sparsam", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as help_:
        print(help_.format_message())
        sys.exit(0)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "sparsam"
        fail(f"{error.format_message().rstrip('.')}. See: {command} --help", status=2)
    except click.Abort:
        fail("stopped.", status=130)
    except KeyboardInterrupt:
        fail("stopped at once; what was done since the last checkpoint is lost.", status=130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has gone; so may we
        sys.exit(141)
    except Exception as error:
        if os.environ.get("SPARSAM_TRACEBACK") == "1":
            raise
        fail(_explained(error))


def _explained(error: Exception) -> str:
    from sparsam.checkpoint import CheckpointError
    from sparsam.run import RunError

    text = " ".join(str(error).split())
    if isinstance(error, ValueError | RunError | CheckpointError) and text:
        return text
    if isinstance(error, OSError):
        return f"{error.filename or 'file'}: {error.strerror or text}."
    return f"a fault of Sparsam's: {type(error).__name__}: {text}. SPARSAM_TRACEBACK=1 shows where; please report it."
