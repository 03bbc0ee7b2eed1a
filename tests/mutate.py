"""Puts known bugs back, one at a time, and runs the tests that should notice.

    python tests/mutate.py                     all of them; exit code 1 if one goes unnoticed
    python tests/mutate.py dia_ mot_           those whose names begin with one of these words
    python tests/mutate.py --list

Each bug is a function below, which replaces a function of the module that it names; helpers/patch calls it right after
that module's import, in the process of the test and in every rank that the test starts. They are bugs of public
trainers, of users' reports, and of this project's own past. One that no test notices is a hole: write the test, or
correct the bug.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCH = ROOT / "tests" / "helpers" / "patch"
TIMEOUT = 300  # seconds for one bug
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Bug:
    module: str
    put_back: Callable  # changes the module
    why: str  # whose bug it is, or what it would do
    tests: tuple[str, ...]  # below tests/


BUGS: dict[str, Bug] = {}


def bug(module: str, why: str, *tests: str):
    """Enters a function into the list under its name."""

    def enter(put_back: Callable) -> Callable:
        @functools.wraps(put_back)
        def checked(module_itself) -> None:
            try:
                put_back(module_itself)
            except Exception as error:  # it must not pass for a failure of the test
                print(f"this bug no longer fits the code: {error!r}", flush=True)
                os._exit(NO_LONGER_FITS)

        BUGS[put_back.__name__] = Bug(module, checked, why, tests)
        return checked

    return enter


NO_LONGER_FITS = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names; default: all")
    parser.add_argument("--list", action="store_true", help="print the bugs and exit")
    args = parser.parse_args()
    chosen = [name for name in BUGS if not args.names or name.startswith(tuple(args.names))]
    if args.list or not chosen:
        for name in chosen:
            print(f"{name:28} {BUGS[name].module}: {BUGS[name].why}")
        return 0 if chosen else 2

    began = time.monotonic()
    preload()
    tests = sorted({test for name in chosen for test in BUGS[name].tests})
    code, log = run_tests(tests, TIMEOUT * 4)
    if code:
        print(f"{log[-3000:]}\nthe tests do not pass without a bug")
        return 1
    print(f"{len(tests)} tests pass without a bug in {time.monotonic() - began:.0f} s", flush=True)
    missed = []
    for name in chosen:
        started = time.monotonic()
        verdict, log = try_bug(name)
        print(f"{verdict:9} {time.monotonic() - started:6.1f} s  {name:28} {BUGS[name].why}", flush=True)
        if verdict != "caught":
            missed.append(name)
            print(log[-1500:] if verdict != "MISSED" else "", end="")
    print(f"{len(chosen)} bugs, {len(chosen) - len(missed)} caught, {time.monotonic() - began:.0f} s", *missed)
    return 1 if missed else 0


def try_bug(name: str) -> tuple[str, str]:
    code, log = run_tests(BUGS[name].tests, TIMEOUT, name)
    if "this bug no longer fits the code" in log:
        return "BROKEN", log
    return {0: "MISSED", 1: "caught", None: "TIMED OUT"}.get(code, "BROKEN"), log


def preload() -> None:
    """Imports what most tests need; nothing of the project, which every fork imports for itself."""
    os.environ.update(CPU)
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import scipy.special  # noqa: F401
    import soundfile  # noqa: F401
    import transformers.models.dia.modeling_dia
    import transformers.models.llama.modeling_llama  # noqa: F401


def run_tests(tests, timeout: float, name: str = "") -> tuple[int | None, str]:
    """pytest's exit code (None: it took too long) and what it printed, in a process with the bug of this name."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if not child:
            os.setsid()  # so that what the tests start can be ended with them
            os.chdir(ROOT)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os._exit(run_pytest(tests, name))
        deadline, ended = time.monotonic() + timeout, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also the ranks that a failed test has left
        if not ended:
            os.waitpid(child, 0)
        log.seek(0)
        return os.waitstatus_to_exitcode(status) if ended else None, log.read()


