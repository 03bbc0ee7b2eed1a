"""What belongs to the whole process, and what a test must therefore leave as it found it.

conftest.py checks this after every test and every file. A test, fixture or helper that has to change some of it puts it
back: by `monkeypatch`, or inside `restored()`.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings


@contextlib.contextmanager
def restored():
    """Whatever changes inside is put back."""
    before = read()
    try:
        yield
    finally:
        restore(before)


@contextlib.contextmanager
def unchanged():
    """Fails if anything is changed afterwards; it is put back all the same, so that one leak is one failure."""
    before = read()
    yield
    found = changes(before, read())
    restore(before)
    if found:
        raise AssertionError("this outlives the test (see helpers/process_state.py):\n  " + "\n  ".join(found))


def read() -> dict[str, dict]:
    """kind -> name -> value."""
    return {kind: reader() for kind, (reader, _) in KINDS.items()}


def restore(before: dict[str, dict]) -> None:
    now = read()
    for kind, (_, write) in KINDS.items():
        if different(kind, before[kind], now[kind]):
            write(before[kind])


def changes(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    lines = []
    for kind in KINDS:
        for name in different(kind, before[kind], after[kind]):
            old, new = (repr(state[kind].get(name, "nothing"))[:100] for state in (before, after))
            lines.append(f"{kind} {name}: {old} became {new}")
    return lines


def different(kind: str, before: dict, after: dict) -> list[str]:
    names = list(before)
    if kind not in MAY_GROW:
        names += [name for name in after if name not in before]
    absent = object()
    return [name for name in names if not same(before.get(name, absent), after.get(name, absent))]


def same(old, new) -> bool:
    # Functions and handlers are compared by identity: some objects do not compare with others.
    if old is new or (is_torchs_own(old) and is_torchs_own(new)):
        return True
    return isinstance(old, PLAIN) and isinstance(new, PLAIN) and old == new


PLAIN = (str, int, float, tuple, list)


# ---- Python ----------------------------------------------------------------------------------------------------


OF_IMPORTS = ("TORCHINDUCTOR_", "TRITON_", "KMP_", "PYTORCH_NVML_")  # set by imports


def read_environment() -> dict:
    names = [name for name in os.environ if not name.startswith(OF_IMPORTS) and name != "PYTEST_CURRENT_TEST"]
    return {name: os.environ[name] for name in names}


def write_environment(before: dict) -> None:
    for name in set(read_environment()) - set(before):
        del os.environ[name]
    os.environ.update(before)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


def read_signals() -> dict:
    return {number.name: signal.getsignal(number) for number in SIGNALS}


def write_signals(before: dict) -> None:
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


def read_interpreter() -> dict:
    return {
        "working folder": os.getcwd(),
        "sys.argv": list(sys.argv),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "warnings.showwarning": warnings.showwarning,
        "garbage collection": gc.isenabled(),
        "modules that may not be imported": sorted(name for name, module in sys.modules.items() if module is None),
    }


def write_interpreter(before: dict) -> None:
    os.chdir(before["working folder"])
    sys.argv[:] = before["sys.argv"]
    sys.excepthook, threading.excepthook = before["sys.excepthook"], before["threading.excepthook"]
    warnings.showwarning = before["warnings.showwarning"]
    (gc.enable if before["garbage collection"] else gc.disable)()
    for name in [name for name, module in sys.modules.items() if module is None]:
        if name not in before["modules that may not be imported"]:
            del sys.modules[name]
    for name in before["modules that may not be imported"]:
        sys.modules.setdefault(name, None)


def read_path() -> dict:
    return {folder: "among the folders" for folder in sys.path}  # scripts of this project add a folder twice


def write_path(before: dict) -> None:
    sys.path[:] = [folder for folder in before if folder not in sys.path] + [f for f in sys.path if f in before]


def loggers() -> dict[str, logging.Logger]:
    known = {n: logger for n, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)}
    return {"root": logging.root, **known}


def handlers(logger: logging.Logger, of_pytest: bool = False) -> list[logging.Handler]:
    """Those of the logger, or those by which pytest captures its lines."""
    return [x for x in logger.handlers if type(x).__module__.startswith("_pytest.") == of_pytest]


def read_loggers() -> dict:
    state = {name: (x.level, x.disabled, x.propagate, *handlers(x), *x.filters) for name, x in loggers().items()}
    state.pop("torch.__trace", None)  # torch's compiler sets it up at its first use
    return state | {"of all levels up to": (logging.root.manager.disable,)}


def write_loggers(before: dict) -> None:
    logging.disable(before["of all levels up to"][0])
    for name, logger in loggers().items():
        if name in before:
            logger.level, logger.disabled, logger.propagate, *others = before[name]
            own = [other for other in others if isinstance(other, logging.Handler)]
            logger.handlers[:] = handlers(logger, of_pytest=True) + own
            logger.filters[:] = [other for other in others if not isinstance(other, logging.Handler)]
    logging.root.manager._clear_cache()


# ---- torch, DeepSpeed, transformers ------------------------------------------------------------------------------


def torch_settings() -> dict[str, tuple]:
    """name -> (how to read it, how to write it)."""
    import torch

    def flag(owner, name: str) -> tuple:
        return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))

    settings = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "fp32 precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "cudnn.allow_tf32": flag(torch.backends.cudnn, "allow_tf32"),
        "cudnn.benchmark": flag(torch.backends.cudnn, "benchmark"),
        "cudnn.deterministic": flag(torch.backends.cudnn, "deterministic"),
    }
    for device in ("cpu", "cuda"):
        settings[f"autocast on {device}"] = (
            lambda device=device: torch.is_autocast_enabled(device),
            lambda value, device=device: torch.set_autocast_enabled(device, value),
        )
        settings[f"autocast dtype on {device}"] = (
            lambda device=device: torch.get_autocast_dtype(device),
            lambda value, device=device: torch.set_autocast_dtype(device, value),
        )
    return settings


def read_torch_settings() -> dict:
    return {name: read_it() for name, (read_it, _) in torch_settings().items()}


def write_torch_settings(before: dict) -> None:
    for name, (read_it, write) in torch_settings().items():
        if read_it() != before[name]:
            write(before[name])


def torch_places() -> dict:
    """What DeepSpeed and others replace functions of: torch.nn.functional.linear, torch.empty, Module.apply."""
    import torch

    places = (torch, torch.nn.functional, torch.nn.init, torch.Tensor, torch.nn.Module, torch.nn.Linear)
    return {getattr(place, "__qualname__", place.__name__): place for place in places}


def read_torch_functions() -> dict:
    places = torch_places().items()
    return {f"{p}.{name}": value for p, place in places for name, value in vars(place).items() if callable(bare(value))}


def bare(value):
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def is_torchs_own(function) -> bool:
    """torch wraps some of its functions when its compiler is imported."""
    code = getattr(bare(function), "__code__", None)
    return code is not None and "/site-packages/torch/" in code.co_filename


def write_torch_functions(before: dict) -> None:
    places = torch_places()
    for path, value in before.items():
        place, name = path.rsplit(".", 1)
        if vars(places[place]).get(name) is not value:
            setattr(places[place], name, value)


def read_groups() -> dict:
    import torch.distributed

    return {"of torch.distributed": torch.distributed.is_initialized()}


def write_groups(before: dict) -> None:
    if before["of torch.distributed"]:
        raise AssertionError("a test has ended the process group of another one")
    import torch.distributed

    if "deepspeed" in sys.modules:
        sys.modules["deepspeed"].comm.destroy_process_group()
    else:
        torch.distributed.destroy_process_group()


def read_sharding() -> dict:
    transformers = sys.modules.get("transformers.integrations.deepspeed")
    return {"by HfDeepSpeedConfig": bool(transformers and transformers.is_deepspeed_zero3_enabled())}


def write_sharding(before: dict) -> None:
    if not before["by HfDeepSpeedConfig"]:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()


KINDS = {
    "environment variable": (read_environment, write_environment),
    "signal handler": (read_signals, write_signals),
    "sys.path": (read_path, write_path),
    "Python's": (read_interpreter, write_interpreter),
    "logger": (read_loggers, write_loggers),
    "torch's": (read_torch_settings, write_torch_settings),
    "function of torch": (read_torch_functions, write_torch_functions),
    "process group": (read_groups, write_groups),
    "sharding of new models": (read_sharding, write_sharding),
}
MAY_GROW = ("logger", "function of torch")  # by the first import of a library
