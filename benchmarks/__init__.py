"""Speed and memory of the layers, as ratios within one run.

`make bench`, or `python -m benchmarks --help`.
"""
