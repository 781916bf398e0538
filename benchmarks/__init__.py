"""Speed and memory of the layers, as ratios within one run.

`make bench`, or `python -m benchmarks --help`.
"""

import os

# nothing is computed by the definition because the kernel is not yet there
os.environ.setdefault("NORMALNORM_WAIT", "1")