def run_pytest(tests, name: str) -> int:
    import pytest

    if name:
        os.environ |= {"PYTHONPATH": str(PATCH), "TEST_PATCHES": f"{BUGS[name].module}=mutate:{name}"}
        start = importlib.util.spec_from_file_location("patch_at_start", PATCH / "sitecustomize.py")
        start.loader.exec_module(importlib.util.module_from_spec(start))  # as Python does when it starts
    words = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    code = pytest.main([*words, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    return int(code)


def wrap(owner, name: str, buggy: Callable) -> None:
    """Replaces owner.name by a function that is given the right one before its arguments."""
    right = getattr(owner, name)
    setattr(owner, name, functools.wraps(right)(lambda *words, **options: buggy(right, *words, **options)))


# ---- the step ----------------------------------------------------------------------------------------------------

ENGINE = "common/test_engine.py::"
DIVIDES = ENGINE + "test_the_step_divides_once_for_all_ranks"
EQUAL = ENGINE + "test_steps_equal_a_plain_loop_over_the_whole_batch"


@bug("common.engine", "DeepSpeed averages over ranks: the gradient shrinks with every rank", DIVIDES)
def engine_world(engine):
    wrap(engine, "share_of_step", lambda right, loss_sum, step_weight, world: right(loss_sum, step_weight, 1))


@bug("common.engine", "an infinite loss with a finite gradient is trained on", DIVIDES)
def engine_infinite_loss(engine):
    engine.share_of_step = lambda loss_sum, step_weight, world: loss_sum * (world / step_weight)


@bug("common.engine", "DeepSpeed divides by the accumulation once more", EQUAL)
def engine_accumulation(engine):
    def backward(engine_itself, loss_sum, step_weight, world, last):
        engine_itself.set_gradient_accumulation_boundary(last)
        engine_itself.backward(engine.share_of_step(loss_sum, step_weight, world))

    engine.backward = backward


@bug(
    "common.engine",
    "ZeRO-0 has no overflow check: one NaN destroys the weights",
    ENGINE + "test_a_step_that_is_not_finite_is_skipped_whole",
)
def engine_no_overflow_check(engine):
    def take_step(engine_itself):
        engine_itself.step()
        return True, 1.0

    engine.take_step = take_step


AVERAGE = ENGINE + "test_the_average_is_the_textbook_one_and_only_borrowed"


@bug("common.ema", "master weights are swapped, but the model computes with the old ones", AVERAGE)
def ema_compute_weights(ema):
    ema.masters_changed = lambda engine: None


LOSS = "common/test_loss.py::"


@bug("common.loss", "padding counts in the loss", LOSS + "test_evaluation_gives_token_losses_and_most_likely_ids")
def loss_padding(loss):
    wrap(loss, "token_losses", lambda right, logits, labels: right(logits, labels.clamp(min=0)))


@bug("common.loss", "softmax over bf16 logits", LOSS + "test_bf16_stays_near_fp32")
def loss_bf16(loss):
    def token_losses(logits, labels):
        logits = logits.view(*labels.shape, -1)
        total = logits.logsumexp(-1)
        picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (total - picked).masked_fill(labels == loss.IGNORE, 0.0), logits, total

    loss.token_losses = token_losses


@bug("common.loss", "codebook weights are ignored", LOSS + "test_loss_and_gradients_equal_plain_cross_entropy")
def loss_weights(loss):
    def forward(right, self, hidden, labels=None, weights=None):
        return right(self, hidden, labels, weights if weights is None else weights / weights)

    wrap(loss.LossHead, "forward", forward)


@bug(
    "common.loss",
    "a mean per micro-batch weights short clips more; 0 / 0 without targets",
    LOSS + "test_a_lora_wrapped_head_trains_its_matrices_as_plain_cross_entropy_does",
)
def loss_mean(loss):
    def codebook_loss(right, head, hidden, labels, weights):
        total, losses = right(head, hidden, labels, weights)
        return total / labels.numel(), losses

    wrap(loss, "codebook_loss", codebook_loss)


OPTIM = "common/test_optim.py::"
CURVE = OPTIM + "test_the_curve_rises_to_the_peak_and_falls_to_the_minimum"


@bug("common.optim", "the first step trains with a rate of 0", CURVE)
def lr_warm_up_from_zero(optim):
    wrap(optim, "learning_rate", lambda right, step, steps, config: right(step, steps, config) if step else 0.0)


@bug(
    "common.optim",
    "layer-wise rates are lost at the first step of the schedule",
    OPTIM + "test_a_scaled_rate_moves_a_parameter_that_much_less",
)
def lr_scale(optim):
    def set_learning_rate(engine, lr):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr

    optim.set_learning_rate = set_learning_rate


@bug("common.optim", "weight decay on biases and norms", OPTIM + "test_groups_partition_the_trainable_parameters")
def decay_of_norms(optim):
    def parameter_groups(right, model, weight_decay, *rest, **more):
        return [group | {"weight_decay": weight_decay} for group in right(model, weight_decay, *rest, **more)]

    wrap(optim, "parameter_groups", parameter_groups)


LORA = "common/test_lora.py::"


@bug("common.lora", "every rank draws its own matrices", LORA + "test_the_first_matrices_depend_on_the_seed_alone")
def lora_seed(lora):
    wrap(
        lora,
        "add_lora",
        lambda right, model, found, rank, seed, *rest, **more: right(
            model, found, rank, time.monotonic_ns() % 2**31, *rest, **more
        ),
    )


@bug(
    "common.lora",
    "PEFT wraps whatever matches: half of the modules would train",
    LORA + "test_a_renamed_projection_gives_found_and_expected_of_its_group_only",
)
def lora_typo(lora):
    def resolve_groups(model, groups, wanted):
        names = [name for name, _ in model.named_modules()]
        return {group: [name for name in names if lora.re.fullmatch(groups[group][0], name)] for group in wanted}

    lora.resolve_groups = resolve_groups


@bug(
    "peft",
    "LoRA in fp32 under ZeRO-3 and bf16",
    "recipes/test_bf16.py::test_lora_has_the_precision_of_the_run_in_every_stage",
)
def lora_precision(peft):
    wrap(peft, "get_peft_model", lambda right, model, config, **_: right(model, config, autocast_adapter_dtype=True))


@bug(
    "common.ds_config",
    "ZeRO-3 rounds the RoPE frequencies to bf16, silently",
    "recipes/test_bf16.py::test_every_floating_buffer_is_that_of_a_plain_fp32_load",
)
def rope_bf16(ds_config):
    def resolve_ds(right, *rest):
        ds = right(*rest)
        ds["data_types"]["keep_in_fp32_modules"] = []
        return ds

    wrap(ds_config, "resolve_ds", resolve_ds)


# ---- plan, randomness, evaluation --------------------------------------------------------------------------------

PLAN = "common/test_plan.py::"


@bug("common.plan", "batches come in order of length", PLAN + "test_short_and_long_batches_are_mixed")
def plan_sorted(plan):
    def epoch_order(right, self, epoch):
        clips, shuffled = right(self, epoch)
        return clips, sorted(shuffled)

    wrap(plan.Plan, "_epoch_order", epoch_order)


@bug(
    "common.plan",
    "set_epoch forgotten: every epoch has the same order",
    PLAN + "test_each_epoch_has_another_order_and_other_companions",
)
def plan_same_epochs(plan):
    wrap(plan.Plan, "_epoch_order", lambda right, self, epoch: right(self, 0))


@bug("common.plan", "the last step of an epoch is dropped", PLAN + "test_steps_cover_the_epochs")
def plan_last_batch(plan):
    wrap(plan.Plan, "steps", lambda right, self, *rest: max(1, right(self, *rest) - 1))


@bug(
    "common.keyed_random",
    "(1, 23) and (12, 3) draw the same",
    "common/test_keyed_random.py::test_different_keys_differ_and_equal_ones_do_not",
)
def random_keys_collide(keyed_random):
    wrap(keyed_random, "key64", lambda right, *key: right("".join(map(str, key))))


@bug(
    "common.evaluation",
    "a rank without a batch counts the first one again",
    "common/test_evaluation.py::test_every_clip_counts_once_and_all_ranks_run_equally_often",
)
def eval_counts_twice(evaluation):
    wrap(evaluation, "evaluation_rows", lambda right, *rest: ((rows, True) for rows, _ in right(*rest)))


@bug(
    "common.evaluation",
    "training goes on without dropout after an evaluation",
    "common/test_evaluation.py::test_the_mode_comes_back_even_after_an_error",
)
def eval_leaves_mode(evaluation):
    @contextlib.contextmanager
    def evaluating(right, model):
        try:
            with right(model):
                yield
        finally:
            model.eval()

    wrap(evaluation, "evaluating", evaluating)


# ---- checkpoints and runs ----------------------------------------------------------------------------------------


@bug(
    "common.metrics",
    "steps after the checkpoint are logged twice",
    "common/test_metrics.py::test_forgetting_drops_later_and_half_written_lines",
)
def resume_logs_twice(metrics):
    metrics.Tracker.forget_after = lambda self, step: None


@bug(
    "common.metrics",
    "a signal to one rank is not heard by all",
    "common/test_metrics.py::test_a_step_is_reduced_to_sums_means_and_the_wish_to_stop",
)
def signal_not_shared(metrics):
    wrap(metrics.Meter, "reduce", lambda right, self, process: replace(right(self, process), stop=False))


CHECKPOINT = "common/test_checkpoint.py::"


@bug(
    "common.checkpoint",
    "resume takes the newest folder, whole or not",
    CHECKPOINT + "test_auto_goes_back_to_the_newest_whole_one_and_says_so",
)
def checkpoint_half_written(checkpoint):
    checkpoint._damage = lambda path: None


@bug("common.checkpoint", "a flipped bit is loaded", CHECKPOINT + "test_harm_to_any_file_is_found_and_named")
def checkpoint_checksum(checkpoint):
    checkpoint._sha256 = lambda path: "0" * 64


@bug(
    "common.checkpoint",
    "retention keeps the worst and deletes the best",
    CHECKPOINT + "test_the_newest_and_the_best_are_kept_and_foreign_folders_untouched",
)
def checkpoint_best_deleted(checkpoint):
    checkpoint.min = max


@bug(
    "common.checkpoint",
    "a checkpoint in the background holds later weights",
    CHECKPOINT + "test_a_checkpoint_in_the_background_holds_the_step_it_was_asked_for",
)
def checkpoint_background(checkpoint):
    name = "host_copy" if hasattr(checkpoint, "host_copy") else "_host_copy"
    wrap(checkpoint, name, lambda right, tree: tree)


@bug(
    "common.checkpoint",
    "another user's checkpoint is loaded",
    CHECKPOINT + "test_what_belongs_to_another_user_is_refused_unless_forced",
)
def checkpoint_owner(checkpoint):
    checkpoint._refuse_foreign = lambda path, force: None


@bug("common.runs", "a run resumes on other data", "common/test_runs.py::test_stage_ranks_and_data_are_part_of_it")
def resume_other_data(runs):
    wrap(runs, "identity", lambda right, config, stage, process, data: right(config, stage, process, {}))


BEST = "recipes/test_dia_lora_features.py::test_the_export_is_the_best_checkpoint_and_says_which"


@bug("common.runs", "the highest loss is the best", BEST)
def best_is_worst(runs):
    wrap(runs.Run, "is_best", lambda right, self, step, score: right(self, step, None if score is None else -score))


@bug("common.runs", "the last weights are exported, not the best", BEST)
def export_last(runs):
    def load_best(right, self, engine, ema, step):
        self.best = {"step": step, "score": 0.0}
        return right(self, engine, ema, step)

    wrap(runs.Run, "load_best", load_best)


# ---- datasets ----------------------------------------------------------------------------------------------------

TOKENS = "common/test_tokens.py::"


@bug(
    "common.tokens",
    "codes of another codec are trained on",
    TOKENS + "test_another_codec_or_channel_count_names_both_values",
)
def tokens_codec(tokens):
    tokens.TokenDataset.require = lambda self, **facts: None


@bug(
    "common.tokens",
    "held-out clips are trained on",
    "recipes/test_dia_lora_features.py::test_held_out_rows_are_never_trained_on",
)
def tokens_split(tokens):
    wrap(tokens.TokenDataset, "rows_of_split", lambda right, self, train: range(len(self)))


@bug("common.arrow", "Arrow loads a flipped bit silently", TOKENS + "test_a_flipped_bit_is_found_by_verify")
def arrow_checksum(arrow):
    arrow.ArrowDataset._check_sums = lambda self, tick: None


@bug(
    "common.holdout",
    "a copy of a training clip is evaluated on",
    "common/test_holdout.py::test_the_same_sound_under_another_id_is_found",
)
def holdout_sound(holdout):
    wrap(holdout, "same_sounds", lambda right, *rest: right(*rest)[:0])


PAIRS = "common/test_pairs.py::"


@bug(
    "common.pairs",
    "noisy and clean crops from different places",
    PAIRS + "test_a_crop_depends_on_its_key_alone_and_both_sides_on_the_same_place",
)
def pairs_misaligned(pairs):
    def crop(right, self, i, length, *key):
        noisy, _, draw = right(self, i, length, *key)
        return noisy, right(self, i, length, *key, "clean")[1], draw

    wrap(pairs.PairDataset, "crop", crop)


@bug("common.pairs", "held-out speakers are trained on", PAIRS + "test_held_out_speakers_are_never_trained_on")
def pairs_hold_out(pairs):
    def split_pairs(right, *rest):
        train, _, held, held_rows = right(*rest)
        return train, pairs.np.arange(len(train)), held, held_rows

    wrap(pairs, "split_pairs", split_pairs)


SPEECH = "common/test_speech_metrics.py::"


@bug("common.speech_metrics", "PESQ of silence becomes a label", SPEECH + "test_no_pesq_is_a_reason_and_never_a_number")
def pesq_made_up(speech_metrics):
    def pesq_wb(right, clean, estimate):
        value, reason = right(clean, estimate)
        return (1.0, "") if reason else (value, "")

    wrap(speech_metrics, "pesq_wb", pesq_wb)


@bug(
    "common.scorer",
    "a dead process scores 1",
    "common/test_scorer.py::test_a_score_that_never_comes_is_a_missing_label",
)
def pesq_worker_died(scorer):
    def collect(right, scores):
        values, reasons = right(scores)
        values[values != values] = 1.0
        return values, reasons

    wrap(scorer, "collect", collect)


@bug(
    "common.codec",
    "codes of a retrained codec are accepted",
    "recipes/test_higgs_clone_features.py::test_codes_of_another_codec_are_refused",
)
def codec_changed(codec):
    codec.refuse_other_codec = lambda tokens, expected, who: None


# ---- Dia ---------------------------------------------------------------------------------------------------------

DIA_LAYOUT = "models/dia/test_layout.py::"
DIA_PROCESSOR = DIA_LAYOUT + "test_ids_mask_and_labels_equal_the_processors"


@bug("models.dia.layout", "public Dia trainers train without the delay pattern", DIA_PROCESSOR)
def dia_delay(layout):
    def delayed(right, codes, of, *rest, **more):
        inputs, labels = right(codes, of, *rest, **more)
        for channel, delay in enumerate(of.delay):
            inputs[:, channel] = layout.np.roll(inputs[:, channel], -delay)
            labels[:, channel] = layout.np.roll(labels[:, channel], -delay)
        return inputs, labels

    wrap(layout, "delayed", delayed)


@bug("models.dia.layout", "labels are the inputs: the loss falls to 0 and nothing is learned", DIA_PROCESSOR)
def dia_shift(layout):
    def delayed(right, *rest, **more):
        inputs, labels = right(*rest, **more)
        return inputs, layout.np.where(labels == layout.IGNORE, labels, inputs)

    wrap(layout, "delayed", delayed)


@bug("models.dia.layout", "no end is trained: speech never stops", DIA_PROCESSOR)
def dia_end_missing(layout):
    def delayed(right, codes, of, *rest, **more):
        inputs, labels = right(codes, of, *rest, **more)
        return inputs, layout.np.where(labels == of.eos, layout.IGNORE, labels)

    wrap(layout, "delayed", delayed)


@bug("models.dia.layout", "padding is a label", DIA_PROCESSOR)
def dia_padding_in_loss(layout):
    def delayed(right, codes, of, *rest, **more):
        inputs, labels = right(codes, of, *rest, **more)
        labels[-1] = layout.np.where(labels[-1] == layout.IGNORE, of.pad, labels[-1])
        return inputs, labels

    wrap(layout, "delayed", delayed)


@bug("models.dia.layout", "generated codes stay delayed", DIA_LAYOUT + "test_undelaying_gives_the_codes_back")
def dia_undelay(layout):
    layout.undelayed = lambda stream, of, frames: stream[1 : 1 + frames]


DIA_DATA = "models/dia/test_data.py::"
PLANNED = DIA_DATA + "test_the_planned_weight_is_the_weight_of_the_labels"


@bug("models.dia.data", "the ends are not counted in the step's weight", PLANNED)
def dia_target_weight(data):
    def target_weight(right, self, clips, epoch=0):
        return right(self, clips, epoch) - sum(self.part(clip, epoch)[3] for clip in clips)

    wrap(data.Clips, "target_weight", target_weight)


@bug(
    "models.dia.data", "the text's mask comes from its ids", DIA_DATA + "test_the_mask_comes_from_lengths_not_from_ids"
)
def dia_text_mask(data):
    def pad_texts(right, texts):
        ids, _ = right(texts)
        return ids, (ids != 0).long()

    wrap(data, "pad_texts", pad_texts)


@bug(
    "models.dia.data",
    "the same clips never have a text",
    DIA_DATA + "test_the_share_of_rows_without_text_is_as_asked",
)
def dia_dropout_epochs(data):
    wrap(data.Clips, "text", lambda right, self, clip, epoch: right(self, clip, 0))


DIA_EVALUATE = "models/dia/test_evaluate.py::"


@bug(
    "models.dia.evaluate",
    "the clip's own text stands in for another one",
    DIA_EVALUATE + "test_evaluation_equals_sums_over_the_models_own_logits",
)
def dia_own_text(evaluate):
    def other_texts(clips, rows):
        ids, mask = evaluate.pad_texts([clips.text(row, 0) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    evaluate.other_texts = other_texts


# ---- Higgs Audio -------------------------------------------------------------------------------------------------

HIGGS = "models/higgs/test_layout.py::"
HIGGS_LABELS = HIGGS + "test_labels_are_the_targets_codes_and_one_end_a_codebook"


@bug(
    "models.higgs.layout",
    "train-higgs-audio trains without the delay pattern",
    HIGGS + "test_delay_is_the_processors_and_can_be_undone",
)
def higgs_delay(layout):
    def delayed(right, codes, of):
        stream = right(codes, of)
        return layout.np.stack([layout.np.roll(stream[:, k], -k) for k in range(of.codebooks)], axis=1)

    wrap(layout, "delayed", delayed)


@bug("models.higgs.layout", "train-higgs-audio masks the ends: speech never stops", HIGGS_LABELS)
def higgs_end_not_trained(layout):
    def delayed_labels(right, stream, of):
        labels = right(stream, of)
        labels[labels == of.eos] = layout.IGNORE
        return labels

    wrap(layout, "delayed_labels", delayed_labels)


@bug("models.higgs.layout", "every place after the codes is an end", HIGGS_LABELS)
def higgs_ends_all_trained(layout):
    def delayed_labels(right, stream, of):
        return layout.np.where(stream == of.bos, layout.IGNORE, stream)

    wrap(layout, "delayed_labels", delayed_labels)


@bug(
    "models.higgs.data",
    "a copy of the target is its reference: copying is learned",
    HIGGS + "test_datasets_that_cannot_clone_are_refused",
)
def higgs_copy_as_reference(data):
    data.VoiceClips._refuse_copies = lambda self: None


@bug("models.higgs.data", "the ends are not counted in the step's weight", HIGGS + "test_loss_equals_the_models_own")
def higgs_target_weight(data):
    def target_weight(right, self, indices, epoch=None):
        return right(self, indices, epoch) - self.codebook_weights.sum() * len(indices)

    wrap(data.VoiceClips, "target_weight", target_weight)


# ---- Llama MoT ---------------------------------------------------------------------------------------------------

MOT = "models/mot/test_layout.py::"


@bug(
    "models.mot.build",
    "the first trainer used donor layer i: the last ones were lost",
    "models/mot/test_build.py::test_layer_map_of_the_published_pairs",
)
def mot_layer_map(build):
    build.layer_map = lambda layers, donor_layers: tuple(min(i, donor_layers - 1) for i in range(layers))


@bug("models.mot.layout", "labels are the inputs", MOT + "test_golden_ids")
def mot_shift(layout):
    def music(right, *rest):
        inputs, codebook, labels = right(*rest)
        return inputs, codebook, layout.np.roll(labels, 1, axis=0)

    wrap(layout, "music", music)


@bug("models.mot.layout", "all codebooks share their ids", MOT + "test_golden_ids")
def mot_id_offset(layout):
    wrap(layout.Layout, "first", lambda right, self, codebook: right(self, 0 * codebook))


@bug("models.mot.layout", "no end is trained in the delay layout", MOT + "test_delayed_layout_by_hand")
def mot_end(layout):
    def music(right, codes, of, final):
        inputs, codebook, labels = right(codes, of, final)
        return inputs, codebook, layout.np.where(labels == of.eos, layout.IGNORE, labels)

    wrap(layout, "music", music)


@bug("models.mot.data", "code 0 goes through the text's expert", "models/mot/test_network.py::test_code_0_is_music")
def mot_route_first_id(data):
    def places(right, ids, mask, labels, layout):
        return right(ids, mask, labels, replace(layout, vocab=layout.vocab + 1))

    wrap(data, "places", places)


MOT_DATA = "models/mot/test_data.py::"


@bug(
    "models.mot.data",
    "the first trainer trained on 50 of 5233 clips",
    MOT_DATA + "test_a_tenth_of_the_source_is_refused",
)
def mot_coverage(data):
    data.check_coverage = lambda tokens, min_coverage: None


@bug(
    "models.mot.data",
    "a window ends with A_EOS in the middle of a clip",
    MOT_DATA + "test_windows_are_whole_frames_anywhere_and_end_only_at_the_true_end",
)
def mot_window_end(data):
    wrap(data.Clips, "part", lambda right, self, clip, epoch: (*right(self, clip, epoch)[:2], True))


@bug(
    "models.mot.data",
    "evaluation without captions",
    MOT_DATA + "test_text_dropout_is_keyed_per_sample_and_off_for_evaluation",
)
def mot_dropout_in_eval(data):
    def text(right, self, clip, epoch):
        self.train, before = True, self.train
        try:
            return right(self, clip, epoch)
        finally:
            self.train = before

    wrap(data.Clips, "text", text)


# ---- enhancers ---------------------------------------------------------------------------------------------------

SOUND = "models/cmgan/test_signal.py::"


@bug(
    "models.cmgan.signal",
    "only the noisy side is normalised",
    SOUND + "test_losses_are_the_published_formulas_on_the_normalised_pair",
)
def cmgan_scale(signal):
    wrap(signal, "normalise", lambda right, noisy, clean: replace(right(noisy, clean), clean=clean))


@bug("models.cmgan.signal", "PESQ's narrow-band range", SOUND + "test_labels_are_clamped_to_what_a_sigmoid_can_say")
def cmgan_label_range(signal):
    signal.quality = lambda pesq: ((pesq + 0.5) / 5).clamp(0, 1)


@bug(
    "models.cmgan.labels",
    "a missing PESQ is trained as 0",
    "models/cmgan/test_labels.py::test_a_silent_sound_is_masked_and_the_others_keep_their_own_labels",
)
def cmgan_missing_label(labels):
    def collect(right, self, step, waiting):
        labelled = right(self, step, waiting)
        labelled.valid = [labels.torch.ones_like(valid) for valid in labelled.valid]
        return labelled

    wrap(labels.Labels, "collect", collect)


@bug(
    "models.diffusion_buffer.signal",
    "g = c k^t as in another paper's code",
    "models/diffusion_buffer/test_signal.py::test_sigma_is_the_integral_and_where_the_forward_process_ends",
)
def buffer_g(signal):
    wrap(signal, "g", lambda right, spec, t: right(spec, t) * 1.1)


@bug(
    "models.diffusion_buffer.signal",
    "complex noise of power 2",
    "models/diffusion_buffer/test_signal.py::test_noise_has_unit_power",
)
def buffer_noise_power(signal):
    wrap(signal, "complex_noise", lambda right, *rest: right(*rest) * 2**0.5)


# ---- data/ -------------------------------------------------------------------------------------------------------

MAKE_PAIRS = "data/test_pairs.py::"


@bug("pairs", "decibels of amplitude for power", MAKE_PAIRS + "test_exact_snr")
def data_snr(pairs):
    def mix(right, clean, noise, id, settings):
        return clean + (right(clean, noise, id, settings) - clean) ** 2

    wrap(pairs, "mix", mix)


@bug("pairs", "loud mixtures are clipped", MAKE_PAIRS + "test_loud_mixture_is_scaled_not_clipped")
def data_clipping(pairs):
    np = pairs.np
    pairs.to_int16 = lambda *waves: [np.round(np.clip(wave, -1, 1) * 32767).astype(np.int16) for wave in waves]


@bug("lib.waveform", "the right channel is thrown away", MAKE_PAIRS + "test_two_channels_become_their_mean")
def data_mono(waveform):
    wrap(waveform, "prepare", lambda right, wave, *rest: right(wave[:1], *rest))


@bug("lib.waveform", "a cut wav counts as whole", "data/test_encode.py::test_rejects_have_a_reason_each")
def data_truncated(waveform):
    waveform.refuse_truncated_wav = lambda data: None


@bug(
    "lib.waveform",
    "codes in a file run code",
    "data/test_encode_bad_input.py::test_pickle_in_npy_codes_is_not_executed",
)
def data_pickle(waveform):
    def read_codes(right, data, *rest, **more):
        import io

        with contextlib.suppress(ValueError):
            waveform.np.load(io.BytesIO(data), allow_pickle=True)
        return right(data, *rest, **more)

    wrap(waveform, "read_codes", read_codes)


@bug(
    "lib.waveform",
    "codes out of range are clamped",
    "data/lib/test_sources.py::test_legacy_codes_out_of_range_are_rejected_not_clamped",
)
def data_code_range(waveform):
    def read_codes(right, data, codebooks, codebook_size, *rest, **more):
        return right(data, codebooks, 2**15, *rest, **more).clip(0, codebook_size - 1)

    wrap(waveform, "read_codes", read_codes)


@bug("pair_speakers", "a copy becomes the reference", "data/test_pair_speakers.py::test_same_audio_is_not_a_reference")
def data_reference_copy(pair_speakers):
    def choose_references(right, clips, *rest):
        return right([clip | {"content": clip["id"]} for clip in clips], *rest)

    wrap(pair_speakers, "choose_references", choose_references)


@bug(
    "pair_speakers",
    "a reference comes from another split",
    "data/test_pair_speakers.py::test_same_speaker_same_split_never_itself",
)
def data_reference_split(pair_speakers):
    def choose_references(right, clips, *rest):
        return right([clip | {"voice": clip["voice"] and clip["voice"][:1]} for clip in clips], *rest)

    wrap(pair_speakers, "choose_references", choose_references)


@bug(
    "lib.resume",
    "a changed recording keeps its old codes",
    "data/test_encode.py::test_only_what_changed_is_encoded_again",
)
def data_resume_changed(resume):
    resume.unfinished = lambda clips, finished: [(clip, None) for clip in clips if clip.id not in finished.clips]


if __name__ == "__main__":
    sys.exit(main())
