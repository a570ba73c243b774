"""Hostfiles, filters, allocations and environment files, as text."""

import pytest

from ddp_zero.launch.job import (
    Host,
    expand_nodelist,
    filter_hosts,
    hosts_of_allocation,
    is_allocation,
    limit_hosts,
    parse_environment,
    parse_filter,
    parse_hostfile,
    port_of_allocation,
    variables_to_export,
)

HOSTS = (Host("a", (0, 1, 2, 3)), Host("b", (0, 1)), Host("c-1.example", (0,)))


# Hostfiles


def test_parse_hostfile_skips_comments_and_blank_lines() -> None:
    text = "# all of them\n\na slots=4   # the first\n  b\tslots=2\r\nc-1.example slots=1#no space\n"
    assert parse_hostfile(text, "hosts") == HOSTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "line 1: Expected 'name slots=count'"),
        ("a slots=1\nb slots=", "line 2: Expected 'name slots=count'"),
        ("a slots=0", "count of at least 1, got 'a slots=0'"),
        ("a slots=-1", "got 'a slots=-1'"),
        ("a slots = 1", "got 'a slots = 1'"),
        ("a slots=1 b slots=2", "got 'a slots=1 b slots=2'"),
        ("a slots=1\n\n# x\na slots=2", "line 4: Expected each host once, got 'a', as in line 1."),
        ("-oProxyCommand=x slots=1", "line 1: Expected a host name of letters"),
        ("a[1-2] slots=1", "got 'a[1-2]'"),
        ("root@a slots=1", "got 'root@a'"),
        ("# nothing\n", "for each host in the file, got none"),
    ],
)
def test_parse_hostfile_refuses_a_bad_line_with_its_number(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="the file") as caught:
        parse_hostfile(text, "the file")
    assert said in str(caught.value)


def test_parse_hostfile_names_all_bad_lines_at_once() -> None:
    with pytest.raises(ValueError, match=r"line 1.*\n.*line 3") as caught:
        parse_hostfile("a\nb slots=1\nb slots=1", "f")
    assert "line 2" not in str(caught.value).replace("as in line 2", "")


# Filters


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", {"a": None}),
        ("a@b:1,0", {"a": None, "b": (0, 1)}),
        (" a : x", None),
        ("b:0, 2", {"b": (0, 2)}),
        ("", None),
        ("a@", None),
        ("a:", None),
        ("a:0,,1", None),
        ("a:-1", None),
        ("worker-0:1,1", {"worker-0": (1,)}),
        ("worker-0:0@worker-0:1", {"worker-0": (0, 1)}),
        ("a:1,0@b@a:01,2", {"a": (0, 1, 2), "b": None}),
        ("a@a", None),
        ("a@a:0", None),
        ("a:0@a", None),
    ],
)
def test_parse_filter_reads_slots_or_refuses(text: str, found: dict[str, tuple[int, ...] | None] | None) -> None:
    if found is not None:
        assert parse_filter(text, "--include") == found
    else:
        with pytest.raises(ValueError, match="--include"):
            parse_filter(text, "--include")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", HOSTS),
        ("b", "", (HOSTS[1],)),
        ("c-1.example@a:3,1", "", (Host("a", (1, 3)), HOSTS[2])),
        ("", "b@a:0", (Host("a", (1, 2, 3)), HOSTS[2])),
        ("a:0@a:0,2", "", (Host("a", (0, 2)),)),
        ("", "a:0@a:2,2", (Host("a", (1, 3)), *HOSTS[1:])),
        ("", "a:0,1,2,3@b", (HOSTS[2],)),
    ],
)
def test_filter_hosts_keeps_included_slots(include: str, exclude: str, left: tuple[Host, ...]) -> None:
    assert filter_hosts(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("a", "b", "--include or --exclude, got both"),
        ("c-1.exampel", "", "Did you mean 'c-1.example'?"),
        ("", "zzz", "There are a, b, c-1.example."),
        ("b:1,2", "", r"slots of b in --include, \[0, 1\], got \[2\]"),
        ("", "a@b@c-1.example", "leaves no slot"),
    ],
)
def test_filter_hosts_refuses_unknown_hosts_and_slots(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        filter_hosts(HOSTS, include, exclude)


def test_limit_hosts_keeps_the_first_hosts_and_slots() -> None:
    assert limit_hosts(HOSTS, 2, None) == HOSTS[:2]
    assert limit_hosts(HOSTS, 2, 2) == (Host("a", (0, 1)), HOSTS[1])
    assert limit_hosts([Host("a", (1, 3))], None, 1) == (Host("a", (1,)),)


def test_limit_hosts_refuses_more_than_there_are() -> None:
    for num_nodes, nproc, said in ((4, None, "from 1 to 3"), (0, None, "got 0"), (None, 2, "the slots of c-1.example")):
        with pytest.raises(ValueError, match=said):
            limit_hosts(HOSTS, num_nodes, nproc)


# Slurm


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b-2", ["a", "b-2"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("r[1-2]n[1,3]x", ["r1n1x", "r1n3x", "r2n1x", "r2n3x"]),
    ],
)
def test_expand_nodelist_lists_all_names(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a[", "a[]", "a[1-]", "a[3-1]", "a[1-999999999]", "a]", "a,a", "a[x]"]
)
def test_expand_nodelist_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="Expected"):
        expand_nodelist(text)


