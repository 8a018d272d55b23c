"""What every script shares: flags, help, and errors as one sentence.

A script is then only its main function:

    from cafcor_jax import cli, config

    def main(cfg: config.Config) -> None:
        ...

    if __name__ == "__main__":
        cli.run(main, doc=__doc__)
"""

import dataclasses
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence

from absl import app, flags, logging

from cafcor_jax import config
from cafcor_jax.errors import UserError

HELP = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")


def run(main: Callable[[config.Config], int | None], *, doc: str | None = None) -> None:
    """Reads the flags, calls ``main`` with the settings, and ends the process.

    The process ends with what ``main`` returned (None is success), with 2 after ``error: <sentence>`` on
    stderr for a :class:`~cafcor_jax.errors.UserError` or a wrong flag, and with 130 after Ctrl-C. Any other
    exception is a bug and keeps its traceback.

    Args:
      main: takes the validated settings; its return value is the exit status.
      doc: what the script does, with examples: the head of ``--help``. Usually ``__doc__``.
    """
    config.define_flags()

    def parse(argv: Sequence[str]) -> config.Config:
        if any(arg in HELP for arg in itertools.takewhile(lambda arg: arg != "--", argv[1:])):
            print(help_text(argv[0], doc))
            sys.exit(0)
        logging.set_verbosity(logging.WARNING)  # JAX and Orbax tell things that are of no use to a person.
        return parse_flags(argv)

    sys.exit(status(lambda: app.run(main, flags_parser=parse)))


def parse_flags(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> config.Config:
    """Reads a command line.

    A value on the command line wins over one in a flagfile wherever the two stand; of two flagfiles the later
    one wins.

    Args:
      argv: the program's name and its arguments.
      flag_values: where the flags are defined (:func:`cafcor_jax.config.define_flags`).

    Returns:
      The settings.

    Raises:
      UserError: if a flag, a value or a flagfile is wrong.
    """
    read(flag_values, argv)
    return config.from_flags(flag_values)


def read(flag_values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Sets flags from a command line and makes no settings of them yet.

    Raises:
      UserError: if a flag, a value or a flagfile is wrong, or something is no flag.
    """
    files, others = split_flagfiles(argv[1:])
    for file in files:
        _check_readable(file)
    try:
        rest = flag_values([argv[0], *(f"--flagfile={file}" for file in files), *others])
    except flags.Error as error:
        raise UserError(_sentence(str(error))) from None
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not a flag: flags are written --name=value.")


def help_text(program: str, doc: str | None = None, flag_values: flags.FlagValues = flags.FLAGS) -> str:
    """The text of ``--help``: usage, the script's own words, then the flags with defaults and choices.

    Args:
      program: the script, as it was called.
      doc: what it does, with examples.
      flag_values: where the flags are defined.

    Returns:
      Text no wider than the terminal.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 110)
    lines = [f"Usage: python {program} [--flagfile=FILE] [--name=value ...]"]
    if doc and doc.strip():
        lines += ["", doc.strip()]
    lines += ["", "Flags and their defaults. Those given here win over those in a flagfile."]

    fields = dataclasses.fields(config.Config)
    for group in dict.fromkeys(field.metadata["group"] for field in fields):
        lines += ["", f"{group}:"]
        for field in fields:
            if field.metadata["group"] == group:
                default = f"({field.metadata['unset']})" if field.default is None else field.default
                lines += _entry(f"--{field.name}={default}", config.describe(field), width)

    own = flag_values.get_key_flags_for_module(program)
    if own:
        lines += ["", "Of this script:"]
        for flag in own:
            lines += _entry(f"--{flag.name}={flag.default}", flag.help or "", width)
    return "\n".join(lines)


def _entry(flag: str, text: str, width: int) -> Iterator[str]:
    """One flag of the help: its name and default at the left, what it means at the right, or below it."""
    indent = 38 if width >= 90 else 8
    head, lines = f"  {flag}", textwrap.wrap(text, width - indent)
    if lines and len(head) < indent - 1:
        head = f"{head:<{indent}}{lines.pop(0)}"
    yield head
    for line in lines:
        yield " " * indent + line


def status(call: Callable[[], object]) -> int:
    """Calls, and turns what the user can put right into a sentence and an exit status."""
    try:
        call()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return 130
    return 0


def split_flagfiles(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes the flagfiles out of a command line: their names, and the other arguments."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if arg == "--":
            others += [arg, *rest]
        elif name in ("--flagfile", "-flagfile"):
            file = value if equals else next(rest, "")
            if not file:
                raise UserError("--flagfile names no file: write --flagfile=FILE.")
            files.append(os.path.expanduser(file))
        else:
            others.append(arg)
    return files, others


def _check_readable(file: str) -> None:
    """Raises a UserError if a flagfile cannot be read."""
    try:
        with open(file) as stream:
            stream.read()
    except FileNotFoundError:
        raise UserError(f"The flagfile {file!r} does not exist.") from None
    except OSError as error:
        raise UserError(f"The flagfile {file!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The flagfile {file!r} is not a text file.") from None


def _sentence(message: str) -> str:
    """The message of absl on one line, without its shouting."""
    message = " ".join(message.replace("ERROR::", "").split())
    return message if message.endswith((".", "?", "!")) else f"{message}."
