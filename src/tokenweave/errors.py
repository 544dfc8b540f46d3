"""Errors that a user can act on: what was given, what was expected, what to do."""

from __future__ import annotations


class TokenWeaveError(Exception):
    """Base of every error that TokenWeave raises on purpose. The command line prints it without a traceback, exit code 2."""


class ModelError(TokenWeaveError):
    """The model folder or file is missing, damaged, or of an architecture that is not supported."""


class RequestError(TokenWeaveError, ValueError):
    """A request or an argument that can never be served as given."""


class ProfileError(RequestError):
    """A table of measured times that cannot be used: damaged, interrupted, stale or of another machine or model."""


class CollectiveError(TokenWeaveError, RuntimeError):
    """A collective was called with arguments that break its contract, or could not complete."""


class CudaError(TokenWeaveError, RuntimeError):
    """The CUDA compiler, driver or library could not do what a kernel or a GEMM needs."""


class RankDied(TokenWeaveError, RuntimeError):
    """A rank's process ended while the others still needed it."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} died: {reason}. The other ranks were ended.")
