from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from paceline.errors import UsageError
from paceline.launch.plan import parse_hosts
from paceline.protocol.job import Host, address_without_user, host_labels


def test_a_list_names_hosts_with_ports() -> None:
    assert parse_hosts("n1,n2:2222,me@n3,[fe80::1]:22,10.0.0.7") == (
        Host("n1"),
        Host("n2", 2222),
        Host("me@n3"),
        Host("[fe80::1]", 22),
        Host("10.0.0.7"),
    )


def test_a_file_has_one_host_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "machines"
    path.write_text("# ours\nn1 slots=4\n\n  n2:2222   # the new one\nme@n3 slots=1\n")
    assert parse_hosts(str(path)) == (Host("n1", None, 4), Host("n2", 2222), Host("me@n3", None, 1))


def test_a_file_of_the_working_folder_does_not_take_a_hosts_place(tmp_path: Path, monkeypatch) -> None:
    """Whoever can write there would choose where a run goes, and its secret with it."""
    monkeypatch.chdir(tmp_path)
    assert parse_hosts("machines") == (Host("machines"),)
    Path("machines").write_text("n1")
    assert parse_hosts("machines") == (Host("machines"),)
    assert parse_hosts("./machines") == (Host("n1"),)


def test_every_mistake_of_a_file_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("n1\nn1\n-oProxyCommand=x\nn2 slots=0\nn3 max=2\nn4:99999\nn5 slots=1 slots=2\nn;6\nn7\n")
    with raises("hosts-wrong", value=f"the hosts file {path}") as caught:
        parse_hosts(str(path))
    lines = caught.value.fields["wrong"].splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [f"line {n}" for n in (2, 3, 4, 5, 6, 7, 8)]
    assert "(see line 1)" in lines[0] and "1024, got '0'" in lines[2] and "slots=N" in lines[3]


@pytest.mark.parametrize(
    "text",
    ["", "n1,,n2", "-n1", "n1:", "n1:0", "n1:x", "n1:٣", "@n1", "-o@n1", "a b@n1", "::1", "[::g]", "n1,N1", "a@n,b@n",
     "n1 n2", "$(id)", "n1;id", "é", "n1:22:33", "./missing", "missing.txt", "n\x00", "n1:+2", "n1:1_0"],
)  # fmt: skip
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xff\xfe\x00n")
    with raises("hosts-unreadable", reason="it is not a text file"):
        parse_hosts(str(path))
    path.write_text("# nobody\n")
    with raises("no-host"):
        parse_hosts(str(path))


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_no_text_becomes_an_option_of_ssh_or_a_shell_word(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    for host in hosts:
        assert not host.name.startswith("-")
        assert set(address_without_user(host)) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:"
        )


def test_two_ports_of_one_name_are_told_apart() -> None:
    assert host_labels(parse_hosts("me@n1:1,n1:2,n2:3,[::1]")) == ("n1:1", "n1:2", "n2", "::1")
