"""Who owns which row. Pure functions of (tokens, ranks): the kernels, the reference and the tests all use these."""

from __future__ import annotations


def rows_per_rank(tokens: int, world_size: int) -> int:
    """ceil(tokens / world_size): the rows that every rank but the last ones owns."""
    return -(-tokens // world_size)


def owned_rows(tokens: int, rank: int, world_size: int) -> range:
    """The contiguous rows that ``rank`` reduces and normalises; may be short or empty on the last ranks."""
    chunk = rows_per_rank(tokens, world_size)
    return range(min(tokens, rank * chunk), min(tokens, (rank + 1) * chunk))


def owner(row: int, tokens: int, world_size: int) -> int:
    """The rank that owns ``row`` of a split of ``tokens`` rows."""
    return row // rows_per_rank(tokens, world_size)
