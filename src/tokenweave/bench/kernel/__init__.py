"""The fused collective against its rivals: ``tokenweave bench kernel``; and its kernels one at a time, for profilers."""
