"""The folder of a run (``job.dump_folder``): its files, when a run may start in it, and its lock. No PyTorch."""
