#!/usr/bin/env bash
# One door to everything, and a batch script for SLURM (sbatch --nodes 2 launch.sh dia_lora ...):
#   ./launch.sh setup [--with-slurm]      make .venv from requirements.txt (every other command does it when needed);
#                                         --with-slurm also installs SLURM (Debian, root), which the tests then use
#   ./launch.sh demo                      fine-tune a tiny Dia on a synthetic corpus, end to end
#   ./launch.sh test [pytest arguments]   run the test suite
#   ./launch.sh encode|check [arguments]  data/encode.py, data/check.py
#   ./launch.sh RECIPE [--ranks N] [arguments]   finetune/RECIPE.py under DeepSpeed: all GPUs, or 2 ranks on a CPU
#   ./launch.sh slurm [sbatch options] RECIPE [arguments]   the same as a SLURM job that survives its time limit
#   ./launch.sh slurm --array=0-7 encode [arguments]        data/encode.py as 8 jobs, and one that joins their parts
# AUDIO_FINETUNE_ENV=/path/to/venv uses that environment as it is and sets nothing up.
# Exit codes of a recipe: 0 finished, 75 stopped by a signal with everything saved (run it again to go on),
# 2 a mistake in the command or the data, anything else a failure.
#
# Defaults of a job; options of sbatch win. The signal comes early enough to save, and the job goes on by itself.
#SBATCH --job-name=audio-finetune
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -d $(dirname -- "$script")/finetune ]]; then
    # sbatch runs a copy of this file from its spool folder; the tasks of an array are a line each.
    script=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -oPm 1 ' Command=\K\S+')
fi
root=$(cd -- "$(dirname -- "$script")" && pwd)
venv=${AUDIO_FINETUNE_ENV:-$root/.venv}

fail() {
    echo "error: $*" >&2
    exit 2
}

# ---- set-up ------------------------------------------------------------------------------------------------------

setup() {
    if [[ -n ${AUDIO_FINETUNE_ENV:-} ]]; then
        [[ -x $venv/bin/python ]] || fail "AUDIO_FINETUNE_ENV=$venv has no bin/python."
        return
    fi
    local key stamp python
    key=$(sha256sum "$root/requirements.txt" | cut -c1-16)
    stamp=$venv/.ready-$key
    [[ -e $stamp ]] && return
    # Two commands started at once must not install into each other.
    exec 9>"$root/.venv.lock"
    flock 9
    if [[ ! -e $stamp ]]; then
        for python in python3.11 python3 ""; do
            [[ -n $python ]] || fail "Python 3.11 is needed and was not found."
            if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then break; fi
        done
        echo "setting up $venv (once; about 7 GB, a few minutes)"
        "$python" -m venv --clear "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt" 2> >(grep -v '^WARNING: Location' >&2)
        touch "$stamp"
    fi
    exec 9>&-
}

# ---- running a recipe --------------------------------------------------------------------------------------------

count_gpus() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
}

free_port() {
    "$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# The ranks of a session, whether or not DeepSpeed's runner and launcher still live; not the workers they forked.
rank_pids() {
    local pid all
    all=$(pgrep -s "$1" -f -- '\.py --local_rank=[0-9]+') || return 0
    for pid in $all; do
        grep -qx "$(ps -o ppid= -p "$pid" | tr -d ' ')" <<<"$all" || echo "$pid"
    done
}

# SIGTERM to DeepSpeed's runner would kill only the runner, and SIGUSR1 to its launcher would orphan the ranks:
# the wish to stop goes to the ranks themselves, which save and end together.
ask_to_stop() {
    local ranks
    stop_asked=1
    [[ -n $1 ]] || return 0 # not started yet: run_recipe looks at stop_asked
    ranks=$(rank_pids "$1")
    if [[ -n $ranks ]]; then
        # shellcheck disable=SC2086  # one word a process id
        kill -TERM $ranks 2>/dev/null || true
    else
        kill -TERM "$1" 2>/dev/null || true # in its first moment it has no session of its own yet
        end_session "$1"
    fi
    echo "asking the ranks to save and stop" >&2 || true # the terminal may be closed
}

# The job runs in a session of its own, so what is left of it can be found and ended.
end_session() {
    pkill -TERM -s "$1" 2>/dev/null || return 0
    for _ in $(seq 50); do
        pgrep -s "$1" >/dev/null || return 0
        sleep 0.1
    done
    pkill -KILL -s "$1" 2>/dev/null || true
}

# DeepSpeed's runner exits 0 after some deaths of its children: only the first rank's own word counts.
final_code() {
    local scratch=$1 code=$2 outcome
    outcome=$(cat "$scratch/outcome" 2>/dev/null || echo none)
    rm -rf "$scratch"
    case $outcome in
        none) ((code)) || code=1 ;;
        *) code=$outcome ;;
    esac
    echo "$code"
}

