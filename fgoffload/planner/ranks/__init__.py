"""Models of pipeline ranks: layers, chunks and the order of passes.

The simulator and the solver use computed and measured models in the same way.
"""
