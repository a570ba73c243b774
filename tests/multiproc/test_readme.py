"""The README is true: example and diffs run and agree, minimal.py learns, the page of features names tests."""

import importlib
import re
from pathlib import Path

import torch

from tests import TIERS
from tests.features import NIGHTLY, NOT_RUN, STATUS, features_of, render, unshown
from tests.multiproc.cases import assert_identical
from tests.multiproc.example_scripts import run_script

ROOT = Path(__file__).parents[2]
README, MIGRATING = ROOT / "README.md", ROOT / "docs" / "guides" / "migrate.md"


def _example() -> str:
    found = re.search(r"<!-- example -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def _undo(source: str, diff: str) -> str:
    """The example as it was before one of the diffs in docs/guides/migrate.md."""
    lines = source.splitlines()
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    for line in diff.splitlines():
        if line.startswith("+"):
            place = lines.index(line[1:])
            lines[place : place + 1] = [removed.pop()] if "(" in line and removed else []
    return "\n".join([*removed, *lines])


def _final_parameters(source: str, folder: Path, name: str) -> dict[str, torch.Tensor]:
    script, result = folder / f"{name}.py", folder / f"{name}.pt"
    # torch aborts some exits where Gloo's threads outlive the group, see comm/communicator.py: leave nothing behind
    save = f"if dist.get_rank() == 1: torch.save(model.state_dict(), {str(result)!r})"
    leave = "import gc\ndel model, opt\ngc.collect()\ndist.destroy_process_group()"
    script.write_text(f"import torch.distributed.nn\n{source}\n{save}\n{leave}\n")
    ended = run_script(script)
    assert ended.code == 0, ended.errors
    return dict(torch.load(result, weights_only=True))


def test_the_example_and_what_it_replaces_give_the_same_parameters(tmp_path: Path) -> None:
    example = _example()
    assert len(example.splitlines()) <= 16
    ours = _final_parameters(example, tmp_path, "ours")
    torch.manual_seed(0)
    untrained = torch.nn.Linear(20, 3).weight
    assert not torch.equal(ours["module.weight"], untrained)
    diffs = re.findall(r"```diff\n(.*?)```", MIGRATING.read_text(), re.DOTALL)
    from_ddp, from_torchs = diffs
    as_torchs = example.replace("import shard_optimizer", "import ZeroRedundancyOptimizer").replace(
        "shard_optimizer(model, AdamW, stage=2", "ZeroRedundancyOptimizer(model.parameters(), AdamW"
    )
    for position, (after, diff) in enumerate(((example, from_ddp), (as_torchs, from_torchs))):
        before = _undo(after, diff)
        assert "ddp_zero" not in before
        assert sum(line[0] in "+-" for line in diff.splitlines()) <= 3
        assert_identical(_final_parameters(before, tmp_path, f"before{position}"), ours, "parameters")


def _run_minimal(folder: Path) -> dict[int, float]:
    """Losses by epoch, as rank 0 prints them."""
    ended = run_script(ROOT / "examples" / "minimal.py", folder=folder)
    assert ended.code == 0, ended.errors
    found = re.findall(r"^epoch (\d+) loss (\S+) stepped", ended.output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_the_minimal_example_learns_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    first, second = _run_minimal(tmp_path), _run_minimal(tmp_path)
    assert list(first) == [1, 2, 3, 4, 5]
    assert list(second) == [6, 7, 8, 9, 10]
    assert first[5] < first[1] / 4
    assert second[6] < first[1] / 4


def test_the_page_of_what_works_names_tests_that_exist() -> None:
    page = STATUS.read_text()
    table = page.partition("\n## ")[0]
    assert len(features_of(page)) == table.count("\n| ") - len(["its heading", "the line below"])
    for feature in features_of(page):
        path, name = feature.test.split("::")
        assert re.search(rf"^(def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), feature.test


def _is_nightly(test: str) -> bool:
    path, name = test.split("::")
    if TIERS.get(path.split("/")[1]) == "nightly":  # not imported: it may need what is not installed
        return True
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    given = [getattr(one, "pytestmark", []) for one in (module, getattr(module, name))]
    return any(mark.name == "nightly" for some in given for mark in (some if isinstance(some, list) else [some]))


def test_what_the_page_claims_is_shown_by_the_readmes_command_or_said_to_be_nightly() -> None:
    for feature in features_of(STATUS.read_text()):
        assert (feature.works == NIGHTLY) == _is_nightly(feature.test), feature.what
        assert feature.claim in (feature.works, NOT_RUN), feature.what


def test_a_claim_needs_a_test_that_passes() -> None:
    features = features_of(STATUS.read_text())
    test = features[0].test
    shown = [other.what for other in features if other.test == test]
    page = render({test: "passed"}, STATUS.read_text())
    assert features_of(page)[0].claim == features[0].works
    assert unshown(page, {f"{test}[a]": "passed", f"{test}[b]": "passed", "another": "failed"}) == []
    for outcome in ("failed", "skipped"):
        assert unshown(page, {f"{test}[a]": "passed", f"{test}[b]": outcome}) == shown
        without = render({f"{test}[a]": outcome}, page)
        assert features_of(without)[0].claim == "not run"
        assert render({test: "passed"}, without) == page