run_recipe() {
    local recipe=$1 ranks="" ranks_given arguments=() placement=() gpus scratch port runner="" code=0
    shift
    while (($#)); do
        case $1 in
            --ranks) ranks=${2:-}; shift 2 || fail "--ranks needs a number." ;;
            --ranks=*) ranks=${1#*=}; shift ;;
            *) arguments+=("$1"); shift ;;
        esac
    done
    [[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || fail "--ranks $ranks is not a positive number."
    gpus=$(count_gpus)
    ranks_given=$ranks
    if ((gpus == 0)); then
        export DS_ACCELERATOR=cpu
        ranks=${ranks:-2}
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + ranks - 1) / ranks))}
        placement=(--num_accelerators "$ranks")
    elif [[ -n $ranks && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        # A number of GPUs would make DeepSpeed forget CUDA_VISIBLE_DEVICES and take the first ones of the machine.
        placement=(--include "localhost:$(cut -d, -f"1-$ranks" <<<"$CUDA_VISIBLE_DEVICES")")
    elif [[ -n $ranks ]]; then
        placement=(--num_accelerators "$ranks")
    fi
    export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        run_in_slurm "$recipe" "${ranks_given:-${SLURM_NTASKS_PER_NODE:-$((gpus ? gpus : 1))}}" "${arguments[@]}"
        return
    fi
    scratch=$(mktemp -d)
    export AUDIO_FINETUNE_OUTCOME=$scratch/outcome

    port=$(free_port)
    stop_asked=""
    trap 'ask_to_stop "$runner"' TERM INT USR1 HUP
    # The shell would let it ignore SIGINT, as it does with everything in the background.
    env --default-signal=INT setsid "$venv/bin/deepspeed" --quiet "${placement[@]}" --master_port "$port" \
        "$root/finetune/$recipe.py" "${arguments[@]}" &
    runner=$!
    if [[ -n $stop_asked ]]; then ask_to_stop "$runner"; fi
    wait "$runner" || code=$?
    while kill -0 "$runner" 2>/dev/null; do # a trapped signal ends `wait`, not the job
        code=0
        wait "$runner" || code=$?
    done
    # Signals can end the runner or the launcher and spare the ranks, which notice it, save and end by themselves.
    for _ in $(seq 6000); do
        [[ -n $(rank_pids "$runner") ]] || break
        sleep 0.1
    done
    trap - TERM INT USR1 HUP
    end_session "$runner"

    return "$(final_code "$scratch" "$code")"
}

# ---- SLURM -------------------------------------------------------------------------------------------------------

# One task a rank on every node, by srun: no ssh, and SLURM itself ends all of them when one fails.
run_in_slurm() {
    local recipe=$1 per_node=$2 first step="" code=0 scratch stop_asked=""
    shift 2
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=$(scontrol show node "$first" --oneliner | grep -oP ' NodeAddr=\K\S+')
    export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # A requeued job keeps its id: with the same run folder it goes on. An --out of the user's comes later and wins.
    set -- --out "$root/runs/$recipe-$SLURM_JOB_ID" "$@"
    scratch=$(mktemp -d) # on the first node, where the first rank is
    export AUDIO_FINETUNE_OUTCOME=$scratch/outcome

    trap 'stop_asked=1; echo "asking the ranks to save and stop" >&2 || true' USR1 TERM
    # shellcheck disable=SC2016  # the variables of each task, not of this script
    # --overcommit: without --ntasks-per-node the job owns one core a node, which is no reason to refuse its GPUs.
    srun --ntasks="$((per_node * SLURM_JOB_NUM_NODES))" --ntasks-per-node="$per_node" --overcommit --kill-on-bad-exit=1 --wait=60 bash -c '
        trap "" USR1 # would kill a rank that is still starting
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_SIZE=$1
        shift
        exec "$@"' bash "$per_node" "$venv/bin/python" -u "$root/finetune/$recipe.py" "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        if [[ -z $stop_asked ]]; then
            wait "$step" || code=$? # or until a signal comes
        else
            kill -USR1 "$step" 2>/dev/null || true # again and again, until all ranks listen
            sleep 2
        fi
    done
    if [[ -n $stop_asked ]]; then
        code=0
        wait "$step" || code=$?
    fi
    trap - USR1 TERM
    code=$(final_code "$scratch" "$code")
    if ((code == 75)); then
        echo "requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}

# A task of an array encodes its part. What was finished is on disk: a task that has to stop starts again.
encode_in_slurm() {
    local encoder="" code=0 job=$SLURM_JOB_ID
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
        job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one task has the id of the whole array
        # shellcheck disable=SC2153  # SLURM's own names
        set -- "$@" --shard "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))/$SLURM_ARRAY_TASK_COUNT"
    fi
    # Not on TERM: a job that scancel ends must not come back.
    trap 'kill "$encoder"; echo "requeueing job $job"; scontrol requeue "$job"' USR1
    "$venv/bin/python" "$root/data/encode.py" "$@" &
    encoder=$!
    wait "$encoder" || code=$?
    return "$code"
}

is_job() { [[ -f $root/finetune/${1:-}.py || ${1:-} == encode ]]; }

submit() {
    local options=() job
    while (($#)) && [[ $1 == -* ]]; do
        options+=("$1")
        if [[ $1 != *=* && ${2:-} != -* ]] && ! is_job "${2:-}"; then
            options+=("$2")
            shift
        fi
        shift
    done
    is_job "${1:-}" || fail "slurm: no recipe '${1:-}'; write slurm [sbatch options] RECIPE ..."
    command -v sbatch >/dev/null || fail "slurm: sbatch is not on this machine."
    if [[ $1 == encode ]]; then
        job=$(sbatch --parsable --output=slurm-%A_%a.out "${options[@]}" "$script" "$@")
        echo "job $job: output in $PWD/slurm-${job}_*.out"
        [[ " ${options[*]}" == *" --array"* ]] || return 0
        job=$(sbatch --parsable --dependency="afterok:$job" --kill-on-invalid-dep=yes "$script" "$@" --merge)
        echo "job $job joins what they made: output in $PWD/slurm-$job.out"
        return
    fi
    job=$(sbatch --parsable "${options[@]}" "$script" "$@")
    echo "job $job: output in $PWD/slurm-$job.out, run folder $root/runs/$1-$job unless --out names another"
    echo "squeue -j $job shows it; scancel --signal=USR1 $job saves, stops and requeues it"
}

# ---- commands ----------------------------------------------------------------------------------------------------

command=${1:-help}
(($#)) && shift
case $command in
    help | -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$script" ;;
    setup)
        if [[ ${1:-} == --with-slurm ]]; then
            command -v apt-get >/dev/null || fail "--with-slurm needs Debian's apt-get."
            (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y slurm-wlm munge) >/dev/null
        fi
        setup
        echo "ready: $venv"
        ;;
    demo)
        setup
        run_recipe dia_lora --ds "$root/ds_configs/zero2.json" --out "$root/runs/demo-$(date +%Y%m%d-%H%M%S)" "$@"
        ;;
    test)
        setup
        cd "$root"
        exec "$venv/bin/python" -m pytest "$@"
        ;;
    slurm) submit "$@" ;;
    encode | check)
        setup
        if [[ -n ${SLURM_JOB_ID:-} && $command == encode ]]; then
            encode_in_slurm "$@"
            exit
        fi
        exec "$venv/bin/python" "$root/data/$command.py" "$@"
        ;;
    *)
        [[ -f $root/finetune/$command.py ]] || fail "no command or recipe '$command'; ./launch.sh help lists them."
        setup
        run_recipe "$command" "$@"
        ;;
esac
