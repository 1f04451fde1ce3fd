"""A thousand hostile connections to every port of a training, by another user: `make soak-connections`.

Trainings of one definition, in turn: left alone, and with a neighbour who watches for every port of theirs from the
first moment and connects to each a thousand times, with nothing, with noise and with the small numbers by which gloo
knows its peers; and with a neighbour who does the same to two ports of his own: on two cores with two ranks every other
process costs something, whatever it does. The digest must be the same, and the steps at most 2 % slower than with him.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.hostile.users import PACELINE, User, two_users

from paceline.runs.events import Step, read_events

MOST_SLOWER = 1.02
NEIGHBOUR = r"""
import os, random, socket, sys, time
uid, times = int(sys.argv[1]), int(sys.argv[2])
own = [socket.socket() for _ in range(2)] if uid == os.getuid() else []
for one in own:
    one.bind(("127.0.0.1", 0))
    one.listen(1)
tried, opened, held = {}, {}, []
random.seed(1)
until, looked, new = time.monotonic() + 600, 0.0, 0.0
def ports():
    found = set()
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, open("/proc/net/" + table).read().splitlines()[1:]):
            if fields[3] == "0A" and int(fields[7]) == uid:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found
print("ready", flush=True)
here = set()
while time.monotonic() < until and not os.path.exists(sys.argv[3]):
    now = time.monotonic()
    ranks_meet = not here or now < new + 1.0
    if ranks_meet or now > looked + 0.5:
        before, here, looked = here, ports(), now
        new = now if here - before else new
    if not ranks_meet:  # what is measured from here on is what connections do, not the processor that they cost him
        os.nice(19)
    for port in here:
        for _ in range(1 if ranks_meet else 10):
            if tried.get(port, 0) < times:
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
                tried[port] = tried.get(port, 0) + 1
                held.append((one, port))
    time.sleep(0.002 if ranks_meet else 0.02)
    for one, port in held:
        try:
            one.send(random.choice([random.randrange(64).to_bytes(8, "little"), os.urandom(64), b"x"]))
            opened[port] = opened.get(port, 0) + 1
        except OSError:
            pass
        if random.random() < 0.7:
            one.close()
    held = [(one, port) for one, port in held if one.fileno() >= 0][-50:]
print(sum(tried.values()), len(tried), sum(opened.values()), flush=True)
"""


def train(victim: User, name: str, steps: int, *more: object) -> tuple[int, str, float, str]:
    """Exit code, digest, median seconds of a step after the first ones, and the output."""
    words = ("train", "mnist-cnn", "--nproc", "2", "--steps", steps, "--batch-size", "32", "--strategy", "exact", *more)
    done = victim.run(PACELINE, *words, "--run-dir", name, timeout=1800)
    run = victim.home / name
    if done.returncode:
        return done.returncode, "", 0.0, done.stderr
    seconds = [event.seconds for event in read_events(run / "events-0.jsonl") if isinstance(event, Step)][10:]
    digest = json.loads((run / "summary.json").read_text())["weights_sha256"]
    return 0, digest, statistics.median(seconds), done.stderr


def attacked(
    victim: User, mallory: User, name: str, steps: int, times: int, *more: object, whose: User | None = None
) -> tuple[Any, list[int]]:
    """As `train`, while a neighbour connects to the ports of the victim or of `whose`; also the connections."""
    over = victim.home.parent / f"over-{name}"
    neighbour = mallory.popen("python3", "-c", NEIGHBOUR, (whose or victim).uid, times, over)
    assert neighbour.stdout is not None and neighbour.stdout.readline() == "ready\n"
    try:
        found = train(victim, name, steps, *more)
    finally:
        over.touch()
        counts = neighbour.communicate(timeout=90)[0]
    return found, [int(word) for word in counts.split()]


def main() -> int:
    """1 if a digest differs, or if the attack slows a run by more than 2 % beyond the noise of other runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder, two_users(Path(folder)) as users:
        victim, mallory = users.victim, users.mallory
        alone: list[float] = []
        beside: list[float] = []
        control: list[float] = []  # beside a neighbour at ports of his own
        digests: set[str] = set()
        refused: list[str] = []
        connections: list[list[int]] = []
        train(victim, "warm", 20)
        for number in range(options.rounds):
            code, digest, seconds, said = train(victim, f"alone-{number}", options.steps)
            assert code == 0, said
            alone.append(seconds)
            own, _ = attacked(victim, mallory, f"own-{number}", options.steps, options.times, whose=mallory)
            ours, counts = attacked(victim, mallory, f"ours-{number}", options.steps, options.times)
            assert own[0] == 0, own
            digests |= {digest, own[1]}
            connections.append(counts)
            if ours[0]:
                refused.append(ours[3])
            else:
                control.append(own[2])
                beside.append(ours[2])
                digests.add(ours[1])
            told = f"{seconds:.4f} s alone, {own[2]:.4f} s with him at his own ports, {ours[2]:.4f} s at ours"
            print(f"round {number}: {told}; connections {counts}", flush=True)
            time.sleep(1)
    ratios = sorted(b / a for a, b in zip(control, beside, strict=True))
    slower = statistics.median(ratios) > MOST_SLOWER if ratios else False
    result = {
        "steps": options.steps, "digests": sorted(digests), "refused_at_the_start": refused,
        "connections_ports_words": connections, "seconds_alone": alone, "seconds_at_his_own_ports": control,
        "seconds_at_ours": beside, "ratio_median": statistics.median(ratios) if ratios else None, "ratios": ratios,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if len(digests) == 1 and not slower else 1


if __name__ == "__main__":
    sys.exit(main())
