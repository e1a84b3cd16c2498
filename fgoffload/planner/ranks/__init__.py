"""What pipeline ranks run in a step, in numbers: layers, chunks and the order of passes.

The simulator and the solver know no more of a training than this, wherever it comes from.
"""
