"""The fused collective against the baselines: ``tokenweave bench kernel``; and its kernels one at a time, for profilers."""
