"""Asks the process that forks (helpers/warm_ranks.py) to run a script in this one's place, with this one's terminal,
folder and environment; passes signals on, and exits as the script does.

    warm_client.py SOCKET PYTHON SCRIPT [arguments]    PYTHON: what the script takes for its Python
"""

import json
import os
import signal
import socket
import sys

place, python, *command = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(place)
    job = {"python": python, "command": command, "environment": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(connection, [json.dumps(job).encode() + b"\n"], [0, 1, 2])
    answers = connection.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    code = int(answers.readline())
if code < 0:  # it was killed
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
