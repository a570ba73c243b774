"""Two hosts, over ssh: a job runs on both, ends on both, and leaves nobody behind on either."""

import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hosts.job import SCRIPT, assert_nobody_left, finish, launched, left_behind, wait_for_lines
from tests.hosts.network import Network, network

TRAINING = Path(__file__).parents[1] / "multiproc" / "restart_script.py"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("network")) as hosts:
        yield hosts


@pytest.fixture
def token() -> str:
    return f"token-{secrets.token_hex(8)}"


def options(net: Network, folder: Path, *more: str) -> list[str]:
    """The command line up to the script, which is written into the folder."""
    (folder / "variables").write_text("GREETING=a host; a 'mad' $PLACE\nGLOO_SOCKET_IFNAME=eth0\n")
    (folder / "wait.py").write_text(SCRIPT)
    reach = ["--launcher=ssh", f"--ssh-args={net.ssh_args}", f"--hostfile={net.hostfile}"]
    return [*reach, f"--env-file={folder / 'variables'}", "--grace=5", *more]


def test_every_host_runs_its_ranks_and_its_lines_begin_with_its_name(net: Network, tmp_path: Path, token: str) -> None:
    with launched(tmp_path, *options(net, tmp_path), "wait.py", token, "none", "%h $HOME") as process:
        code, out, err = finish(process)
    assert (code, sorted(out.splitlines())) == (
        0,
        ["alpha: rank 0 of 2 on a host; a 'mad' $PLACE", "beta: rank 1 of 2 on a host; a 'mad' $PLACE"],
    )
    assert {"alpha: rank 0 of 2 to stderr", "beta: rank 1 of 2 to stderr"} <= set(err.splitlines())
    assert_nobody_left(token, within=0)  # the daemons of a script that has ended well end, too


def test_a_host_that_fails_stops_the_others(net: Network, tmp_path: Path, token: str) -> None:
    with launched(tmp_path, *options(net, tmp_path), "wait.py", token, "1") as process:
        wait_for_lines(process, 2, "rank")
        assert len(left_behind(token)) >= 6  # two ranks with a torchrun and a daemon each, at the least
        code, _, err = finish(process)
    assert code == 1
    assert "ddp-zero launch: beta ended with exit code 1; stopping alpha" in err
    assert_nobody_left(token, within=0)


def test_ctrl_c_stops_all(net: Network, tmp_path: Path, token: str) -> None:
    with launched(tmp_path, *options(net, tmp_path), "wait.py", token, "never") as process:
        wait_for_lines(process, 2, "rank")
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
    assert (code, "got SIGINT; stopping alpha, beta" in err) == (130, True)
    assert_nobody_left(token, within=0)


def test_a_launcher_that_is_killed_leaves_nobody(net: Network, tmp_path: Path, token: str) -> None:
    with launched(tmp_path, *options(net, tmp_path), "wait.py", token, "never") as process:
        wait_for_lines(process, 2, "rank")
        process.kill()
    assert_nobody_left(token, within=20)


def test_a_host_that_loses_its_power_is_found_out(tmp_path: Path, token: str) -> None:
    (tmp_path / "network").mkdir()
    with network(tmp_path / "network", "lost") as net:
        arguments = options(net, tmp_path, "--lost-after=8")
        with launched(tmp_path, *arguments, "wait.py", token, "never") as process:
            wait_for_lines(process, 2, "rank")
            net.kill("beta")
            code, _, err = finish(process, timeout=60)
    assert code == 255
    assert "beta ended with exit code 255, that of a connection that failed; stopping alpha" in err
    assert_nobody_left(token, within=0)


def test_a_host_that_is_cut_off_stops_on_its_own(net: Network, tmp_path: Path, token: str) -> None:
    arguments = options(net, tmp_path, "--lost-after=8")
    with launched(tmp_path, *arguments, "wait.py", token, "never") as process:
        wait_for_lines(process, 2, "rank")
        try:
            net.set_link("beta", "down")
            code, _, err = finish(process, timeout=60)
            assert (code, "beta ended with exit code 255" in err) == (255, True)
            assert_nobody_left(token, within=30)
        finally:
            net.set_link("beta", "up")


def test_hosts_that_do_not_answer_or_are_not_ready_are_named(net: Network, tmp_path: Path, token: str) -> None:
    arguments = options(net, tmp_path)
    more = tmp_path / "more"
    more.write_text(net.hostfile.read_text() + "gamma slots=1\n")
    with launched(tmp_path, *arguments, f"--hostfile={more}", "wait.py", token, "never") as process:
        code, out, err = finish(process)
    assert (code, out) == (2, "")
    assert "Expected all 3 hosts to be ready, got from\n  gamma: exit code 255, ssh: connect to host" in err
    assert "alpha" not in err
    with launched(tmp_path, *arguments, "none.py", token) as process:
        code, _, err = finish(process)
    assert code == 2
    assert err.count(f"no script none.py in {tmp_path}") == 2


def test_a_worker_that_dies_comes_back_and_the_job_ends_bit_equal(net: Network, tmp_path: Path) -> None:
    results = []
    for name, dies_after in (("unbroken", -1), ("broken", 2)):
        folder = tmp_path / name
        folder.mkdir()
        arguments = options(net, folder, "--max-restarts=2")
        script = [str(TRAINING), str(folder / "checkpoints"), str(folder / "result.pt"), str(dies_after), "0"]
        with launched(folder, *arguments, *script) as process:
            code, out, err = finish(process, timeout=240)
        assert code == 0, err
        restarts = re.findall(r"^(alpha|beta): attempt [01] rank [01] starts at step 3$", out, flags=re.MULTILINE)
        assert sorted(restarts) == (["alpha", "beta"] if dies_after > 0 else [])
        results.append(torch.load(folder / "result.pt"))
    for param, expected in zip(*results, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=0)
