"""A real SLURM cluster with two nodes on this machine during a test: our own munged, slurmctld and two slurmd."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from helpers import support

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=600
JobRequeue=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def reason_to_skip() -> str:
    """Why no cluster can run here; empty if it can. Installs SLURM if it is missing."""
    if os.getuid() != 0:
        return "SLURM's daemons need root"
    if all(map(find, PROGRAMS)):
        return ""
    environment = support.environment(AUDIO_FINETUNE_ENV=support.VENV)
    done = subprocess.run(
        [support.ROOT / "launch.sh", "setup", "--with-slurm"], env=environment, capture_output=True, text=True
    )
    absent = [name for name in PROGRAMS if not find(name)]
    return f"./launch.sh setup --with-slurm did not install {', '.join(absent)}: {done.stderr[-300:]}" if absent else ""


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def cluster(folder: Path):
    """Yields the environment for sbatch, scontrol and so on, the daemons by node, and a function that starts a node."""
    folder.mkdir(mode=0o700)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = [support.free_port() for _ in range(3)]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname(), ports=ports))
    env = support.environment(SLURM_CONF=str(conf))
    env["PATH"] += ":/usr/sbin:/sbin"
    daemons = []

    def start(*words) -> subprocess.Popen:
        log = open(folder / f"{words[0]}-{len(daemons)}.out", "w")
        daemons.append(
            subprocess.Popen([find(words[0]), *words[1:]], env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        )
        return daemons[-1]

    def start_node(name: str) -> subprocess.Popen:
        return start("slurmd", "-D", "-f", conf, "-N", name)

    try:
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        start("munged", "--foreground", "--force", "--key-file", key, "--socket", files["socket"],
              "--pid-file", files["pid"], "--log-file", files["log"], "--seed-file", files["seed"])  # fmt: skip
        wait_until(files["socket"].exists)
        start("slurmctld", "-D", "-f", conf)
        nodes = {name: start_node(name) for name in ("n1", "n2")}
        wait_until(lambda: run(env, "sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"])
        yield env, nodes, start_node
    finally:
        run(env, "scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def run(env: dict, *words) -> str:
    return subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, check=False).stdout


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.time() + seconds
    while not condition():
        if time.time() > deadline:
            raise TimeoutError(f"not reached within {seconds:g} s")
        time.sleep(0.2)


def state(env: dict, job: str) -> str:
    words = dict(word.split("=", 1) for word in run(env, "scontrol", "show", "job", job, "-o").split() if "=" in word)
    return words.get("JobState", "GONE")
