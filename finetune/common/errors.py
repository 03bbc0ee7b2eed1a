"""How the commands of finetune/ and data/ end: a user's mistake is one sentence and exit code 2, never a traceback."""

import argparse
import contextlib
import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # stopped early by a signal with everything saved: run the same command again to continue


class UserError(Exception):
    """A user's mistake. The message is one sentence that names the flag, file or sample and says what to do."""


def disk_error(error: OSError) -> str | None:
    """A sentence about a file that cannot be read or written; None for an error of another kind."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'a file'} cannot be written: the disk is full; free some space and try again."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be read or written ({error.strerror}); check the path and its permissions."
    return None


def run_command(work: Callable[..., int | None], *args) -> None:
    """Runs work(*args) and exits with the code that it returns; 2 for a user's mistake, 130 for Ctrl-C."""
    sentence = None
    try:
        code = work(*args) or 0
        sys.stdout.flush()
    except UserError as error:
        sentence = str(error)
    except BrokenPipeError:  # whatever read our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        sentence = disk_error(error)
        if not sentence:
            raise
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        code = 130
    if sentence:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()  # what was said before comes first
        print(f"error: {sentence}", file=sys.stderr)
        code = EXIT_USER_ERROR
    sys.exit(code)


# ---- flags of a command ------------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """argparse with one sentence per mistake, without the list of all flags; a misspelt flag names the nearest."""

    def error(self, message: str):
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        message = unknown_flag(unknown[1], self) if unknown else f"{message.rstrip('.')}; --help lists the flags."
        self.exit(EXIT_USER_ERROR, f"error: {message}\n")


def command_parser(doc: str) -> CommandParser:
    return CommandParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)


def unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"{word!r} follows a flag that does not take it; --help lists the flags."
    name = word.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"unknown flag {name}" + (f"; did you mean {nearest[0]}?" if nearest else "; --help lists the flags.")


def between(kind: type, low: float, high: float = math.inf, *, above: bool = False):
    """A type for argparse: a number from `low` to `high`, which refuses NaN and infinity. `above`: not `low` itself."""
    if above:
        bounds = f"above {low:g}"
    elif high == math.inf:
        bounds = f"{low:g} or more"
    else:
        bounds = f"{low:g} to {high:g}"

    def number(text: str):
        value = kind(text)
        if not low <= value <= high or (above and value == low) or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is out of range: it takes {bounds}")
        return value

    number.__name__ = kind.__name__  # for argparse's own message about what is no number
    return number
