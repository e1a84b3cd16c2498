"""Models of pipeline ranks: layers, chunks and the order of passes.

These models are the only input of the simulator and the solver, whether they were computed or measured.
"""
