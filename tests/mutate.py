"""Puts known bugs back into a copy of the repository, one at a time, and runs the tests that should notice.

    python tests/mutate.py                     all of them; exit code 1 if one goes unnoticed
    python tests/mutate.py dia-delay mot-      those whose names begin with one of these words
    python tests/mutate.py --list

The list is at the end: bugs of other trainers, and holes that these tests once had. A bug that no test notices is a
hole: write the test, or correct the list. tests/test_mutate.py checks that every old text still occurs exactly once.

The copy is runs/mutants. The named tests first run unchanged, then once per mutation, each in a process forked from
one that has already imported the libraries: importing takes longer than most of these tests.
"""

import argparse
import ast
import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "runs" / "mutants"
TIMEOUT = 300  # seconds for one mutation
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str  # one line, which occurs exactly once in the file
    new: str
    why: str  # whose bug it is, or what it would do
    tests: tuple[str, ...]  # below tests/


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutations and exit")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.names or m.name.startswith(tuple(args.names))]
    if args.list or not chosen:
        for mutation in chosen:
            print(f"{mutation.name:28} {mutation.file}: {mutation.why}")
        return 0 if chosen else 2
    problems = [problem for mutation in chosen for problem in problems_of(mutation)]
    for problem in problems:
        print(problem)
    if problems:
        return 1

    began = time.monotonic()
    COPY.mkdir(parents=True, exist_ok=True)
    lock = open(COPY.with_suffix(".lock"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    make_copy()
    preload()
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    code, log = run_tests(tests, TIMEOUT * 4)
    if code:
        print(f"{log[-3000:]}\nthe tests do not pass without a mutation")
        return 1
    print(f"{len(tests)} tests pass unchanged in {time.monotonic() - began:.0f} s", flush=True)
    survived = []
    for mutation in chosen:
        started = time.monotonic()
        verdict, log = try_mutation(mutation)
        print(f"{verdict:9} {time.monotonic() - started:6.1f} s  {mutation.name:28} {mutation.why}", flush=True)
        if verdict != "caught":
            survived.append(mutation.name)
            if verdict != "SURVIVED":
                print(log[-2000:])
    print(f"{len(chosen)} mutations, {len(chosen) - len(survived)} caught, {time.monotonic() - began:.0f} s"
          + (f"; not caught: {', '.join(survived)}" if survived else ""))  # fmt: skip
    return 1 if survived else 0


def problems_of(mutation: Mutation) -> list[str]:
    """What is wrong with an entry of the list, as sentences."""
    source = read(ROOT / mutation.file)
    count = source.count(mutation.old)
    problems = [] if count == 1 else [f"{mutation.name}: {mutation.file} has its old text {count} times, not once"]
    for test in mutation.tests:
        place, _, name = test.partition("::")
        if f"\ndef {name.partition('[')[0]}(" not in read(ROOT / "tests" / place):
            problems.append(f"{mutation.name}: there is no test tests/{test}")
    if not mutation.tests:
        problems.append(f"{mutation.name}: no test is named")
    try:
        ast.parse(source.replace(mutation.old, mutation.new))
    except SyntaxError as error:
        problems.append(f"{mutation.name}: its new text is not Python ({error})")
    return problems


@functools.cache
def read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def make_copy() -> None:
    """Every file that git would commit, as it is now. runs/ of an earlier copy stays: it holds the demo assets."""
    for path in COPY.iterdir():
        if path.name != "runs":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


def preload() -> None:
    """Imports what most tests need; nothing of the project, which every fork imports from the copy."""
    os.environ.update(CPU)
    sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for the original
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT / "tests"]
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import scipy.special  # noqa: F401
    import soundfile  # noqa: F401
    import transformers.models.dia.modeling_dia
    import transformers.models.llama.modeling_llama  # noqa: F401


def try_mutation(mutation: Mutation) -> tuple[str, str]:
    file = COPY / mutation.file
    original = file.read_text(encoding="utf-8")
    file.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, log = run_tests(mutation.tests, TIMEOUT)
    finally:
        file.write_text(original, encoding="utf-8")
    return {0: "SURVIVED", 1: "caught", None: "TIMED OUT"}.get(code, "BROKEN"), log


def run_tests(tests: list[str] | tuple[str, ...], timeout: float) -> tuple[int | None, str]:
    """pytest's exit code (None: it took too long) and what it printed."""
    log = COPY / "runs" / "mutant.log"
    log.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setsid()  # so that what the tests start can be ended with them
        os.chdir(COPY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        words = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(COPY)]
        code = pytest.main([*words, *(f"tests/{test}" for test in tests)])
        sys.stdout.flush()
        os._exit(int(code))
    deadline, ended = time.monotonic() + timeout, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also the ranks that a failed test has left
    if not ended:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None, log.read_text(errors="replace")


# ---- the list --------------------------------------------------------------------------------------------------

MUTATIONS: list[Mutation] = []


def add(name: str, file: str, old: str, new: str, why: str, *tests: str) -> None:
    MUTATIONS.append(Mutation(name, file, old, new, why, tests))


# fmt: off
# loss, optimizer, engine

FILE = "finetune/common/engine.py"
ENGINE = "common/test_engine.py::"
EQUAL = (ENGINE + "test_steps_equal_a_plain_loop_over_the_whole_batch",)
add("engine-world", FILE, "loss_sum * (world / step_weight)", "loss_sum / step_weight",
    "DeepSpeed averages over ranks: the gradient shrinks with every rank",
    ENGINE + "test_the_step_divides_once_for_all_ranks")
add("engine-accumulation", FILE, "engine.backward(loss, scale_wrt_gas=False)", "engine.backward(loss)",
    "DeepSpeed divides by the accumulation once more", *EQUAL)
add("engine-infinite-loss", FILE, "loss = loss * (1 + (loss - loss).detach())", "loss = loss * 1",
    "an infinite loss with a finite gradient is trained on", ENGINE + "test_the_step_divides_once_for_all_ranks")
add("engine-stage0-overflow", FILE, "if math.isfinite(norm) and norm <= max_norm:", "if True:",
    "ZeRO-0 has no overflow check: one NaN destroys the weights",
    ENGINE + "test_a_step_that_is_not_finite_is_skipped_whole")
add("engine-spike", FILE, "spike = torch.where(norm > max_norm,", "spike = torch.where(norm < 0,",
    "a spike is trained on", ENGINE + "test_a_step_over_the_norm_is_skipped_whole_and_tells_its_norm")
EMA = ENGINE + "test_the_average_is_the_textbook_one_and_only_borrowed"
add("ema-warm-up", FILE, "decay = min(self.decay, (1 + step) / (10 + step))", "decay = self.decay",
    "the average holds on to the initial weights", EMA)
add("ema-direction", FILE, "masters(self.engine), 1 - decay)", "masters(self.engine), decay)",
    "the average follows the last step", EMA)
add("ema-compute-weights", FILE, "optimizer.update_lp_params()", "pass",
    "master weights are swapped, but the model computes with the old ones", EMA)

FILE = "finetune/common/one_piece.py"
BRANCHES = ENGINE + "test_layers_that_only_one_micro_batch_uses_are_trained_by_that_one"
add("one-piece-old-gradients", FILE, "self.flat.zero_()", "pass",
    "layers that a step does not use are trained with the gradients of an earlier one", BRANCHES)
add("one-piece-muon", "finetune/common/engine.py", 'and not any(hasattr(p, "use_muon")', 'and any(True',
    "Muon's gradients are not orthogonalised", ENGINE + "test_deepspeed_reduces_what_does_not_fit_into_one_piece")
add("one-piece-micro-batches", FILE, "parameter.grad = None", "pass",
    "gradients of the last step are added to the next", *EQUAL)
TWO_RANKS = "recipes/test_dia_lora.py::test_two_ranks_equal_one_process[zero2]"
add("one-piece-mean", FILE, "len(own))).div_(world)", "len(own)))",
    "the gradient grows with every rank", TWO_RANKS)
add("one-piece-shard", FILE, "total.narrow(0, rank * len(own), len(own))", "total.narrow(0, 0, len(own))",
    "every rank trains the first shard", TWO_RANKS)

FILE = "finetune/common/zero3.py"
WHOLE = "common/test_zero3.py::test_modules_gathered_whole_have_the_gradients_of_a_plain_loop"
add("zero3-leaf-gradients", FILE, "lambda _: False", "stage3.z3_leaf_parameter",
    "the first layer behind a frozen embedding is not trained", WHOLE)
RELEASED = "common/test_zero3.py::test_a_weight_that_was_released_is_gathered_for_the_backward_pass_only"
add("zero3-released", FILE, "weight.all_gather()", "pass", "a released weight has no gradient", RELEASED)
add("zero3-kept", FILE, "weight.partition()", "pass", "a weight stays gathered after the backward pass", RELEASED)
add("zero3-linear-bias", FILE, "rows.sum(0) if needs_bias", "rows.mean(0) if needs_bias",
    "biases learn more slowly in larger batches",
    "common/test_zero3.py::test_the_linear_layer_has_the_gradients_of_the_formula")
SMALL = "common/test_zero3.py::test_small_weights_stay_whole_and_are_renewed_together"
add("zero3-own-shard", FILE, "shards[rank].copy_(own)", "pass", "gathered weights lack a rank's own shard", SMALL)
add("zero3-small-old", FILE, "send_shards([p for p in stay if p.dtype == dtype])", "pass",
    "small weights are never trained", SMALL)
add("zero3-padded-shard", FILE, "-(-len(tensor) // world)", "len(tensor) // world",
    "the last weights get no gradient", SMALL)
add("zero3-reduce-scatter", FILE, "Broadcasts, shards_of_means", "Broadcasts, stage3.reduce_scatter_coalesced",
    "gloo reduces at half the speed", SMALL)
add("zero3-memory-lost", FILE, "whole.set_(self.memory.like(whole))", "self.memory.like(whole)",
    "weights are gathered into new memory in every step", SMALL)
add("zero3-memory-shared", FILE, "lease = block[:]", "lease = block[: len(block) // 2]",
    "a weight's memory is cut off", "common/test_zero3.py::test_memory_is_used_again_when_nothing_else_uses_it")
add("zero3-memory-kept", FILE, "self.free.clear()", "pass", "memory of other sizes is kept for ever",
    "common/test_zero3.py::test_no_more_memory_is_kept_than_was_used_at_once")
add("zero3-views", FILE, '"stage3_allgather_sequential": True', '"stage3_allgather_sequential": False',
    "weights that are gathered together are garbage", SMALL)
add("zero3-signatures", FILE, "without_setup_context(function)", "function",
    "torch inspects a signature at every hook", WHOLE)
add("zero3-old-average", "finetune/common/engine.py", "optimizer._partition_all_parameters()", "pass",
    "weights that are gathered are not exchanged for their average",
    "common/test_zero3.py::test_the_average_replaces_weights_that_are_gathered")

FILE = "finetune/common/compiling.py"
COMPILING = "common/test_compiling.py::test_layers_share_their_code_in_training_and_keep_their_names"
add("compile-static", FILE, "dynamic=True", "dynamic=False", "every length is compiled anew", COMPILING)
add("compile-evaluation", FILE, "(fast if layer.training else run)", "fast",
    "generation compiles at every step, and text logits are no longer Llama's own", COMPILING)

FILE = "finetune/common/loss.py"
LOSS = "common/test_loss.py::"
add("loss-padding", FILE, "return (total - picked).masked_fill(labels_nc == IGNORE, 0.0), logits, total",
    "return total - picked, logits, total", "padding counts in the loss",
    LOSS + "test_evaluation_gives_token_losses_and_most_likely_ids")
add("loss-weights", FILE, "return (losses_nc * weights_nc).sum(), losses_nc", "return losses_nc.sum(), losses_nc",
    "codebook weights change the gradient but not the loss",
    LOSS + "test_loss_and_gradients_equal_plain_cross_entropy")
add("loss-fp32-logits", FILE, "logits = logits_nv.float().view(", "logits = logits_nv.view(",
    "softmax over bf16 logits", LOSS + "test_bf16_stays_near_fp32")
add("loss-mean", FILE, "return (losses * weights_nc).sum(), losses.detach()",
    "return (losses * weights_nc).mean(), losses.detach()",
    "a mean per micro-batch weights short clips more; 0 / 0 without targets",
    LOSS + "test_a_lora_wrapped_head_trains_its_matrices_as_plain_cross_entropy_does")

FILE = "finetune/common/optim.py"
OPTIM = "common/test_optim.py::"
CURVE = OPTIM + "test_the_curve_rises_to_the_peak_and_falls_to_the_minimum"
add("lr-warm-up-from-zero", FILE, "return config.lr * (step + 1) / warm", "return config.lr * step / warm",
    "the first step trains with a rate of 0", CURVE)
add("lr-end", FILE, "progress = (step - warm) / max(1, steps - 1 - warm)",
    "progress = (step - warm) / max(1, steps - warm)", "off by one: the last step is above the minimum", CURVE)
add("lr-step-drop", FILE, "config.decay ** int(step / steps_per_epoch / config.decay_epochs)",
    "config.decay ** int((step + 1) / steps_per_epoch / config.decay_epochs)", "drops one step early",
    OPTIM + "test_drops_are_torchs_step_lr_a_warm_up_comes_first_and_a_cosine_is_the_usual_one")
add("lr-scale", FILE, 'group["lr"] = lr * group.get("lr_scale", 1.0)', 'group["lr"] = lr',
    "layer-wise rates are lost at the first step of the schedule",
    OPTIM + "test_a_scaled_rate_moves_a_parameter_that_much_less")
add("decay-norms", FILE, "exempt = not is_matrix or any(part in name for part in no_decay)",
    "exempt = any(part in name for part in no_decay)", "weight decay on biases and norms",
    OPTIM + "test_groups_partition_the_trainable_parameters")
add("adam-betas", FILE, "betas: tuple[float, float] = (0.9, 0.95)", "betas: tuple[float, float] = (0.9, 0.999)",
    "torch's defaults instead of the documented ones", *EQUAL)
add("plateau-patience", FILE, 'if state["stale"] >= patience:', 'if state["stale"] > patience:',
    "the rate drops one evaluation late", OPTIM + "test_drops_are_torchs_reduce_on_plateau")

add("ds-clipping", "finetune/common/ds_config.py", '"gradient_clipping": (config.max_grad_norm,',
    '"gradient_clipping": (1e9,', "--max-grad-norm never reaches DeepSpeed", *EQUAL)
add("plain-clipping", "finetune/common/single_process.py",
    "torch.nn.utils.clip_grad_norm_(trained, self.config.max_grad_norm)", "pass", "--no-deepspeed does not clip",
    "common/test_single_process.py::test_the_plain_engine_equals_a_plain_loop")
add("plain-accumulation", "finetune/common/single_process.py",
    "return (self.micro_steps + 1) % self.config.accumulation == 0", "return True",
    "--no-deepspeed steps at every micro-batch",
    "common/test_single_process.py::test_the_plain_engine_equals_a_plain_loop")

FILE = "finetune/common/lora.py"
add("lora-seed", FILE, "torch.manual_seed(seed)", "pass", "every rank draws its own matrices",
    "common/test_lora.py::test_the_first_matrices_depend_on_the_seed_alone")
add("lora-precision", FILE, "autocast_adapter_dtype=False", "autocast_adapter_dtype=True",
    "LoRA in fp32 under ZeRO-3 and bf16",
    "recipes/test_bf16.py::test_lora_has_the_precision_of_the_run_in_every_stage")
add("lora-typo", FILE, "if len(hits) != groups[group][1]}", "if not hits}",
    "PEFT wraps whatever matches: half of the modules would train",
    "common/test_lora.py::test_a_renamed_projection_gives_found_and_expected_of_its_group_only")
add("lora-alpha-dia", "finetune/dia_lora.py", "lora_alpha=config.lora_alpha,", "lora_alpha=config.lora_rank,",
    "--lora-alpha has no effect", "recipes/test_dia_lora_features.py::test_the_lora_flags_reach_peft")
add("lora-alpha-higgs", "finetune/higgs_clone.py", "lora_alpha=config.lora_alpha,", "lora_alpha=config.lora_rank,",
    "--lora-alpha has no effect", "recipes/test_higgs_clone_features.py::test_the_lora_flags_reach_peft")
add("lora-merge", "finetune/infer/dia_speak.py", "model = model.merge_and_unload()", "model = model.unload()",
    "the merged folder is the base",
    "recipes/test_dia_lora_features.py::test_merged_folder_loads_alone_and_equals_base_plus_adapter")
add("gradient-check", "finetune/common/gradient_check.py", "else self.dead & dead", "else set()",
    "matrices that never get a gradient are not found",
    "common/test_gradient_check.py::test_what_stays_dead_ends_the_run_after_three_steps_and_is_named")

FILE = "finetune/common/hub.py"
add("rope-bf16", FILE, "    restore_rope(model)", "    pass", "ZeRO-3 rounds the RoPE frequencies to bf16, silently",
    "recipes/test_bf16.py::test_every_floating_buffer_is_that_of_a_plain_fp32_load")
add("hub-missing-weights", FILE, 'if info["missing_keys"]:', "if False:",
    "missing weights stay random with a warning",
    "models/dia/test_evaluate.py::test_damaged_or_missing_weights_are_a_sentence")

add("hub-unpinned", FILE, 'commits[revision] = _folders[path].name if path in _folders else ""',
    "commits[revision] = getattr(config, revision)", "a resumed run silently trains on newer weights",
    "common/test_hub_fetch.py::test_a_run_notes_the_commit_and_keeps_to_it")
FILE = "finetune/common/errors.py"
add("disk-errors", FILE, "    except OSError as error:", "    except ZeroDivisionError as error:",
    "a folder that cannot be written is a traceback", "test_mistakes.py::test_a_mistake_is_one_sentence")

# plan, randomness, data of a step

FILE = "finetune/common/plan.py"
PLAN = "common/test_plan.py::"
add("plan-sorted", FILE, "slot = shuffled[place]", "slot = place", "batches come in order of length",
    PLAN + "test_short_and_long_batches_are_mixed")
add("plan-same-epochs", FILE, 'draw = keyed.generator(self.seed, epoch, "order")',
    'draw = keyed.generator(self.seed, "order")', "set_epoch forgotten: every epoch has the same order",
    PLAN + "test_each_epoch_has_another_order_and_other_companions")
add("plan-budget", FILE, " * (1 + jitter)).astype", " * 1.0).astype",
    "jittered batches exceed --micro-tokens", PLAN + "test_the_budget_holds_and_every_clip_comes_once_an_epoch")
add("plan-last-batch", FILE, "int(np.ceil(epochs", "int(np.floor(epochs", "the last step of an epoch is dropped",
    PLAN + "test_steps_cover_the_epochs")
add("mix-skips", FILE, "return self.main.micro_batch(number - others)", "return self.main.micro_batch(number)",
    "rehearsal takes clips away from the data", PLAN + "test_a_mix_takes_its_share_and_each_plan_in_its_own_order")
add("random-keys-collide", "finetune/common/keyed_random.py", "repr(key).encode()", '"".join(map(str, key)).encode()',
    "(1, 23) and (12, 3) draw the same",
    "common/test_keyed_random.py::test_different_keys_differ_and_equal_ones_do_not")
add("eval-counts-twice", "finetune/common/evaluation.py", "[1], counts", "[1], True",
    "a rank without a batch counts the first one again",
    "common/test_evaluation.py::test_every_clip_counts_once_and_all_ranks_run_equally_often")
add("eval-leaves-mode", "finetune/common/evaluation.py", "model.train(was_training)", "pass",
    "training goes on without dropout after an evaluation",
    "common/test_evaluation.py::test_the_mode_comes_back_even_after_an_error")

FILE = "finetune/common/metrics.py"
METRICS = "common/test_metrics.py::"
add("resume-logs-twice", FILE, "if _step_of(line) <= step]", "if True]",
    "steps after the checkpoint are logged twice", METRICS + "test_forgetting_drops_later_and_half_written_lines")
add("signal-not-shared", FILE, "float(stop_requested())], process)", "0.0], process)",
    "a signal to one rank is not heard by all", METRICS + "test_a_step_is_reduced_to_sums_means_and_the_wish_to_stop")
add("skip-names-good-clips", FILE, "if not fine for name in names]", "if fine for name in names]",
    "a skipped step names the clips that were fine", METRICS + "test_only_clips_of_non_finite_losses_are_named")

# checkpoints and runs

FILE = "finetune/common/checkpoint.py"
CHECKPOINT = "common/test_checkpoint.py::"
add("checkpoint-half-written", FILE, "        damage = _refuse_foreign(path, force) or _damage(path)",
    "        damage = _refuse_foreign(path, force)", "resume takes the newest folder, whole or not",
    CHECKPOINT + "test_auto_goes_back_to_the_newest_whole_one_and_says_so")
add("checkpoint-checksum", FILE, "if _sha256(file) != digest:", "if not digest:", "a flipped bit is loaded",
    CHECKPOINT + "test_harm_to_any_file_is_found_and_named")
add("checkpoint-best-deleted", FILE, "kept.add(min(scored, key", "kept.add(max(scored, key",
    "retention keeps the worst and deletes the best",
    CHECKPOINT + "test_the_newest_and_the_best_are_kept_and_foreign_folders_untouched")
add("checkpoint-keep-every", FILE, "if is_due(keep_every, entry[\"step\"])", "if False",
    "--keep-every keeps nothing", CHECKPOINT + "test_every_so_many_steps_one_is_kept_for_good")
add("checkpoint-unscored-deleted", FILE, 'if entry.get("unscored")}', "if False}",
    "a checkpoint is deleted before its samples are scored",
    "common/test_sample_scores.py::test_checkpoints_wait_for_their_scores_and_the_best_stays")
add("checkpoint-ema", FILE, "shadow.copy_(saved)", "pass", "the average starts again on resume",
    CHECKPOINT + "test_training_goes_on_bitwise_after_loading")
add("checkpoint-background", FILE, "(lambda tree: tree, _host_copy(files))", "(lambda tree: tree, files)",
    "a checkpoint in the background holds later weights",
    CHECKPOINT + "test_a_checkpoint_in_the_background_holds_the_step_it_was_asked_for")
add("checkpoint-pickle", "finetune/common/runtime.py", 'os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"', "pass",
    "DeepSpeed unpickles its shards: a planted pickle runs",
    CHECKPOINT + "test_a_planted_pickle_never_runs_though_its_checksum_is_right")
add("checkpoint-enum", FILE, "return value.value if isinstance(value, Enum) else value", "return value",
    "saved with Python 3.11.2, no checkpoint can be loaded",
    CHECKPOINT + "test_the_files_hold_nothing_that_loading_would_have_to_trust")
add("checkpoint-new-flag", FILE, "for key, value in now.items() if then.get(key) != value",
    "for key, value in now.items() if then.get(key, value) != value",
    "a flag that the checkpoint did not know is accepted",
    CHECKPOINT + "test_another_run_is_refused_with_the_field_and_both_values_unless_forced")
add("checkpoint-owner", FILE, "if facts.st_uid != os.getuid()", "if False", "another user's checkpoint is loaded",
    CHECKPOINT + "test_what_belongs_to_another_user_is_refused_unless_forced")

SCORES = "common/test_sample_scores.py::"
FILE = "finetune/common/sample_scores.py"
add("scores-stale", FILE, "if not run.checkpoint or step > run.start_step:", "if False:",
    "samples of before a kill are scored for weights that never were",
    SCORES + "test_a_killed_run_finds_what_it_waited_for_and_forgets_what_it_takes_again")
add("scores-similarity-sign", FILE, '"similarity": lambda: -metrics', '"similarity": lambda: metrics',
    "the least similar voice is the best", SCORES + "test_a_better_sample_has_a_lower_score_and_the_loss_breaks_ties")
add("scores-silence", "data/watch.py", "| {name: WORST[name] for name in WORST if name in asked}", "",
    "a silent model has no errors",
    "data/test_watch.py::test_samples_are_decoded_and_scored_and_a_silent_one_gets_the_worst")

FILE = "finetune/common/runs.py"
add("resume-position", FILE, 'self.start_step, self.best = state["step"], state["best"]',
    'self.start_step, self.best = state["step"] + 1, state["best"]', "a resumed run skips a step",
    "common/test_runs.py::test_a_run_that_resumes_with_other_threads_says_so")
add("resume-spikes", FILE, 'self.norms.extend(state.get("norms", []))', "pass", "a resumed run knows no median",
    "common/test_runs.py::test_a_spike_is_measured_against_the_median_of_the_last_norms_also_after_a_resume")
add("resume-other-data", FILE, '"ranks": process.world, "fingerprint": fingerprint}', '"ranks": process.world}',
    "a run resumes on other data", "common/test_runs.py::test_stage_ranks_and_data_are_part_of_it")
BEST = "recipes/test_dia_lora_features.py::test_the_export_is_the_best_checkpoint_and_says_which"
add("best-is-worst", FILE, 'score >= self.best["score"]', 'score <= self.best["score"]',
    "the highest loss is the best", BEST)
add("export-last", FILE, 'if not self.best or self.best["step"] == step:', "if True:",
    "the last weights are exported, not the best", BEST)

# exports: the check after an export must end the run for each of these
CONVERT = "recipes/test_convert.py::test_a_lora_checkpoint_is_exported_with_its_moving_average"
add("convert-ema", "finetune/infer/convert.py", 'averaged = bool(config.ema) and tag != "d"', "averaged = False",
    "the weights are exported, not their moving average", CONVERT)
ADAPTER = "recipes/test_export_check.py::test_an_adapter_computes_what_the_engine_does_and_the_base_does_not"
FOLDER = "recipes/test_export_check.py::test_a_damaged_model_folder_is_noticed"
add("export-dropped-adapter", "finetune/common/lora.py", "model.save_pretrained(str(draft), state_dict=weights,",
    "model.save_pretrained(str(draft), state_dict={n: v * 0 for n, v in weights.items()},",
    "an adapter that does nothing", ADAPTER)
add("export-wrong-alpha", "finetune/common/lora.py", 'model.peft_config["default"].revision = revision',
    'model.peft_config["default"].lora_alpha *= 2', "an adapter with twice its effect", ADAPTER)
add("export-base", "finetune/dia_full.py",
    "weights = engine.full_weights(ds_engine, everything=True, keep=process.is_main)",
    "weights = load_dia(config.model, torch.float32).state_dict()", "the base is exported", FOLDER)
add("export-wrong-rope", "finetune/models/dia/weights.py", "model.config.dtype = torch.float32",
    'model.config.decoder_config.rope_parameters["rope_theta"] = 500.0', "other positions than in training", FOLDER)
FILE = "finetune/common/export_check.py"
add("export-check-ignored", FILE, "    if problem:", "    if False:", "a wrong export is kept",
    "recipes/test_export_check.py::test_a_wrong_export_ends_the_run_and_keeps_its_checkpoint")
add("export-check-without-ema", FILE, "with exact_products(), ema.applied():", "with exact_products():",
    "the average in the export is compared with the last weights", ADAPTER)

# datasets

FILE = "finetune/common/tokens.py"
TOKENS = "common/test_tokens.py::"
add("tokens-split", FILE, "return everything[~held_out]", "return everything", "held-out clips are trained on",
    "recipes/test_dia_lora_features.py::test_held_out_rows_are_never_trained_on")
add("tokens-codec", FILE, "if self.info.get(name) != wanted:", "if False:", "codes of another codec are trained on",
    TOKENS + "test_another_codec_or_channel_count_names_both_values")
add("holdout-rows", "finetune/common/holdout.py", "return rows[is_held_out != train]", "return rows",
    "what --eval-split holds out is trained on",
    "common/test_holdout.py::test_each_row_is_on_one_side_and_the_sides_have_their_sizes")
add("holdout-sound", "finetune/common/holdout.py", "    found = rows >= 0\n", "    found = rows < -1\n",
    "a copy of a training clip is evaluated on",
    "common/test_holdout.py::test_the_same_sound_under_another_id_is_found")
add("codec-changed", "finetune/common/codec.py", "if digest and hash_weights(path) != digest:", "if False:",
    "a retrained codec speaks", "common/test_codec.py::test_a_codec_is_found_again_or_named")
add("tokens-range", FILE, "low < 0 or high >= size", "low < 0 or high > size",
    "the code right after the last one passes", TOKENS + "test_a_code_outside_the_codebook_names_the_clip")
FILE = "finetune/common/arrow.py"
add("arrow-checksum", FILE, 'hexdigest() != file["sha256"]:', 'hexdigest() == "":',
    "Arrow loads a flipped bit silently", TOKENS + "test_a_flipped_bit_is_found_by_verify")
add("arrow-size", FILE, 'if size != file["bytes"]:', "if size is None:", "Arrow loads a cut file silently",
    TOKENS + "test_a_cut_tail_is_refused_at_once")
FILE = "finetune/common/pairs.py"
PAIRS = "common/test_pairs.py::"
add("pairs-misaligned", FILE, "return noisy[start : start + length], clean", "return noisy[:length], clean",
    "noisy and clean crops from different places",
    PAIRS + "test_a_crop_depends_on_its_key_alone_and_both_sides_on_the_same_place")
add("pairs-hold-out", FILE, "train_rows = np.setdiff1d(np.arange(len(pairs)), held_out)",
    "train_rows = np.arange(len(pairs))", "held-out speakers are trained on",
    PAIRS + "test_held_out_speakers_are_never_trained_on")
add("pairs-eval-is-train", FILE, "    if eval_pairs:", "    if False:", "evaluation on training clips",
    PAIRS + "test_evaluation_data_must_not_be_training_data")
add("pesq-made-up", "finetune/common/speech_metrics.py", 'return float("nan"), type(error).__name__',
    'return 1.0, ""', "PESQ of silence becomes a label",
    "common/test_speech_metrics.py::test_no_pesq_is_a_reason_and_never_a_number")
add("pesq-narrow-band", "finetune/common/speech_metrics.py", '"wb")), ""', '"nb")), ""', "narrow-band PESQ is higher",
    "common/test_speech_metrics.py::test_pesq_and_stoi_are_the_packages")
add("pesq-worker-died", "finetune/common/scorer.py", 'value, reason = float("nan"), type(error).__name__',
    'value, reason = 1.0, ""', "a dead process scores 1",
    "common/test_scorer.py::test_a_score_that_never_comes_is_a_missing_label")
add("memory-gradients", "finetune/common/memory.py", "* trained / (world if stage >= 2 else 1)",
    "* trained / (world if stage >= 1 else 1)", "ZeRO-1 is predicted to split gradients",
    "common/test_memory.py::test_full_tuning_is_split_as_the_stage_says")
add("memory-8-bit-step", "finetune/common/optim.py", "return 20.0 if device_type", "return 0.0 if device_type",
    "8-bit AdamW on a CPU takes 2 GB more than predicted per 0.1 G weights that it updates at once",
    "common/test_memory.py::test_8_bit_adamw_unpacks_what_it_updates_on_a_cpu_and_nothing_on_a_gpu")
add("memory-sub-group", "finetune/common/memory.py", '1e9) + largest / world}', '1e9)}',
    "sub-groups are larger than their size by a parameter",
    "common/test_memory.py::test_a_step_unpacks_a_partition_a_sub_group_or_a_parameter")
add("memory-4-bit", "finetune/common/memory.py", "return quantised.shape.numel() if quantised else",
    "return parameter.numel() if quantised else", "4-bit weights count as half their number",
    "common/test_memory.py::test_packed_weights_count_with_their_true_size")
add("memory-packed-scales", "finetune/common/memory.py", "4: size // 2 + 4 * -(-size // 64) + 16 * 4",
    "4: size // 2", "the scales of 4-bit weights are not counted",
    "recipes/test_on_paper.py::test_a_quantised_base_on_paper_takes_the_bytes_that_bitsandbytes_allocates")
add("fit-batch", "finetune/common/fit.py", "config.accumulation * part", "config.accumulation",
    "--fit trains with smaller batches",
    "common/test_fit.py::test_smaller_cards_get_more_frugal_settings_and_the_same_batch")
add("plan-longest", "finetune/common/plan.py", " - np.argmax(padded[::-1])", "",
    "memory is predicted for a clip that was left over",
    "common/test_plan.py::test_a_clip_that_was_left_over_is_not_the_micro_batch_that_takes_most_memory")
add("flags-abbreviated", "finetune/common/errors.py", "allow_abbrev=False", "allow_abbrev=True",
    "--lr-floor is taken for another flag", "common/test_config.py::test_unknown_and_abbreviated_flags_are_refused")
REPORT = "common/test_report.py::"
add("report-escape", "finetune/common/report.py", "autoescape=True", "autoescape=False",
    "a text from the data runs as HTML", REPORT + "test_text_from_data_is_escaped_everywhere")
add("report-script", "finetune/common/report.py", '.replace("<", "\\\\u003c")', "",
    "a name from the data ends the script element", REPORT + "test_text_from_data_is_escaped_everywhere")
add("report-direction", "finetune/common/report.py", '(difference < 0) == (measure.better == "low")',
    '(difference < 0) == (measure.better == "high")', "the report calls a worse run better",
    REPORT + "test_results_are_those_of_the_export_and_their_change")
add("report-base", "finetune/common/report_samples.py", '"step-00000000", *tuned', '"step-00000001", *tuned',
    "the samples of the untrained base are not shown",
    REPORT + "test_recording_base_and_tuned_stand_side_by_side_under_their_text")
add("watch-host", "finetune/infer/watch.py", 'if name not in ("127.0.0.1", "localhost"):', "if False:",
    "another web site can read the report of a private run",
    "test_report_watch.py::test_only_this_machine_and_only_the_page")
add("report-thinned", "finetune/common/report_charts.py", "(np.argmin, np.argmax)", "(np.argmin, np.argmin)",
    "the curves of a long run lose their spikes",
    REPORT + "test_the_page_of_a_long_run_stays_small_and_keeps_its_extremes")
INSPECT = "recipes/test_inspect.py::"
add("inspect-base", "finetune/infer/inspect_clip.py", "    set_peft_model_state_dict(model, weights)", "    pass",
    "the predictions shown for a run are the base's", INSPECT + "test_a_run_and_its_export_predict_with_their_adapter")
add("inspect-shift", "finetune/models/higgs/show.py", "    shifted[at - 1] = labels", "    shifted[at] = labels",
    "labels are shown one position late", INSPECT + "test_higgs_shows_the_librarys_loss_and_predictions")

# Dia

FILE = "finetune/models/dia/layout.py"
PROCESSOR = "models/dia/test_layout.py::test_ids_mask_and_labels_equal_the_processors"
add("dia-delay", FILE, "stream[delay + 1 : delay + 1 + frames, channel] = codes_tc[:, channel]",
    "stream[1 : 1 + frames, channel] = codes_tc[:, channel]", "public Dia trainers train without the delay pattern",
    PROCESSOR)
add("dia-shift", FILE, "stream[:positions], stream[1 : positions + 1]", "stream[:positions], stream[:positions]",
    "labels are the inputs: the loss falls to 0 and nothing is learned", PROCESSOR)
add("dia-eos-missing", FILE, "stream[delay + 1 + frames, channel] = layout.eos",
    "stream[delay + 1 + frames, channel] = layout.pad", "no end is trained: speech never stops", PROCESSOR)
add("dia-padding-in-loss", FILE, "np.where((labels == layout.bos) | (labels == layout.pad), IGNORE, labels)",
    "np.where(labels == layout.bos, IGNORE, labels)", "padding is a label", PROCESSOR)
add("dia-undelay", FILE, "stream_lc[d + 1 : d + 1 + frames, c]", "stream_lc[1 : 1 + frames, c]",
    "generated codes stay delayed", "models/dia/test_layout.py::test_undelaying_gives_the_codes_back")
add("dia-voice-in-loss", FILE, "labels[: delay + context, channel] = IGNORE", "labels[:delay, channel] = IGNORE",
    "the voice prompt is trained too",
    "models/dia/test_voices.py::test_the_prompt_is_generations_own_prefix_and_only_the_clip_is_a_target")
add("dia-tag-order", FILE, "sorted(tag_map, key=len, reverse=True)", "sorted(tag_map, key=len)",
    "[de] is replaced inside [de][old]",
    "models/dia/test_text.py::test_a_tag_that_contains_another_keeps_its_own_byte")
add("dia-nfc", FILE, '    text = unicodedata.normalize("NFC", text)', "    text = text",
    "composed and decomposed letters are different texts",
    "models/dia/test_text.py::test_composed_and_decomposed_letters_are_the_same_text")
FILE = "finetune/models/dia/data.py"
add("dia-target-weight", FILE, "(end - start + 1 + eos_extra)", "(end - start + eos_extra)",
    "the ends are not counted in the step's weight",
    "models/dia/test_data.py::test_the_planned_weight_is_the_weight_of_the_labels")
add("dia-window-weight", FILE, "return start, start + self.window, self.window, False",
    "return start, start + self.window, self.window, True",
    "a window in the middle of a clip is weighted as if it had its ends",
    "models/dia/test_data.py::test_the_planned_weight_is_the_weight_of_the_labels")
add("dia-dropout-mask", FILE, "ids = np.zeros(len(ids), dtype=np.uint8)", "ids = ids[:0]",
    "unconditional rows have another mask than in guidance",
    "models/dia/test_evaluate.py::test_training_rows_without_text_are_what_generation_compares_with")
add("dia-dropout-epochs", FILE, 'uniform(config.seed, epoch, name, "text_dropout")',
    'uniform(config.seed, name, "text_dropout")', "the same clips never have a text",
    "models/dia/test_data.py::test_the_share_of_rows_without_text_is_as_asked")
add("dia-voice-itself", FILE, "place += low <= own[clip] <= place", "place += 0", "a clip continues itself",
    "models/dia/test_voices.py::test_each_epoch_continues_other_clips_of_the_speaker_within_the_planned_length")
add("dia-text-mask", FILE, "ids[row, : len(text)], mask[row, : len(text)] = text, 1",
    "ids[row, : len(text)], mask[row, : len(text)] = text, text > 0", "the text's mask comes from its ids",
    "models/dia/test_data.py::test_the_mask_comes_from_lengths_not_from_ids")
FILE = "finetune/models/dia/evaluate.py"
METRIC = "models/dia/test_evaluate.py::test_evaluation_equals_sums_over_the_models_own_logits"
add("dia-text-gap-sign", FILE, '(total["loss_other_text"] - loss.sum())',
    '(loss.sum() - total["loss_other_text"])', "the text gap's sign", METRIC)
add("dia-onsets-shifted", FILE, "(labels_nc[:, 0] != before_n)", "(labels_nc[:, 0] == before_n)",
    "onsets where nothing changes", METRIC)
add("dia-own-text", FILE, "for k in range(1, len(clips))", "for k in range(2, len(clips))",
    "another clip than the next one lends its text", METRIC)
add("dia-false-alarm", FILE, "(predicts_end & ~is_end & is_target[:, 0])", "(predicts_end & ~is_end)",
    "padding counts as a false end", METRIC)
FILE = "finetune/models/dia/generate.py"
add("dia-prefill", FILE, "primed, _ = delayed(prompt, layout, start + layout.tail, final=False)",
    "primed = np.full((1, layout.channels), layout.bos, dtype=np.int64)", "generation starts without the delay",
    "models/dia/test_evaluate.py::test_memorised_clips_are_spoken_exactly_with_their_ends")
add("dia-sample-guidance", FILE, 'options["guidance_scale"] = guidance if guidance > 1 else None',
    'options["guidance_scale"] = None', "samples are made without the guidance that people speak with",
    "models/dia/test_generate.py::test_samples_equal_plain_generate_with_the_same_settings")
FILE = "finetune/models/dia/weights.py"
add("dia-stereo-scale", FILE, "((embed.weight, old_embed, 0.5)", "((embed.weight, old_embed, 1.0)",
    "stereo doubles the embedding's sum",
    "models/dia/test_weights.py::test_stereo_with_equal_halves_is_the_mono_model")
add("dia-stereo-adapter", "finetune/common/lora.py", "save_file(load_file(file) | whole,",
    "save_file(load_file(file),", "the trained embedding and head of a stereo adapter are lost",
    "models/dia/test_weights.py::test_a_stereo_adapter_loads_with_plain_peft_onto_the_widened_base")
add("dia-qk-rate", "finetune/dia_lora.py", "lambda name: qk_lr if", "lambda name: 1.0 if", "--qk-lr has no effect",
    "models/dia/test_weights.py::test_queries_and_keys_may_learn_more_slowly")
add("dia-native-transpose", FILE, "value = value.reshape(inputs, outputs).T",
    "value = value.reshape(outputs, inputs)", "native kernels are reshaped instead of transposed",
    "models/dia/test_weights.py::test_native_kernels_compute_what_the_imported_matrices_do")
add("dia-average", FILE, "value.double() / len(sources)", "value.double()", "the average is a sum",
    "models/dia/test_weights.py::test_the_average_of_folders_is_their_mean")
WEIGHTS = "models/dia/test_evaluate.py::test_channel_and_end_weights_weigh_single_tokens"
for recipe in ("dia_lora", "dia_full"):
    add(f"{recipe.replace('_', '-')}-eos-weight", f"finetune/{recipe}.py", "weights_nc * clips.config.eos_weight",
        "weights_nc", "--eos-weight is counted in the step's weight but not in the loss", WEIGHTS)
    add(f"{recipe.replace('_', '-')}-endless", f"finetune/{recipe}.py", ">= config.min_eos_recall else None",
        ">= 0 else None", "a model that does not stop becomes the best",
        "models/dia/test_evaluate.py::test_a_model_that_does_not_stop_has_no_score")
add("dia-layer-decay", "finetune/dia_full.py", "layer_decay ** (depth[layer[1]] - int(layer[2]))",
    "layer_decay ** int(layer[2])", "layer-wise rates the wrong way round",
    "models/dia/test_weights.py::test_lower_layers_learn_more_slowly")
add("dia-lora-ranks", "finetune/dia_lora.py", "range(first + process.rank, end, process.world)",
    "range(first, end, process.world)", "every rank trains on the same clips",
    "recipes/test_dia_lora.py::test_two_ranks_equal_one_process[zero0]")

# Higgs

FILE = "finetune/models/higgs/layout.py"
HIGGS = "models/higgs/test_layout.py::"
add("higgs-delay", FILE, "stream[k + 1 : k + 1 + frames, k] = codes_tk[:, k]",
    "stream[1 : 1 + frames, k] = codes_tk[:, k]", "train-higgs-audio trains without the delay pattern",
    HIGGS + "test_delay_is_the_processors_and_can_be_undone")
add("higgs-end-not-trained", FILE, "scored = slice(k + 1, k + 2 + frames)", "scored = slice(k + 1, k + 1 + frames)",
    "train-higgs-audio masks the ends: speech never stops",
    HIGGS + "test_labels_are_the_targets_codes_and_one_end_a_codebook")
add("higgs-shift", FILE, 'state_at[found["audio_at"][scored] - 1]', 'state_at[found["audio_at"][scored]]',
    "a position predicts itself",
    HIGGS + "test_loss_equals_the_models_own")
add("higgs-reference-labelled", FILE, "labels[-len(streams[-1]) :] = delayed_labels(streams[-1], layout)",
    "labels[: len(streams[0])] = delayed_labels(streams[0], layout)", "the reference is the target",
    HIGGS + "test_labels_are_the_targets_codes_and_one_end_a_codebook")
add("higgs-packed-rows", FILE, "np.repeat(np.arange(len(rows)), lengths)", "np.repeat(np.zeros(len(rows)), lengths)",
    "packed documents attend to each other", HIGGS + "test_packed_rows_equal_padded_ones_in_loss_and_gradient")
add("higgs-packed-first-text", FILE, "text[0] = IGNORE  #", "text[:0] = IGNORE  #",
    "a packed row's first token is predicted from the row before",
    HIGGS + "test_packed_text_labels_are_those_of_the_padded_rows")
add("higgs-prompt-labelled", FILE, "labels[: row.text_from] = IGNORE", "labels[:0] = IGNORE",
    "the prompt is a text target", HIGGS + "test_loss_equals_the_models_own")
FILE = "finetune/models/higgs/data.py"
add("higgs-copy-as-reference", FILE, "np.array_equal(self.tokens.codes(i), self.tokens.codes(j))", "False",
    "a copy of the target is its reference: copying is learned",
    HIGGS + "test_datasets_that_cannot_clone_are_refused")
add("higgs-target-weight", FILE, "(weights * (frames + 1)).sum()", "(weights * frames).sum()",
    "the ends are not counted in the step's weight", HIGGS + "test_loss_equals_the_models_own")
add("higgs-clip-weight", "finetune/higgs_clone.py", 'batch["codebook_weights"] * batch.get("label_weights", 1)',
    'batch["codebook_weights"]', "the column `weight` changes the denominator but not the loss",
    HIGGS + "test_a_weight_multiplies_its_clips_loss")
add("higgs-dropout-by-batch", FILE, 'keyed.uniform(seed, epoch, name, "reference dropout") for name in',
    'keyed.uniform(seed, epoch, i, "reference dropout") for i, _ in enumerate(self.ids(indices)) for _ in',
    "whether a reference is dropped depends on its batch",
    HIGGS + "test_a_reference_is_cropped_and_dropped_by_clip_and_epoch_alone")
add("higgs-dialogue-tags", "finetune/models/higgs/text.py", 'f"[SPEAKER{number}] {mark}" if voices > 1 else mark',
    "mark", "a dialogue's references are not told apart", HIGGS + "test_a_dialogue_is_the_processors")
add("export-other-codes", "finetune/infer/check_export.py", "if others > other_share", "if 0 > other_share",
    "an export may say other codes than the engine",
    "recipes/test_export_check.py::test_an_export_that_would_say_something_else_is_refused")
add("higgs-third-voice", FILE, 'REFERENCES = ("ref", "ref1", "ref2", "ref3")', 'REFERENCES = ("ref", "ref1")',
    "the third voice of a dialogue is not heard", HIGGS + "test_four_voices_are_the_processors")
add("silent-model-stops-best", "data/watch.py", 'stopped and facts.get("seconds") != 0', "stopped",
    "a model that says nothing has the best stop rate",
    "data/test_watch.py::test_an_end_before_the_first_frame_is_no_stop")
add("higgs-codebook-weights", FILE, "return weights / weights.mean()", "return weights",
    "--codebook-weights change the loss's scale", HIGGS + "test_codebook_weights_have_a_mean_of_one")
add("higgs-other-voice", FILE, "(speakers != speakers[clip])", "(speakers == speakers[clip])",
    "the other voice is the same speaker's: the gap is always 0",
    HIGGS + "test_another_reference_changes_the_targets_logits")
add("higgs-bos-twice", "finetune/models/higgs/text.py", "encode_batch_fast(prompts, add_special_tokens=False",
    "encode_batch_fast(prompts, add_special_tokens=True", "the tokenizer adds BOS again",
    HIGGS + "test_a_prompt_begins_with_one_bos")
add("higgs-gap-sign", "finetune/models/higgs/evaluate.py", '(total["loss_other_voice"] - loss.sum())',
    '(loss.sum() - total["loss_other_voice"])', "the voice gap's sign",
    "models/higgs/test_evaluate.py::test_metrics_equal_sums_over_the_models_own_logits")
add("higgs-codec", "finetune/common/codec.py", "if all(hashes) and hashes[0] != hashes[1] and len(formats) == 1:",
    "if False:", "codes of a retrained codec are accepted",
    "recipes/test_higgs_clone_features.py::test_codes_of_another_codec_are_refused")
add("higgs-worse-is-best", "finetune/higgs_clone.py", "if change.get(name, 0) < -0.05]",
    "if change.get(name, 0) > 0.05]", "a checkpoint that stops less often becomes the best",
    "recipes/test_higgs_clone_features.py::test_a_checkpoint_worse_than_the_base_is_never_the_best")
add("higgs-empty-stopped", "finetune/models/higgs/generate.py", "spoken.ended and not spoken.refused", "spoken.ended",
    "a base that says nothing has a stop rate of 1",
    "models/higgs/test_generate.py::test_a_sample_that_says_nothing_has_not_stopped")
add("higgs-cut-stream", "finetune/models/higgs/generate.py", "frames = max(0, stop - layout.codebooks)",
    "frames = max(0, stop - 1)", "undelayed too far: the tail's EOS become codes",
    "models/higgs/test_generate.py::test_a_whole_stream_gives_its_codes")

# Llama MoT

FILE = "finetune/models/mot/build.py"
BUILD = "models/mot/test_build.py::"
add("mot-norm-weight", FILE, 'ffn.norm.weight.copy_(block["final_layer_norm.weight"])', "pass",
    "the transplant forgets MusicGen's norm; the demo's weights are all 1",
    BUILD + "test_a_deeper_llama_has_no_random_expert")
add("mot-layer-map", FILE, "int((i + 0.5) * donor_layers / layers)", "i",
    "the first trainer used donor layer i: the last ones were lost", BUILD + "test_layer_map_of_the_published_pairs")
add("mot-projection-scale", FILE, "* (hidden / width) ** 0.5", "* 1.0",
    "the block's output is quieter than MusicGen's", BUILD + "test_projections_are_orthonormal_and_keep_the_loudness")
add("mot-gain", FILE, "float(llama_rms / expert_rms.clamp(min=1e-12))",
    "float(expert_rms / llama_rms.clamp(min=1e-12))", "experts are calibrated the wrong way round",
    BUILD + "test_calibrated_experts_are_as_loud_as_the_blocks_they_replace")
add("mot-llama-trains", FILE, "return llama.requires_grad_(False)", "return llama", "Llama itself is trained",
    "models/mot/test_network.py::test_text_logits_are_plain_llamas_bit_for_bit_before_and_after_training")
add("mot-packed-weights", FILE, 'value = dequantize_module_weight(source.get_submodule(name.rpartition(".")[0]))',
    "value = torch.zeros_like(parameter)",
    "experts copied from a quantised Llama are not its weights",
    BUILD + "test_a_quantised_llama_is_the_plain_one_for_text_and_its_experts_are_whole")
FILE = "finetune/models/mot/layout.py"
LAYOUT = "models/mot/test_layout.py::"
add("mot-shift", FILE, "labels[place[:-1], place[:-1] % c] = inputs[1:]",
    "labels[place[:-1], place[:-1] % c] = inputs[:-1]", "labels are the inputs", LAYOUT + "test_golden_ids")
add("mot-delay", FILE, "stream[k + 1 : k + 1 + frames, k] = ids[:, k]", "stream[1 : 1 + frames, k] = ids[:, k]",
    "the delay layout without its delay", LAYOUT + "test_delayed_layout_by_hand")
add("mot-eos", FILE, "labels[frames, 0] = layout.eos", "labels[frames, 0] = IGNORE",
    "no end is trained in the delay layout", LAYOUT + "test_delayed_layout_by_hand")
add("mot-id-offset", FILE, "return self.vocab + self.size * codebook",
    "return self.vocab + 0 * codebook", "all codebooks share their ids", LAYOUT + "test_golden_ids")
FILE = "finetune/models/mot/network.py"
NETWORK = "models/mot/test_network.py::"
add("mot-route-first-id", FILE, "audio = (input_ids[..., 0] >= vocab).flatten()",
    "audio = (input_ids[..., 0] > vocab).flatten()", "code 0 goes through the text's expert",
    NETWORK + "test_code_0_is_music")
add("mot-eos-class", FILE, "ids == layout.eos, layout.size",
    "ids == layout.eos, layout.size - 1", "the end is another code's class",
    NETWORK + "test_loss_and_gradients_equal_both_experts_and_a_mask")
add("mot-codebook-embedding", FILE, "(self.audio_embed(ids - vocab) + self.codebook_embed(books)).sum(1)",
    "self.audio_embed(ids - vocab).sum(1)", "codebooks are not told apart",
    NETWORK + "test_loss_and_gradients_equal_both_experts_and_a_mask")
FILE = "finetune/models/mot/data.py"
DATA = "models/mot/test_data.py::"
add("mot-dropout-in-eval", FILE, "if self.train and draw < self.config.text_dropout:",
    "if draw < self.config.text_dropout:", "evaluation without captions",
    DATA + "test_text_dropout_is_keyed_per_sample_and_off_for_evaluation")
add("mot-window-end", FILE, "return start, start + window, start + window == frames",
    "return start, start + window, True", "a window ends with A_EOS in the middle of a clip",
    DATA + "test_windows_are_whole_frames_anywhere_and_end_only_at_the_true_end")
add("mot-coverage", FILE, "if rows < wanted / 2:", "if False:",
    "the first trainer trained on 50 of 5233 clips", DATA + "test_a_tenth_of_the_source_is_refused")
add("mot-mask", FILE, "mask[row, :end] = 1", "mask[row] = 1", "padding takes part",
    DATA + "test_padding_is_at_the_right_and_masked")
add("mot-guidance", "finetune/models/mot/generate.py", "logits = none + guidance * (caption - none)",
    "logits = caption + guidance * (caption - none)", "guidance 1 already guides",
    "models/mot/test_generate.py::test_guidance_is_u_plus_w_times_c_minus_u")
add("mot-other-base", "finetune/models/mot/weights.py", 'if fingerprint != description["base_fingerprint"]:',
    "if False:", "an adapter is loaded into another Llama",
    "models/mot/test_weights.py::test_fingerprint_tells_llamas_apart_but_not_their_precision")
add("mot-rope-cast", "finetune/models/mot/weights.py", "    for parameter in model.adapter().values():",
    "    for parameter in model.to(dtype).adapter().values():", "reloading in bf16 rounds the rotary frequencies",
    "models/mot/test_weights.py::test_reload_in_bf16_keeps_the_rotary_frequencies")
add("mot-caption-gain-sign", "finetune/models/mot/evaluate.py",
    '"caption_gain": total["loss_other"].sum() / targets - loss,',
    '"caption_gain": loss - total["loss_other"].sum() / targets,', "the caption gain's sign",
    "models/mot/test_evaluate.py::test_metrics_equal_sums_over_single_clips")
add("mot-own-caption", "finetune/models/mot/evaluate.py", "np.roll(order, 1)", "np.roll(order, 0)",
    "another clip's caption is the clip's own",
    "models/mot/test_evaluate.py::test_metrics_equal_sums_over_single_clips")

add("mot-first-loss", "finetune/llama_mot.py", "if abs(loss - expected) > 0.5:", "if False:",
    "wrong embeddings train as well, and only sound wrong",
    "recipes/test_llama_mot_bad_input.py::test_a_first_loss_that_cannot_be_is_refused")

# Diffusion Buffer

add("parts-only-the-last", "finetune/common/in_parts.py", "a.add_(b) for a, b", "b for a, b",
    "only the last part of a micro-batch is trained on",
    "common/test_in_parts.py::test_parts_add_up_to_the_gradient_of_the_whole")
add("parts-forgotten", "finetune/common/in_parts.py", "return output, parts", "return output, 1",
    "every step runs out of memory again", "common/test_in_parts.py::test_parts_add_up_to_the_gradient_of_the_whole")
FILE = "finetune/models/diffusion_buffer/network.py"
PLAIN_A = "models/diffusion_buffer/test_network.py::test_ncsnpp_equals_the_plain_computation"
PLAIN_B = "models/diffusion_buffer/test_network.py::test_block_causal_equals_the_plain_computation"
NORMS = "models/diffusion_buffer/test_network.py::test_norms_hold_their_epsilon_for_quiet_sounds"
add("buffer-skip-order", FILE, "torch.cat([h, skips.pop()], dim=1), next(times))",
    "torch.cat([skips.pop(), h], dim=1), next(times))", "skip connections are concatenated the other way round",
    PLAIN_A)
add("buffer-skip-order-causal", FILE, "torch.cat([h, skips.pop()], dim=1), next(times), frames",
    "torch.cat([skips.pop(), h], dim=1), next(times), frames", "the same in the second network", PLAIN_B)
add("buffer-log-time", FILE, "torch.log(t + 0.01)", "torch.log(t + 0.001)", "times are embedded on another scale",
    PLAIN_A)
add("buffer-no-log-time", FILE, "fourier(torch.log(t + 0.01))", "fourier(t)", "the logarithm of the times is dropped",
    PLAIN_A)
add("buffer-log-time-causal", FILE, "time = self.temp_enc(t).transpose(1, 2)",
    "time = self.temp_enc(torch.log(t + 0.01)).transpose(1, 2)",
    "the second network has no logarithm, though the official code computes one", PLAIN_B)
add("buffer-silu", FILE, "grown = next(parts)(F.silu(grown))", "grown = next(parts)(grown)",
    "SiLU dropped in the output pyramid", PLAIN_A)
add("buffer-silu-block", FILE, "h = self.Conv_1(F.silu(self.GroupNorm_1(h)))",
    "h = self.Conv_1(F.relu(self.GroupNorm_1(h)))", "ReLU instead of SiLU", PLAIN_A)
add("buffer-silu-time", FILE, "return F.silu(self.lin_layer2.lin_layer(", "return (self.lin_layer2.lin_layer(",
    "SiLU dropped after the time embedding", PLAIN_B)
add("buffer-silu-out", FILE, "CumulativeNorm(width), nn.SiLU(),", "CumulativeNorm(width), nn.Identity(),",
    "SiLU dropped before the output", PLAIN_B)
add("buffer-norm-epsilon", FILE, "torch.rsqrt(variance.clamp(min=0) + 1e-6)",
    "torch.rsqrt(variance.clamp(min=0) + 1e-5)", "torch's default epsilon in the cumulative norm", NORMS)
add("buffer-norm-epsilon-large", FILE, "torch.rsqrt(variance.clamp(min=0) + 1e-6)",
    "torch.rsqrt(variance.clamp(min=0) + 0.1)", "a large epsilon in the cumulative norm", PLAIN_B)
add("buffer-group-norm-epsilon", FILE, "channels, eps=1e-6)", "channels, eps=1e-5)",
    "torch's default epsilon in the group norm", NORMS)
add("buffer-causality", FILE, "F.pad(x, (past, 0))", "F.pad(x, (past - 1, 1))", "a frame sees the one after it",
    PLAIN_B)
FILE = "finetune/models/diffusion_buffer/enhance.py"
STREAM = "models/diffusion_buffer/test_enhance.py::"
add("buffer-condition-unshifted", FILE, "self.y = torch.cat([self.y[",
    "self.y = torch.cat([self.y.roll(1, -1)[", "the noisy frames do not move with the buffer",
    STREAM + "test_the_noisy_frames_move_with_the_buffer_also_those_of_the_context")
add("buffer-condition-unshifted-oracle", FILE, "self.y = torch.cat([self.y[",
    "self.y = torch.cat([self.y.roll(1, -1)[", "the same, noticed by the oracle that users run",
    STREAM + "test_the_exact_score_gives_clean_speech[10]", STREAM + "test_clean_frames_come_out_at_every_delay[5]")
add("buffer-drift-sign", FILE, "- self.g.square() * out", "+ self.g.square() * out",
    "the score pushes away from clean speech", STREAM + "test_the_exact_score_gives_clean_speech[10]")
add("buffer-phase", FILE, ") * self.phase_signs, self.spec.n_fft)", "), self.spec.n_fft)",
    "--phase middle is not undone", STREAM + "test_a_phase_from_the_middle_is_that_of_the_turned_window")
OFFICIAL = STREAM + "test_the_official_stream_is_the_official_loop"
add("buffer-official-start", FILE, "if official and self.count < size:", "if False:",
    "the official stream without its empty start", OFFICIAL)
add("buffer-official-start-late", FILE, "if official and self.count < size:", "if official and self.count < size - 1:",
    "the context is cleared one frame too few", OFFICIAL)
add("buffer-official-context", FILE, "(output if official and self.spec.predicts_clean else self.x)", "(self.x)",
    "the official stream without its renewed context", OFFICIAL)
FILE = "finetune/models/diffusion_buffer/signal.py"
SIGNAL = "models/diffusion_buffer/test_signal.py::"
add("buffer-g", FILE, "return math.sqrt(spec.sde_c) * spec.sde_k", "return spec.sde_c * spec.sde_k",
    "g = c k^t as in another paper's code",
    "models/diffusion_buffer/test_diagnose.py::test_what_the_diagnosis_checks_holds[sigma]")
add("buffer-noise-power", FILE, "np.float32(math.sqrt(0.5))", "np.float32(1.0)", "complex noise of power 2",
    "models/diffusion_buffer/test_diagnose.py::test_what_the_diagnosis_checks_holds[noise]")
add("buffer-compression", FILE, "POWER, FACTOR = 0.5, 0.15", "POWER, FACTOR = 0.5, 0.33",
    "another compression than the checkpoint's", SIGNAL + "test_one_second_is_63_frames_and_they_are_those_of_torch")
add("buffer-expand", FILE, "return bins * bins.abs() / FACTOR**2", "return bins * bins.abs() / FACTOR",
    "the inverse of another compression", STREAM + "test_as_many_samples_come_out_as_went_in[200]")
FILE = "finetune/models/diffusion_buffer/data.py"
add("buffer-crop-place", FILE, "start = (last - spec.frames + 1) * spec.hop - spec.n_fft // 2",
    "start = (last - spec.frames + 1) * spec.hop", "training frames lie half a window later than a stream's",
    SIGNAL + "test_a_window_is_a_cut_of_the_whole_spectrum_with_silence_before")
add("buffer-level-gain", FILE, "[: last + 1] * np.square(32768 * gain), spec)", "[: last + 1], spec)",
    "--level track ignores a crop's gain",
    SIGNAL + "test_a_crop_s_level_has_its_gain_and_the_powers_of_a_clip_are_computed_once")
FILE = "finetune/diffusion_buffer.py"
add("buffer-score-sign", FILE, "error_nfb = sigma_nb[:, None] * output_nfb + z_nfb",
    "error_nfb = sigma_nb[:, None] * output_nfb - z_nfb", "DSM with the wrong sign",
    SIGNAL + "test_the_losses_are_zero_for_the_right_answer_and_known_for_a_wrong_one")
add("buffer-context-noisy", FILE, "context_nfk = clean_nfk[..., :context]", "context_nfk = noisy_nfk[..., :context]",
    "the context is noisy, as no stream's is", SIGNAL + "test_the_network_is_shown_the_buffer_of_the_paper")
add("buffer-best-by", FILE, 'if best_by in ("lsd", "loss") else -metrics[best_by]',
    'if best_by in ("lsd", "loss") else metrics[best_by]', "the worst SI-SDR is the best",
    "models/diffusion_buffer/test_score.py::test_a_higher_metric_is_a_better_score_and_broken_output_has_none")
add("doctor-demo-settings", "finetune/infer/diagnose.py",
    "flags = trained_flags(read_record(place)) if place else {}", "flags = {}",
    "the doctor checks the defaults, not the user's run",
    "models/diffusion_buffer/test_diagnose.py::test_a_run_is_checked_with_its_own_settings")
add("doctor-own-model", "finetune/infer/diagnose.py",
    "network, spec = open_model(changes", "spec = open_model(changes",
    "the doctor checks another network than the trained one",
    "models/diffusion_buffer/test_diagnose.py::test_a_run_is_checked_with_its_own_settings")
add("doctor-own-spec", "finetune/models/diffusion_buffer/diagnose.py", "spec, checks = spec_of(config), dict(CHECKS)",
    "spec, checks = Spec(), dict(CHECKS)", "the checks run with the paper's settings",
    "models/diffusion_buffer/test_diagnose.py::test_every_check_gets_the_settings_of_the_flags")
add("buffer-large-attention", "finetune/models/diffusion_buffer/network.py",
    "skips.append(next(parts)(h) if level == ATTENTION_LEVEL else h)",
    "skips.append(h + 0 * next(parts)(h) if level == ATTENTION_LEVEL else h)",
    "the large network without the attention of its fifth scale",
    "models/diffusion_buffer/test_network.py::test_ncsnpp_large_equals_the_plain_computation")
add("buffer-official-context-time", "finetune/models/diffusion_buffer/weights.py",
    'settings["context_time"] = 1.0', 'settings["context_time"] = 0.0',
    "official weights are shown other times than in their training",
    "models/diffusion_buffer/test_network.py::test_an_official_checkpoint_tells_its_settings")
add("buffer-official-average", "finetune/models/diffusion_buffer/weights.py", "fill_ema(network, ema, path)", "pass",
    "an official checkpoint gives its raw weights, not their average",
    "models/diffusion_buffer/test_network.py::test_a_lightning_checkpoint_gives_its_average")

# CMGAN

FILE = "finetune/models/cmgan/signal.py"
SOUND = "models/cmgan/test_signal.py::"
add("cmgan-scale-bug", FILE, "return Normalised(noisy * scale[:, None], clean * scale[:, None], scale)",
    "return Normalised(noisy * scale[:, None], clean, scale)", "only the noisy side is normalised",
    SOUND + "test_losses_are_the_published_formulas_on_the_normalised_pair")
add("cmgan-window", FILE, "torch.hamming_window(", "torch.hann_window(", "another window than the checkpoint's",
    SOUND + "test_the_spectrum_is_the_plain_one_compressed")
add("cmgan-compression", FILE, "POWER = 0.3", "POWER = 0.5", "another compression than the checkpoint's",
    SOUND + "test_the_spectrum_is_the_plain_one_compressed")
add("cmgan-power", FILE, "return real_imag * power ** ((POWER - 1) / 2)", "return real_imag * power ** (POWER - 1)",
    "the power of the power, not of the magnitude", SOUND + "test_the_spectrum_is_the_plain_one_compressed")
add("cmgan-label-range", FILE, "return ((pesq - 1) / 3.5).clamp(0, 1)", "return ((pesq + 0.5) / 5).clamp(0, 1)",
    "PESQ's narrow-band range", SOUND + "test_labels_are_clamped_to_what_a_sigmoid_can_say")
FILE = "finetune/models/cmgan/network.py"
PLAIN_G = "models/cmgan/test_network.py::test_the_generator_equals_the_plain_computation"
add("cmgan-relative-sign", FILE, "(place[:, None] - place).clamp", "(place - place[:, None]).clamp",
    "relative positions the other way round", PLAIN_G)
add("cmgan-dense-order", FILE, "seen = torch.cat([x, seen], dim=1)", "seen = torch.cat([seen, x], dim=1)",
    "dense connections the other way round", PLAIN_G)
add("cmgan-half", FILE, "return 0.5 * self.fn(x)", "return self.fn(x)", "whole feed-forward steps", PLAIN_G)
add("cmgan-sub-pixel", FILE, "x.view(b, 2, c // 2, t, f).permute(0, 2, 3, 4, 1)",
    "x.view(b, c // 2, 2, t, f).permute(0, 1, 3, 4, 2)", "PyTorch's channel order of pixel shuffle", PLAIN_G)
add("cmgan-batch-norm", FILE, "layer.running_mean.lerp_(mean, layer.momentum)",
    "layer.running_mean.lerp_(mean, 1 - layer.momentum)", "running statistics of the last step only",
    "models/cmgan/test_network.py::test_the_statistics_of_one_batch_are_batch_norms_and_of_two_their_mean")
IN_PARTS = "models/cmgan/test_network.py::test_a_batch_in_parts_has_the_output_gradients_and_statistics_of_the_whole"
add("cmgan-parts-norm", FILE, "return in_parts(from_norm, parts, x, norm(conv))",
    "return in_parts(lambda x, conv: from_norm(x, norm(conv)), parts, x, conv)",
    "after running out of memory every part has its own BatchNorm", IN_PARTS)
add("cmgan-parts-dropout", FILE, "if _rows is None or not self.training:", "if True:",
    "parts drop other units than the whole batch", IN_PARTS)
add("cmgan-parts-random", FILE, "with torch.random.fork_rng(gpus, enabled=end < rows):",
    "with torch.random.fork_rng(gpus, enabled=False):", "later parts drop other units than the whole batch", IN_PARTS)
add("cmgan-spectral-norm", FILE, "return self.compute(x, self.weight_orig / largest, self.bias)",
    "return self.compute(x, self.weight_orig, self.bias)", "the discriminator without spectral norm",
    "models/cmgan/test_network.py::test_the_discriminator_equals_torchs_spectral_norm_under_old_and_new_names")
FILE = "finetune/models/cmgan/labels.py"
LABELS = "models/cmgan/test_labels.py::"
add("cmgan-missing-label", FILE, "valid.append(pesq.isfinite().float())", "valid.append(torch.ones_like(pesq))",
    "a missing PESQ is trained as 0", LABELS + "test_a_silent_sound_is_masked_and_the_others_keep_their_own_labels")
add("cmgan-replay-keeps-all", FILE, 'item["step"] > step - self.replay]', 'item["step"] > -1]',
    "the memory of past estimates grows forever",
    LABELS + "test_the_past_is_remembered_chosen_by_key_saved_and_restored")
add("cmgan-replay-of-ranks", FILE, 'if item["slot"] % process.world == process.rank:', "if True:",
    "after a change of ranks every rank remembers everything",
    LABELS + "test_the_past_is_dealt_again_to_another_number_of_ranks")
add("reshard-buffers", "finetune/common/reshard.py", 'buffers[name].copy_(saved["module"][name])', "pass",
    "after a change of ranks the running statistics start again",
    "recipes/test_cmgan_faults.py::test_another_number_of_ranks_goes_on_with_the_same_samples")
FILE = "finetune/cmgan.py"
add("cmgan-batch-label", FILE, "(valid * (discriminator(clean, other) - labels).square()).sum()",
    "(valid * (discriminator(clean, other) - labels.mean()).square()).sum()",
    "MetricGAN code that averages PESQ over the batch",
    LABELS + "test_a_silent_sound_is_masked_and_the_others_keep_their_own_labels")
add("cmgan-label-count", FILE, ".sum() / max(1.0, count)", ".sum() / sounds",
    "missing labels shrink the loss of the others",
    LABELS + "test_a_silent_sound_is_masked_and_the_others_keep_their_own_labels")
add("cmgan-time-loss", FILE, '"time": (estimate.wave - estimate.normalised.clean).abs().mean(1)',
    '"time": (estimate.wave - estimate.normalised.noisy).abs().mean(1)',
    "the waveform is compared with the noisy one", SOUND + "test_a_perfect_estimate_scores_zero_in_every_term")
WATCH = "models/cmgan/test_watch.py::"
add("cmgan-phase-turns", "finetune/models/cmgan/signal.py", "target[:, 0], -target[:, 1])  # (B, T, F)",
    "target[:, 0], target[:, 1])  # (B, T, F)", "phases are added instead of compared",
    SOUND + "test_phases_are_compared_without_their_turns_and_a_silent_bin_has_none")
add("cmgan-gate", "finetune/models/cmgan/watch.py",
    'used = config.gan_gate == "on" or (config.gan_gate == "auto" and bool(config.model))',
    'used = config.gan_gate == "on"', "a random discriminator pulls a trained generator away",
    "recipes/test_cmgan_features.py::test_fine_tuning_a_bare_generator_holds_its_random_discriminator_back")
add("cmgan-noisy-term", FILE, 'return self.noisy_term == "on" or (self.noisy_term == "auto" and bool(self.model))',
    'return self.noisy_term == "on"', "a discriminator of good speech only: the gate never opens",
    WATCH + "test_a_discriminator_that_learns_pesq_opens_the_gate_and_one_with_shuffled_labels_does_not")
add("cmgan-own-outputs", "finetune/models/cmgan/watch.py", "generator(signal.spectrum(pair.model_input))",
    "signal.spectrum(pair.clean)", "D is asked about clean speech instead of the generator's outputs",
    WATCH + "test_predictions_for_the_generators_own_outputs_are_compared_with_their_pesq")
add("cmgan-best-by-loss", FILE, 'return -metrics["pesq"] if math.isfinite(metrics["pesq"]) else None',
    'return metrics["loss"]', "the best is chosen by the loss, which contains the discriminator",
    "recipes/test_cmgan_features.py::test_the_best_by_pesq_is_exported_and_the_test_set_chooses_nothing")
add("cmgan-dropout-of-ranks", FILE, 'slot, "dropout"))', '"dropout"))',
    "all micro-batches of a step drop the same units",
    "recipes/test_cmgan.py::test_two_ranks_equal_one_process_in_both_networks")
FILE = "finetune/common/enhance_folder.py"
PEOPLE = "models/cmgan/test_enhance.py::"
add("enhance-high-band", FILE, "block = block + whole - np.stack(next(heard), axis=1)[: len(block)]",
    "block = block + whole", "the noisy recording is mixed back in",
    PEOPLE + "test_above_8_khz_the_recording_is_cut_or_kept")
add("enhance-resample-seam", FILE, "left, right = min(margin, start), min(margin, frames - end)", "left, right = 0, 0",
    "a click every 20 s", PEOPLE + "test_resampling_in_blocks_is_resampling_the_whole")
add("cmgan-padding", "finetune/models/cmgan/enhance.py", "if padding else noisy", "if False else noisy",
    "the last samples differ from the published output",
    PEOPLE + "test_the_output_is_the_published_one_up_to_its_last_sample")
add("cmgan-seam", "finetune/models/cmgan/enhance.py", "wave[:FADE] = fade_in * wave[:FADE] + (1 - fade_in) * tail",
    "pass", "windows are joined with a hard seam", "models/cmgan/test_enhance.py::test_a_seam_is_a_cross_fade")

# data/

FILE = "data/pairs.py"
MAKE_PAIRS = "data/test_pairs.py::"
add("data-snr", FILE, "10 ** (snr / 10))", "10 ** (snr / 20))", "decibels of amplitude for power",
    MAKE_PAIRS + "test_exact_snr")
add("data-clipping", FILE, "np.round(wave * (32767 / peak))", "np.round(np.clip(wave, -1, 1) * 32767)",
    "loud mixtures are clipped", MAKE_PAIRS + "test_loud_mixture_is_scaled_not_clipped")
add("data-noise-place", FILE, 'start = keyed(settings.seed, id, "place", len(noise))', "start = 0",
    "every clip has the same piece of noise", MAKE_PAIRS + "test_each_clip_has_its_own_piece_of_the_noise")
add("data-hf-columns", FILE, 'for column in ("clean", "noisy")))', 'for column in ("noisy", "clean")))',
    "noisy speech is the target", MAKE_PAIRS + "test_hugging_face_columns")
add("data-lengths", FILE, "if abs(len(clean) - len(noisy)) > 1:", "if False:", "unequal pairs are cut silently",
    MAKE_PAIRS + "test_lengths_and_names_are_checked")
add("cluster-linkage", "data/cluster_speakers.py", '"cosine"), "average")', '"cosine"), "single")',
    "single linkage chains different voices together",
    "data/test_cluster_speakers.py::test_clusters_are_those_of_average_linkage")
FILE = "data/pair_speakers.py"
SPEAKERS = "data/test_pair_speakers.py::"
add("data-reference-split", FILE, '(row["speaker"], row.get("split"))', '(row["speaker"],)',
    "a reference comes from another split", SPEAKERS + "test_same_speaker_same_split_never_itself")
add("data-reference-copy", FILE, 'if other["content"] != clip["content"]', 'if other["id"] != clip["id"]',
    "a copy becomes the reference", SPEAKERS + "test_same_audio_is_not_a_reference")
FILE = "data/lib/waveform.py"
add("data-mono", FILE, "wave = wave.mean(axis=0, keepdims=True)", "wave = wave[:1]",
    "the right channel is thrown away", MAKE_PAIRS + "test_two_channels_become_their_mean")
add("data-truncated", FILE, "if 0 < size < 0xFFFFFFF0 and len(data) < size + 8:", "if False:",
    "a cut wav counts as whole", "data/test_encode.py::test_rejects_have_a_reason_each")
add("data-pickle", FILE, "allow_pickle=False)", "allow_pickle=True)",
    "codes run code", "data/test_encode_bad_input.py::test_pickle_in_npy_codes_is_not_executed")
add("data-code-range", FILE, "if codes.min() < 0 or codes.max() >= codebook_size:", "if codes.min() < 0:",
    "codes out of range are accepted",
    "data/lib/test_sources.py::test_legacy_codes_out_of_range_are_rejected_not_clamped")
add("data-codes-transposed", FILE, "            codes = codes.T", "            codes = codes.reshape(codes.T.shape)",
    "codes are reshaped instead of transposed", "data/lib/test_sources.py::test_legacy_npy")
add("data-loudness", FILE, "10 ** ((target - loudness) / 20)", "10 ** ((target - loudness) / 10)",
    "clips do not get the loudness asked for",
    "data/test_encode.py::test_loudness_is_that_of_the_standard_and_never_clips")
add("data-flat-codes", FILE, "codes = codes.reshape(-1, codebooks)", "codes = codes.reshape(codebooks, -1).T",
    "flat codes are read codebook by codebook", "data/lib/test_sources.py::test_legacy_npy_of_interleaved_codes")
add("data-musiccaps-cut", "data/lib/musiccaps.py", "return replace(clip, start=start, end=end)", "return clip",
    "a whole video gets the caption of 10 s",
    "data/lib/test_sources.py::test_musiccaps_cuts_longer_recordings_to_the_captioned_part")
add("data-chunk-overlap", "data/lib/codec.py", "DAC_OVERLAP = 8", "DAC_OVERLAP = 0",
    "codes differ at the seams of chunks", "data/lib/test_codec.py::test_chunks_give_the_codes_of_the_whole_clip")
add("data-encodec-scale", "data/lib/codec.py", "config.normalize or config.chunk_length_s or", "",
    "an EnCodec that needs a scale per clip is accepted",
    "data/lib/test_codec.py::test_an_encodec_whose_codes_need_a_scale_is_refused")
add("data-resume-changed", "data/lib/resume.py", "if not (same and stamp == content_stamp(clip)):", "if not result:",
    "a changed recording keeps its old codes", "data/test_encode.py::test_only_what_changed_is_encoded_again")
add("data-other-weights", "data/encode.py",
    '(info.get("codec"), info.get("weights_sha256")) != (job.codec, job.weights_sha256)',
    'info.get("codec") != job.codec', "codes of two codecs in one dataset",
    "data/test_encode.py::test_another_codec_is_refused")
add("data-leak", "data/check.py", "if (first_folder, first_split) == (folder, split):", "if True:",
    "the same audio in two splits is a note", "data/test_check.py::test_leak_between_two_datasets")
add("data-arrow-offsets", "data/lib/store.py", "np.cumsum([len(value) for value in values], out=offsets[1:])",
    "offsets[1:] = np.arange(1, len(values) + 1) * len(values[0])", "every clip gets the first one's length",
    "data/test_encode.py::test_folder_to_dataset", MAKE_PAIRS + "test_given_pairs")
# fmt: on


if __name__ == "__main__":
    sys.exit(main())
