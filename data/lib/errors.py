"""How every command in data/ ends: a user's mistake is one sentence and exit code 2, never a traceback."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """A user's mistake. The message names the flag, file or clip, and says what to do."""


def run(main: Callable[[], int | None]) -> None:
    """Run a command's main() and exit with its code; 2 for a UserError, 130 for Ctrl-C."""
    try:
        code = main()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left: run the same command again to continue", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # whatever read our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code or 0)
