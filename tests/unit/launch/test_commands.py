"""Command lines: from options to what runs on each host."""

import shlex
from pathlib import PurePosixPath

import pytest

from ddp_zero.launch.guard import MARK
from ddp_zero.launch.job import Host, HostCommand, Meeting, check_command, commands, torchrun_command
from ddp_zero.launch.launcher import Answer, Lines, read_answer
from tests.unit.launch.options import options

GUARD, FOLDER = PurePosixPath("/lib/guard.py"), PurePosixPath("/my runs")
TWO = (Host("a", (0, 1)), Host("b", (1, 3)))
MEETING = Meeting("10.0.0.1", 1234, "job", {"a": "10.0.0.1", "b": "10.0.0.2"})


def build(launcher: str, *arguments: str) -> tuple[HostCommand, ...]:
    return commands(launcher, TWO, MEETING, options(*arguments), GUARD, FOLDER, {"X": "a b"})


def test_options_are_parsed_with_their_defaults_and_the_script() -> None:
    script = ("train.py", "--lr", "it's %n")
    nothing = {"hostfile": None, "include": "", "exclude": "", "num_nodes": None, "nproc": None, "launcher": None}
    lists = {"env_files": [], "ssh_args": (), "script": script}
    numbers = {"master_port": None, "max_restarts": 0, "lost_after": 120.0, "grace": 15.0, "dry_run": False}
    nothing |= {"node_rank": None, "rank_logs": None}
    expected = {**nothing, **lists, **numbers, "master_addr": None, "python": "/bin/py"}
    assert vars(options()) | expected == vars(options())
    found = options(
        "--num_gpus=2", "-m", "--ssh-args=-p 22 -o 'A b'", "--env-file=x", "--env-file=y", "--max-restarts=3"
    )
    assert (found.nproc, found.ssh_args, found.env_files) == (2, ("-p", "22", "-o", "A b"), ["x", "y"])
    assert (found.script[0], found.max_restarts) == ("--module", 3)


@pytest.mark.parametrize(
    "wrong",
    [
        "--launcher=rsh",
        "--launcher=local",
        "--launcher=pdsh",
        "--master-port=0",
        "--max-restarts=-1",
        "--grace=0",
        "--lost-after=nan",
        "--ssh-args='",
        "--nope",
    ],
)
def test_wrong_options_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options(wrong)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options("--module", "--no-python")


def test_torchrun_keeps_the_order_of_hosts_unless_it_may_restart() -> None:
    fixed = torchrun_command(TWO[1], 1, 2, MEETING, options())
    assert fixed == [
        *("/bin/py", "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2", "--node-rank=1"),
        *("--master-addr=10.0.0.1", "--master-port=1234", "train.py", "--lr", "it's %n"),
    ]
    elastic = torchrun_command(TWO[1], 1, 2, MEETING, options("--max-restarts=3"))
    assert elastic[4:10] == [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=10.0.0.1:1234"),
        *("--rdzv-conf=is_host=0", "--local-addr=10.0.0.2"),
    ]
    assert "--rdzv-conf=is_host=1" in torchrun_command(TWO[0], 0, 2, MEETING, options("--max-restarts=3"))
    alone = torchrun_command(TWO[0], 0, 1, Meeting(None, None, "job"), options("--module", "--max-restarts=1"))
    assert alone[3:7] == ["--nproc-per-node=2", "--standalone", "--max-restarts=1", "--module"]


def test_ssh_gets_one_argument_that_a_shell_takes_apart_again() -> None:
    first, second = build("ssh", "--ssh-args=-p 22")
    assert first.argv[-4:-1] == ("-p", "22", "a")
    remote = shlex.split(second.argv[-1])
    assert remote[:4] == ["/bin/py", "/lib/guard.py", "--chdir=/my runs", "--grace=15"]
    assert remote[4:6] == ["--lost-after=120", "--script=train.py"]
    assert remote[6:9] == ["--env=X=a b", "--env=CUDA_VISIBLE_DEVICES=1,3", "--"]
    assert remote[-3:] == ["train.py", "--lr", "it's %n"]
    assert not any("CUDA" in argument for argument in shlex.split(first.argv[-1]))


@pytest.mark.parametrize(
    ("launcher", "front"), [("local", ()), ("slurm", ("srun", "--nodes=1", "--ntasks=1", "--nodelist=b"))]
)
def test_local_commands_and_srun_get_the_arguments_unquoted(launcher: str, front: tuple[str, ...]) -> None:
    _, second = build(launcher)
    assert second.argv[: len(front)] == front
    assert second.argv[-1] == "it's %n"
    assert "/lib/guard.py" in second.argv
    assert second.has_prefix == (launcher != "local")


def test_a_check_names_the_script_unless_it_is_a_module() -> None:
    remote = shlex.split(check_command("a", "b", options(), GUARD, FOLDER).argv[-1])
    assert remote == ["/bin/py", "/lib/guard.py", "--check", "--chdir=/my runs", "--script=train.py", "--toward=b"]
    assert "--script" not in check_command("a", "", options("-m"), GUARD, FOLDER).argv[-1]


def test_an_answer_is_read_after_lines_of_a_greeting() -> None:
    answer = f'Welcome!\n{MARK}{{"addresses": ["10.0.0.1"], "port": 77}}\n'
    assert read_answer(answer) == Answer(("10.0.0.1",), 77)
    for wrong in ("", "Welcome!", f"{MARK}", f"{MARK}[]", f'{MARK}{{"addresses": [], "port": "x"}}', f"{MARK}{{}}"):
        assert read_answer(wrong) is None


def test_lines_get_a_prefix_however_they_are_cut() -> None:
    lines = Lines(b"a: ")
    pieces = [b"one", b" line\ntwo\r", b"\nbar 1%\rbar", b" 2%\r", b"", b"rest", b""]
    assert b"".join(map(lines.feed, pieces)) == b"a: one line\na: two\ra: \na: bar 1%\ra: bar 2%\ra: rest\n"
    long = b"x" * (1 << 17)
    assert Lines(b"a: ").feed(long) == b"a: " + long + b"\n"
