"""What a GPU does with the layers.

`make gpu MINUTES=9`, or `python -m benchmarks.gpu --help`.
"""
