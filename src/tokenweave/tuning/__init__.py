"""Measures a model's parts on this machine, for the planner; finds what was measured."""

from tokenweave.tuning.find import agreed_profile, find_profile, profile_path

__all__ = ["agreed_profile", "find_profile", "profile_path"]
