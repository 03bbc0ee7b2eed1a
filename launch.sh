#!/usr/bin/env bash
# The one command for everything; also a SLURM batch script (sbatch --nodes 2 launch.sh dia_lora ...).
#   ./launch.sh setup [--with-slurm]         make .venv from requirements.txt (every other command does so when needed);
#               [--with-browser]             also install SLURM, or Chromium (Debian, root), which the tests then use
#   ./launch.sh doctor                       print what this machine has, and what the recipes can use
#   ./launch.sh demo                         fine-tune a tiny Dia on a synthetic corpus, end to end
#   ./launch.sh test [pytest arguments]      run the quick tests; --long runs all the others,
#                                            --shuffle SEED another order
#   ./launch.sh bench [NAME...]              measure speed and memory against peers and limits, in one table
#   ./launch.sh encode [arguments]           run data/encode.py; likewise decode, check, pairs, pair_speakers, score,
#                                            cluster_speakers, fetch (a model or codec from the hub)
#   ./launch.sh RECIPE [--ranks N] [flags]   train with finetune/RECIPE.py under DeepSpeed: on all GPUs, or as 2 ranks
#                                            on a CPU; RECIPE: dia_lora, dia_full, higgs_clone, llama_mot, cmgan,
#                                            diffusion_buffer
#   ./launch.sh speak --run RUN --text TEXT --wav FILE   speak with a Dia or Higgs Audio run; --help lists the flags
#   ./launch.sh generate --run RUN [flags]               generate music with a llama_mot run
#   ./launch.sh enhance --run RUN [flags]                clean noisy recordings with a cmgan or diffusion_buffer run
#   ./launch.sh diagnose --run RUN                       check such a run: loss, labels, data, output, machine
#   ./launch.sh convert --run RUN [--step N] [--out DIR] export any checkpoint of any run; the best by default
#   ./launch.sh report RUN...                            write RUN/report.html again, or compare several runs
#   ./launch.sh watch RUN [--port N]                     show the report in a browser while RUN trains
#   ./launch.sh push --run RUN owner/name                upload its export to the Hugging Face hub, with a model card
#   ./launch.sh inspect --recipe RECIPE [flags]          show one clip as it is trained: tokens, labels, masks, loss
#   ./launch.sh slurm [sbatch options] RECIPE [flags]    train as a SLURM job that resumes after its time limit
#   ./launch.sh slurm --array=0-7 encode [arguments]     encode in 8 SLURM jobs, and merge their parts in a final one
# AUDIO_FINETUNE_ENV=/path/to/venv uses that environment as it is and installs nothing.
# Exit codes of a recipe: 0 finished; 75 stopped by a signal with everything saved, run the same command to resume;
# 2 a mistake in the command or the data; anything else is a failure.
#
# Defaults of a SLURM job; sbatch options override them. The signal leaves 180 s to save before the time limit.
#SBATCH --job-name=audio-finetune
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail

script=${BASH_SOURCE[0]}
if [[ -n ${SLURM_JOB_ID:-} && ! -d $(dirname -- "$script")/finetune ]]; then
    # sbatch runs a copy of this file from its spool folder. For an array, scontrol prints one line per task.
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
    key=$(cat "$root"/requirements*.txt | sha256sum | cut -c1-16)
    stamp=$venv/.ready-$key
    [[ -e $stamp ]] && return
    # Two commands started at once must not install at the same time.
    exec 9>"$root/.venv.lock"
    flock 9
    if [[ ! -e $stamp ]]; then
        python=$(find_python)
        echo "setting up $venv (once; about 7 GB, a few minutes)"
        if [[ $python == "$venv/bin/python" ]]; then
            "$python" -m ensurepip >/dev/null # what an interrupted set-up installed stays
        else
            "$python" -m venv --clear "$venv"
        fi
        install_packages
        touch "$stamp"
    fi
    exec 9>&-
}

# The environment's own Python, if it has one already: an interrupted set-up continues.
find_python() {
    local python
    for python in "$venv/bin/python" python3.11 python3.12 python3.13 python3; do
        if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed and was not found (Debian, Ubuntu: apt-get install python3 python3-venv)."
}

install_packages() {
    local requirements=$root/requirements.txt progress
    if ! can_compile; then
        requirements=$(mktemp)
        grep -v '^pesq==' "$root/requirements.txt" >"$requirements" || true
        echo "warning: cmgan and diffusion_buffer will not train: pesq needs a C compiler and Python's headers. Install them" \
            "(Debian, Ubuntu: apt-get install build-essential python3-dev), then delete $venv and start again." >&2
    fi
    # Its fds are not those of this script, so that nobody waits for the last sleep.
    while sleep 15 >/dev/null 2>&1; do echo "installing: $(du -sm "$venv" | cut -f1) MB so far"; done 9>&- &
    progress=$!
    trap 'kill "$progress"' EXIT
    pip_install -r "$requirements" ||
        fail "the packages in requirements.txt could not be installed; the same command tries again."
    pip_install --no-deps -r "$root/requirements-scoring.txt" ||
        echo "warning: the demo will not print word error rate and speaker similarity." >&2
    trap - EXIT
    kill "$progress"
}

