"""Every message for users ends with one code, and ``docs/troubleshooting.md`` explains exactly these codes."""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ddp_zero.__main__ import main
from ddp_zero.error_codes import coded, truncated

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ddp_zero"
PAGE = REPOSITORY / "docs" / "troubleshooting.md"

CODE = re.compile(r"\[(ZERO-\d{3})\]")
ANY = "\0"
"""Stands for a value in a message whose text is known only when it is raised."""

PROTOCOL = {"AttributeError", "KeyError", "IndexError", "StopIteration", "EOFError", "ArgumentTypeError"}
"""Exceptions that Python, argparse or a caller in this library expects and turns into a message of its own."""

INTERNAL = {
    **dict.fromkeys(
        (
            "core/comm/exchange.py:wait",
            "core/comm/exchange.py:_keep_unfinished",
            "core/comm/reduction.py:wait",
            "core/comm/ring.py:_run_jobs",
        ),
        "the text of an earlier error, without the frames that it went through",
    ),
    "core/comm/exchange.py:await_background_job": "an error of a wait; callers name the rank in theirs",
    **dict.fromkeys(
        [f"core/state/frames.py:{name}" for name in ("receive_frame", "decode_frame")]
        + ["snapshots/connections.py:call"]
        + [f"core/comm/requests.py:{name}" for name in ("_as_os_errors", "await_answer", "connection")]
        + ["core/comm/serving.py:start_serving"],
        "an error of a connection, which `gather` turns into a message that names the rank",
    ),
    "snapshots/copies.py:_check_not_refused": "an answer of a peer, which goes into a warning, or a note of a load",
    **dict.fromkeys(
        [f"checkpoint/foreign/torch_file.py:{name}" for name in ("_call", "_build", "_push_name", "_top")]
        + [f"checkpoint/foreign/torch_file.py:{name}" for name in ("step", "_pop")],
        "a fault of a pickle, which the function that reads it puts into its own message",
    ),
    **dict.fromkeys(
        [f"checkpoint/rows.py:{name}" for name in ("of", "_of_tree", "_one_value")]
        + [f"checkpoint/tensor_file.py:{name}" for name in ("_span", "check_spec")]
        + [f"values/tree.py:{name}" for name in ("specs_in", "_dtype")]
        + ["tools/files.py:check_types"],
        "a fault of a part or a frame, which the function that reads it puts into its own message",
    ),
    **dict.fromkeys(
        [f"tools/postmortem/records.py:{name}" for name in ("_text", "_check")],
        "a fault of a record, which `read` puts into its own message",
    ),
    **dict.fromkeys(
        ("deepspeed/optimizers.py:_update", "deepspeed/schedules.py:lr", "core/comm/recorder.py:open_range"),
        "an abstract method",
    ),
    "checkpoint/tensor_file.py:_write": "the error of the system itself, with its number",
    "tools/files.py:written": "the error of the system itself, with its number and the file",
    "tools/files.py:by_rank": "a remedy that its callers pass, with its code",
    "launch/guard.py:main": "an error that the same function prints",
    "parallel/alike.py:difference": "a fact that its caller has established",
    "core/backward/bucket_gradients.py:whole": "an abstract method",
    "core/comm/tracing.py:warn": "the message of its caller",
    "core/comm/parameter_sync.py:_complete_all": "the error of a sync or a step, where nothing can be raised",
    "core/backward/hook.py:_report_unconfirmed": "the message of `check_confirmed`, where nothing can be raised",
    "core/backward/hook.py:_finish_backward": "a message of `reason_to_refuse`, whose returns are followed elsewhere",
    "core/engine/shardable.py:check_unknown": "the kept message of an earlier `check_shardable`",
}
"""Functions whose messages are built elsewhere, or seen by no user by themselves, and the reason."""

BUILDERS = {"reason_to_refuse", "difference_in_options", "_trains_elsewhere"}
"""Methods that return a message, or None, for a caller in a different file to raise."""


@dataclass(frozen=True)
class Message:
    """A message, with `ANY` for its values."""

    place: str
    text: str


@cache
def sources() -> dict[str, ast.Module]:
    found = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in found}


@cache
def functions() -> dict[str, list[tuple[ast.Module, ast.FunctionDef]]]:
    """The library's functions by name, each with its file."""
    found: dict[str, list[tuple[ast.Module, ast.FunctionDef]]] = {}
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append((tree, node))
    return found


def is_exception(name: str) -> bool:
    return name.endswith("Error") and name not in PROTOCOL


def is_log(function: ast.expr) -> bool:
    """True for a line of the log that a user sees by default."""
    levels = {"warning", "error", "exception", "critical"}
    return isinstance(function, ast.Attribute) and function.attr in levels and name_of(function.value) == "logger"


