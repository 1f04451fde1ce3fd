"""Plant every bug of loops.py, and see what verify says: `python FOLDER/loop_table.py [--out FILE.md]`."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import warm
from tests.lab.ranks import loops

from paceline.lab.ranks.loop_findings import make_verify_reports
from paceline.lab.verify import CAUSES, LOOP_CAUSES, LoopCase, LoopSpec, VerifyReport, compare_and_print_digests

RANKS = (1, 2, 3)
ENDS = (
    "stopped_by_one_rank", "lr_by_rank", "order_from_a_generator_seeded_by_rank", "second_backward_of_another_head",
    "clipped_by_own_norm", "gradient_added_by_hand", "gradients_combined_by_hand", "second_backward_unchecked",
    "gradient_added_by_hand_unchecked", "gradients_combined_by_hand_unchecked", "right_with_a_clamp_and_weights",
    "right_with_a_clamp_and_losses_of_each_sample",
)  # fmt: skip
"""what ends with an error on some ranks, in a step that others may have left already; no loop can follow it"""
RIGHT = (
    "right", "right_with_noise_and_batch_norm", "right_with_two_models", "right_with_gradients_added_up",
    "right_with_a_stream", "right_with_a_clamp", "right_with_a_module_hook", "right_with_parameter_hooks",
    "right_with_micro_batches_of_the_loaders_own", "right_with_an_order_from_pythons_stream",
    "right_with_averages_of_the_model",
)  # fmt: skip
LATE_WEIGHTS = ("right_with_a_clamp_and_weights", "right_with_a_clamp_and_losses_of_each_sample")
"""loops whose global weight is known after backward only; they must equal one process, or raise an error"""


def spec_of(name: str, ranks: Sequence[int] = RANKS) -> LoopSpec:
    most = max(ranks)
    plain = LoopCase(1, exact=False, plain=True)
    cases = [plain, LoopCase(most, exact=False), LoopCase(most, exact=True, strategy="exact")]
    return LoopSpec(f"{loops.__file__}:{name}", [], cases, most, steps=4, seed=0)


def said_of(names: Sequence[str], folder: Path, ranks: Sequence[int] = RANKS, *, window: int = 20) -> dict[str, str]:
    """All that verify says against each loop; they run one after the other in the same processes.

    `window`: seconds after which ranks that wait for each other are ended.
    """
    for name in names:
        (folder / name).mkdir()
    ended: dict[int, str] = {}
    for size in ranks:
        launch = ("-m", "paceline", "launch", "--nproc", size, "--run-dir", f"{folder}/run-{size}")
        program = (Path(__file__).with_name("loop_ranks.py"), folder, *names)
        words = program if ranks == (1,) else (*launch, "--hang-timeout", window, "--", *program)
        done = warm.run(words, ranks=True, cwd=folder, timeout=900)
        ended[size] = "" if done.returncode == 0 else done.stderr
    return {name: said(*make_verify_reports(folder / name, spec_of(name), ranks, ended)) for name in names}


def said(report: VerifyReport, bits: Sequence[object]) -> str:
    found = [r.finding for r in report.results if r.finding]
    first = {f.cause: f for f in reversed(found)}
    words = [f"[{cause}] {(CAUSES | LOOP_CAUSES)[cause]}. {f.detail} {f.tensor}".rstrip() for cause, f in first.items()]
    equal = bool(bits) and compare_and_print_digests(None, bits)
    return "; ".join([*words, *report.notes, *([] if equal or not bits else ["the bits differ"])])


def right(name: str, words: str) -> bool:
    """Whether a bug is called by its name, or nothing is said against a loop without one."""
    if name in loops.BUGS:
        return loops.BUGS[name].named in words
    if name in LATE_WEIGHTS and words.startswith("[refused]"):
        return True
    return not words or (words.startswith("the loop draws random numbers") and ";" not in words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("--only", nargs="*", help="names of loops")
    arguments = parser.parse_args()
    names = [name for name in (*RIGHT, *LATE_WEIGHTS, *loops.BUGS) if not arguments.only or name in arguments.only]
    lines = ["| planted bug | known from | verify said | verdict |", "|---|---|---|---|"]
    words: dict[str, str] = {}
    # one that ends its ranks must not spoil the others
    for group in ([n for n in names if n not in ENDS], *([n] for n in names if n in ENDS)):
        with tempfile.TemporaryDirectory() as folder:
            words |= said_of(group, Path(folder)) if group else {}
    named = sum(right(name, words[name]) for name in names)
    for name in names:
        bug, verdict = loops.BUGS.get(name), "named" if name in loops.BUGS else "right"
        verdict = verdict if right(name, words[name]) else "WRONG"
        cells = (name, bug.known_from if bug else "no bug", words[name] or "-", verdict)
        lines.append(f"| {' | '.join(cells)} |")
    warm.close()
    print(text := "\n".join(lines) + f"\n\n{named} of {len(names)} right, on {', '.join(map(str, RANKS))} ranks.\n")
    if arguments.out:
        arguments.out.write_text(
            "# What verify says of bugs in loops of one's own\n\nMade by `make soak-mutations`.\n\n" + text
        )
    return named != len(names)


if __name__ == "__main__":
    raise SystemExit(main())