pip_install() {
    if command -v uv >/dev/null && uv pip install --quiet --python "$venv/bin/python" "$@"; then return; fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2)
}

can_compile() {
    command -v cc >/dev/null &&
        [[ -f $("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]
}

# What only the tests need: install_debian FLAG PACKAGE...
install_debian() {
    command -v apt-get >/dev/null || fail "$1 needs Debian's apt-get."
    (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${@:2}") >/dev/null
}

# ---- running a recipe --------------------------------------------------------------------------------------------

# The numbers of the GPUs that this command may use, one per line. nvidia-smi lists those that CUDA_VISIBLE_DEVICES hides
# too; as in CUDA, what follows the first device that does not exist is hidden.
visible_gpus() {
    local all=() device number
    if command -v nvidia-smi >/dev/null; then mapfile -t all < <(nvidia-smi -L 2>/dev/null | grep '^GPU'); fi
    if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
        for number in "${!all[@]}"; do echo "$number"; done
        return
    fi
    for device in ${CUDA_VISIBLE_DEVICES//,/ }; do
        [[ $device != MIG-* ]] || fail "CUDA_VISIBLE_DEVICES=$device: launch.sh cannot count the parts of a GPU; start a" \
            "single rank with python finetune/RECIPE.py instead."
        if [[ $device =~ ^[0-9]+$ ]]; then
            ((device < ${#all[@]})) || return 0
            echo "$device"
            continue
        fi
        for number in "${!all[@]}"; do
            if [[ $device == GPU-* && ${all[number]} == *"UUID: $device"* ]]; then
                echo "$number"
                continue 2
            fi
        done
        return 0
    done
}

# Under SLURM the GPUs of the job on this node: its tasks may see only one each.
count_gpus() {
    if [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        echo "$SLURM_GPUS_ON_NODE"
    else
        visible_gpus | wc -l
    fi
}

# Asks the ranks to save and exit together. One that is still starting just ends.
ask_to_stop() {
    stop_asked=1
    ((${#rank_pids[@]})) || return 0 # not started yet: run_recipe checks stop_asked
    kill -TERM "${rank_pids[@]}" 2>/dev/null || true
    echo "asking the ranks to save and stop" >&2 || true # the terminal may be closed
}

# Ends all that is left of a rank, which runs in a session of its own, after 30 s by force.
end_session() {
    pkill -TERM -s "$1" 2>/dev/null || return 0
    for _ in $(seq 300); do
        pgrep -s "$1" >/dev/null || return 0
        sleep 0.1
    done
    pkill -KILL -s "$1" 2>/dev/null || true
}

# Prints the exit code of a job of which a process exited with CODE. What rank 0 reported in AUDIO_FINETUNE_OUTCOME
# counts; without that the job failed.
final_code() {
    local code=$1
    if [[ -s $AUDIO_FINETUNE_OUTCOME ]]; then cat "$AUDIO_FINETUNE_OUTCOME"; else echo "$((code ? code : 1))"; fi
    rm -rf "$(dirname "$AUDIO_FINETUNE_OUTCOME")"
}

run_recipe() {
    local recipe=$1 ranks="" arguments=() gpus rank pid alive code=0
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
    elif ((${ranks:-1} > gpus)); then
        fail "--ranks $ranks: only $gpus GPUs are visible, and each rank needs its own."
    elif [[ -z ${SLURM_JOB_ID:-} ]]; then
        CUDA_VISIBLE_DEVICES=$(visible_gpus | sed -n "1,${ranks:-$gpus}p" | paste -sd,)
        export CUDA_VISIBLE_DEVICES
    fi
    export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1 PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
    AUDIO_FINETUNE_OUTCOME=$(mktemp -d)/outcome # under SLURM on the first node, where rank 0 is
    export AUDIO_FINETUNE_OUTCOME
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        run_in_slurm "$recipe" "${ranks:-${SLURM_NTASKS_PER_NODE:-$((gpus ? gpus : 1))}}" "${arguments[@]}"
        return
    fi

    # As DeepSpeed's launcher would; but that one and its runner import all of torch and DeepSpeed before they start
    # anything, one after the other.
    : "${ranks:=$((gpus ? gpus : 2))}"
    stop_asked="" rank_pids=()
    trap ask_to_stop TERM INT USR1 HUP
    for ((rank = 0; rank < ranks; rank++)); do
        # bash makes background commands ignore SIGINT; env undoes that.
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks LOCAL_SIZE=$ranks env --default-signal=INT setsid \
            "$venv/bin/python" "$root/finetune/$recipe.py" "--local_rank=$rank" "${arguments[@]}" &
        rank_pids+=("$!")
    done
    if [[ -n $stop_asked ]]; then ask_to_stop; fi
    alive=("${rank_pids[@]}")
    while ((${#alive[@]})); do
        sleep 0.5
        for rank in "${!alive[@]}"; do
            pid=${alive[rank]}
            kill -0 "$pid" 2>/dev/null && continue
            unset "alive[rank]"
            wait "$pid" || code=$?
        done
        # The others would wait for a rank that failed. Those that were stopped save together, however long it takes.
        if ((code != 0 && code != 75)); then break; fi
    done
    trap - TERM INT USR1 HUP
    for pid in "${rank_pids[@]}"; do end_session "$pid" & done
    wait

    return "$(final_code "$code")"
}

# ---- SLURM -------------------------------------------------------------------------------------------------------

# Runs a recipe inside a SLURM job, one srun task per rank: no ssh, and SLURM ends all ranks when one fails.
run_in_slurm() {
    local recipe=$1 per_node=$2 first step="" code=0 stop_asked=""
    shift 2
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    MASTER_ADDR=$(scontrol show node "$first" --oneliner | grep -oP ' NodeAddr=\K\S+')
    export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # A requeued job keeps its id, so it finds its run folder and resumes. The user's --out comes later and wins.
    set -- --out "$root/runs/$recipe-$SLURM_JOB_ID" "$@"

    trap 'stop_asked=1; echo "asking the ranks to save and stop" >&2 || true' USR1 TERM
    # --overcommit: without --ntasks-per-node a job gets one core per node, and srun would refuse more tasks than cores.
    # shellcheck disable=SC2016  # the variables of each task, not of this script
    srun --ntasks="$((per_node * SLURM_JOB_NUM_NODES))" --ntasks-per-node="$per_node" --overcommit \
        --kill-on-bad-exit=1 --wait=60 bash -c '
            trap "" USR1 # would kill a rank that is still starting
            export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_SIZE=$1
            shift
            exec "$@"' bash "$per_node" "$venv/bin/python" "$root/finetune/$recipe.py" "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        if [[ -z $stop_asked ]]; then
            wait "$step" || code=$? # or until a signal comes
        else
            kill -USR1 "$step" 2>/dev/null || true # repeated until all ranks have installed their handlers
            sleep 2
        fi
    done
    if [[ -n $stop_asked ]]; then
        code=0
        wait "$step" || code=$?
    fi
    trap - USR1 TERM
    code=$(final_code "$code")
    if ((code == 75)); then
        echo "requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}

# Encodes one array task's share. Finished clips are on disk, so a task that reaches its time limit is requeued.
encode_in_slurm() {
    local encoder="" code=0 job=$SLURM_JOB_ID
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
        job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one of the tasks has the id of the whole array
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
        echo "job $job merges their parts: output in $PWD/slurm-$job.out"
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
    help | -h | --help) sed -n '2,/^#$/s/^# \{0,1\}//p' "$script" ;;
    setup)
        for option; do
            case $option in
                --with-slurm) install_debian "$option" slurm-wlm munge ;;
                --with-browser) install_debian "$option" chromium chromium-driver ;;
                *) fail "setup knows --with-slurm and --with-browser, not $option." ;;
            esac
        done
        setup
        echo "ready: $venv"
        ;;
    demo)
        setup
        run_recipe dia_lora --ds "$root/ds_configs/zero2.json" --out "$root/runs/demo-$(date +%Y%m%d-%H%M%S)" "$@"
        ;;
    doctor | push)
        setup
        exec "$venv/bin/python" "$root/finetune/infer/$command.py" "$@"
        ;;
    test)
        setup
        cd "$root"
        # More workers than cores: ranks often wait for each other.
        exec "$venv/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
        ;;
    bench)
        setup
        exec "$venv/bin/python" "$root/tests/bench/run.py" "$@"
        ;;
    slurm) submit "$@" ;;
    encode | decode | check | pairs | pair_speakers | cluster_speakers | score | fetch)
        setup
        if [[ -n ${SLURM_JOB_ID:-} && $command == encode ]]; then
            encode_in_slurm "$@"
            exit
        fi
        exec "$venv/bin/python" "$root/data/$command.py" "$@"
        ;;
    speak | generate | enhance | diagnose | convert | report | watch | inspect)
        setup
        if (($(count_gpus) == 0)); then export DS_ACCELERATOR=cpu; fi
        exec "$venv/bin/python" "$root/finetune/infer/dispatch.py" "$command" "$@"
        ;;
    *)
        [[ -f $root/finetune/$command.py ]] || fail "no command or recipe '$command'; ./launch.sh help lists them."
        setup
        run_recipe "$command" "$@"
        ;;
esac
