"""Which hosts, how they are reached and where they meet; and that ``--dry-run`` starts nothing."""

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddp_zero.__main__ import main
from ddp_zero.launch import launcher
from ddp_zero.launch.guard import MARK
from ddp_zero.launch.job import WAYS_HERE, Host, HostCommand
from ddp_zero.launch.launcher import Answer, ask, hosts_of, launcher_of, meeting_of, variables_of
from tests import HANG
from tests.unit.launch.options import options

ALLOCATION = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
TWO = (Host("n1", (0, 1)), Host("n2", (0, 1)))


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    return f"--hostfile={tmp_path / 'hosts'}"


def test_hosts_are_of_the_file_the_allocation_or_this_machine(hostfile: str) -> None:
    assert hosts_of(options(hostfile, "--exclude=n1:0"), ALLOCATION) == (Host("n1", (1,)), TWO[1])
    assert hosts_of(options("--num-nodes=1"), ALLOCATION) == TWO[:1]
    assert hosts_of(options("--nproc=3"), {}) == (Host("localhost", (0, 1, 2)),)
    with pytest.raises(ValueError, match="--launcher ssh needs --hostfile"):
        hosts_of(options("--launcher=ssh"), ALLOCATION)
    with pytest.raises(OSError, match="nowhere"):
        hosts_of(options("--hostfile=nowhere"), {})


def test_this_host_needs_no_launcher_a_hostfile_ssh_and_an_allocation_slurm(hostfile: str) -> None:
    here = (Host(socket.gethostname(), (0,)),)
    assert launcher_of(options(), (Host("localhost", (0,)),), {}) == "local"
    assert launcher_of(options(hostfile), here, ALLOCATION) == "local"
    assert launcher_of(options(), TWO, ALLOCATION) == "slurm"
    assert launcher_of(options(hostfile), TWO, ALLOCATION) == "ssh", "the file is asked for, the allocation is there"
    assert launcher_of(options(hostfile), TWO[:1], {}) == "ssh"
    assert launcher_of(options("--launcher=ssh"), here, {}) == "ssh", "as asked for"


