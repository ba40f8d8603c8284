"""Sizes and durations, read and shown."""

import pytest

from snugtune.errors import UsageError
from snugtune.units import parse_size, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("11 GiB", 11 * 2**30),
        ("11GiB", 11 * 2**30),
        ("11GB", 11 * 10**9),
        ("11 gb", 11 * 10**9),
        ("512 MiB", 2**29),
        ("0.5 GiB", 2**29),
        (".5GiB", 2**29),
        ("100 B", 100),
        ("11G", 11 * 2**30),
        ("512m", 2**29),
    ],
)
def test_gib_is_a_power_of_two_and_gb_a_power_of_ten(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["11", "GiB", "-1 GiB", "0 GiB", "1e3 GiB", "eleven GiB", "", "nan GiB"])
def test_what_is_not_a_size_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="11 GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(None, "unknown"), (0, "0 B"), (2048, "2 KiB"), (640 * 2**20, "640 MiB"), (11 * 2**30, "11.0 GiB")],
)
def test_sizes_are_shown_in_the_unit_that_people_use(size_bytes, text):
    assert show_size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (3.4, "3 s"),
        (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_shown_as_people_say_them(seconds, text):
    assert show_duration(seconds) == text
