"""``python -m ddp_zero launch`` on this machine: ranks, exit codes, and nobody left behind, however it ends."""

import secrets
import subprocess
import sys
from pathlib import Path

from tests.hosts.job import SCRIPT, assert_nobody_left, finish, launched, left_behind, wait_for_lines


def test_a_job_on_this_machine_gives_its_exit_code_and_leaves_nobody(tmp_path: Path) -> None:
    token = f"token-{secrets.token_hex(8)}"
    (tmp_path / "wait.py").write_text(SCRIPT)
    (tmp_path / "variables").write_text("GREETING=one machine\n")
    options = ["--nproc=2", "--env-file=variables", "--grace=5", "wait.py", token]
    with launched(tmp_path, *options, "1") as process:
        code, out, err = finish(process)
    assert (code, sorted(out.splitlines())) == (1, [f"rank {rank} of 2 on one machine" for rank in range(2)])
    assert "ddp-zero launch: localhost ended with exit code 1" in err
    assert_nobody_left(token, within=0)
    with launched(tmp_path, *options, "never") as process:
        wait_for_lines(process, 2, "rank")
        assert len(left_behind(token)) >= 6  # the launcher, the guard, torchrun, two ranks, a daemon of each
        process.kill()
        assert_nobody_left(token, within=30)


def test_the_library_does_not_import_the_launcher() -> None:
    program = "import sys, ddp_zero.launch; print(sorted(n for n in sys.modules if n.startswith('ddp_zero.launch')))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "['ddp_zero.launch']\n"
