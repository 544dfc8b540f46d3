"""One step as torch.profiler sees it: ``tokenweave trace``."""
