#!/usr/bin/env bash
# One door to everything:
#   ./launch.sh setup                     make .venv from requirements.txt (every other command does it when needed)
#   ./launch.sh demo                      fine-tune a tiny Dia on a synthetic corpus, end to end
#   ./launch.sh test [pytest arguments]   run the test suite
#   ./launch.sh encode|check [arguments]  data/encode.py, data/check.py
#   ./launch.sh RECIPE [--ranks N] [arguments]   finetune/RECIPE.py under DeepSpeed: all GPUs, or 2 ranks on a CPU
# AUDIO_FINETUNE_ENV=/path/to/venv uses that environment as it is and sets nothing up.
# Exit codes of a recipe: 0 finished, 75 stopped by a signal with everything saved (run it again to go on),
# 2 a mistake in the command or the data, anything else a failure.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
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

# DeepSpeed's runner starts one launcher, and that starts the ranks.
rank_pids() {
    local launcher
    for launcher in $(pgrep -P "$1"); do pgrep -P "$launcher" || true; done
}

# SIGTERM to DeepSpeed's runner would kill only the runner, and SIGUSR1 to its launcher would orphan the ranks:
# the wish to stop goes to the ranks themselves, which save and end together.
ask_to_stop() {
    local ranks
    stop_asked=1
    [[ -n $1 ]] || return 0 # not started yet: run_recipe looks at stop_asked
    ranks=$(rank_pids "$1")
    echo "asking the ranks to save and stop" >&2
    # shellcheck disable=SC2086  # one word a process id
    if [[ -n $ranks ]]; then kill -TERM $ranks 2>/dev/null || true; else end_session "$1"; fi
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

run_recipe() {
    local recipe=$1 ranks="" arguments=() placement=() gpus scratch runner="" code=0 outcome
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
    scratch=$(mktemp -d)
    export AUDIO_FINETUNE_OUTCOME=$scratch/outcome

    stop_asked=""
    trap 'ask_to_stop "$runner"' TERM INT USR1 HUP
    setsid "$venv/bin/deepspeed" --quiet "${placement[@]}" --master_port "$(free_port)" \
        "$root/finetune/$recipe.py" "${arguments[@]}" &
    runner=$!
    if [[ -n $stop_asked ]]; then ask_to_stop "$runner"; fi
    wait "$runner" || code=$?
    while kill -0 "$runner" 2>/dev/null; do # a trapped signal ends `wait`, not the job
        code=0
        wait "$runner" || code=$?
    done
    trap - TERM INT USR1 HUP
    end_session "$runner"

    # DeepSpeed's runner exits 0 after some deaths of its children: only the first rank's own word counts.
    outcome=$(cat "$scratch/outcome" 2>/dev/null || echo none)
    rm -rf "$scratch"
    case $outcome in
        none) ((code)) || code=1 ;;
        0) [[ -z $stop_asked ]] || code=0 ;; # the signal came when all was done
        *) code=$outcome ;;
    esac
    return "$code"
}

# ---- commands ----------------------------------------------------------------------------------------------------

command=${1:-help}
(($#)) && shift
case $command in
    help | -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;
    setup)
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
    encode | check)
        setup
        exec "$venv/bin/python" "$root/data/$command.py" "$@"
        ;;
    *)
        [[ -f $root/finetune/$command.py ]] || fail "no command or recipe '$command'; ./launch.sh help lists them."
        setup
        run_recipe "$command" "$@"
        ;;
esac
