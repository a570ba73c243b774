"""Pages name files, links, tests and public names that exist; every public name has its place in the API reference."""

import ast
import importlib
import inspect
import re
from enum import Enum
from pathlib import Path

import pytest

from tests.pages import DOCS, OUTSIDE, PAGES, ROOT, SITE, Block, anchors_of, blocks_of, links_of, prose_of

PACKAGE = ROOT / "ddp_zero"
ROOMS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"))
MANUAL = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
API = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
UNNAMED = {"self", "defaults", "norm", "coefficient", "scale"}
"""Options of the optimizer class, and the raw numbers behind properties of `StepRecord`."""
WITH_ALL = ["ddp_zero", "ddp_zero.checkpoint", "ddp_zero.deepspeed", "ddp_zero.launch", "ddp_zero.parallel"]
PARTS: dict[str, set[str]] = {
    "integrations/accelerate.py": set(),
    "integrations/lightning.py": set(),
    "integrations/transformers.py": set(),
    "tools/monitor.py": {"Passes", "breakdown", "means", "memory_line", "sink_for"},  # parts of Monitor
}
"""Modules without ``__all__`` that users import from, and their names that are not for users."""


def files_named(text: str) -> set[str]:
    """Paths such as ``core/comm/exchange`` and modules such as ``ddp_zero.core.comm``, as paths in the package."""
    paths = re.findall(rf"(?<![\w/.-])(?:ddp_zero/)?((?:{ROOMS})/[a-z_0-9/]+)", text)
    modules = re.findall(r"\bddp_zero\.((?:core|tools)(?:\.[a-z_0-9]+)+)", text)
    return {path.rstrip("/") for path in paths} | {module.replace(".", "/") for module in modules}


@pytest.mark.parametrize("page", [*PAGES, *MANUAL], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_files_that_exist(page: Path) -> None:
    named = files_named(re.sub(r"\]\([^)]*\)", "", page.read_text()))
    assert {one for one in named if not (PACKAGE / one).exists() and not (PACKAGE / f"{one}.py").exists()} == set()


def test_paths_and_modules_are_found() -> None:
    text = "`core/comm/ring.py`, `ddp_zero/core/plan/`, `ddp_zero.tools.monitor`, tests/unit/core/comm/test_x.py"
    assert files_named(text) == {"core/comm/ring", "core/plan", "tools/monitor"}


@pytest.mark.parametrize("page", [*OUTSIDE, *SITE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    lost = []
    for link, anchor in links_of(page):
        target = (page.parent / link).resolve() if link else page
        is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors_of(target))
        if not is_there:
            lost.append(f"{link}#{anchor}" if anchor else link)
    assert lost == []


def test_the_navigation_has_every_page_of_the_site() -> None:
    in_navigation = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(in_navigation) == sorted(page.relative_to(DOCS).as_posix() for page in SITE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_each_block_of_python_says_how_it_is_run(block: Block) -> None:
    assert block.is_fragment or block.mark in ("quickstart", "example"), f"{block.place}: see tests/pages.py"
    ast.parse(block.code)
    if block.test is not None:
        path, _, name = block.test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), block.test


def test_blocks_are_found_with_their_marks() -> None:
    page = ROOT / "docs" / "guides" / "clip.md"
    plain, built, used, *_ = blocks_of(page)
    assert (plain.needs, built.needs, used.needs) == (["model", "plain_opt", "loss"], ["ddp"], ["clipping_opt", "loss"])
    assert plain.is_run
    assert plain.code.startswith("loss.backward()\n")


@pytest.mark.parametrize("module", WITH_ALL)
def test_every_public_name_is_in_the_api_reference(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert [name for name in names if f"::: {module}.{name}\n" not in API] == []


@pytest.mark.parametrize("path", PARTS)
def test_every_name_of_a_module_for_users_is_in_the_api_reference(path: str) -> None:
    tree = ast.parse((PACKAGE / path).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    module = f"ddp_zero.{path.removesuffix('.py').replace('/', '.')}"
    public = {name for name in defined if not name.startswith("_")} - PARTS[path]
    assert {name for name in public if f"::: {module}.{name}\n" not in API} == set()


def undocumented(name: str) -> list[str]:
    """The arguments of a public function, or of a class and its public methods, that the docstring does not name."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if inspect.isclass(thing) and issubclass(thing, Exception | Enum):
        return []
    called = {name: thing}
    if inspect.isclass(thing):
        called |= {
            f"{name}.{key}": one for key, one in vars(thing).items() if inspect.isfunction(one) and key[0] != "_"
        }
    return [
        f"{where}({argument})"
        for where, one in called.items()
        for argument in set(inspect.signature(one).parameters) - UNNAMED
        if not re.search(rf"(?<!\w){argument}(?!\w)", inspect.getdoc(one) or "")
    ]


@pytest.mark.parametrize("module", WITH_ALL)
def test_every_argument_of_a_public_name_is_documented(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert [one for name in names for one in undocumented(f"{module}.{name}")] == []


def test_the_api_reference_names_nothing_that_is_gone() -> None:
    for name in re.findall(r"^::: (\S+)$", API, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        if not module.startswith("ddp_zero.integrations."):  # which need their frameworks
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_english_of_the_pages_is_that_of_the_field() -> None:
    prose = "\n".join(prose_of(page) for page in [ROOT / "README.md", *SITE])
    words = len(re.findall(r"[A-Za-z']+", prose))
    assert len(re.findall(r"\bwhat\b", prose, re.IGNORECASE)) / words <= 8 / 10_000
    assert len(re.findall(r"\b(?:that|those) of\b", prose, re.IGNORECASE)) / words <= 4 / 10_000


def test_every_table_of_performance_has_a_date_and_a_commit() -> None:
    sections = re.split(r"^##+ ", (DOCS / "performance.md").read_text(), flags=re.MULTILINE)
    for section in sections:
        before, table, _ = section.partition("\n| --- |")
        assert not table or re.search(
            r"20\d\d-\d\d-\d\d.*\bcommits? [0-9a-f]{7}|Measured between", before, re.DOTALL
        ), section


def test_the_design_fits_two_thousand_words() -> None:
    assert len((DOCS / "design.md").read_text().split()) <= 2000


def test_the_manifest_for_kubernetes_is_a_train_job() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (DOCS / "guides" / "nodes.md").read_text(), re.DOTALL | re.MULTILINE)
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    fields = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert set(trainer) <= fields
    assert trainer["command"][0] == "torchrun"
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert all(set(variable) == {"name", "value"} for variable in trainer["env"])
