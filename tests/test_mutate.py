"""The list of mutations fits the code; running it takes minutes and is done by hand: python tests/mutate.py."""

from pathlib import Path

import mutate


def test_every_mutation_finds_its_place_and_its_tests():
    assert not [problem for mutation in mutate.MUTATIONS for problem in mutate.problems_of(mutation)]
    assert len({mutation.name for mutation in mutate.MUTATIONS}) == len(mutate.MUTATIONS)
    assert all("\n" not in mutation.old and mutation.why for mutation in mutate.MUTATIONS)


def test_every_recipe_and_the_shared_code_is_in_it():
    files = {mutation.file for mutation in mutate.MUTATIONS}
    recipes = {str(file.relative_to(mutate.ROOT)) for file in (mutate.ROOT / "finetune").glob("*.py")}
    assert recipes <= files
    models = {Path(file).parts[2] for file in files if file.startswith("finetune/models/")}
    assert models == {folder.name for folder in (mutate.ROOT / "finetune/models").glob("[a-z]*")}
    assert len(mutate.MUTATIONS) >= 60 and any(file.startswith("data/") for file in files)
