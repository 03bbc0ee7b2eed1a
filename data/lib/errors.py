"""How the scripts of data/ end: a user's mistake is one sentence and exit code 2, never a traceback."""

import os
import sys
from collections.abc import Callable


class UsageError(Exception):
    """A mistake of the user: the message names the flag, file or clip, and what to do."""


def run(main: Callable[[], int | None]) -> None:
    try:
        code = main()
        sys.stdout.flush()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left: run the same command again", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code or 0)
