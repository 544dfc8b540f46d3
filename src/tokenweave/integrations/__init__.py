"""TokenWeave inside other engines: one folder each, imported by that engine alone."""
