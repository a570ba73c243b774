"""Blocks on pages say how they are run; every public name has its place in the API reference."""

import ast
import difflib
import importlib
import inspect
import re
from enum import Enum
from itertools import pairwise

import pytest

from tests.pages import DOCS, PAGES, ROOT, Block, blocks_of

PACKAGE = ROOT / "ddp_zero"
QUICKSTART = DOCS / "quickstart.md"
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
API = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
IN_API = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
UNNAMED = {"self", "defaults", "norm", "coefficient", "scale"}
"""Options of the optimizer class, and the raw numbers behind properties of `StepRecord`."""
WITH_ALL = ["ddp_zero", "ddp_zero.checkpoint", "ddp_zero.deepspeed", "ddp_zero.launch", "ddp_zero.parallel"]
FOR_USERS = [f"integrations/{name}.py" for name in ("accelerate", "lightning", "transformers")]
"""Modules without ``__all__`` that users import from."""


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_each_block_of_python_says_how_it_is_run(block: Block) -> None:
    has_box = "(index.md#names)" in (ROOT / block.page).read_text()
    is_marked = block.is_fragment or re.fullmatch(r"names|example|file: .*", block.mark)
    assert has_box if block.is_typed else is_marked, f"{block.place}: see tests/pages.py"
    ast.parse(block.code)
    if block.test is not None:
        path, _, name = block.test.partition("::")
        assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / path).read_text(), re.MULTILINE), block.test


def test_blocks_are_found_with_their_marks() -> None:
    theirs, ours = blocks_of(DOCS / "guides" / "deepspeed.md")
    assert (theirs.needs, theirs.is_run, theirs.is_typed) == (["deepspeed"], False, False)
    assert ours.is_typed
    assert ours.code.startswith("from torch.utils.data")


def test_the_quickstart_shows_its_files() -> None:
    shown = re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", QUICKSTART.read_text(), re.DOTALL | re.MULTILINE)
    assert [path for path, _ in shown] == sorted(
        file.relative_to(ROOT).as_posix() for file in (ROOT / "examples" / "quickstart").glob("*.py")
    )
    codes = [(ROOT / path).read_text().split("\n\n", 1)[1] for path, _ in shown]
    assert shown[0][1] == codes[0]
    for (before, code), (path, text) in zip(pairwise(codes), shown[1:], strict=True):
        changed = [line for line in difflib.ndiff(before.splitlines(), code.splitlines()) if line[0] in "+-"]
        found = [f"{line[0]}{line[2:]}" for line in changed if line[2:]]
        assert sorted(text.splitlines()) == sorted(found), path


@pytest.mark.parametrize("module", WITH_ALL)
def test_every_public_name_is_in_the_api_reference(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert [name for name in names if f"::: {module}.{name}\n" not in API] == []


@pytest.mark.parametrize("path", FOR_USERS)
def test_every_name_of_a_module_for_users_is_in_the_api_reference(path: str) -> None:
    tree = ast.parse((PACKAGE / path).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    module = f"ddp_zero.{path.removesuffix('.py').replace('/', '.')}"
    public = {name for name in defined if not name.startswith("_")}
    assert {name for name in public if f"::: {module}.{name}\n" not in API} == set()


def undocumented(name: str) -> list[str]:
    """Of a public function, or a class and its public methods: no docstring, or arguments that it does not name."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if inspect.isclass(thing) and issubclass(thing, Exception | Enum):
        return []
    called = {name: thing}
    if inspect.isclass(thing):
        called |= {
            f"{name}.{key}": one for key, one in vars(thing).items() if inspect.isfunction(one) and key[0] != "_"
        }
    silent = [where for where, one in called.items() if not one.__doc__]
    return silent + [
        f"{where}({argument})"
        for where, one in called.items()
        for argument in set(inspect.signature(one).parameters) - UNNAMED
        if not re.search(rf"(?<!\w){argument}(?!\w)", inspect.getdoc(one) or "")
    ]


@pytest.mark.parametrize("name", [name for name in IN_API if not name.startswith("ddp_zero.integrations.")])
def test_every_public_name_and_argument_is_documented(name: str) -> None:
    assert undocumented(name) == []


def test_the_api_reference_names_nothing_that_is_gone() -> None:
    for name in IN_API:
        module, _, attribute = name.rpartition(".")
        if not module.startswith("ddp_zero.integrations."):  # which need their frameworks
            assert hasattr(importlib.import_module(module), attribute), name


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