def name_of(node: ast.expr) -> str:
    """``f`` for ``f`` and for ``a.b.f``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Texts:
    """The texts that an expression may have; names are looked up in the function and the file around it."""

    def __init__(self, *scopes: ast.AST, seen: frozenset[str] = frozenset()) -> None:
        self._scopes = scopes
        self._seen = seen  # names and functions that are being followed

    def of(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=None):
                return []
            case ast.JoinedStr(values=parts):
                return _products([self.of(part) for part in parts])
            case ast.FormattedValue(value=ast.Name() | ast.Call(args=[], keywords=[]) as value):
                return self.of(value)
            case ast.BinOp(op=ast.Add()):
                return _products([self.of(node.left), self.of(node.right)])
            case ast.IfExp():
                return [*self.of(node.body), *self.of(node.orelse)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.of(value)]
            case ast.Name(id=name):
                return self._assigned(name)
            case ast.Call():
                return self._called(node)
        return [ANY]

    def _assigned(self, name: str) -> list[str]:
        """The texts of a name, from the innermost scope that assigns it."""
        for scope in self._scopes:
            values = values_in(scope).get(name, [])
            if values and name not in self._seen:
                deeper = Texts(*self._scopes, seen=self._seen | {name})
                return [text for value in values for text in deeper.of(value)]
        return [ANY]

    def _called(self, call: ast.Call) -> list[str]:
        name = name_of(call.func)
        if name == "coded":
            quoting, code = call.args
            return [f"{text} {last}" for text in self.of(quoting) for last in self.of(code)]
        if name == "join" and isinstance(call.args[0], ast.List):
            first, *_, last = call.args[0].elts
            return _products([self.of(first), [ANY], self.of(last)])
        if name in ("format", "strip") and isinstance(call.func, ast.Attribute):
            return [re.sub(r"\{.*?\}", ANY, text) for text in self.of(call.func.value)]
        everywhere = functions().get(name, [])
        here = [one for one in everywhere if one[0] in self._scopes]
        is_own = isinstance(call.func, ast.Name) or ast.unparse(call.func) == f"self.{name}"
        known = here if is_own and here else everywhere
        unseen = [(tree, function) for tree, function in known if f"{id(function)}" not in self._seen]
        if known and not unseen:
            return []
        found = [
            text
            for tree, function in unseen
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
            for text in Texts(function, tree, seen=self._seen | {f"{id(function)}"}).of(node.value)
        ]
        return found or [ANY]


@cache
def values_in(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """What statements and expressions assign to each name."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                found.setdefault(name, []).append(value)
    return found


def _products(parts: list[list[str]]) -> list[str]:
    texts = [""]
    for choices in parts:
        texts = [text + choice for text in texts for choice in dict.fromkeys(choices)][:50]
    return texts


def calls(node: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.Call, ast.AST | None]]:
    if isinstance(node, ast.Call):
        yield node, function
    inside = node if isinstance(node, ast.FunctionDef) else function
    for child in ast.iter_child_nodes(node):
        yield from calls(child, inside)


def messages_in(path: str, tree: ast.Module) -> list[Message]:
    """The messages that a file builds for exceptions, warnings and the log, but for those in `INTERNAL` functions."""
    found = []
    for call, function in calls(tree):
        name, where = name_of(call.func), getattr(function, "name", "")
        if (
            call.args
            and (is_exception(name) or name == "warn" or is_log(call.func))
            and f"{path}:{where}" not in INTERNAL
        ):
            texts = Texts(*filter(None, (function, tree))).of(call.args[0])
            if is_log(call.func):
                texts = [re.sub(r"%[srd]", ANY, text) for text in texts]
            found += [Message(f"{path}:{call.lineno}", text) for text in texts]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in BUILDERS:
            values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            texts = [text for value in values for text in Texts(node, tree).of(value)]
            found += [Message(f"{path}:{node.lineno}", text) for text in texts if text != ANY]
    return found


@cache
def messages() -> list[Message]:
    return [one for path, tree in sources().items() for one in messages_in(path, tree)]


@cache
def sections() -> dict[str, str]:
    """The sections of the page by code."""
    found = re.findall(r"^### ZERO-(\d{3})\n((?:(?!##).*\n?)*)", PAGE.read_text(), re.M)
    assert len(found) == len(dict(found)) == PAGE.read_text().count("\n### "), "every code has one section"
    return {f"ZERO-{number}": text for number, text in found}


def wrong_endings(found: list[Message]) -> list[str]:
    """Messages that do not end with exactly one code."""
    return [
        f"{one.place}: {one.text.replace(ANY, '…')}"
        for one in found
        if len(CODE.findall(one.text)) != 1 or not re.search(rf"[.?!)\w'\"{ANY}] {CODE.pattern}$", one.text)
    ]


def test_every_message_ends_with_one_code() -> None:
    assert len(messages()) > 100
    assert wrong_endings(messages()) == []


