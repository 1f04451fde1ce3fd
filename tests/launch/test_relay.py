from __future__ import annotations

import os
import time
from collections.abc import Generator

import pytest

from paceline.launch import output as module
from paceline.launch.output import HostRelay, Screen, cleaned
from paceline.launch.ssh.sessions import why_lost, why_no_agent
from paceline.runs.console import in_runs

NAMES = ("n1", "n2", "n3", "n4", "n5")


class Shown:
    """A pipe in the place of both stdout and stderr."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.screen = Screen()
        put = self.screen.put
        self.screen.put = lambda descriptor, data: put(self.writer, data)  # type: ignore[method-assign]
        self.relay = HostRelay(NAMES, self.screen)

    def text(self) -> str:
        """All that was shown, once no more comes."""
        self.relay.finish()
        self.screen.close()
        assert self.screen.closed(10)
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read().decode()


@pytest.fixture
def shown() -> Generator[Shown]:
    made = Shown()
    yield made
    made.screen.close()


def test_the_same_line_of_several_hosts_is_shown_once(shown: Shown) -> None:
    for node in (3, 1, 2):
        shown.relay.put(node, 2, b"out of memory\n")
    shown.relay.put(4, 2, b"fine\n")
    assert shown.text() == "[n2-n4] out of memory\n[n5] fine\n"


def test_a_line_that_a_host_says_twice_is_shown_twice_and_in_its_order(shown: Shown) -> None:
    shown.relay.put(1, 1, b"a\nb\n")
    shown.relay.put(2, 1, b"b\na\na\n")
    assert shown.text() == "[n2] a\n[n2,n3] b\n[n3] a\n[n3] a\n"


def test_lines_wait_for_their_like_and_no_longer(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown.relay.put(1, 1, b"a\n")
    assert shown.relay.flush() == pytest.approx(module.FOLD_SECONDS)
    now[0] = 0.31
    assert shown.relay.flush() == float("inf")
    shown.relay.put(2, 1, b"a\n")
    assert shown.text() == "[n2] a\n[n3] a\n"


def test_no_line_is_put_into_a_half_line_of_node_0(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown.relay.put(0, 1, b"loss 0")
    shown.relay.put(1, 1, b"late\n")
    now[0] = 0.5
    shown.relay.flush()
    shown.relay.put(0, 1, b".25\n")
    shown.relay.flush()
    shown.relay.put(0, 1, b"bar 10%")
    shown.relay.put(1, 1, b"second\n")
    now[0] = 1.6
    shown.relay.flush()
    assert shown.text() == "loss 0.25\n[n2] late\nbar 10%\n[n2] second\n"


def test_half_lines_of_hosts_are_put_together(shown: Shown) -> None:
    shown.relay.put(1, 1, b"one ")
    shown.relay.put(2, 1, b"two ")
    shown.relay.put(1, 1, b"line\nlast")
    shown.relay.put(2, 1, b"line\n")
    shown.relay.end(1)
    assert shown.text() == "[n2] one line\n[n3] two line\n[n2] last\n"


def test_a_host_cannot_make_us_remember_without_end(shown: Shown) -> None:
    for _ in range(40):
        shown.relay.put(1, 1, b"x" * 1000)
    for number in range(1000):
        shown.relay.put(2, 1, b"%d\n" % number)
    assert sum(map(len, shown.relay._unfinished.values())) <= module.MAX_HOST_LINE_BYTES
    assert len(shown.relay._waiting) <= module.MAX_WAITING_LINES
    text = shown.text()
    assert all(f"[n3] {number}\n" in text for number in range(1000))


def test_what_could_move_the_cursor_or_hide_words_is_gone() -> None:
    assert cleaned(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b \xff\ttab \xe2\x80\xaereversed") == (
        "red \ufffd]0;title\ufffd \ufffd \ufffd\ttab \ufffdreversed"
    )
    assert cleaned(b"10%\r20%\r") == "20%" and cleaned(b"windows\r") == "windows"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("n2",), "n2"),
        (("n1", "n2"), "n1,n2"),
        (("n1", "n3", "n4", "n5"), "n1,n3-n5"),
        (("gpu08", "gpu09", "gpu10"), "gpu08-gpu10"),
        (("a1", "b2", "b3"), "a1,b2,b3"),
        (("10.0.0.1", "10.0.0.2", "10.0.0.3"), "10.0.0.1-10.0.0.3"),
        (("n9", "n10", "n11"), "n9-n11"),
    ],
)
def test_names_together(names: tuple[str, ...], text: str) -> None:
    assert in_runs(names, ",") == text


def test_a_screen_that_nobody_reads_says_that_it_is_full() -> None:
    reader, writer = os.pipe()
    screen = Screen()
    try:
        for _ in range(40):
            screen.put(writer, b"x" * 65536)
        screen.close()
        assert screen.full and not screen.closed(0.1)
        os.set_blocking(reader, False)
        deadline = time.monotonic() + 10
        while not screen.closed(0.0) and time.monotonic() < deadline:
            try:
                os.read(reader, 1 << 20)
            except BlockingIOError:
                time.sleep(0.001)
        assert screen.closed(0.0) and not screen.full
    finally:
        os.close(writer)
        os.close(reader)


# ---- refusal.py --------------------------------------------------------------------------------------------------

ARGV = ("ssh", "-F", "mine", "-T", "-x", "-p", "2222", "--", "me@n2", "exec /env/python -P -m paceline.launch.agent")


@pytest.mark.parametrize(
    ("code", "words", "told"),
    [
        (255, "me@n2: Permission denied (publickey,password).", "ssh-copy-id"),
        (255, "No ED25519 host key is known for n2 and you have requested strict checking.", "ssh-keyscan"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R"),
        (255, "ssh: Could not resolve hostname n2: Name or service not known", "spelt right"),
        (255, "ssh: connect to host n2 port 22: Connection refused", "sshd running"),
        (255, "ssh: connect to host n2 port 22: No route to host", "no way to it"),
        (255, "ssh: connect to host n2 port 22: Connection timed out", "does not answer"),
        (255, "kex_exchange_identification: Connection closed by remote host", "MaxStartups"),
        (255, "", "ssh -F mine -p 2222 me@n2 true"),
        (127, "sh: 1: exec: /env/python: not found", "no Python at /env/python"),
        (126, "sh: /env/python: Permission denied", "no Python at /env/python"),
        (1, "/env/python: Error while finding module specification for 'paceline.launch.agent' (ModuleNotFoundError: "
            "No module named 'paceline')", "paceline is not installed for /env/python"),
        (1, "This account is currently not available.", "exit code 1"),
        (None, "", "no agent has answered in time"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_remedy(code: int | None, words: str, told: str) -> None:
    text = why_no_agent(ARGV, code, words.encode())
    assert told in text
    if words:
        assert words.splitlines()[0][:40] in text or words.splitlines()[-1][:40] in text


def test_hostile_words_of_a_host_are_cleaned_and_bounded() -> None:
    text = why_no_agent(ARGV, 3, b"\x1b[2J\x07" + b"z" * 5000)
    assert "\x1b" not in text and "\x07" not in text and len(text) < 500


def test_why_a_session_was_lost() -> None:
    cause = "Timeout, server n2 not responding."
    assert why_lost(255, f"step 7\n{cause}\r\n".encode()) == f"ssh: {cause}"
    assert "step 7" not in why_lost(255, b"step 7\n") and "signal 9" in why_lost(-9, b"")
