"""Models of pipeline ranks: layers, chunks and the order of passes, in numbers.

The simulator and the solver know nothing else about a training run, whatever the source of these numbers.
"""
