"""What every kernel of the package needs, whatever it computes: a compiler with a cache, launches, graphs."""
