"""Models of pipeline ranks: layers, chunks and the order of passes, in numbers.

The simulator and the solver know no more of a training than this, wherever it comes from.
"""
