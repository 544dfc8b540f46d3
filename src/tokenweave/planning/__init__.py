"""Chooses mode, cut, CTAs and SM budgets for every batch."""

from tokenweave.planning.plan import Mode, Plan

__all__ = ["Mode", "Plan"]