def test_options_of_deepspeeds_launcher_are_taken_or_refused_with_the_replacement(
    hostfile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = hostfile.partition("=")[2]
    short = options("-H", file, "-i", "n1:1,1", "--num_accelerators=1", "--no_local_rank")
    assert hosts_of(short, {}) == (Host("n1", (1,)),)
    assert hosts_of(options("-H", file, "-e", "n1"), {}) == TWO[1:]
    page = (Path(__file__).parents[3] / "docs" / "launch.md").read_text()
    for names, way in WAYS_HERE.items():
        for name in names.split():
            with pytest.raises(SystemExit) as ended:
                options(name)
            assert ended.value.code == 2
            assert f"is an option of deepspeed's launcher; here {way}" in capsys.readouterr().err
        assert f"`{names.split()[0]}`" in page, names
    for wrong in (["--no_ssh"], ["--node_rank=0"]):
        with pytest.raises(ValueError, match="both --no-ssh and --node-rank, or neither"):
            options(*wrong)


def test_each_host_can_be_started_by_hand(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        logs = "--enable_each_rank_log=logs"
        arguments = [hostfile, "--no_ssh", f"--node_rank={rank}", "--master_port=5", logs, "--dry-run", "train.py"]
        assert main(["launch", *arguments]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        for part in ("--nnodes=2", f"--node-rank={rank}", "--master-addr=n1", "--master-port=5"):
            assert part in line
        assert "--log-dir=logs --redirects=3 train.py" in line
        assert "ssh" not in line.partition(":")[2]
    for wrong, said in ((["--node-rank=2"], "below 2, got 2"), (["--node-rank=1", "--launcher=ssh"], "got both: ssh")):
        assert main(["launch", hostfile, "--no-ssh", *wrong, "train.py"]) == 2
        assert said in capsys.readouterr().err


def test_meeting_of_has_the_address_port_and_job_of_each_launcher() -> None:
    answers = {"n1": Answer(("10.0.0.1", "10.1.0.1"), 77), "n2": Answer((), 78)}
    found = meeting_of(options(), "ssh", TWO, answers, {})
    assert (found.address, found.port, found.own) == ("10.0.0.1", 77, {"n1": "10.0.0.1"})
    given = meeting_of(options("--master-addr=x", "--master-port=5"), "ssh", TWO, answers, {})
    assert (given.address, given.port) == ("x", 5)
    asked = meeting_of(options(), "ssh", TWO, {}, {})  # for --dry-run
    assert (asked.address, asked.port) == ("n1", launcher.DEFAULT_PORT)
    slurm = meeting_of(options(), "slurm", TWO, {}, ALLOCATION)
    assert (slurm.address, slurm.port, slurm.own) == ("n1", 20005, {"n1": "n1", "n2": "n2"})
    assert meeting_of(options(), "ssh", TWO[:1], answers, {}).address is None
    assert found.job != given.job
    with pytest.raises(RuntimeError, match=r"n1 has no address .* Say --master-addr"):
        meeting_of(options(), "ssh", TWO, {"n1": Answer((), 1)}, {})


def test_variables_of_files_override_those_that_other_hosts_get(tmp_path: Path) -> None:
    here = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    (tmp_path / "file").write_text("NCCL_DEBUG=WARN\nOMP_NUM_THREADS\nPATH=/a:$PATH\n")  # values as they stand
    file = f"--env-file={tmp_path / 'file'}"
    assert variables_of(options(), "local", here) == {}
    assert variables_of(options(), "ssh", here) == here
    expected = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "PATH": "/a:$PATH"}
    assert variables_of(options(file), "local", here) == expected


def test_a_dry_run_prints_a_command_for_each_host_and_asks_none(
    hostfile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run starts nothing")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert main(["launch", hostfile, "--dry-run", "--include=n2:1", "train.py"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("n2: ssh ")
    assert "CUDA_VISIBLE_DEVICES=1" in line
    assert line.endswith("torch.distributed.run --nproc-per-node=1 --standalone train.py'")
    assert main(["launch", "--hostfile=nowhere", "--dry-run", "train.py"]) == 2
    assert "ddp-zero launch: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "told"), [(["none.py"], "no script none.py in"), (["-m", "none.x"], "no module none.x in")]
)
def test_a_script_that_is_not_there_is_told_before_torchrun_starts(
    script: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--nproc=2", *script]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("ddp-zero launch: Expected the folder and the script of the job on ")
    assert told in first
    assert second == "ddp-zero launch: localhost ended with exit code 2"


def test_every_host_that_is_not_ready_is_named() -> None:
    says = {
        "good": f"print('{MARK}' + '{{\"addresses\": [], \"port\": 1}}')",
        "fails": "import sys; sys.exit('no python here')",
        "silent": "pass",
        "slow": "import time; time.sleep(600)",
    }

    def command(host: str) -> HostCommand:
        return HostCommand(host, (sys.executable, "-c", says[host]) if host in says else ("no-such-program",))

    assert ask(["good"], command, HANG) == {"good": Answer((), 1)}
    with pytest.raises(
        RuntimeError, match=r"Expected all 1 hosts to be ready, got from\n  slow: no answer within 0\.2 s"
    ):
        ask(["slow"], command, 0.2)
    with pytest.raises(RuntimeError, match="Expected all 4 hosts to be ready, got from\n  fails: ") as caught:
        ask(["good", "fails", "silent", "gone"], command, HANG)
    message = str(caught.value)
    for line in ("exit code 1, no python here", "silent: exit code 0, no output"):
        assert line in message
    assert "gone: no-such-program cannot be started: No such file" in message
    assert "good" not in message


def commands_of(*programs: str) -> list[HostCommand]:
    return [HostCommand(f"h{number}", (sys.executable, "-c", program)) for number, program in enumerate(programs)]


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        (["pass", "pass"], 0, []),
        (["import sys; sys.exit(7)", "import sys; sys.stdin.read()"], 7, ["h0 ended with exit code 7; stopping h1"]),
        (["import os; os.kill(os.getpid(), 9)"], 137, ["h0 ended with exit code 137"]),
    ],
)
def test_the_first_failure_is_the_exit_code_and_ends_the_others(
    programs: Sequence[str], code: int, said: Sequence[str]
) -> None:
    lines: list[str] = []
    assert launcher.run(commands_of(*programs), HANG, HANG, lines.append) == code
    assert lines == said


def test_a_job_under_nohup_ignores_sighup_and_ends_at_sigterm() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        program = (
            "import os, signal; os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getppid(), signal.SIGTERM); input()"
        )
        lines: list[str] = []
        assert launcher.run(commands_of(program), HANG, HANG, lines.append) == 143
        assert lines == ["got SIGTERM; stopping h0"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_that_cannot_be_started_ends_those_that_were() -> None:
    lines: list[str] = []
    commands = [*commands_of("import sys; sys.stdin.read()"), HostCommand("h1", ("no-such-program",))]
    assert launcher.run(commands, HANG, HANG, lines.append) == 127
    assert "Expected no-such-program to be started for h1" in lines[0]
