"""The bugs name modules and tests that exist. Running all takes minutes, by hand: tests/mutate.py."""

import re
from pathlib import Path

import mutate
import pytest

from helpers import support


def test_every_bug_names_a_module_and_tests_that_exist():
    assert 60 <= len(mutate.BUGS) <= 80
    for name, bug in mutate.BUGS.items():
        place = bug.module.replace(".", "/") + ".py"
        known = [(mutate.ROOT / folder / place).is_file() for folder in ("finetune", "data")]
        assert any(known) or bug.module == "peft", name
        assert bug.why and bug.tests, name
        for test in bug.tests:
            file, function = re.fullmatch(r"(.+\.py)::(\w+)(\[.*\])?", test).group(1, 2)
            assert f"\ndef {function}(" in Path(support.ROOT / "tests" / file).read_text(), (name, test)


@pytest.mark.long
def test_a_bug_is_put_back_in_the_process_of_a_test_and_only_there():
    mutate.preload()
    assert mutate.try_bug("plan_sorted")[0] == "caught"
    assert mutate.run_tests(mutate.BUGS["plan_sorted"].tests, mutate.TIMEOUT)[0] == 0
