"""What kernels need whatever they compute: a compiler with a cache, launches, graphs, a share of the SMs."""
