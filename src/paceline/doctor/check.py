"""The outcome of a check, and the words that checks have in common."""

from collections.abc import Iterable

import msgspec

from paceline.host.compare import Finding


class Check(msgspec.Struct, frozen=True):
    """One question: `summary` says what is true where all is well, `findings` what is wrong."""

    name: str
    summary: str
    findings: tuple[Finding, ...] = ()
    done: bool = True  # False: it could not be asked, and `summary` says why

    @property
    def verdict(self) -> str:
        """The worst of it: error, warning, ok, or - where nobody knows."""
        severities = {finding.severity for finding in self.findings}
        return next((one for one in ("error", "warning") if one in severities), "ok" if self.done else "-")


def checked(name: str, summary: str, findings: Iterable[Finding]) -> Check:
    """A check with the errors before the warnings."""
    return Check(name, summary, tuple(sorted(findings, key=lambda finding: finding.severity)))


def size(size_bytes: float) -> str:
    """44.7 MB: as disks and networks are sold, by powers of 1000."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} bytes"


def rate(bytes_per_second: float) -> str:
    """11.9 Gbit/s."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def duration(seconds: float) -> str:
    """120 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def listed(names: Iterable[str]) -> str:
    """n1, n2 and n3."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
