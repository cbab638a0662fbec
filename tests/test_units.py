"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.units import GIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * GIB),
        ("80 gib", 80 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("24GB", 24 * 10**9),
        ("80e9", 80 * 10**9),
        ("8.5e+10", 85 * 10**9),
        ("85899345920", 80 * GIB),
        ("512 B", 512),
        ("0.5TiB", 512 * GIB),
    ],
)
def test_a_size_is_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "0.1", "80 G", "80Gb it", "1e-3", "nan", "inf", "1e999", "80GiB!"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size from 1 byte, such as 80GiB, 24GB, 80e9"):
        parse_bytes(text)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_printed_can_be_read_back(num_bytes):
    assert parse_bytes(format_bytes(num_bytes).replace(",", "")) == pytest.approx(num_bytes, rel=0.06)
