"""./launch.sh doctor"""

import shutil
import sys

import pytest

from common.errors import UserError
from infer import doctor


def test_it_prints_what_this_machine_has(capsys):
    doctor.examine(None)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["Python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert lines["GPU"].startswith("none: training runs on")
    assert float(lines["disk"].split()[0]) == pytest.approx(shutil.disk_usage(doctor.ROOT).free / 2**30, abs=5)
    assert (lines["C++"] != "missing: no optimizer offload (zero2_offload, zero3_offload)") == bool(shutil.which("c++"))


def test_other_versions_and_missing_packages_are_named(monkeypatch):
    def version(name):
        if name == "peft":
            raise doctor.importlib.metadata.PackageNotFoundError
        return "0.0.1" if name == "torch" else real(name) + "+local"

    real = doctor.importlib.metadata.version
    before = doctor.unlike_pins()
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    new = [line.split(" (")[0] for line in doctor.unlike_pins() if line not in before]
    assert new == ["torch 0.0.1", "peft missing"]


def test_what_no_training_can_do_without_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "deepspeed" else 1)
    with pytest.raises(UserError, match=r"deepspeed not installed in .*launch.sh setup"):
        doctor.examine(None)
