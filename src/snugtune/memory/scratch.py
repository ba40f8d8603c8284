"""What an operation asks the allocator for, in order.

A number of bytes is a new block; ~n frees the n-th of them, counted from 0 within the operation. What is
left at the end is freed there, the last first. A `Result` stands for one of the operation's own results.
"""

from __future__ import annotations

from typing import NamedTuple


class Result(NamedTuple):
    """The result with this number is allocated now; those that are never named come last."""

    number: int


class OnHost(NamedTuple):
    """The result with this number does not lie on the card."""

    number: int


class Lasting(NamedTuple):
    """Bytes that a library allocates once and keeps."""

    size_bytes: int
    name: str


Need = int | Result | OnHost | Lasting
