"""A third host connects 1,000 times to every port of a training on two hosts: `make soak-strangers` (root).

Trainings of one definition over ssh on n2 and n3, in turn: beside a stranger on n4 who does all this to ports of his
own, and beside one who does it to theirs, and who is told each port the moment that it opens. He connects and says
nothing, sends noise, and the small numbers by which gloo knows its peers; he keeps 50 connections open. The weights
must be the same, no run may end otherwise, and the steps may be at most 5 % slower.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cluster.lab import Lab
from tests.cluster.ssh import SshHosts
from tests.cluster.training import PACELINE, words

from paceline.runs.events import Step, read_events

MOST_SLOWER = 1.05
HOSTS, STRANGER = ("n2", "n3"), "n4"
SPY = r"""
import os, sys, time
while not os.path.exists(sys.argv[2]):
    found = set()
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, open("/proc/net/" + table).read().splitlines()[1:]):
            address, _, port = fields[1].rpartition(":")
            if fields[3] == "0A":
                found.add(int(port, 16))
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(" ".join(map(str, sorted(found))))
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.01)
"""
ATTACK = r"""
import os, random, socket, sys, time
seed, times, over, own, *targets = sys.argv[1:]  # a target: ADDRESS=FILE, in which its ports are
random.seed(int(seed))
doors = []
for _ in range(4 if own == "own" else 0):
    doors.append(socket.create_server(("127.0.0.1", 0)))
    doors[-1].setblocking(False)
tried, opened, held, said = {}, 0, [], 0
print("ready", flush=True)
while not os.path.exists(over):
    here = [("127.0.0.1", door.getsockname()[1]) for door in doors]
    for address, file in (target.split("=") for target in targets if not doors):
        try:
            here += [(address, int(port)) for port in open(file).read().split() if port != "22"]
        except OSError:
            pass
    for place in here:
        for _ in range(2):
            if tried.get(place, 0) < int(times):
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(place)
                tried[place] = tried.get(place, 0) + 1
                held.append(one)
    for door in doors:
        try:
            held.append(door.accept()[0])
        except OSError:
            pass
    time.sleep(0.003)
    for one in held:
        try:
            one.send(random.choice([
                random.randrange(64).to_bytes(8, "little"), os.urandom(64), b"x", os.urandom(5000),
                b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4]))
            said += 1
        except OSError:
            pass
        if random.random() < 0.5:
            one.close()
    held = [one for one in held if one.fileno() >= 0][-50:]
print(sum(tried.values()), len(tried), said, flush=True)
"""


def train(lab: Lab, ssh: SshHosts, run: Path, steps: int) -> tuple[int, str, float, str]:
    """Exit code, digest, median seconds of a step after the first ones, and the output."""
    shape = words("train", "mnist-cnn", "--steps", steps, "--batch-size", 32, "--device", "cpu", "--strategy", "exact")
    where = words("--on", "ssh", "--hosts", ",".join(HOSTS), "--nproc", 1, "--ssh", ssh.command, "--run-dir", run)
    done = lab.run("n1", *PACELINE, *shape, *where, cwd=run.parent, timeout=900)
    if done.returncode:
        return done.returncode, "", 0.0, done.stderr + done.stdout
    seconds = [event.seconds for event in read_events(run / "events-0.jsonl") if isinstance(event, Step)][10:]
    return 0, json.loads((run / "summary.json").read_text())["weights_sha256"], statistics.median(seconds), ""


def attacked(
    lab: Lab, ssh: SshHosts, run: Path, options: argparse.Namespace, seed: int, *, own: bool
) -> tuple[tuple[int, str, float, str], list[int]]:
    """As `train`, with a stranger at the ports of the hosts or the run; also its connections, ports, messages."""
    over = run.parent / f"over-{run.name}"
    ports = {host: run.parent / f"ports-{host}" for host in HOSTS}
    spies = [lab.popen(host, sys.executable, "-c", SPY, ports[host], over) for host in HOSTS]
    targets = [f"{lab.address(host)}={ports[host]}" for host in HOSTS]
    attack = [sys.executable, "-c", ATTACK, seed, options.times, over, "own" if own else "theirs", *targets]
    stranger = lab.popen(STRANGER, *attack, stdout=subprocess.PIPE, text=True)
    assert stranger.stdout is not None and stranger.stdout.readline() == "ready\n"
    try:
        found = train(lab, ssh, run, options.steps)
    finally:
        over.touch()
        counts = stranger.communicate(timeout=180)[0]
        for spy in spies:
            spy.wait(timeout=180)
    return found, [int(word) for word in counts.split()]


def main() -> int:
    """1 if a result is wrong; see `judged`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--times", type=int, default=1000, help="connections to each port")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-strangers-") as folder:
        lab = Lab(Path(folder), 4)
        try:
            ssh = SshHosts.start(lab, Path(folder))
            for number in range(options.rounds):
                one: dict[str, Any] = {"round": number}
                for name in ("own", "theirs"):
                    run = Path(folder) / f"{name}-{number}"
                    found, counts = attacked(lab, ssh, run, options, options.seed + number, own=name == "own")
                    one[name] = {"code": found[0], "weights": found[1], "step_seconds": found[2], "did": counts}
                    if found[0]:
                        one[name]["said"] = found[3][-2000:]
                rows.append(one)
                print(json.dumps(one), flush=True)
                if options.out:  # after each round: the rest may be cut off
                    options.out.write_text(json.dumps({**judged(rows, options.times), "rounds": rows}, indent=1) + "\n")
                time.sleep(1)
        finally:
            lab.close()
    result = judged(rows, options.times)
    print(json.dumps(result, indent=1))
    return int(result["wrong"])


def judged(rows: list[dict[str, Any]], times: int) -> dict[str, Any]:
    """The summary of all rounds. `wrong`: a different exit code, different weights, or 5 % slower."""
    failed = [row["round"] for row in rows if row["own"]["code"] or row["theirs"]["code"]]
    good = [row for row in rows if row["round"] not in failed]
    digests = sorted({row[name]["weights"] for row in good for name in ("own", "theirs")})
    ratios = sorted(row["theirs"]["step_seconds"] / row["own"]["step_seconds"] for row in good)
    median = statistics.median(ratios) if ratios else None
    wrong = bool(failed) or len(digests) != 1 or median is None or median > MOST_SLOWER
    found = {"times": times, "wrong": wrong, "digests": digests, "failed": failed}
    return {**found, "ratio_median": median, "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main())
