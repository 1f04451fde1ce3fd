"""`--network`: what is understood means what it says, and what is not is refused with examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from paceline.lab.scale import Network, parse_network


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("100Gbit,5us", 12.5e9, 5e-6),
        ("100 Gbit/s, 5 us", 12.5e9, 5e-6),
        ("10Gbps,30us", 1.25e9, 30e-6),
        ("12.5GB,2us", 12.5e9, 2e-6),
        ("1GiB/s,1ms", 2.0**30, 1e-3),
        ("100mbit", 12.5e6, 0.0),  # as tc writes it
        ("1Gbit,\u00b5s".replace("\u00b5", "7\u00b5"), 125e6, 7e-6),
        ("25gbit,900ns", 25e9 / 8, 900e-9),
    ],
)
def test_a_link_is_a_rate_and_a_latency(text: str, rate: float, latency: float) -> None:
    found = parse_network(text)
    assert found.bytes_per_second == pytest.approx(rate)
    assert found.latency_seconds == pytest.approx(latency)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "100", "100Gb", "0Gbit,5us", "-1Gbit,5us", "5us,100Gbit", "100Gbit,", "100Gbit,5", "1Gbit,5us,2"],
)
def test_what_is_no_link_is_refused_with_examples(text: str) -> None:
    with raises("network-not-understood", setting="network", value=text):
        parse_network(text)


@given(st.floats(0.001, 1e6), st.floats(0, 1e6))
def test_bits_are_eighths_of_bytes_and_every_prefix_is_a_thousand(rate: float, latency: float) -> None:
    value, delay = f"{rate:.6f}", f"{latency:.6f}"
    in_bits, in_bytes = parse_network(f"{value}Gbit,{delay}us"), parse_network(f"{value}GB,{delay}us")
    assert in_bytes.bytes_per_second == pytest.approx(8 * in_bits.bytes_per_second)
    assert parse_network(f"{value}Mbit,{delay}ms") == Network(
        pytest.approx(in_bits.bytes_per_second / 1000), pytest.approx(in_bits.latency_seconds * 1000)
    )