def test_a_message_without_a_code_or_with_two_is_found() -> None:
    source = """
def _why():
    return f"It is {late}. [ZERO-301]" if late else f"It is {early}."

def first():
    raise ValueError("Expected one, got two.")

def second(error):
    message = f"Expected peace, got {error}. [ZERO-101]"
    raise RuntimeError(f"{message} [ZERO-102]")

def third():
    raise RuntimeError(f"{self.reason}")

def fourth(error):
    raise RuntimeError(coded(f"Expected peace, got {error}", "[ZERO-505]")) from error

def fifth(error):
    logger.warning("Expected peace, got %s.", error)
    logger.warning("Expected peace, got %s. [ZERO-101]", error)
    logger.info("peace")
"""
    found = messages_in("made/up.py", ast.parse(source))
    assert [one.split(": ")[0] for one in wrong_endings(found)] == [f"made/up.py:{line}" for line in (6, 10, 13, 19)]


def test_exclusions_name_functions_that_exist() -> None:
    known = {f"{path}:{getattr(node, 'name', '')}" for path, tree in sources().items() for node in ast.walk(tree)}
    assert INTERNAL.keys() - known == set()


def groups() -> dict[str, list[str]]:
    """The codes of the page by group."""
    parts = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE.read_text(), re.M)
    return {title: re.findall(r"^### (ZERO-\d{3})$", part, re.M) for title, part in parts}


def test_groups_are_short_and_listed_at_the_top() -> None:
    before, _, _ = PAGE.read_text().partition("\n## ")
    assert re.findall(r"^- \[(.+)\]\(#", before, re.M) == list(groups())
    assert all(0 < len(codes) < 30 and codes == sorted(codes) for codes in groups().values())


def test_the_page_has_a_section_for_every_code_and_no_more() -> None:
    used = {code for one in messages() for code in CODE.findall(one.text)}
    assert used == sections().keys()


@pytest.mark.parametrize("code", sorted(sections()))
def test_a_section_says_what_happened_and_then_what_to_do(code: str) -> None:
    text = re.sub(r"<!--.*", "", sections()[code], flags=re.S)
    happened, what_to_do = text.strip().split("\n\n")
    assert len(happened.split()) <= 40
    assert len(what_to_do.split()) < 60


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().split()) <= 5000


def test_coded_ends_with_the_only_quoted_code_or_else_with_its_own() -> None:
    assert coded("Expected all, got a failure", "[ZERO-505]") == "Expected all, got a failure [ZERO-505]"
    assert coded("got rank 1: a; no. [ZERO-101]; see.", "[ZERO-505]") == "got rank 1: a; no.; see. [ZERO-101]"
    both = coded("got 0: a [ZERO-101]; 1: b [ZERO-102]", "[ZERO-505]")
    assert both == "got 0: a [ZERO-101]; 1: b [ZERO-102] [ZERO-505]"


@pytest.mark.parametrize("asked", ["ZERO-203", "zero-203", "203", "[ZERO-203]"])
def test_explain_prints_the_section(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", asked]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ZERO-203: The optimizer's hook is missing from the DDP model.\n\nCall `opt.attach(ddp)`")
    assert not any(part in text for part in ("ZERO-205", "##", "```", "<!--"))


def test_explain_knows_every_code_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert [code for code in sections() if main(["explain", code]) != 0] == []
    assert main(["explain", "ZERO-000"]) == 1
    assert "there is no code ZERO-000" in capsys.readouterr().err


def test_the_wheel_is_told_to_contain_the_page_of_codes() -> None:
    settings = (REPOSITORY / "pyproject.toml").read_text()
    assert '"docs/troubleshooting.md" = "ddp_zero/troubleshooting.md"' in settings


def test_truncated_cuts_the_text_and_keeps_the_code() -> None:
    assert truncated("short. [ZERO-505]", 40) == b"short. [ZERO-505]"
    assert truncated("x" * 100 + ". [ZERO-505]", 40) == b"x" * 29 + b" [ZERO-505]"
    assert truncated("x" * 100, 40) == b"x" * 40


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("nothing", "there is no command 'nothing'.*ZERO-905"),
        ("estimate nomod:build", "can be imported here, got 'nomod:build'.*ZERO-905"),
        ("estimate --ranks many a:b", "invalid int value: 'many'.*ZERO-905"),
        ("launch --hostfile /nohosts x.py", "'/nohosts'.*ZERO-901"),
        ("launch --launcher pdsh x.py", "got 'pdsh', of deepspeed: say --launcher ssh.*ZERO-901"),
        ("launch --launcher openmpi x.py", "got 'openmpi', of deepspeed: say --launcher ssh, slurm.*--no-ssh.*-901"),
        ("config none.json", "'none.json': no such file.*ZERO-701"),
        ("config keys zero_stage", "got 'zero_stage'.*ZERO-703"),
        ("checkpoint info /nowhere", "at /nowhere.*ZERO-613"),
        ("postmortem /nowhere", "/nowhere.*ZERO-907"),
        ("explain 000", "no code ZERO-000.*ZERO-905"),
    ],
)
def test_errors_of_commands_have_codes(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # of the parser
        assert main(command.split()) != 0
    assert re.search(said, capsys.readouterr().err)


def test_the_command_explains_keys_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("config keys zero_optimization.stage", "config stage"):
        assert main(command.split()) == 0
        assert "zero_optimization.stage  honoured  0: plain DDP" in capsys.readouterr().out
