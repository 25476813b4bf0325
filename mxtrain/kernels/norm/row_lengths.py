"""Row lengths that the norm kernels take, in elements."""

MAX_COLUMNS = 65536
# Longer rows do not fit in a program's registers. They are read twice, the second time mostly from the L2 cache.
MAX_PERSISTENT_COLUMNS = 16384