JOB = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_an_allocation_has_a_list_of_nodes_and_a_port_of_its_id() -> None:
    assert is_allocation(JOB)
    assert not is_allocation({"SLURM_JOB_ID": "1"})
    assert port_of_allocation(JOB) == 23456


def test_hosts_of_an_allocation_have_slots_of_its_gpus_or_tasks() -> None:
    job = JOB
    assert hosts_of_allocation({**job, "SLURM_GPUS_ON_NODE": "4"}, None)[1] == Host("n2", (0, 1, 2, 3))
    assert hosts_of_allocation({**job, "SLURM_GPUS_PER_NODE": "h100:2"}, None)[0] == Host("n1", (0, 1))
    assert hosts_of_allocation({**job, "SLURM_TASKS_PER_NODE": "2(x2)"}, None)[1] == Host("n2", (0, 1))
    assert hosts_of_allocation({**job, "SLURM_TASKS_PER_NODE": "2,1"}, None)[1] == Host("n2", (0,))
    assert hosts_of_allocation({**job, "SLURM_TASKS_PER_NODE": "odd"}, 3)[1] == Host("n2", (0, 1, 2))


def test_an_allocation_without_nodes_or_with_other_counts_of_tasks_is_refused() -> None:
    for tasks in ("1", "1(x3)", "odd", "0(x2)"):
        with pytest.raises(ValueError, match="for 2 nodes"):
            hosts_of_allocation({**JOB, "SLURM_TASKS_PER_NODE": tasks}, None)
    with pytest.raises(ValueError, match="salloc"):
        hosts_of_allocation({}, None)


# Variables


def test_parse_environment_reads_values_quotes_and_names_alone() -> None:
    text = "# for all\nA=1\n\nexport B= two words \nC='q=u'\nHOME\nD=\n"
    found = parse_environment(text, "f", {"HOME": "/home/me"})
    assert found == {"A": "1", "B": " two words", "C": "q=u", "HOME": "/home/me", "D": ""}


def test_lines_of_an_environment_file_end_at_line_feeds_only() -> None:
    text = "A=one\u2028B=two\x0c\u0085three\r\nC=4\n"
    assert parse_environment(text, "x", {}) == {"A": "one\u2028B=two\x0c\u0085three", "C": "4"}


def test_parse_environment_names_all_bad_lines() -> None:
    with pytest.raises(ValueError, match=r"line 1.*\n.*line 2.*\n.*line 4") as caught:
        parse_environment("1A=2\nNOT_HERE\nA=1\nA=2", "the file", {})
    assert "'NOT_HERE=value', got neither" in str(caught.value)


def test_variables_to_export_are_those_of_nccl_gloo_and_omp() -> None:
    here = {
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "eth1",
        "MY_NCCL_X": "1",
    }
    assert variables_to_export(here) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
