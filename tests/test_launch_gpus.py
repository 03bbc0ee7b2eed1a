"""Which GPUs launch.sh gives to the ranks: a fake nvidia-smi says what the machine has, fakes of Python and `srun` say
what they were asked for."""

import os
import subprocess
from pathlib import Path

import pytest

from helpers import support

SAYS = "#!/bin/bash\n"
# The second of the tasks on each node, as srun would start it.
SRUN = (
    SAYS
    + """echo "srun $*"
while [[ $1 == --* ]]; do shift; done
export SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4
exec "$@"
"""
)
PYTHON = (
    SAYS + 'echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_SIZE on its node; GPUs ${CUDA_VISIBLE_DEVICES-};'
)
PYTHON += ' accelerator ${DS_ACCELERATOR-}; threads ${OMP_NUM_THREADS-}; $*"\n'
PYTHON += 'echo 0 >"$AUDIO_FINETUNE_OUTCOME"\n'
SCONTROL = SAYS + '[[ $2 == hostnames ]] && echo node1 || echo "NodeName=node1 NodeAddr=10.0.0.1 Port=1"\n'


@pytest.fixture
def launch(tmp_path):
    """launch(gpus, words, environment) -> output of launch.sh on a machine with so many GPUs; None = no nvidia-smi."""
    venv, fakes = tmp_path / "venv" / "bin", tmp_path / "fakes"
    for folder in (venv, fakes):
        folder.mkdir(parents=True)

    def write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    write(venv / "python", PYTHON)
    write(fakes / "srun", SRUN)
    write(fakes / "scontrol", SCONTROL)

    def run(gpus: int | None, *words, code: int = 0, **environment) -> str:
        if gpus is not None:
            lines = [f"GPU {i}: NVIDIA A100 (UUID: GPU-{i}{i}aa-77)" for i in range(gpus)]
            write(fakes / "nvidia-smi", SAYS + "\n".join(f"echo '{line}'" for line in lines) + "\n")
        # Nothing of the caller's own environment: it may hold CUDA_VISIBLE_DEVICES or be a SLURM job.
        clean = {"PATH": f"{fakes}:{os.environ['PATH']}", "HOME": str(tmp_path), "AUDIO_FINETUNE_ENV": str(venv.parent)}
        command = [support.ROOT / "launch.sh", "dia_lora", *words]
        done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("visible", "words", "placement"),
    [
        (None, [], "0,1,2,3"),
        (None, ["--ranks", "2"], "0,1"),
        ("2,3", [], "2,3"),
        ("3,1,0", ["--ranks", "2"], "3,1"),
        ("GPU-33aa-77,GPU-00aa", [], "3,0"),  # whole or shortened UUIDs
        ("1,9,2", [], "1"),  # CUDA hides what follows a device that does not exist
        ("2,-1,3", [], "2"),
    ],
)
def test_ranks_go_to_the_visible_gpus(launch, visible, words, placement):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    output = launch(4, *words, "--lr", "1", **environment)
    recipe, ranks = support.ROOT / "finetune" / "dia_lora.py", len(placement.split(","))
    assert sorted(output.splitlines()) == [
        f"rank {i} of {ranks}, {i} of {ranks} on its node; GPUs {placement}; accelerator ; threads ;"
        f" {recipe} --local_rank={i} --lr 1"
        for i in range(ranks)
    ]


@pytest.mark.parametrize(
    ("gpus", "visible"), [(None, None), (0, None), (4, ""), (4, "-1"), (4, "NoDevFiles"), (2, "2")]
)
def test_without_a_visible_gpu_two_ranks_run_on_the_cpu(launch, gpus, visible):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    output = launch(gpus, **environment)
    assert output.count(" of 2 on its node; ") == output.count("accelerator cpu; threads ;") == 2
    output = launch(gpus, "--ranks", "5", **environment)
    assert output.count(" of 5 on its node; ") == 5, "a CPU takes any number of ranks"


def test_the_users_threads_are_kept(launch):
    assert "threads 3;" in launch(0, OMP_NUM_THREADS="3")


def test_more_ranks_than_gpus_and_parts_of_a_gpu_are_refused(launch):
    sentence = "error: --ranks 3: only 2 GPUs are visible, and each rank needs its own.\n"
    assert launch(4, "--ranks", "3", code=2, CUDA_VISIBLE_DEVICES="1,2") == sentence
    output = launch(1, code=2, CUDA_VISIBLE_DEVICES="MIG-12-0")
    assert output.startswith("error: CUDA_VISIBLE_DEVICES=MIG-12-0: ") and output.count("\n") == 1


JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "per_node"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),  # 4 of 8 GPUs, which nvidia-smi shows all
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({}, 8),
    ],
)
def test_in_a_slurm_job_each_allocated_gpu_gets_a_task(launch, environment, per_node):
    output = launch(8, **JOB, **environment)
    assert f"--ntasks={2 * per_node} --ntasks-per-node={per_node} " in output
    assert f"rank 1 of 4, 1 of {per_node} on its node" in output, "the rank tells its device, not launch.sh"
    assert f"GPUs {environment.get('CUDA_VISIBLE_DEVICES', '')}; " in output
