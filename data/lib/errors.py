"""How every command in data/ ends: a user's mistake is one sentence and exit code 2, never a traceback."""

import argparse
import contextlib
import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable


class UserError(Exception):
    """A user's mistake. The message names the flag, file or clip, and says what to do."""


def disk_error(error: OSError) -> str | None:
    """A sentence about a file that cannot be read or written; None for an error of another kind."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a file'} cannot be written: the disk is full; free some space and try again."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be read or written ({error.strerror}); check the path and its permissions."
    return None


def complain(sentence: str) -> int:
    """Prints a mistake and returns its exit code."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()  # what was said before comes first
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def run(main: Callable[[], int | None]) -> None:
    """Run a command's main() and exit with its code; 2 for a UserError, 130 for Ctrl-C."""
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        code = complain(str(error))
    except BrokenPipeError:  # whatever read our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if not (sentence := disk_error(error)):
            raise
        code = complain(sentence)
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left: run the same command again to continue", file=sys.stderr)
        code = 130
    sys.exit(code or 0)


# ---------------------------------------------------------------- flags


class CommandParser(argparse.ArgumentParser):
    """argparse with one sentence per mistake, without the list of all flags; a misspelt flag names the nearest."""

    def error(self, message: str):
        if unknown := re.match(r"unrecognized arguments: (-\S+)", message):
            known = [option for action in self._actions for option in action.option_strings]
            nearest = difflib.get_close_matches(unknown[1].split("=")[0], known, n=1)
            message = f"unknown flag {unknown[1]}" + (f"; did you mean {nearest[0]}?" if nearest else "")
        self.exit(2, f"error: {message.rstrip('.')}{'' if message.endswith('?') else '; --help lists the flags.'}\n")


def command_parser(doc: str) -> CommandParser:
    return CommandParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def between(kind: type, low: float, high: float = math.inf, *, above: bool = False):
    """A type for argparse: a number from `low` to `high`, which refuses NaN and infinity. `above`: not `low` itself."""

    def number(text: str):
        value = kind(text)
        if not low <= value <= high or (above and value == low) or value == math.inf:
            bounds = f"above {low:g}" if above else f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it takes {bounds}")
        return value

    number.__name__ = kind.__name__  # for argparse's own message about what is no number
    return number
