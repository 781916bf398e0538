"""What a GPU does with the layers, and what the prototypes of kernels would do.

`make gpu MINUTES=9`, or `python -m benchmarks.gpu --help`.
"""
