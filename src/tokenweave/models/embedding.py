"""Looking tokens up in one rank's part of the vocabulary."""

from __future__ import annotations

import torch

from tokenweave.models import kernels


def vocabulary_rows(table: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, *, first: int, count: int) -> None:
    """Rows of the tokens in this rank's part of the vocabulary, zeros for the others: summed over all ranks, the embedding.

    Args:
        table, token_ids, out, first, count: as :func:`tokenweave.models.kernels.embed_rows`, which runs where it can.
    """
    if kernels.available(out):
        kernels.embed_rows(table, token_ids, out, first=first, count=count)
        return
    rows = token_ids - first
    elsewhere = (rows < 0) | (rows >= count)
    torch.index_select(table, 0, rows.masked_fill_(elsewhere, 0), out=out)
    out.masked_fill_(elsewhere.unsqueeze(1), 0)
